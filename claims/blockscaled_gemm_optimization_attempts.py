"""Claims of the field note "Blackwell BlockScaled GEMM Kernel Optimizations": two attempts that failed, and four bands.

The attempts are arithmetic (`ch14.blockscaled.smem_planner`). The bands were measured on Hopper, and
`ch14.blockscaled.impacts` decides whether a measurement lies in its band.
"""

from __future__ import annotations

from ch14.blockscaled import impacts as blockscaled_impacts
from ch14.blockscaled import note_attempts
from ch14.mx_formats import number_formats
from claims.judge import UNTESTED, Finding, Note, decide

NOTE = Note("Blackwell BlockScaled GEMM Kernel Optimizations")
ATTEMPTS, HIDE = "Who gets the memory in the note's two attempts", "What five stages hide"
BANDS = "The four bands, on Hopper"


@NOTE.claim("The format of its benchmarks, E2M1 with scales E8M0 over 16, is a standard one (implied).",
            "ch14_mx_formats", "Verdict")
def format_measured(evidence):
    measured, ocp, nvidia = (number_formats.FORMATS[name] for name in ("fp4_e8m0_16", "mxfp4", "nvfp4"))

    def describe(form):
        return f"{form.scale.upper()} over {form.block[1]}, {form.bits:g} bits"
    return decide(any((measured.scale, measured.block) == (form.scale, form.block) for form in (ocp, nvidia)),
                  f"{describe(measured)}: neither MXFP4 ({describe(ocp)}) nor NVFP4 ({describe(nvidia)})")


@NOTE.claim("Two accumulators at N = 256 press on tensor memory.", "ch14_blockscaled", ATTEMPTS)
def tensor_memory(evidence):
    row = next(row for row in note_attempts.accumulator_rows() if row["tile"].endswith("256"))
    return decide(row["columns"] > row["of"], f"with the scales they take {row['columns']} columns of {row['of']}")


@NOTE.claim("Always two accumulators is 2 to 7 % slower across all tests.", "ch14_blockscaled", ATTEMPTS)
def accumulators_slower(evidence):
    rows = note_attempts.accumulator_rows()
    same = sum(row["verdict"] == "the same kernel" for row in rows)
    return decide(not same, f"in {same} of {len(rows)} tests it is the same kernel")


def attempt_2(test: str) -> dict:
    return next(row for row in note_attempts.stage_rows() if row["test"] == test)


@NOTE.claim("5 stages of A and B with 4 or more of C are 2.1 % slower (test 3).", "ch14_blockscaled", ATTEMPTS)
def balanced_stages(evidence):
    row = attempt_2("test 3")
    return decide(not row["same kernel"], f"before it {row['greedy']} stages, with it {row['attempt 2']}: "
                  f"{'the same' if row['same kernel'] else 'another'} kernel, at {row['note us']} us where the floor "
                  f"is {row['floor us']:.1f}")


@NOTE.claim("Scaling the stages down to fit made test 2 crash.", "ch14_blockscaled", ATTEMPTS)
def crash(evidence):
    row = attempt_2("test 2")
    figure = (f"before it {row['greedy']} stages, with it {row['attempt 2']}: "
              f"{'nothing' if row['same kernel'] else 'something'} had to be scaled")
    return Finding(UNTESTED, figure, "its code is not in the note")


@NOTE.claim("Fewer stages of A and B hide less latency (test 1).", "ch14_blockscaled", HIDE)
def fewer_stages(evidence):
    row = attempt_2("test 1")
    return decide(row["with attempt 2"] < row["hidden us"], f"{row['greedy']} stages hide {row['hidden us']:.2f} us, "
                  f"{row['attempt 2']} hide {row['with attempt 2']:.2f}, by Little's law")


@NOTE.claim("6 to 8 stages hide the latency.", "ch14_blockscaled", HIDE)
def six_to_eight(evidence):
    rows = note_attempts.stage_rows()
    figure = (f"with an H200's latency and the datasheets' speeds {max(row['for memory'] for row in rows)} for memory; "
              f"at the tensor core's rate {', '.join(str(row['stages to hide']) for row in rows)}, by the tile")
    return Finding(UNTESTED, figure, "a B200's latency is not known")


def judge_band(evidence, claim: str) -> Finding:
    """Judge a band by every place in which `ch14.blockscaled.impacts` measured the impact."""
    impacts, epilogue, thin = (evidence(f"ch14_blockscaled_{name}") for name in ("impacts", "epilogue", "thin"))
    bf16 = note_attempts.hopper_rows(evidence("ch10_gemm_sweep"))
    rows = [row for row in blockscaled_impacts.verdicts(impacts, epilogue, thin, bf16) if row["claim"] == claim]
    saved = {}
    for row in rows:
        saved.setdefault(" × ".join(map(str, row["shape"])), []).append(f"{row['time saved']} ({row['where']})")
    figure = "; ".join(f"{shape}: {', '.join(shares)}" for shape, shares in saved.items())
    inside = [row["where"] for row in rows if row["verdict"] == "as claimed"]
    return decide(len(inside) == len(rows), f"time saved on an H200, {figure}", "/".join(inside))


@NOTE.claim("Hiding TMA's latency is worth 40 to 50 %.", "ch14_blockscaled", BANDS)
def latency_band(evidence):
    """Judge from five stages on, where the note begins; a ring's first stages are worth more."""
    times = {}
    for row in evidence("ch14_blockscaled_impacts", claim="latency"):
        if row.get("ms"):
            times.setdefault(row["what"], {})[int(row["name"].split()[0])] = row["ms"]
    from_5 = {what: 1 - min(ms.values()) / ms[5] for what, ms in times.items()}
    figure = "time saved on an H200 from 5 stages on: " + ", ".join(
        f"{from_5[what]:.0%} ({what}; from {min(ms)}: {1 - min(ms.values()) / ms[min(ms)]:.0%})"
        for what, ms in times.items())
    inside = [what for what, share in from_5.items() if blockscaled_impacts.verdict("latency", share) == "as claimed"]
    return decide(len(inside) == len(from_5), figure, "/".join(inside))


@NOTE.claim("The number of warps is worth 20 to 30 %.", "ch14_blockscaled", BANDS)
def warps_band(evidence):
    return Finding(UNTESTED, judge_band(evidence, "warps").figure,
                   "its warps are the epilogue's; here those that multiply were varied, and the tile with them")


@NOTE.claim("Fusing into the epilogue is worth 15 to 25 %.", "ch14_blockscaled", BANDS)
def epilogue_band(evidence):
    return judge_band(evidence, "epilogue")


@NOTE.claim("Split-K is worth 10 to 20 % for K above 4096.", "ch14_blockscaled", BANDS)
def split_k_band(evidence):
    return judge_band(evidence, "split-K")  # K is above 4096 in all shapes here
