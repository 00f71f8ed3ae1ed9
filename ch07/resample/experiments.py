"""The measurements behind the notebook `ch07_resample`.

Each experiment returns a tilelab.results.Record: measured here and now on a GPU with TMA, else the recorded one.
"""

from __future__ import annotations

import csv
import functools
import io
import shutil
import subprocess
import sys

import torch

from ch07 import bulk_copy, resample
from ch07.resample import LADDER, ResampleConfig
from tilelab import bench, build, check, device, results, worker_pool

# (B, S, T, D): compulsory bytes far past L2, so that the copy beside it is launched plainly, not in a graph.
LARGE = {32: (4096, 1024, 2048, 32), 128: (1024, 1024, 2048, 128), 256: (512, 1024, 2048, 256),
         512: (256, 1024, 2048, 512)}
RATES = ((1024, 2048, 1024, 128), (1024, 2048, 2048, 128), (1024, 1024, 2048, 128), (1024, 512, 2048, 128))
NOTE = ((32, 100, 256, 32), (32, 50, 32, 16), (64, 100, 50, 32), (128, 200, 100, 64))
PROFILED = (512, 1024, 2048, 128)
METRICS = {"dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
           "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
           "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
           "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
           "instructions": "smsp__inst_executed.sum",
           "ns": "gpu__time_duration.sum"}


def source(*things) -> str:
    """Hash of what is measured, and of what an experiment runs beside it."""
    return results.source_hash(resample, resample.SOURCE, *things)


def inputs(batches: int, sources: int, targets: int, depth: int, dtype=torch.bfloat16, odd: bool = False,
           where: str = "cuda") -> list[torch.Tensor]:
    """Random features, ascending source times and target times.

    The targets ascend and lie between 0 and 1, as the sources do; with `odd` a fifth lies outside, a third hits a
    source time, some source times are equal, and every second batch's targets are in no order.
    """
    features = torch.randn(batches, sources, depth, device=where).to(dtype)
    source_times = torch.rand(batches, sources, device=where).sort(1).values
    target_times = torch.rand(batches, targets, device=where).sort(1).values
    if odd:
        target_times = 1.25 * target_times - 0.125
        source_times[:, sources // 2:sources // 2 + 2] = source_times[:, sources // 2:sources // 2 + 1]
        source_times[:, -2:] = source_times[:, -1:]
        hit = source_times.gather(1, torch.randint(0, sources, (batches, targets), device=where))
        target_times = torch.where(torch.rand(batches, targets, device=where) < 0.33, hit, target_times)
        target_times[1::2] = target_times[1::2, torch.randperm(targets, device=where)]
    return [features, source_times.contiguous(), target_times.contiguous()]


def verify(kernel: str, shape: tuple[int, int, int, int], dtype, odd: bool = False,
           config: ResampleConfig | None = None) -> dict:
    """{status, reason, ulps}: fresh data, a poisoned and guarded output, every element against float64."""
    given = inputs(*shape, dtype, odd)
    reference = resample.spec(*given)  # before the kernel, which might damage what it reads
    out, touched = check.make_poisoned(tuple(reference.shape), dtype, "cuda")
    resample.prepare(*given, out, kernel, config)()
    torch.cuda.synchronize()
    # Where the rows cancel to less than this, neither float64 nor the kernel has digits left to compare.
    least = float(given[0].abs().max()) * (2.0**-28 if dtype == torch.float32 else 2.0**-40)
    error, reason = check.ulps(out, reference, least), touched()
    if error == float("inf"):
        reason = reason or f"{int((~torch.isfinite(out)).sum())} of {out.numel()} elements were never written"
    elif error > 1:
        reason = reason or f"the error is {error:.3g} units in the last place"
    return {"status": "wrong" if reason else "ok", "reason": reason, "ulps": error if error < float("inf") else None}


SMALL = ((3, 100, 256, 32), (2, 1, 5, 8), (2, 2, 70, 24), (5, 37, 129, 10), (2, 3000, 77, 64), (1, 65, 1000, 7),
         (3, 333, 3, 257), (2, 20, 40, 2500))


@results.experiment("ch07_resample_check", source)
def checked():
    """Every step and dtype: ragged and odd shapes, then one of 16.8 million elements; the largest error."""
    shapes = SMALL + ((64, 1024, 2048, 128),)
    _compile((kernel, dtype, shape) for kernel in LADDER for dtype in resample.ELEMENTS for shape in shapes)
    return [_checked(kernel, dtype, shapes) for kernel in LADDER for dtype in resample.ELEMENTS]


def _compile(cases, also=()) -> None:
    """Compile what (kernel, dtype, shape) will launch, and the jobs `also`, all at once: alone, each launch would wait
    for its own."""
    jobs = [*also, *(resample.job(kernel, device.current().target, dtype, shape) for kernel, dtype, shape in cases)]
    build.compile_ahead({(job.kernel, *job.constants.items()): job for job in jobs}.values())


def _checked(kernel: str, dtype, shapes) -> dict:
    shapes = [shape for shape in shapes if kernel != "bulk_rows" or shape[3] * dtype.itemsize % 16 == 0]
    cases = [verify(kernel, shape, dtype, odd) for shape in shapes for odd in (False, shape[1] > 2)]
    wrong = [case for case in cases if case["status"] != "ok"]
    return {"kernel": kernel, "dtype": str(dtype)[6:], "cases": len(cases),
            "ulps": max(case["ulps"] or 0 for case in cases), "status": "wrong" if wrong else "ok",
            "reason": wrong[0]["reason"] if wrong else ""}


# ---- speed


def copy_of(nbytes: int):
    """A launch that copies half of `nbytes`, so that it moves as many."""
    old, new = (torch.randint(0, 256, (nbytes // 2,), device="cuda", dtype=torch.uint8) for _ in range(2))
    return lambda: new.copy_(old)


def against_copy(shape: tuple[int, int, int, int], kernels, dtype=torch.bfloat16, **timing) -> list[dict]:
    """Rows of bench.Timing for `kernels` (names, or {name: launcher of the inputs}) beside torch's copy of the
    compulsory bytes, all interleaved."""
    nbytes = resample.compulsory_bytes(*inputs(*shape, dtype))

    def given():
        fresh = inputs(*shape, dtype)
        return [*fresh, fresh[0].new_empty(shape[0], shape[2], shape[3])]

    def launcher(kernel):
        return lambda *tensors: resample.prepare(*tensors, kernel, validate=False)

    candidates = kernels if isinstance(kernels, dict) else {kernel: launcher(kernel) for kernel in kernels}
    copy = copy_of(nbytes)
    found = bench.compare({"torch copy": lambda *_: copy, **candidates}, given, "torch copy", nbytes=nbytes, **timing)
    return [{"shape": list(shape), "dtype": str(dtype)[6:], "mbytes": nbytes / 1e6, **found[name].row()}
            for name in candidates]


@results.experiment("ch07_resample_ladder", source)
def ladder():
    """Every step at D = 128, and the best two at the other depths."""
    best = [(kernel, torch.bfloat16, LARGE[depth]) for kernel in (resample.BEST, "bulk_rows") for depth in LARGE]
    _compile([(kernel, torch.bfloat16, LARGE[128]) for kernel in LADDER] + best)
    rows = against_copy(LARGE[128], list(LADDER))
    for depth in (32, 256, 512):
        rows += against_copy(LARGE[depth], [resample.BEST, "bulk_rows"])
    return rows


@results.experiment("ch07_resample_rates", source)
def rates():
    """The best step at other rates of targets to sources, in float32, and at targets in no order."""
    _compile([(resample.BEST, torch.bfloat16, shape) for shape in RATES] + [(resample.BEST, torch.float32, PROFILED)])
    rows = [row for shape in RATES for row in against_copy(shape, [resample.BEST])]
    rows += against_copy(PROFILED, [resample.BEST], torch.float32)

    def shuffled(features, source_times, target_times, out):
        mixed = target_times[:, torch.randperm(target_times.shape[1], device="cuda")].contiguous()
        return resample.prepare(features, source_times, mixed, out, validate=False)

    return rows + against_copy(LARGE[128], {f"{resample.BEST}, targets in no order": shuffled})


def torch_resample(features, source_times, target_times):
    """What one would write in torch: `spec` with the interpolation in float32 and the result in features' dtype."""
    last = source_times.shape[1] - 1
    left = (torch.searchsorted(source_times, target_times, right=True) - 1).clamp(0, last - 1)
    begin, end = source_times.gather(1, left), source_times.gather(1, left + 1)
    weight = ((target_times - begin) / (end - begin)).nan_to_num(1.0).clamp(0, 1)[..., None]
    depth = features.shape[2]
    before = features.gather(1, left[..., None].expand(-1, -1, depth)).float()
    after = features.gather(1, (left + 1)[..., None].expand(-1, -1, depth)).float()
    return torch.lerp(before, after, weight).to(features.dtype)


def torch_spec(features, source_times, target_times):
    """The meaning, as exact as the kernels: in float64."""
    return resample.spec(features, source_times, target_times).to(features.dtype)


@results.experiment("ch07_resample_torch", lambda: source(torch_resample, torch_spec))
def against_torch():
    """The best step beside torch in float64 and in float32, eager and compiled; `ratio` is to float64 compiled, `ulps`
    the largest error."""
    return [row for shape in (PROFILED, (2048, 1024, 2048, 32)) for row in _against_torch(shape)]


def _against_torch(shape) -> list[dict]:
    torch._dynamo.reset()
    functions = {"torch float64, compiled": torch.compile(torch_spec), "torch float64, eager": torch_spec,
                 "torch float32, compiled": torch.compile(torch_resample), "torch float32, eager": torch_resample,
                 resample.BEST: functools.partial(resample.resample, validate=False)}
    given = inputs(*shape)
    reference = resample.spec(*given)
    errors = {name: check.ulps(function(*given), reference) for name, function in functions.items()}
    del reference
    candidates = {name: lambda *tensors, function=function: functools.partial(function, *tensors)
                  for name, function in functions.items()}
    candidates[resample.BEST] = lambda features, source_times, target_times: resample.prepare(
        features, source_times, target_times, features.new_empty(*target_times.shape, features.shape[2]),
        validate=False)  # made once, as for the ladder: a call's preparation can take as long as the kernel
    found = bench.compare(candidates, lambda: inputs(*shape), "torch float64, compiled")
    return [{"shape": list(shape), "ulps": errors[name], **found[name].row()} for name in functions]


@results.experiment("ch07_resample_note", source)
def note():
    """The field note's shapes, microseconds by graph replay: the best step, the note's search, and torch's copy."""
    kernels = [resample.BEST, "lane0_search", "bulk_rows"]
    _compile((kernel, torch.bfloat16, shape) for kernel in kernels for shape in NOTE)
    rows = [row for shape in NOTE for row in against_copy(shape, kernels)]
    return [{**row, "us": row["ms"] * 1e3, "peer_us": row["peer_ms"] * 1e3} for row in rows]


# ---- the profiler


class NotProfiled(RuntimeError):
    """Nsight Compute gave no counters; the message is one sentence: why, and what to do."""


def profile(kernels, shape=PROFILED, dtype=torch.bfloat16) -> list[dict]:
    """METRICS of one launch of each kernel by Nsight Compute, in a process of its own. Raises NotProfiled."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NotProfiled("ncu is not on the PATH: install Nsight Compute, or read the counters in results/.")
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
               "--kernel-name", f"regex:^({'|'.join(kernels)})$", "--metrics", ",".join(METRICS.values()),
               sys.executable, "-m", "ch07.resample", "--mode", "single_run", "--kernel", ",".join(kernels),
               "--shape", ",".join(map(str, shape)), "--dtype", str(dtype)[6:]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=worker_pool.ROOT, check=False)
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise NotProfiled("this user may not read the GPU's counters: run as root, or have the administrator load the "
                          "driver with NVreg_RestrictProfilingToAdminUsers=0.")
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(table) < 3:
        reason = next((line for line in said.splitlines()[::-1] if line.strip()), "it said nothing")
        raise NotProfiled(f"ncu gave no counters ({reason.strip()[:200]}).")
    heads, _, *lines = csv.reader(io.StringIO("\n".join(table)))  # names, units, then a line a launch
    rows = [dict(zip(heads, line)) for line in lines]
    try:
        return [{"kernel": row["Kernel Name"].split("(")[0], "shape": list(shape), "dtype": str(dtype)[6:],
                 "status": "ok", **{key: float(row[metric].replace(",", "")) for key, metric in METRICS.items()}}
                for row in rows]
    except (KeyError, ValueError) as error:
        raise NotProfiled(f"ncu's answer lacks a counter that this version or GPU does not have ({error}).") from error


def profiled() -> results.Record:
    """Every step's counters, beside what `predicted_percent` expects of it; the recorded ones where this user may not
    read the GPU's."""
    try:
        return _profiled()
    except NotProfiled as error:
        print(f"Recorded counters: {error}")
        return results.load_record("ch07_resample_ncu", _profiled.source())


@results.experiment("ch07_resample_ncu", lambda: source(profile, predicted_percent),
                    can_run=lambda: device.current().has_tma and shutil.which("ncu") is not None)
def _profiled():
    nbytes = resample.compulsory_bytes(*inputs(*PROFILED))
    return [{**row, "predicted_percent": predicted_percent(row["kernel"]), "gbps": nbytes / row["ns"]}
            for row in profile(list(LADDER))]


profiled.source = _profiled.source


def predicted_percent(kernel: str, shape=PROFILED, peak_gbps: float = 4800, copy_gbps: float = 4200, sms: int = 132,
                      clock_ghz: float = 1.7) -> float:
    """% of DRAM's peak that a step would reach if only issue slots and bytes counted: no latency, perfect overlap.

    Instructions a lane executes, estimated from the source: 8 for a step of a search (10 with a shuffle, 15 with a
    ballot, 3 without bounds), 45 for the weights, 20 for an element moved alone, 10 for one of a vector.
    """
    batches, sources, targets, depth = shape
    steps = sources.bit_length()
    each = {"search_a_thread": depth * (8 * steps + 45 + 20), "lane0_search": 32 * (10 * steps + 45) + 20 * depth,
            "ballot_search": 32 * (15 * -(-steps // 5) + 45) + 20 * depth, "shared_search": 3 * steps + 45 + 20 * depth}
    lanes = batches * targets * each.get(kernel, 3 * steps + 45 + 10 * depth)
    issue_us = lanes / (sms * 128 * clock_ghz * 1e3)
    dram_us = batches * (sources + targets) * depth * 2 / copy_gbps / 1e3
    return 100 * copy_gbps / peak_gbps * dram_us / max(issue_us, dram_us)


# ---- the sanitizer

def _watched() -> list[tuple]:
    """(kernel, dtype, shape) of every step on small and ragged cases."""
    cases = ((torch.bfloat16, (3, 100, 70, 32)), (torch.float16, (2, 37, 129, 10)), (torch.float32, (2, 2, 5, 8)))
    return [(kernel, dtype, shape) for kernel in LADDER for dtype, shape in cases
            if kernel != "bulk_rows" or shape[3] * dtype.itemsize % 16 == 0]


def sanitizer_cases(share: int = 0, shares: int = 1) -> None:
    """Every kernel of the chapter on small and ragged cases, or every so-manyth, for a sanitizer to watch;
    AssertionError when one is wrong."""
    from ch07.bulk_copy import experiments

    wrong, cases = [], [(op, *named) for op in experiments.OPS for named in bulk_copy.configs(op).items()]
    for op, name, config in cases[share::shares]:
        for n, offset in ((17, 1), (100_003, 3)):
            row = experiments.verify(op, config, torch.uint8 if op == "copy" else torch.bfloat16, n, offset)
            wrong += [f"{op} {name}: {row['reason']}"] if row["status"] != "ok" else []
    for kernel, dtype, shape in _watched()[share::shares]:
        row = verify(kernel, shape, dtype, odd=shape[1] > 2)
        wrong += [f"{kernel} {shape}: {row['reason']}"] if row["status"] != "ok" else []
    if wrong:
        raise AssertionError("; ".join(wrong))


@results.experiment("ch07_sanitizer", lambda: source(sanitizer_cases, _watched, bulk_copy, bulk_copy.SOURCE),
                    can_run=check.can_sanitize)
def sanitized():
    """What compute-sanitizer finds in `sanitizer_cases`, tool by tool."""
    from ch07.bulk_copy import experiments

    _compile(_watched(), [bulk_copy.job(config, device.current().target, "u8" if op == "copy" else "bf16")
                          for op in experiments.OPS for config in bulk_copy.configs(op).values()])
    return check.sanitize("ch07.resample.experiments", shares=2)
