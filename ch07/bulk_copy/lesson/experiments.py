"""The measurements behind the notebook `01_ch07_bulk_copy`.

Each experiment returns a results.Record: measured now on a GPU with TMA, else the recorded one.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import tempfile

import torch

from ch07 import bulk_copy
from ch07.bulk_copy import ELEMENTS, OPS, SOURCE, BulkConfig, configs
from tilelab.measure import bench, check
from tilelab.records import results
from tilelab.runtime import build, device, provenance

MEASURED_CODE = (bulk_copy, SOURCE.with_name("configs.py"), SOURCE)
PEER = {"copy": "torch copy_", "axpy": "torch add"}
DTYPE = {"copy": torch.uint8, "axpy": torch.float32}  # what is timed
ELEMENT = {"copy": "u8", "axpy": ELEMENTS[torch.float32]}  # what its kernels are compiled for
LARGE = 1 << 30  # bytes of each array of a copy; a x + y has three arrays of half as many
A = 1.5
RAGGED = (1, 3, 17, 1000, 4096, 100_003, 3_000_017)  # elements
OFFSETS = (0, 1, 3)  # elements from an aligned address
QUICK = {"rounds": 8, "warm_s": 0, "burst_ms": 2}
RUNS = 20  # of a broken ring, because some runs give a correct result
LIMIT_S = 10  # for the RUNS of a broken ring, while the other rings use the GPU too


def source(*things) -> str:
    """Return the hash of the code that is measured, and of `things`."""
    return provenance.source_hash(*MEASURED_CODE, *things)


def make_random(n: int, dtype) -> torch.Tensor:
    """Return n random elements on the GPU: any byte, or normally distributed numbers."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, (n,), device="cuda", dtype=dtype)
    return torch.randn(n, device="cuda").to(dtype)


def verify(op: str, config, dtype, n: int, offset: int = 0, source: pathlib.Path = SOURCE) -> dict:
    """Run a configuration on `n` fresh elements, `offset` elements past an aligned address: {status, reason, ulps}.

    A copy must equal its input bit for bit; the error of a x + y is against float64. The memory around the output must
    stay as it was.
    """
    inside = slice(64 + offset, 64 + offset + n)
    buffers = [make_random(n + 128, dtype) for _ in range(3)]
    x, y, out = (buffer[inside] for buffer in buffers)
    out.view(torch.uint8).copy_(~x.view(torch.uint8))  # no byte of a copy is right by chance
    if op == "copy":
        y = None
    else:
        out.fill_(float("nan"))
    expected = buffers[2].clone()
    bulk_copy.prepare(x, y=y, a=A, out=out, config=config, source=source)()
    torch.cuda.synchronize()
    expected[inside] = out
    reason = ""
    if not torch.equal(expected.view(torch.uint8), buffers[2].view(torch.uint8)):
        reason = "memory outside the output was overwritten"
    elif y is None and (different := int((out.view(torch.uint8) != x.view(torch.uint8)).sum())):
        reason = f"{different} bytes differ"
    return judge_error(0.0 if y is None else check.ulps(out, bulk_copy.spec(x, y, A)), reason)


def judge_error(ulps: float, reason: str = "") -> dict:
    """Return {status, reason, ulps} of a result that is `ulps` units in the last place off, or wrong for a `reason`."""
    if ulps == float("inf"):
        return {
            "status": "wrong",
            "reason": reason or "elements are not finite, or were never written",
            "ulps": None,
        }
    if ulps > 1:
        reason = reason or f"the error is {ulps:.3g} units in the last place"
    return {"status": "wrong" if reason else "ok", "reason": reason, "ulps": ulps}


def _compile(cases) -> None:
    """Compile all (config, element) in parallel: one launch after the other would compile only one at a time."""
    build.compile_ahead([bulk_copy.job(each, device.current().target, element) for each, element in cases])


@results.experiment("ch07_bulk_check", source)
def check_correctness():
    """Verify every configuration on ragged sizes and offsets: the number of cases, the largest error, what is wrong."""
    elements = {torch.uint8: "u8", **ELEMENTS}
    cases = [
        (op, name, dtype)
        for op in OPS
        for name in configs(op)
        for dtype in ([torch.uint8] if op == "copy" else ELEMENTS)
    ]
    _compile((configs(op)[name], elements[dtype]) for op, name, dtype in cases)
    rows = []
    for op, name, dtype in cases:
        found = [verify(op, name, dtype, n, offset) for n in RAGGED for offset in OFFSETS]
        rows.append({"op": op, "name": name, "dtype": str(dtype)[6:], **summarize(found)})
    return rows


def summarize(rows: list[dict]) -> dict:
    """Return one row for many of `verify`: how many, the largest error, and the first that is wrong."""
    worst = next((row for row in rows if row["status"] != "ok"), rows[0])
    return {**worst, "cases": len(rows), "ulps": max(row["ulps"] or 0 for row in rows)}


# ---- speed


def compare_with_torch(
    op: str, timed: dict[str, BulkConfig], nbytes: int | None = None, **timing
) -> list[dict]:
    """Time configurations and torch interleaved, on arrays of `nbytes` each; one row of bench.Timing per config."""
    nbytes, dtype = nbytes or (LARGE if op == "copy" else LARGE // 2), DTYPE[op]
    arrays = 2 if op == "copy" else 3

    def make_inputs():  # out, x and, for a x + y, y
        return [make_random(nbytes // dtype.itemsize, dtype) for _ in range(arrays)]

    def prepare_torch(out, x, y=None):
        return (lambda: out.copy_(x)) if y is None else (lambda: torch.add(y, x, alpha=A, out=out))

    def prepare_kernel(config, out, x, y=None):
        return bulk_copy.prepare(x, y=y, a=A, out=out, config=config)

    candidates = {name: functools.partial(prepare_kernel, config) for name, config in timed.items()}
    found = bench.compare(
        {PEER[op]: prepare_torch, **candidates}, make_inputs, PEER[op], nbytes=arrays * nbytes, **timing
    )
    return [
        {"op": op, "config": str(config), "shape": [nbytes], **found[name].row()}
        for name, config in timed.items()
    ]


@results.experiment("ch07_bulk_speed", source)
def measure_speed():
    """Time every configuration of both operators against torch: 2 GiB and 1.5 GiB are moved."""
    _compile((config, ELEMENT[op]) for op in OPS for config in configs(op).values())
    return [row for op in OPS for row in compare_with_torch(op, configs(op))]


def front_configs() -> dict[str, BulkConfig]:
    """Return a ring of 4 stages of 8 KiB that gets its chunks in different orders, then loads of growing size."""
    ring = functools.partial(BulkConfig, "bulk", 32, 8192, stages=4)
    strided = ring(chunks_per_cta=0, ctas_per_sm=2)
    return {
        f"persistent, every {2 * (device.current().sms or 132)}th chunk": strided,
        "persistent, the next free chunk": dataclasses.replace(strided, kernel="bulk_in_order"),
        **{f"{chunks} chunks per CTA": ring(chunks_per_cta=chunks) for chunks in (64, 16, 8, 4)},
        **{
            f"loads, {16 * units} B per thread": BulkConfig("loads", 256, 4096 * units)
            for units in (1, 2, 4, 8)
        },
    }


@results.experiment("ch07_bulk_fronts", source)
def measure_fronts():
    """Time `front_configs` against torch's copy."""
    _compile((config, "u8") for config in front_configs().values())
    return compare_with_torch("copy", front_configs())


# ---- rings that lack a line


@contextlib.contextmanager
def broken_source(fault: str):
    """Yield the path of a copy of bulk_copy.cu without the line of the kernel `bulk` that `fault` names."""
    line, instead = {
        "nothing": ("", ""),
        "expect_tx": ("mbarrier_arrive_expect_tx(barrier, INPUTS * bytes);", "mbarrier_arrive(barrier);"),
        "phase": ("if (stage == 0) phase ^= 1;", ""),
        "wait_read": ("bulk_wait_read<BEHIND>();", ""),
        "proxy_fence": ("fence_proxy_async();", ""),
    }[fault]
    text = SOURCE.read_text()
    assert not line or text.count(line) == 1, f"{line!r} must stand in {SOURCE.name} once."
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, SOURCE.name)
        path.write_text(text.replace(line, instead) if line else text)
        yield path


def broken_cases() -> list[tuple[str, BulkConfig, str]]:
    """Return (op, configuration, fault) of each ring to try; the first is whole."""
    ring = BulkConfig("bulk", 256, 4096, stages=4, chunks_per_cta=0, ctas_per_sm=4)
    large = BulkConfig("bulk", 32, 65536, stages=1, chunks_per_cta=0, ctas_per_sm=3)
    faults = ("nothing", "expect_tx", "phase", "proxy_fence", "wait_read")
    return [*(("axpy", ring, fault) for fault in faults), ("copy", large, "wait_read")]


def run_broken_kernel(number: int) -> None:
    """Print a line when the GPU is open, then {status, reason} of one of `broken_cases` as JSON; it may hang."""
    op, config, fault = broken_cases()[number]
    print(torch.ones(1, device="cuda"), flush=True)
    with broken_source(fault) as path:
        rows = [
            verify(op, config, DTYPE[op], (1 << 24) // DTYPE[op].itemsize, source=path) for _ in range(RUNS)
        ]
    wrong = [row["reason"] for row in rows if row["status"] != "ok"]
    reason = f"wrong in {len(wrong)} of {RUNS} runs: {wrong[-1]}" if wrong else f"right in all {RUNS} runs"
    print(json.dumps({"status": "wrong" if wrong else "ok", "reason": reason}))


@results.experiment("ch07_bulk_broken", lambda: source(broken_source, broken_cases))
def run_broken_kernels():
    """Run every ring that lacks a line, in parallel because two rings hang until LIMIT_S."""
    cases = broken_cases()
    code = "from ch07.bulk_copy.lesson import experiments; experiments.run_broken_kernel({})"
    runs = [functools.partial(check.try_rows, code.format(number), LIMIT_S) for number in range(len(cases))]
    found = check.run_side_by_side(*runs)
    rows = []
    for (op, config, fault), row in zip(cases, found):
        kernel = f"{op}, {config}" + f", without {fault}" * (fault != "nothing")
        rows.append({"op": op, "name": fault, "kernel": kernel, **row})
    return rows
