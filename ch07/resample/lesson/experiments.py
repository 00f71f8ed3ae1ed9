"""The measurements behind the notebook `02_ch07_resample`.

Each experiment returns a results.Record: measured now on a GPU with TMA, else the recorded one.
"""

import functools
import itertools
import sys

import torch

from ch07 import bulk_copy, resample
from ch07.bulk_copy.lesson import experiments as bulk_copy_experiments
from ch07.resample import BEST, EXAMPLE, LADDER
from tilelab.measure import bench, check, profiler
from tilelab.records import results
from tilelab.runtime import build, device, provenance

# (B, S, T, D): the compulsory bytes are far more than L2 holds, so the copy beside it is launched without a graph.
LARGE = {depth: (131072 // depth, 1024, 2048, depth) for depth in (32, 128, 256, 512)}
NOTE = ((32, 100, 256, 32), (32, 50, 32, 16), (64, 100, 50, 32), (128, 200, 100, 64))
SMALL = ((3, 100, 256, 32), (2, 1, 5, 8), (2, 2, 70, 24), (5, 37, 129, 10), (2, 3000, 77, 64))
SMALL += ((1, 65, 1000, 7), (3, 333, 3, 257), (2, 20, 40, 2500))
LARGEST = (64, 1024, 2048, 128)  # that is checked
PROFILED = EXAMPLE
TORCH_SHAPES = (PROFILED, (2048, 1024, 2048, 32))
METRICS = {
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "instructions": "smsp__inst_executed.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",  # of shared memory
    "ns": "gpu__time_duration.sum",
}


def source(*things) -> str:
    """Return the hash of the code that is measured, and of `things`."""
    return provenance.source_hash(resample, resample.SOURCE.with_name("configs.py"), resample.SOURCE, *things)


def make_inputs(
    batches: int,
    sources: int,
    targets: int,
    depth: int,
    dtype=torch.bfloat16,
    odd: bool = False,
    where: str = "cuda",
) -> list[torch.Tensor]:
    """Return random features, ascending source times and target times.

    All times are between 0 and 1 and ascend. With `odd`, a fifth of the targets lies outside, a third equals a source
    time, some source times are equal, and the targets of every second batch are in no order.
    """
    features = torch.randn(batches, sources, depth, device=where).to(dtype)
    source_times = torch.rand(batches, sources, device=where).sort(1).values
    target_times = torch.rand(batches, targets, device=where).sort(1).values
    if odd:
        target_times = 1.25 * target_times - 0.125
        source_times[:, sources // 2 : sources // 2 + 2] = source_times[:, sources // 2 : sources // 2 + 1]
        source_times[:, -2:] = source_times[:, -1:]
        hit = source_times.gather(1, torch.randint(0, sources, (batches, targets), device=where))
        target_times = torch.where(torch.rand(batches, targets, device=where) < 0.33, hit, target_times)
        target_times[1::2] = target_times[1::2, torch.randperm(targets, device=where)]
    return [features, source_times.contiguous(), target_times.contiguous()]


def verify(config, shape: tuple[int, int, int, int], dtype, odd: bool = False) -> dict:
    """Run a configuration on fresh inputs and compare every element with float64: {status, reason, ulps}.

    The output is poisoned before, and the memory around it must stay as it was.
    """
    given = make_inputs(*shape, dtype, odd)
    reference = resample.spec(*given)  # before the kernel, which could damage its inputs
    out, touched = check.make_poisoned(tuple(reference.shape), dtype, "cuda")
    resample.prepare(*given, out=out, config=config)()
    torch.cuda.synchronize()
    # Below this neither float64 nor the kernel has digits left to compare: the rows have cancelled.
    smallest = float(given[0].abs().max()) * (2.0**-28 if dtype == torch.float32 else 2.0**-40)
    return bulk_copy_experiments.judge_error(check.ulps(out, reference, smallest), touched())


def can_run(kernel: str, shape, dtype) -> bool:
    """Return whether a kernel takes rows of this size: a bulk copy needs multiples of 16 bytes."""
    return kernel != "bulk_rows" or shape[3] * dtype.itemsize % 16 == 0


def _compile(cases, others=()) -> None:
    """Compile all (kernel, dtype, shape) and the jobs `others` in parallel: launches would compile one at a time."""
    target = device.current().target
    jobs = [*others, *(resample.job(kernel, target, dtype, shape) for kernel, dtype, shape in cases)]
    build.compile_ahead({(job.kernel, *job.constants.items()): job for job in jobs}.values())


@results.experiment("ch07_resample_check", source)
def check_correctness():
    """Verify every kernel and dtype on ragged and odd shapes, then on one of 16.8 million elements."""
    shapes = (*SMALL, LARGEST)
    _compile((kernel, dtype, shape) for kernel in LADDER for dtype in resample.ELEMENTS for shape in shapes)
    rows = []
    for kernel, dtype in itertools.product(LADDER, resample.ELEMENTS):
        sizes = [shape for shape in shapes if can_run(kernel, shape, dtype)]
        cases = [verify(kernel, shape, dtype, odd) for shape in sizes for odd in (False, shape[1] > 2)]
        rows.append({"kernel": kernel, "dtype": str(dtype)[6:], **bulk_copy_experiments.summarize(cases)})
    return rows


# ---- speed


def compare_with_copy(shape: tuple[int, ...], kernels, dtype=torch.bfloat16, **timing) -> list[dict]:
    """Time kernels and torch's copy of the compulsory bytes, interleaved; one row of bench.Timing per kernel.

    `kernels` are names, or {name: function of (features, source_times, target_times, out) that returns a Launch}.
    """

    def make_operands():
        features, *times = make_inputs(*shape, dtype)
        return [features, *times, features.new_empty(shape[0], shape[2], shape[3])]

    def prepare(kernel, *given):
        return resample.prepare(*given[:3], out=given[3], config=kernel, validate=False)

    nbytes = resample.compulsory_bytes(*make_inputs(*shape, dtype))
    old, new = (torch.randint(0, 256, (nbytes // 2,), device="cuda", dtype=torch.uint8) for _ in range(2))
    if not isinstance(kernels, dict):
        kernels = {kernel: functools.partial(prepare, kernel) for kernel in kernels}
    every = {"torch copy": lambda *_: lambda: new.copy_(old), **kernels}
    found = bench.compare(every, make_operands, "torch copy", nbytes=nbytes, **timing)
    case = {"shape": list(shape), "dtype": str(dtype)[6:], "mbytes": nbytes / 1e6}
    return [{**case, **found[name].row()} for name in kernels]


@results.experiment("ch07_resample_ladder", source)
def measure_ladder():
    """Time every kernel at D = 128, and the best two at the other depths."""
    runs = {128: list(LADDER), **{depth: [BEST, "bulk_rows"] for depth in (32, 256, 512)}}
    _compile((kernel, torch.bfloat16, LARGE[depth]) for depth, kernels in runs.items() for kernel in kernels)
    return [row for depth, kernels in runs.items() for row in compare_with_copy(LARGE[depth], kernels)]


# Bytes per row, by the number of source times; two targets per source, and about 800 MB to move.
ROW_BYTES = {1024: (64, 80, 96, 128, 192, 256, 320, 384, 512, 768, 1024), 4096: (64, 96, 256, 384, 1024)}


def row_shapes() -> list[tuple[int, int, int, int]]:
    """Return the shapes (B, S, T, D) in bf16 of `measure_rows`."""
    return [
        (round(800e6 / (3 * sources * row)), sources, 2 * sources, row // 2)
        for sources, sizes in ROW_BYTES.items()
        for row in sizes
    ]


@results.experiment("ch07_resample_rows", source)
def measure_rows():
    """Time the fastest kernel beside torch's copy for rows of 64 to 1,024 bytes, with 1,024 and 4,096 source times."""
    _compile((BEST, torch.bfloat16, shape) for shape in row_shapes())
    return [
        row | {"sources": shape[1], "row_bytes": 2 * shape[3]}
        for shape in row_shapes()
        for row in compare_with_copy(shape, [BEST], rounds=10)
    ]


def torch_resample(features, source_times, target_times):
    """Resample as one would write it in torch: in float32, with the result in the dtype of features."""
    last = source_times.shape[1] - 1
    left = (torch.searchsorted(source_times, target_times, right=True) - 1).clamp(0, last - 1)
    begin, end = source_times.gather(1, left), source_times.gather(1, left + 1)
    weight = ((target_times - begin) / (end - begin)).nan_to_num(1.0).clamp(0, 1)[..., None]
    depth = features.shape[2]
    before = features.gather(1, left[..., None].expand(-1, -1, depth)).float()
    after = features.gather(1, (left + 1)[..., None].expand(-1, -1, depth)).float()
    return torch.lerp(before, after, weight).to(features.dtype)


def torch_spec(features, source_times, target_times):
    """Resample in float64, as exactly as the kernels."""
    return resample.spec(features, source_times, target_times).to(features.dtype)


@results.experiment("ch07_resample_torch", lambda: source(torch_resample, torch_spec))
def compare_with_torch():
    """Time the best kernel beside torch in float64 and float32, eager and compiled.

    `ratio` is relative to float64 compiled, `ulps` the largest error.
    """
    rows = []
    for shape in TORCH_SHAPES:
        torch._dynamo.reset()
        functions = {
            "torch float64, compiled": torch.compile(torch_spec),
            "torch float64, eager": torch_spec,
            "torch float32, compiled": torch.compile(torch_resample),
            "torch float32, eager": torch_resample,
        }
        # The kernel is prepared once, as for the ladder: preparing each call can take as long as the kernel.
        candidates = {
            **{name: functools.partial(functools.partial, function) for name, function in functions.items()},
            BEST: functools.partial(resample.prepare, validate=False),
        }
        given = make_inputs(*shape)
        reference = resample.spec(*given)
        errors = {name: check.ulps(prepare(*given)(), reference) for name, prepare in candidates.items()}
        del reference
        found = bench.compare(candidates, functools.partial(make_inputs, *shape), "torch float64, compiled")
        rows += [{"shape": list(shape), "ulps": errors[name], **found[name].row()} for name in candidates]
    return rows


@results.experiment("ch07_resample_note", source)
def measure_note_shapes():
    """Time the field note's shapes by graph replay: the best kernel, the note's search, and rows by TMA."""
    kernels = [BEST, "lane0_search", "bulk_rows"]
    _compile((kernel, torch.bfloat16, shape) for kernel in kernels for shape in NOTE)
    rows = [row for shape in NOTE for row in compare_with_copy(shape, kernels)]
    return [{**row, "us": row["ms"] * 1e3, "peer_us": row["peer_ms"] * 1e3} for row in rows]


# ---- the profiler


def profile_kernels(kernels, shape=PROFILED, dtype=torch.bfloat16, report: str | None = None) -> list[dict]:
    """Return the METRICS of one launch of each kernel, run by this topic's command line under Nsight Compute.

    Its report is kept in the file `report` (.ncu-rep), if one is named. Raises profiler.ProfilerUnavailable.
    """
    sizes, names = (",".join(map(str, each)) for each in (shape, kernels))
    options = f"--mode single_run --kernel {names} --shape {sizes} --dtype {str(dtype)[6:]}"
    command = [sys.executable, "-m", "ch07.resample", *options.split()]
    return [
        {"shape": list(shape), "dtype": str(dtype)[6:], "status": "ok", **row}
        for row in profiler.profile_kernels(command, kernels, METRICS, report)
    ]


@profiler.experiment("ch07_resample_ncu", lambda: source(profile_kernels))
def measure_counters():
    """Profile every kernel."""
    nbytes = resample.compulsory_bytes(*make_inputs(*PROFILED))
    return [row | {"gbps": nbytes / row["ns"]} for row in profile_kernels(list(LADDER))]


# ---- compute-sanitizer


def sanitizer_cases(share: int = 0, shares: int = 1) -> None:
    """Verify every kernel of the chapter on small and ragged cases, or every `shares`-th case from `share` on.

    Raises AssertionError for a wrong result.
    """
    rows = [
        bulk_copy_experiments.verify(op, name, torch.uint8 if op == "copy" else torch.bfloat16, n, offset)
        for op, name in BULK_CASES[share::shares]
        for n, offset in ((17, 1), (100_003, 3))
    ]
    rows += [
        verify(kernel, shape, dtype, odd=shape[1] > 2)
        for kernel, dtype, shape in RESAMPLE_CASES[share::shares]
    ]
    wrong = [row["reason"] for row in rows if row["status"] != "ok"]
    if wrong:
        raise AssertionError("; ".join(wrong))


BULK_CASES = [(op, name) for op in bulk_copy.OPS for name in bulk_copy.configs(op)]
_SHAPES = {torch.bfloat16: (3, 100, 70, 32), torch.float16: (2, 37, 129, 10), torch.float32: (2, 2, 5, 8)}
RESAMPLE_CASES = [(kernel, *case) for kernel in LADDER for case in _SHAPES.items()]
RESAMPLE_CASES = [case for case in RESAMPLE_CASES if can_run(case[0], case[2], case[1])]


@results.experiment(
    "ch07_sanitizer",
    lambda: source(sanitizer_cases, *bulk_copy_experiments.MEASURED_CODE),
    can_run=check.can_sanitize,
)
def run_sanitizers():
    """Run each tool of compute-sanitizer over `sanitizer_cases`."""
    kinds = [(name, "u8" if op == "copy" else "bf16") for op, name in BULK_CASES]
    _compile(RESAMPLE_CASES, [bulk_copy.job(name, device.current().target, kind) for name, kind in kinds])
    return check.sanitize("ch07.resample.lesson.experiments", shares=2)
