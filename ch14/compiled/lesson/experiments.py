"""The measurements behind `11_ch14_compiled`: every workload in every mode, and the instructions that ran."""

from __future__ import annotations

import collections
import functools

from ch14.compiled.lesson import decoder_timing, executed_instructions, process, reading, worker, workloads
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
COUNTED = ("UTMALDG", "UTMASTG", "LDGSTS")  # the instructions that the tables show


def source() -> str:
    """Return the hash of what is run: the workloads and modes, and how they are compiled, checked, timed and read."""
    return provenance.source_hash(workloads, worker, process, reading)


_experiment = functools.partial(results.experiment, source=source)


def measure_cases(cases=CASES) -> list[dict]:
    """Return the rows of worker.measure_modes for `cases`, with the generated code and all candidates."""
    with worker_pool.lease_worker(worker.MODULE, worker.WHAT) as compiler:
        worker.ask(compiler, "start", 120, where="cuda")
        rows = [row for case in cases for row in worker.measure_modes(compiler, *case)]
        compiler.stop()  # frees its memory on the GPU
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


# ---- what the lesson's tables show


def read_cells() -> results.Record:
    """Return the recorded rows of `measure_cells`; measuring them takes two minutes."""
    return results.load_record("ch14_compiled_cells", source())


def read_choices() -> results.Record:
    """Return the recorded rows of `measure_choices`."""
    return results.load_record("ch14_compiled_choices", source())


def tabulate_products(cells: results.Record) -> results.Table:
    """Return the table of the recorded product in every mode, with the time of the graph's copies and the winner."""
    rows = []
    for row in cells.rows:
        if row["workload"] == "matmul" and row["status"] == "ok":
            copies = sum(each["us"] for each in row["kernels"] if "multi_tensor_apply" in each["kernel"])
            shown = {"mode": row["name"], "× eager": row["ratio"], "±": row.get("spread")}
            shown |= {"copies, µs": copies, "compile, s": row.get("compile_s")}
            rows.append(
                _round(shown) | {"fastest candidate": "; ".join(dict.fromkeys(row.get("winner", [])))}
            )
    return results.table(rows, f"a product of 4096³: {cells.label()}")


def _round(row: dict) -> dict:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


def describe_votes(choices: results.Record) -> str:
    """Return the time of the best candidate of each kind for the product, as a multiple of the fastest one's."""
    best: dict[str, float] = {}
    for row in sorted((row for row in choices.rows if row["ms"]), key=lambda row: row["ms"]):
        if (row["name"], row["workload"]) == ("persistent-tma", "matmul"):
            best.setdefault(row["whose"], row["ms"])
    return "; ".join(f"{whose} {ms / min(best.values()):.2f}" for whose, ms in best.items())


def describe_limit(cells: results.Record, roof) -> str:
    """Return what the fusion of silu(g) * u can save of the MLP's time at most, from its bytes and the roof."""
    sizes = workloads.pointwise_bytes(8192, 14336)
    saved = bench.floor_ms(roof, nbytes=sizes["eager, two kernels"] - sizes["one kernel"])
    eager_ms = next(row["ms"] for row in cells.rows if (row["workload"], row["name"]) == ("mlp", "eager"))
    factor = eager_ms / (eager_ms - saved)
    return f"fusing silu(g) * u saves at most {saved:.2f} of the MLP's {eager_ms:.2f} ms: {factor:.3f} ×"


# ---- the decoder block


@results.experiment("ch14_compiled_decoder", decoder_timing.source)
def measure_decoder():
    """Time a decoder block of Llama 3 8B in decoder_timing.VARIANTS, and check it against float64."""
    return decoder_timing.measure()


def tabulate_decoder(record: results.Record) -> results.Table:
    """Return the table of the decoder block's speed, with the times of its products, of attention and of the rest."""
    columns = {
        "tokens": "tokens",
        "name": "variant",
        "ratio": "× eager",
        "call_ratio": "× eager, plain calls",
        "products_ms": "products, ms",
        "attention_ms": "attention, ms",
        "other_ms": "other, ms",
        "error": "error",
    }
    rows = [_round({title: row.get(key) for key, title in columns.items()}) for row in record.rows]
    return results.table(rows, f"a decoder block of Llama 3 8B: {record.label()}", list(columns.values()))
