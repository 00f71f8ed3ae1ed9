"""The measurements behind the notebook `ch14_compiled`.

Each experiment returns a tilelab.results.Record: measured here and now on a GPU with TMA, else the recorded one.
"""

from __future__ import annotations

import collections
import functools
import shutil
from collections.abc import Callable

from ch07.resample.experiments import NotProfiled
from ch14 import compiled
from ch14.compiled import TUNED, executed_instructions, reading
from ch14.compiled import worker as compiled_worker
from tilelab import bench, device, results, worker_pool

# (family, shape, modes). `math` keeps all scores in float32, so it has a small shape, where all backends are. The MLP's
# autotuning is long: `persistent-tma`, whose candidates include the others', is first and alone in timing them.
LONG = (4, 16, 16, 8192, 128)
CASES = (("matmul", (4096, 4096, 4096), ("eager", "default", "max-autotune", TUNED, "persistent-tma", "tma-only")),
         ("mlp", (8192, 4096, 14336), ("eager", "default", "persistent-tma", "max-autotune", TUNED)),
         ("attention", LONG, ("cuDNN", "flash", "efficient", "eager", "unfused", "default", "max-autotune",
                              "unfused-default", "course")),
         ("causal attention", LONG, ("cuDNN", "flash", "flex", "flex-tma", "flex-max-autotune", "course")),
         ("attention", (1, 16, 16, 2048, 128), ("cuDNN", "flash", "efficient", "math")))
# Ragged, and small enough for a CPU.
SMALL = (("matmul", (333, 136, 200), ("eager", "default")), ("mlp", (77, 136, 200), ("eager", "default")),
         ("attention", (2, 4, 2, 77, 64), ("eager", "default")),
         ("causal attention", (1, 4, 4, 300, 64), ("eager", "default", "flex")))
COUNTED = ("UTMALDG", "UTMASTG", "LDGSTS")  # the instructions that a reader is shown


def source() -> str:
    """Hash of what the experiments run: the workloads and modes, and how they are compiled, checked, timed and read."""
    return results.source_hash(compiled, compiled_worker, reading)


_experiment = functools.partial(results.experiment, source=source)


def measured(cases=CASES, say: Callable[[str], None] = compiled_worker.quiet) -> list[dict]:
    """The rows of compiled_worker.measure for `cases`, with the generated code and all candidates in them."""
    with worker_pool.lease_worker("ch14.compiled.worker", "the compiler's process") as worker:
        compiled_worker.ask(worker, "start", 120, say, where="cuda")
        rows = [row for family, shape, modes in cases
                for row in compiled_worker.measure(worker, family, shape, modes, say=say)]
        worker.stop()  # its memory on the GPU is others'
    return rows


_once = functools.cache(measured)  # cells and choices are two views of one run


@_experiment("ch14_compiled_cells")
def cells():
    """Every workload in every mode: compile and run time, error, what was chosen, what ran, and its instructions."""
    return [{key: value for key, value in row.items() if key not in ("code", "decided")} for row in _once()]


@_experiment("ch14_compiled_choices", can_run=lambda: device.current().has_tma
             and compiled.offers_triton_gemm(device.current().sms))
def choices():
    """Every candidate that a mode timed in its own autotuning, in the order of speed."""
    return [{"workload": row["workload"], "shape": row["shape"], "name": row["name"], "status": "ok", **each,
             "whose": reading.in_words(each["choice"])}
            for row in _once() if row.get("caches") == row["name"] for each in row.get("decided", ())]


@results.experiment("ch14_compiled_ncu", lambda: results.source_hash(compiled, executed_instructions, reading),
                    can_run=lambda: device.current().has_tma and shutil.which("ncu") is not None)
def _profiled():
    return executed_instructions.profile()


def profiled() -> results.Record:
    """Instructions that the libraries' kernels execute; the recorded ones where this user may not read counters."""
    try:
        return _profiled()
    except NotProfiled as error:
        print(f"Recorded counters: {error}")
        return results.load_record("ch14_compiled_ncu", _profiled.source())


profiled.source = _profiled.source


def evidence(row: dict, counters: list[dict]) -> list[dict]:
    """The kernels of a cell's call, {kernel, us, share, COUNTED, proof}, the one that takes most time first.

    `proof` is "SASS": so many instructions are in the code that Triton built; "ncu": so many were executed; or "none":
    nothing is claimed, and the counts are None. `counters` are rows of `profiled`.
    """
    spent = collections.Counter()
    for launch in row.get("kernels", ()):
        spent[launch["kernel"]] += launch["us"]
    executed = {each["kernel"]: each for each in counters
                if (each["workload"], each["shape"]) == (row["workload"], row["shape"])}
    found = []
    for kernel, us in spent.most_common():
        sources = ("SASS", row.get("triton", {}).get(kernel)), ("ncu", executed.get(kernel)), ("none", {})
        proof, counts = next(each for each in sources if each[1] is not None)
        found.append({"kernel": kernel, "us": us, "share": us / spent.total(), "proof": proof,
                      **{opcode: counts.get(opcode) for opcode in COUNTED}})
    return found


def ran(rows: list[dict], counters: list[dict], least: float = 0.02) -> list[dict]:
    """The distinct kernels of cells, those of less than a `least` share of a call left out: {workload, shape, kernel,
    COUNTED, proof, modes that ran it}."""
    found = {}
    for row in rows:
        for each in evidence(row, counters):
            kept = {key: each[key] for key in ("kernel", *COUNTED, "proof")}
            same = found.setdefault((row["workload"], *row["shape"], *kept.values()),
                                    {"workload": row["workload"], "shape": row["shape"], **kept, "modes": []})
            same["modes"] += [row["name"]] if each["share"] >= least else []
    return [{**each, "modes": ", ".join(each["modes"])} for each in found.values() if each["modes"]]


def table(rows: list[dict], counters: list[dict]) -> list[dict]:
    """The cells with their winner in words, and the `evidence` of the kernel that takes most of their time, `main`."""
    none = {"kernel": "", "proof": "none", **dict.fromkeys(COUNTED)}
    made = []
    for row in rows:
        main = next(iter(evidence(row, counters)), none)
        made.append({**row, "winner": "; ".join(row["winner"]) or "nothing to choose" if "winner" in row else "",
                     "main": main["kernel"], **{key: main[key] for key in ("proof", *COUNTED)}})
    return made


def checked() -> list[dict]:
    """SMALL against float64, here and now: compiled for the GPU, or for the CPU where there is none."""
    with worker_pool.lease_worker("ch14.compiled.worker", "the compiler's process") as worker:
        return [row for family, shape, modes in SMALL  # the process stays, for `measured`
                for row in compiled_worker.measure(worker, family, shape, modes, compiled.here(), timed=False)]


roofs = bench.measured_roofs
