"""The cost of a launch before the kernel starts, and a way to encode a descriptor only once.

Triton 3.6 and 3.7 call `cuTensorMapEncodeTiled` for each host descriptor at each launch, also for a TensorDescriptor
that was kept (`triton/backends/nvidia/driver.py`, `make_tensordesc_arg`). `bind` encodes the maps once and
launches Triton's binary through the driver, as `tilelab.runtime.triton_launch` does for the course's operators.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import descriptors
from ch14.descriptors.configs import TileConfig
from tilelab.runtime import provenance, triton_launch


def bind(launch: descriptors.TileLaunch) -> Callable[[], None]:
    """Return a function that repeats `launch` without Triton's Python, its tensor maps encoded once.

    UnknownParameters for a Triton whose kernels take other parameters.
    """
    call = triton_launch.bind(launch.compile(), (launch.grid,), launch.arguments)

    def run(keep_alive=launch):  # a map holds an address, not the tensor
        call()

    return run


def prepare_launches(x, out) -> dict[str, Callable[[], object]]:
    """Return ways to launch a copy of bf16 matrices, with the same tile by pointers, host and device descriptors."""
    config = {way: TileConfig(way, 4, 256, 1) for way in ("pointers", "host", "device")}
    kept = {way: descriptors.prepare("copy", x, out=out, config=config[way]) for way in config}
    host = kept["host"]

    def make_each_time():
        made = {
            name: TensorDescriptor.from_tensor(host.arguments[name].base, [4, 256]) for name in ("x", "out")
        }
        host.kernel[(host.grid,)](**{**host.arguments, **made}, **host.options)

    return {
        "pointers": kept["pointers"],
        "host, kept": host,
        "host, made each time": make_each_time,
        "host, all of prepare": lambda: descriptors.prepare("copy", x, out=out, config=config["host"])(),
        "device": kept["device"],
        **{f"{way}, bound": bind(kept[way]) for way in config},
        "torch copy_": lambda: out.copy_(x),
    }


def measure_enqueue_us(
    calls: dict[str, Callable[[], object]], each: int = 200, batches: int = 25
) -> dict[str, float]:
    """Return the CPU's microseconds for a launch that nobody waits for, by name.

    Each figure is the median of interleaved batches. A batch of `each` launches fits into the driver's queue of 1,024.
    """
    times = {name: [] for name in calls}
    for batch in range(batches + 1):
        for name in list(calls)[:: 1 if batch % 2 else -1]:
            call = calls[name]
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(each):
                call()
            spent = time.perf_counter() - begun
            if batch:  # the first batch warms up
                times[name].append(spent / each * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(spent) for name, spent in times.items()}


def measure_node_us(call: Callable[[], object], nodes: int = 100, replays: int = 20) -> float:
    """Return the GPU's microseconds per node of a CUDA graph of such launches; capturing copies the maps into it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / (nodes * replays)


def measure_cost(rows: int = 8, columns: int = 256) -> list[dict]:
    """Check each way, and return rows {name, us, node_us, status}.

    `us` is the CPU's time for a launch, `node_us` the GPU's in a graph, None where another way has the same kernel.
    """
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    out = torch.empty_like(x)
    calls, checks = prepare_launches(x, out), []
    for name, call in calls.items():
        x.copy_(torch.randn(rows, columns, device="cuda"))
        out.fill_(float("nan"))
        call()
        checks.append({"name": name, "status": "ok" if torch.equal(x, out) else "wrong"})
    enqueue_us = measure_enqueue_us(calls)
    nodes = {
        name: measure_node_us(calls[name]) for name in ("pointers", "host, kept", "device", "torch copy_")
    }
    return [{**row, "us": enqueue_us[row["name"]], "node_us": nodes.get(row["name"])} for row in checks]


def source() -> str:
    """Return the hash of what is measured."""
    return provenance.source_hash(
        bind,
        triton_launch,
        prepare_launches,
        measure_enqueue_us,
        measure_node_us,
        measure_cost,
        descriptors.TileLaunch,
    )
