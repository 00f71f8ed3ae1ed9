"""The cost of a launch before the kernel starts, and a way to encode a descriptor only once.

Triton 3.6 and 3.7 call `cuTensorMapEncodeTiled` for each host descriptor at each launch, also for a TensorDescriptor
that was kept (`triton/backends/nvidia/driver.py`, `make_tensordesc_arg`). `bind` encodes the maps once and
launches Triton's binary through the driver. Its parameters are in the order that driver.py gives them.
"""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from collections.abc import Callable

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import descriptors
from ch14.descriptors.configs import TileConfig
from tilelab import cuda, results, tensor_map

INTEGERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
SWIZZLES = list(tensor_map.SWIZZLES)  # Triton numbers them as the driver does


def parameter_bytes(ptx: str) -> list[int]:
    """Return the size of each parameter of the kernel in this PTX, in bytes."""
    entry = ptx[ptx.index(".entry"):]
    sizes = re.findall(r"\.param \.(?:align \d+ \.b8 \w+\[(\d+)\]|[a-z](\d+))", entry[:entry.index(")")])
    return [int(array) if array else int(bits) // 8 for array, bits in sizes]


def make_parameters(compiled, arguments: dict, encode: Callable = tensor_map.make_tensor_map) -> list:
    """Return the parameters of Triton's CompiledKernel for `arguments` by name, but for the two of its scratch memory.

    A descriptor becomes a map, a shape (32 bits each) and strides (64). RuntimeError when the binary wants others.
    """
    values, maps = [], iter(compiled.metadata.tensordesc_meta or ())
    for name, kind in compiled.src.signature.items():
        given = arguments[name]
        if isinstance(given, TensorDescriptor):
            meta = next(maps)
            values.append(encode(torch.as_strided(given.base, tuple(given.shape), tuple(given.strides)),
                                 meta["block_size"], swizzle=SWIZZLES[meta["swizzle"]],
                                 fill="nan" if given.padding == "nan" else "zero"))
            values += [*map(ctypes.c_int32, given.shape), *map(ctypes.c_int64, given.strides)]
        elif kind.startswith("*"):
            values.append(given)
        elif kind != "constexpr":
            values.append(INTEGERS[kind](given))
    sizes = [ctypes.sizeof(value) if isinstance(value, ctypes._SimpleCData) else
             8 if isinstance(value, torch.Tensor) else 128 for value in values]
    if parameter_bytes(compiled.asm["ptx"]) != [*sizes, 8, 8]:
        raise RuntimeError(f"this Triton's kernels take parameters of {parameter_bytes(compiled.asm['ptx'])} bytes, "
                           f"not of {[*sizes, 8, 8]}: launch it through Triton.")
    return values


def bind(launch: descriptors.TileLaunch) -> Callable[[], None]:
    """Return a function that repeats `launch` without Triton's Python, its tensor maps encoded once.

    Keep one launch in flight at a time. RuntimeError for a Triton whose kernels take other parameters; else as
    `tilelab.cuda.prepare_launch`.
    """
    from cuda.core import ObjectCode

    compiled = launch.compile()
    kernel = ObjectCode.from_cubin(compiled.asm["cubin"]).get_kernel(compiled.metadata.name)
    scratch = torch.empty(max(1, launch.grid * compiled.metadata.global_scratch_size), dtype=torch.int8, device="cuda")
    args = [*make_parameters(compiled, launch.arguments), scratch, ctypes.c_uint64(0)]
    call = cuda.prepare_launch(kernel, launch.grid, 32 * compiled.metadata.num_warps, args, compiled.metadata.shared)

    def run(keep_alive=launch):  # a map holds an address, not the tensor
        call()

    return run


def prepare_launches(x, out) -> dict[str, Callable[[], object]]:
    """Return ways to launch a copy of bf16 matrices, with the same tile by pointers, host and device descriptors."""
    config = {way: TileConfig(way, 4, 256, 1) for way in ("pointers", "host", "device")}
    kept = {way: descriptors.prepare("copy", x, out=out, config=config[way]) for way in config}
    host = kept["host"]

    def make_each_time():
        made = {name: TensorDescriptor.from_tensor(host.arguments[name].base, [4, 256]) for name in ("x", "out")}
        host.kernel[(host.grid,)](**{**host.arguments, **made}, **host.options)

    return {"pointers": kept["pointers"], "host, kept": host, "host, made each time": make_each_time,
            "host, all of prepare": lambda: descriptors.prepare("copy", x, out=out, config=config["host"])(),
            "device": kept["device"], **{f"{way}, bound": bind(kept[way]) for way in config},
            "torch copy_": lambda: out.copy_(x)}


def measure_enqueue_us(calls: dict[str, Callable[[], object]], each: int = 200, batches: int = 25) -> dict[str, float]:
    """Return the CPU's microseconds for a launch that nobody waits for, by name.

    Each figure is the median of interleaved batches. A batch of `each` launches fits into the driver's queue of 1,024.
    """
    times = {name: [] for name in calls}
    for batch in range(batches + 1):
        for name in list(calls)[::1 if batch % 2 else -1]:
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
    nodes = {name: measure_node_us(calls[name]) for name in ("pointers", "host, kept", "device", "torch copy_")}
    return [{**row, "us": enqueue_us[row["name"]], "node_us": nodes.get(row["name"])} for row in checks]


def source() -> str:
    """Return the hash of what is measured."""
    return results.source_hash(bind, make_parameters, prepare_launches, measure_enqueue_us, measure_node_us,
                               measure_cost, descriptors.TileLaunch)
