"""The measurements behind `11_ch14_compiled`: every workload in every mode, and the instructions that ran."""

from __future__ import annotations

import collections
import functools

from ch14.compiled.lesson import decoder_timing, executed_instructions, reading, worker, workloads
from ch14.compiled.lesson.workloads import TUNED
from tilelab.measure import bench, profiler
from tilelab.records import results
from tilelab.runtime import device, provenance, worker_pool

# (family, shape, modes). `math` keeps all scores in float32, so it has a small shape, with all backends. The MLP's
# autotuning takes long, so `persistent-tma`, which times the candidates of the others too, comes first.
LONG = (4, 16, 16, 8192, 128)
ATTENTION_MODES = "cuDNN flash efficient eager unfused default max-autotune unfused-default course".split()
CASES = (
    ("matmul", (4096, 4096, 4096), ("eager", "default", "max-autotune", TUNED, "persistent-tma", "tma-only")),
    ("mlp", (8192, 4096, 14336), ("eager", "default", "persistent-tma", "max-autotune", TUNED)),
    ("attention", LONG, ATTENTION_MODES),
    ("causal attention", LONG, ("cuDNN", "flash", "flex", "flex-tma", "flex-max-autotune", "course")),
    ("attention", (1, 16, 16, 2048, 128), ("cuDNN", "flash", "efficient", "math")),
)
# Ragged shapes, small enough for a CPU.
SMALL = (
    ("matmul", (333, 136, 200), ("eager", "default")),
    ("mlp", (77, 136, 200), ("eager", "default")),
    ("attention", (2, 4, 2, 77, 64), ("eager", "default")),
    ("causal attention", (1, 4, 4, 300, 64), ("eager", "default", "flex")),
)
COUNTED = ("UTMALDG", "UTMASTG", "LDGSTS")  # the instructions that the tables show


def source() -> str:
    """Return the hash of what is run: the workloads and modes, and how they are compiled, checked, timed and read."""
    return provenance.source_hash(workloads, worker, reading)


_experiment = functools.partial(results.experiment, source=source)


def measure_cases(cases=CASES) -> list[dict]:
    """Return the rows of worker.measure_modes for `cases`, with the generated code and all candidates."""
    with worker_pool.lease_worker(worker.MODULE, worker.WHAT) as process:
        worker.ask(process, "start", 120, where="cuda")
        rows = [row for case in cases for row in worker.measure_modes(process, *case)]
        process.stop()  # frees its memory on the GPU
    return rows


_measure_once = functools.cache(measure_cases)  # measure_cells and measure_choices are two views of one run


def drop_details(rows: list[dict]) -> list[dict]:
    """Return the rows without the generated code and the candidates."""
    return [{key: value for key, value in row.items() if key not in ("code", "decided")} for row in rows]


@_experiment("ch14_compiled_cells")
def measure_cells():
    """Measure every workload in every mode: compile and run time, error, what was chosen, what ran, instructions."""
    return drop_details(_measure_once())


@_experiment(
    "ch14_compiled_choices",
    can_run=lambda: device.current().has_tma and workloads.offers_triton_gemm(device.current().sms),
)
def measure_choices():
    """List every candidate that a mode timed in its own autotuning, in the order of speed."""
    rows = []
    for row in (row for row in _measure_once() if row.get("caches") == row["name"]):
        label = {key: row[key] for key in ("workload", "shape", "name")} | {"status": "ok"}
        for candidate in row.get("decided", ()):
            rows.append(label | candidate | {"whose": reading.describe_choice(candidate["choice"])})
    return rows


@profiler.experiment(
    "ch14_compiled_ncu", lambda: provenance.source_hash(workloads, executed_instructions, reading)
)
def profile_kernels():
    """Count the instructions that the libraries' kernels execute."""
    return executed_instructions.profile()


def list_kernels(row: dict, counters: list[dict]) -> list[dict]:
    """Return the kernels of a cell's call, {kernel, us, share, COUNTED, proof}, the longest first.

    `proof` is "SASS" if the counts are of instructions in the code that Triton built, "ncu" if they are of executed
    instructions, or "none": then nothing is claimed, and they are None. `counters` are rows of `profile_kernels`.
    """
    spent = collections.Counter()
    for launch in row.get("kernels", ()):
        spent[launch["kernel"]] += launch["us"]
    mine = [each for each in counters if all(each[key] == row[key] for key in ("workload", "shape"))]
    executed, found = {counts["kernel"]: counts for counts in mine}, []
    for kernel, us in spent.most_common():
        sources = ("SASS", row.get("triton", {}).get(kernel)), ("ncu", executed.get(kernel)), ("none", {})
        proof, counts = next(pair for pair in sources if pair[1] is not None)
        counted = {opcode: counts.get(opcode) for opcode in COUNTED}
        found.append({"kernel": kernel, "us": us, "share": us / spent.total(), "proof": proof, **counted})
    return found


def make_table(rows: list[dict], counters: list[dict]) -> list[dict]:
    """Return the cells with their winner in words, and with the kernel that takes most of their time as `main`."""
    none = {"kernel": "", "proof": "none", **dict.fromkeys(COUNTED)}
    table = []
    for row in rows:
        main = next(iter(list_kernels(row, counters)), none)
        winner = "; ".join(row["winner"]) or "nothing to choose" if "winner" in row else ""
        counted = {key: main[key] for key in ("proof", *COUNTED)}
        table.append({**row, "winner": winner, "main": main["kernel"], **counted})
    return table


def check_correctness() -> list[dict]:
    """Check SMALL against float64 now: compiled for the GPU, or for the CPU if there is none."""
    where = workloads.device_here()
    with worker_pool.lease_worker(worker.MODULE, worker.WHAT) as process:
        return [row for case in SMALL for row in worker.measure_modes(process, *case, where, timed=False)]


# ---- what the lesson's tables show


def read_cells() -> results.Record:
    """Return the recorded rows of `measure_cells`; measuring them takes two minutes."""
    return results.load_record("ch14_compiled_cells", source())


def read_choices() -> results.Record:
    """Return the recorded rows of `measure_choices`."""
    return results.load_record("ch14_compiled_choices", source())


def list_products(cells: results.Record) -> list[dict]:
    """Return the recorded product and MLP in every mode, with the time of the graph's copies and the winner."""
    rows = []
    for row in cells.rows:
        if row["workload"] in ("matmul", "mlp") and row["status"] == "ok":
            copies = sum(each["us"] for each in row["kernels"] if "multi_tensor_apply" in each["kernel"])
            shown = {key: row.get(key) for key in "workload name compile_s ms peer_ms ratio spread".split()}
            winner = "; ".join(dict.fromkeys(row.get("winner", [])))
            rows.append({**shown, "copies, us": copies, "winner": winner})
    return rows


def describe_votes(choices: results.Record) -> str:
    """Return a line per product: the best candidate of each kind as a multiple of the fastest one's time."""
    best: dict = {}
    for row in sorted((row for row in choices.rows if row["ms"]), key=lambda row: row["ms"]):
        if row["name"] == "persistent-tma":
            best.setdefault((row["workload"], str(row["operands"])), {}).setdefault(row["whose"], row["ms"])
    return "\n".join(
        f"{workload:6} {operands:31} "
        + "; ".join(f"{whose} {ms / min(times.values()):.3f}" for whose, ms in times.items())
        for (workload, operands), times in best.items()
    )


def describe_limit(cells: results.Record, roof) -> str:
    """Return what the fusion of silu(g) * u can save of the MLP's time at most, from its bytes and the roof."""
    sizes = workloads.pointwise_bytes(8192, 14336)
    saved = bench.floor_ms(roof, nbytes=sizes["eager, two kernels"] - sizes["one kernel"])
    eager_ms = next(row["ms"] for row in cells.rows if (row["workload"], row["name"]) == ("mlp", "eager"))
    factor = eager_ms / (eager_ms - saved)
    return f"fusing silu(g) * u saves at most {saved:.2f} of the MLP's {eager_ms:.2f} ms: {factor:.3f} ×"


def judge_claim(cells: results.Record, choices: results.Record) -> str:
    """Return the note's claims on a product beside the recorded ratios, and who offered the TMA template.

    The note is about another GPU, so a verdict names the GPU that was measured, as in CLAIMS.md.
    """
    lines, gpu = [], cells.device["name"].removeprefix("NVIDIA ")
    here = f"{'an' if gpu[0] in 'AH' else 'a'} {gpu}"
    for name, said in {"default": 1.5, "max-autotune": 2.0}.items():
        row = next(row for row in cells.rows if (row["workload"], row["name"]) == ("matmul", name))
        spread = f" ± {row['spread']:.2f}" if row.get("spread") is not None else ""
        lines.append(
            f"4096³, {name}: the note says {said:.1f} × eager, measured {row['ratio']:.2f}{spread}: "
            + (f"holds on {here}" if row["ratio"] >= said else f"not on {here}")
        )
    offered = sorted({row["name"] for row in choices.rows if row["whose"] == "Triton, persistent TMA"})
    return "\n".join([*lines, f"a descriptor template was offered by: {', '.join(offered) or 'no mode'}"])


# ---- the decoder block


@results.experiment("ch14_compiled_decoder", decoder_timing.source)
def measure_decoder():
    """Time a decoder block of Llama 3 8B in decoder_timing.VARIANTS, and check it against float64."""
    return decoder_timing.measure()


def tabulate_traces(rows: list[dict]) -> results.Table:
    """Return the table of decoder_timing.trace_variants: graph breaks, operators, and graphs after each call."""
    calls = ", ".join(map(str, decoder_timing.CALLS))
    kinds = list(decoder_timing.PREDICTED_GRAPHS)
    shown = [row | {kind: ", ".join(map(str, row[kind])) for kind in kinds} for row in rows]
    caption = f"traced without data; graphs after calls with {calls} tokens, marked and unmarked"
    return results.table(shown, caption, ["variant", "breaks", "operators", "marked", "unmarked"])


def describe_decoder(record: results.Record) -> str:
    """Return a line per compiled variant and number of tokens: its ratio to eager, graph breaks and graphs."""
    lines = []
    for row in record.rows:
        if row.get("status") != "ok":
            lines.append(f"{row['tokens']:5} tokens, {row['name']}: {row.get('reason', 'not measured')}")
        elif "graphs" in row:
            spread = f" ± {row['spread']:.2f}" if row.get("spread") is not None else ""
            lines.append(
                f"{row['tokens']:5} tokens, {row['name']:13}: {row['ratio']:.2f}{spread} × eager under CUDA "
                f"graphs, {row['call_ratio']:.2f} × called plainly; {row['breaks']} graph breaks"
            )
    counted = {row["name"]: row["graphs"] for row in record.rows if "graphs" in row}
    calls = ", ".join(map(str, decoder_timing.CALLS))
    predicted = list(decoder_timing.PREDICTED_GRAPHS["marked"])
    seen = (
        f"predicted {predicted}; seen {', '.join(f'{name} {numbers}' for name, numbers in counted.items())}"
    )
    return "\n".join([*lines, f"graphs after calls with {calls} tokens, marked: {seen}"])


def tabulate_decoder(record: results.Record) -> results.Table:
    """Return the table of the decoder block's times, with the kernels of a call by kind, and of its errors."""
    columns = "tokens name ms ratio spread products_ms attention_ms other_ms launches call_ms call_ratio error".split()
    rows = [{key: row.get(key) for key in columns} for row in record.rows]
    return results.table(rows, f"a decoder block of Llama 3 8B: {record.label()}", columns)
