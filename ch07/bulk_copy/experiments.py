"""The measurements behind the notebook `ch07_bulk_copy`.

Each experiment returns a tilelab.results.Record: measured here and now on a GPU with TMA, else the recorded one.
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time

import torch

from ch07 import bulk_copy
from ch07.bulk_copy import BulkConfig, configs
from tilelab import bench, build, check, cuda, device, results, worker_pool

OPS = ("copy", "axpy")
PEER = {"copy": "torch copy_", "axpy": "torch add"}
LARGE = 1 << 30  # bytes of each array of a copy, and of all arrays of a x + y together, or nearly
A = 1.5
RAGGED = (1, 3, 17, 1000, 4096, 100_003, 3_000_017)  # elements
OFFSETS = (0, 1, 3)  # elements from an aligned address
QUICK = {"rounds": 8, "warm_s": 0, "burst_ms": 2}
RUNS = 20  # of a ring that lacks a line: not each of them is wrong
LIMIT_S = 10  # for all of them, with the GPU shared by the others


def source() -> str:
    """Hash of what is measured."""
    return results.source_hash(bulk_copy, bulk_copy.SOURCE)


def random(n: int, dtype) -> torch.Tensor:
    """n random elements on the GPU: any byte, or normal."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, (n,), device="cuda", dtype=dtype)
    return torch.randn(n, device="cuda").to(dtype)


def verify(op: str, config, dtype, n: int, offset: int = 0) -> dict:
    """{status, reason, ulps}: `n` fresh elements that start `offset` elements past an aligned address, bits or units in
    the last place against float64, every element, and what lies around the output."""
    room = 64
    x, y, buffer = (random(n + 2 * room, dtype) for _ in range(3))
    x, y, out = (tensor[room + offset:room + offset + n] for tensor in (x, y, buffer))
    if op == "copy":
        out.copy_(~x.view(torch.uint8).view(x.shape) if dtype == torch.uint8 else -x)  # other bits everywhere
    else:
        out.fill_(float("nan"))
    before = buffer.clone()
    bulk_copy.prepare(x, out, y=None if op == "copy" else y, a=A, config=config)()
    torch.cuda.synchronize()
    before[room + offset:room + offset + n] = out
    error = 0.0 if op == "copy" else check.ulps(out, bulk_copy.axpy_spec(A, x, y))
    reason = ""
    if not torch.equal(before.view(torch.uint8), buffer.view(torch.uint8)):
        reason = "memory outside the output was overwritten"
    elif op == "copy" and not torch.equal(out.view(torch.uint8), x.view(torch.uint8)):
        reason = f"{int((out.view(torch.uint8) != x.view(torch.uint8)).sum())} bytes differ"
    elif error > 1:
        reason = f"the error is {error:.3g} units in the last place"
    return {"status": "wrong" if reason else "ok", "reason": reason,
            "ulps": error if error < float("inf") else None}


def _compile(cases) -> None:
    """Compile what (config, element) will launch, all at once: alone, each launch would wait for its own."""
    build.compile_ahead([bulk_copy.job(config, device.current().target, element) for config, element in cases])


@results.experiment("ch07_bulk_check", source)
def checked():
    """Every variant on ragged sizes and offsets: the number of cases, the largest error, what was wrong."""
    rows = []
    _compile((config, element) for op in OPS for config in configs(op).values()
             for element in (("u8",) if op == "copy" else bulk_copy.ELEMENTS.values()))
    for op in OPS:
        for name, config in configs(op).items():
            for dtype in (torch.uint8,) if op == "copy" else bulk_copy.ELEMENTS:
                cases = [verify(op, config, dtype, n, offset) for n in RAGGED for offset in OFFSETS]
                wrong = [case for case in cases if case["status"] != "ok"]
                rows.append({"op": op, "name": name, "dtype": str(dtype)[6:], "cases": len(cases),
                             "ulps": max(case["ulps"] or 0 for case in cases),
                             "status": "wrong" if wrong else "ok", "reason": wrong[0]["reason"] if wrong else ""})
    return rows


def hello(source_code: str, name: str, block_bytes: int, options=()) -> results.Record:
    """Compile a copy kernel of one's own, (x, out), for the GPU here and run it, a block for each `block_bytes` of
    1 MiB; compare bit for bit."""
    def rows():
        x = random(1 << 20, torch.uint8)
        out = ~x
        cubin = cuda.compile_cubin(source_code, device.current().target, f"{name}.cu", options)
        cuda.launch(cuda.load_cubin(cubin, name), x.numel() // block_bytes, 32, [x, out])
        torch.cuda.synchronize()
        wrong = int((x != out).sum())
        return [{"bytes": x.numel(), "blocks": x.numel() // block_bytes, "wrong": wrong,
                 "status": "wrong" if wrong else "ok"}]

    return results.live_or_recorded("ch07_bulk_hello", rows, source())


# ---- speed


def _problem(op: str, nbytes: int):
    """(make_inputs, bytes moved, candidate of torch) for arrays of `nbytes` each."""
    dtype = torch.uint8 if op == "copy" else torch.float32
    n = nbytes // dtype.itemsize

    def inputs():
        x = random(n, dtype)
        return [x, torch.empty_like(x)] + ([random(n, dtype)] if op == "axpy" else [])

    if op == "copy":
        return inputs, 2 * nbytes, lambda x, out: lambda: out.copy_(x)
    return inputs, 3 * nbytes, lambda x, out, y: lambda: torch.add(y, x, alpha=A, out=out)


def _launcher(config):
    return lambda x, out, y=None: bulk_copy.prepare(x, out, y=y, a=A, config=config)


def against_torch(op: str, chosen: dict[str, BulkConfig], nbytes: int | None = None, **timing) -> list[dict]:
    """Rows of bench.Timing, one a configuration, all of them and torch interleaved."""
    nbytes = nbytes or (LARGE if op == "copy" else LARGE // 2)
    inputs, moved, peer = _problem(op, nbytes)
    found = bench.compare({PEER[op]: peer, **{name: _launcher(config) for name, config in chosen.items()}}, inputs,
                          PEER[op], nbytes=moved, **timing)
    return [{"op": op, "config": str(config), "shape": [nbytes], **found[name].row()} for name, config in
            chosen.items()]


@results.experiment("ch07_bulk_speed", source)
def speed():
    """The variants of both operations against torch, 2 GiB and 1.5 GiB moved."""
    _compile((config, "u8" if op == "copy" else bulk_copy.ELEMENTS[torch.float32]) for op in OPS
             for config in configs(op).values())
    return [row for op in OPS for row in against_torch(op, configs(op))]


def fronts() -> dict[str, BulkConfig]:
    """One ring, 4 stages of 8 KiB, and its chunks handed out in different orders; then plain loads, more and more of
    them in flight."""
    ring = functools.partial(BulkConfig, "bulk", 32, 8192, stages=4)
    persistent = {f"persistent, every {2 * (device.current().sms or 132)}th chunk": ring(span=0, ctas=2),
                  "persistent, the next free chunk": BulkConfig("bulk_in_order", 32, 8192, stages=4, span=0, ctas=2)}
    short = {f"{span} chunks a CTA": ring(span=span) for span in (64, 16, 8, 4)}
    loads = {f"loads, {16 * each} B a thread": BulkConfig("loads", 256, 4096 * each) for each in (1, 2, 4, 8)}
    return {**persistent, **short, **loads}


@results.experiment("ch07_bulk_fronts", source)
def front():
    """`fronts` against torch's copy."""
    _compile((config, "u8") for config in fronts().values())
    return against_torch("copy", fronts())


def first_kernel() -> dict:
    """In this process, with nothing compiled before: seconds from source to a checked result, by part."""
    marks = [time.perf_counter()]
    x = random(1 << 20, torch.uint8)
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    out = bulk_copy.copy(x)
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    right = torch.equal(out, x)
    marks.append(time.perf_counter())
    return {"gpu_starts_s": marks[1] - marks[0], "compile_load_launch_s": marks[2] - marks[1],
            "compare_s": marks[3] - marks[2], "status": "ok" if right else "wrong"}


@results.experiment("ch07_bulk_first", source)
def first():
    """`first_kernel` in fresh processes, by tilelab.bench.measure_first_launches."""
    return bench.measure_first_launches("ch07.bulk_copy.experiments")


# ---- what breaks


def broken_configs() -> list[tuple[str, BulkConfig]]:
    """The ring as it is, and with one thing left out at a time."""
    def ring(what, **rest):
        return BulkConfig("bulk", 256, 4096, stages=4, span=0, ctas=4, leaves_out=what, **rest)

    large = BulkConfig("bulk", 32, 65536, stages=1, span=0, ctas=3, leaves_out="wait_read")
    return [("axpy", ring("nothing")), ("axpy", ring("expect_tx")), ("axpy", ring("phase")),
            ("axpy", ring("proxy_fence")), ("axpy", ring("wait_read")), ("copy", large)]


def tried(number: int) -> None:
    """Print {status, reason} of that one of `broken_configs` as JSON; after LIMIT_S this process ends by SIGALRM."""
    op, config = broken_configs()[number]
    dtype = torch.uint8 if op == "copy" else torch.float32
    signal.alarm(LIMIT_S)
    try:
        rows = [verify(op, config, dtype, (1 << 24) // dtype.itemsize) for _ in range(RUNS)]
        wrong = [row["reason"] for row in rows if row["status"] != "ok"]
        found = {"status": "wrong" if wrong else "ok",
                 "reason": f"wrong in {len(wrong)} of {RUNS} runs: {wrong[-1]}" if wrong else
                           f"right in all {RUNS} runs"}
    except Exception as error:
        found = {"status": "failed", "reason": f"{type(error).__name__}: {device.first_line(error)}"}
    print(json.dumps(found), flush=True)


def alone(number: int) -> dict:
    """What `tried` says in a process of its own, or what became of that."""
    command = [sys.executable, "-c", f"from ch07 import bulk_trials; bulk_trials.tried({number})"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=worker_pool.ROOT, check=False)
    if done.stdout:
        return json.loads(done.stdout)
    hung = done.returncode == -signal.SIGALRM
    return {"status": "failed",
            "reason": f"no answer within {LIMIT_S} s" if hung else f"its process ended with status {done.returncode}"}


@results.experiment("ch07_bulk_broken", source)
def broken():
    """What comes of a ring that lacks a line: all at once, as two of them hang."""
    every = broken_configs()
    found = check.run_side_by_side(*(functools.partial(alone, number) for number in range(len(every))))
    return [{"op": op, "name": config.leaves_out, "kernel": f"{op}, {config}", **row}
            for (op, config), row in zip(every, found)]


# ---- compiled


def built() -> list[dict]:
    """The variants compiled here for each target, with the instructions that their SASS holds; needs no GPU."""
    jobs = [(op, name, bulk_copy.job(config, target, "u8" if op == "copy" else "float"))
            for op in OPS for name, config in configs(op).items() for target in device.TARGETS[1:]]
    reports = {(report.job.constants["ELEMENT"], report.job.name, report.job.target): report
               for report in build.build([job for _, _, job in jobs])}
    return [{"op": op, **reports[job.constants["ELEMENT"], job.name, job.target].row(), "name": name}
            for op, name, job in jobs]


if __name__ == "__main__":
    print(json.dumps(first_kernel()))
