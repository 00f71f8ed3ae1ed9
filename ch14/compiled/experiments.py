"""The measurements behind the notebook `ch14_compiled`: every workload in every mode, and the instructions that ran."""

from __future__ import annotations

import collections
import functools

from ch14 import compiled
from ch14.compiled import TUNED, executed_instructions, reading, worker
from tilelab import device, profiler, results, worker_pool

# (family, shape, modes). `math` keeps all scores in float32, so it has a small shape, with all backends. The MLP's
# autotuning takes long, so `persistent-tma`, which times the candidates of the others too, comes first.
LONG = (4, 16, 16, 8192, 128)
CASES = (("matmul", (4096, 4096, 4096), ("eager", "default", "max-autotune", TUNED, "persistent-tma", "tma-only")),
         ("mlp", (8192, 4096, 14336), ("eager", "default", "persistent-tma", "max-autotune", TUNED)),
         ("attention", LONG, ("cuDNN", "flash", "efficient", "eager", "unfused", "default", "max-autotune",
                              "unfused-default", "course")),
         ("causal attention", LONG, ("cuDNN", "flash", "flex", "flex-tma", "flex-max-autotune", "course")),
         ("attention", (1, 16, 16, 2048, 128), ("cuDNN", "flash", "efficient", "math")))
# Ragged shapes, small enough for a CPU.
SMALL = (("matmul", (333, 136, 200), ("eager", "default")), ("mlp", (77, 136, 200), ("eager", "default")),
         ("attention", (2, 4, 2, 77, 64), ("eager", "default")),
         ("causal attention", (1, 4, 4, 300, 64), ("eager", "default", "flex")))
COUNTED = ("UTMALDG", "UTMASTG", "LDGSTS")  # the instructions that the tables show


def source() -> str:
    """Return the hash of what is run: the workloads and modes, and how they are compiled, checked, timed and read."""
    return results.source_hash(compiled, worker, reading)


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


@_experiment("ch14_compiled_choices", can_run=lambda: device.current().has_tma
             and compiled.offers_triton_gemm(device.current().sms))
def measure_choices():
    """List every candidate that a mode timed in its own autotuning, in the order of speed."""
    return [{"workload": row["workload"], "shape": row["shape"], "name": row["name"], "status": "ok", **candidate,
             "whose": reading.describe_choice(candidate["choice"])}
            for row in _measure_once() if row.get("caches") == row["name"] for candidate in row.get("decided", ())]


@profiler.experiment("ch14_compiled_ncu", lambda: results.source_hash(compiled, executed_instructions, reading))
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
    executed = {counts["kernel"]: counts for counts in counters
                if (counts["workload"], counts["shape"]) == (row["workload"], row["shape"])}
    found = []
    for kernel, us in spent.most_common():
        sources = ("SASS", row.get("triton", {}).get(kernel)), ("ncu", executed.get(kernel)), ("none", {})
        proof, counts = next(pair for pair in sources if pair[1] is not None)
        found.append({"kernel": kernel, "us": us, "share": us / spent.total(), "proof": proof,
                      **{opcode: counts.get(opcode) for opcode in COUNTED}})
    return found


def list_distinct_kernels(rows: list[dict], counters: list[dict], least_share: float = 0.02) -> list[dict]:
    """Return {workload, shape, kernel, COUNTED, proof, modes that ran it} of the kernels of all cells.

    A kernel that takes less than `least_share` of a call is left out.
    """
    found = {}
    for row in rows:
        for kernel in list_kernels(row, counters):
            kept = {key: kernel[key] for key in ("kernel", *COUNTED, "proof")}
            same = found.setdefault((row["workload"], *row["shape"], *kept.values()),
                                    {"workload": row["workload"], "shape": row["shape"], **kept, "modes": []})
            same["modes"] += [row["name"]] if kernel["share"] >= least_share else []
    return [{**kernel, "modes": ", ".join(kernel["modes"])} for kernel in found.values() if kernel["modes"]]


def make_table(rows: list[dict], counters: list[dict]) -> list[dict]:
    """Return the cells with their winner in words, and with the kernel that takes most of their time as `main`."""
    none = {"kernel": "", "proof": "none", **dict.fromkeys(COUNTED)}
    table = []
    for row in rows:
        main = next(iter(list_kernels(row, counters)), none)
        table.append({**row, "winner": "; ".join(row["winner"]) or "nothing to choose" if "winner" in row else "",
                      "main": main["kernel"], **{key: main[key] for key in ("proof", *COUNTED)}})
    return table


def check_correctness() -> list[dict]:
    """Check SMALL against float64 now: compiled for the GPU, or for the CPU if there is none."""
    with worker_pool.lease_worker(worker.MODULE, worker.WHAT) as process:
        return [row for family, shape, modes in SMALL
                for row in worker.measure_modes(process, family, shape, modes, compiled.device_here(), timed=False)]
