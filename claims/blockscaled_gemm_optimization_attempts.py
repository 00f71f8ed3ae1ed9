"""Claims of the field note "Blackwell BlockScaled GEMM Kernel Optimizations": two attempts that failed, and four bands.

The attempts are arithmetic (`ch14.blockscaled.smem_planner`); the bands were measured on Hopper, what they become is decided in
`ch14.blockscaled.impacts`.
"""

from __future__ import annotations

from ch14.blockscaled import impacts as blockscaled_impacts
from ch14.blockscaled import note_attempts
from ch14.mx_formats import number_formats
from claims.judge import Finding, Note, decide, holds, only_if, refuted, untested

NOTE = Note("Blackwell BlockScaled GEMM Kernel Optimizations")
ATTEMPTS, HIDE = "Who gets the memory in the note's two attempts", "What five stages hide"
BANDS = "The four bands, on Hopper"


@NOTE.claim("The format of its benchmarks, E2M1 with scales E8M0 over 16, is a standard one (implied).",
            "ch14_mx_formats", "Verdict")
def format_measured(of) -> Finding:
    its, ocp, nvidia = (number_formats.FORMATS[name] for name in ("fp4_e8m0_16", "mxfp4", "nvfp4"))

    def told(form):
        return f"{form.scale.upper()} over {form.block[1]}, {form.bits:g} bits"
    return decide(any((its.scale, its.block) == (form.scale, form.block) for form in (ocp, nvidia)),
                  f"{told(its)}: neither MXFP4 ({told(ocp)}) nor NVFP4 ({told(nvidia)})")


def attempt_1() -> dict[str, dict]:
    return {row["test"]: row for row in note_attempts.accumulator_rows()}


@NOTE.claim("Two accumulators at N = 256 press on tensor memory.", "ch14_blockscaled", ATTEMPTS)
def tensor_memory(of) -> Finding:
    row = next(row for row in attempt_1().values() if row["tile"].endswith("256"))
    return decide(row["columns"] > row["of"], f"with the scales they take {row['columns']} columns of {row['of']}")


@NOTE.claim("Always two accumulators is 2 to 7 % slower across all tests.", "ch14_blockscaled", ATTEMPTS)
def accumulators_slower(of) -> Finding:
    rows = attempt_1().values()
    same = sum(row["verdict"] == "the same kernel" for row in rows)
    return decide(not same, f"in {same} of {len(rows)} tests it is the same kernel")


def attempt_2(test: str) -> dict:
    return next(row for row in note_attempts.stage_rows() if row["test"] == test)


@NOTE.claim("5 stages of A and B with 4 or more of C are 2.1 % slower (test 3).", "ch14_blockscaled", ATTEMPTS)
def balanced_stages(of) -> Finding:
    row = attempt_2("test 3")
    return decide(not row["same kernel"], f"before it {row['greedy']} stages, with it {row['attempt 2']}: "
                  f"{'the same' if row['same kernel'] else 'another'} kernel, at {row['note us']} us where the floor "
                  f"is {row['floor us']:.1f}")


@NOTE.claim("Scaling the stages down to fit made test 2 crash.", "ch14_blockscaled", ATTEMPTS)
def crash(of) -> Finding:
    row = attempt_2("test 2")
    return untested("its code is not in the note", f"before it {row['greedy']} stages, with it {row['attempt 2']}: "
                    f"{'nothing' if row['same kernel'] else 'something'} had to be scaled")


@NOTE.claim("Fewer stages of A and B hide less latency (test 1).", "ch14_blockscaled", HIDE)
def fewer_stages(of) -> Finding:
    row = attempt_2("test 1")
    return decide(row["with attempt 2"] < row["hidden us"], f"{row['greedy']} stages hide {row['hidden us']:.2f} us, "
                  f"{row['attempt 2']} hide {row['with attempt 2']:.2f}, by Little's law")


@NOTE.claim("6 to 8 stages hide the latency.", "ch14_blockscaled", HIDE)
def six_to_eight(of) -> Finding:
    rows = note_attempts.stage_rows()
    wanted, memory = ([row[key] for row in rows] for key in ("stages to hide", "for memory"))
    return untested("a B200's latency is not known", f"with an H200's latency and the datasheets' speeds {max(memory)} "
                    f"for memory; at the tensor core's rate {', '.join(map(str, wanted))}, by the tile")


def band(of, claim: str) -> Finding:
    """The verdict of `ch14.blockscaled.impacts`, over every place where the impact was measured."""
    impacts, epilogue, thin = (of(f"ch14_blockscaled_{name}") for name in ("impacts", "epilogue", "thin"))
    bf16 = note_attempts.hopper_rows(of("ch10_gemm_sweep"))
    rows = [row for row in blockscaled_impacts.verdicts(impacts, epilogue, thin, bf16) if row["claim"] == claim]
    of_shape = {}
    for row in rows:
        of_shape.setdefault(" × ".join(map(str, row["shape"])), []).append(f"{row['time saved']} ({row['where']})")
    figure = "time saved on an H200, " + "; ".join(f"{shape}: {', '.join(told)}" for shape, told in of_shape.items())
    so = [row["where"] for row in rows if row["verdict"] == "as claimed"]
    if len(so) == len(rows):
        return holds(figure)
    return only_if("/".join(so), figure) if so else refuted(figure)


@NOTE.claim("Hiding TMA's latency is worth 40 to 50 %.", "ch14_blockscaled", BANDS)
def latency_band(of) -> Finding:
    """From five stages on, which is where the note begins; a ring's first stages are worth more."""
    saved = {}
    for row in of("ch14_blockscaled_impacts"):
        if row["claim"] == "latency" and row.get("ms"):
            saved.setdefault(row["what"], {})[int(row["name"].split()[0])] = row["ms"]
    from_5 = {what: 1 - min(ms.values()) / ms[5] for what, ms in saved.items()}
    whole = {what: 1 - min(ms.values()) / ms[min(ms)] for what, ms in saved.items()}
    figure = "time saved on an H200 from 5 stages on: " + ", ".join(
        f"{share:.0%} ({what}; from {min(saved[what])}: {whole[what]:.0%})" for what, share in from_5.items())
    fit = [what for what, share in from_5.items() if blockscaled_impacts.verdict("latency", share) == "as claimed"]
    return holds(figure) if len(fit) == len(from_5) else only_if("/".join(fit), figure) if fit else refuted(figure)


@NOTE.claim("The number of warps is worth 20 to 30 %.", "ch14_blockscaled", BANDS)
def warps_band(of) -> Finding:
    return untested("its warps are the epilogue's; here those that multiply were varied, and the tile with them",
                    band(of, "warps").figure)


@NOTE.claim("Fusing into the epilogue is worth 15 to 25 %.", "ch14_blockscaled", BANDS)
def epilogue_band(of) -> Finding:
    return band(of, "epilogue")


@NOTE.claim("Split-K is worth 10 to 20 % for K above 4096.", "ch14_blockscaled", BANDS)
def split_k_band(of) -> Finding:
    """K above 4096 is the note's one condition; all shapes here meet it, whatever the split is held against."""
    return band(of, "split-K")
