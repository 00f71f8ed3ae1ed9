"""What a launch costs before the kernel starts, and a way to pay for a descriptor once.

Triton 3.6 and 3.7 call `cuTensorMapEncodeTiled` for each host descriptor at each launch, also for a TensorDescriptor
that was kept (`triton/backends/nvidia/driver.py`, `make_tensordesc_arg`). `bind` encodes the maps once and launches the
binary that Triton made through the driver, with its parameters laid out as that file lays them out.
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

INTEGERS = {"i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
            "i64": ctypes.c_int64, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32,
            "u64": ctypes.c_uint64}
SWIZZLES = list(tensor_map.SWIZZLES)  # Triton counts them as the driver does


def parameters(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in this PTX."""
    entry = ptx[ptx.index(".entry"):]
    found = re.findall(r"\.param \.(?:align \d+ \.b8 \w+\[(\d+)\]|[a-z](\d+))", entry[:entry.index(")")])
    return [int(array) if array else int(bits) // 8 for array, bits in found]


def layout(compiled, arguments: dict, encode: Callable = tensor_map.make_tensor_map) -> list:
    """The parameters of Triton's CompiledKernel for `arguments` by name, but for its two of scratch; a descriptor is a
    map, a shape (32 bits) and strides (64). RuntimeError when the binary wants others."""
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
    widths = [ctypes.sizeof(value) if isinstance(value, ctypes._SimpleCData) else
              8 if isinstance(value, torch.Tensor) else 128 for value in values]
    if parameters(compiled.asm["ptx"]) != [*widths, 8, 8]:
        raise RuntimeError(f"this Triton's kernels take parameters of {parameters(compiled.asm['ptx'])} bytes, not of "
                           f"{[*widths, 8, 8]}: launch it through Triton.")
    return values


def bind(launch: descriptors.Launch) -> Callable[[], None]:
    """The same launch, its tensor maps encoded once and without Triton's Python: one at a time, for the tensors and the
    device of `launch`. RuntimeError for a Triton of another layout; else as `tilelab.cuda.prepare_launch`."""
    from cuda.core import ObjectCode

    compiled = launch.compiled()
    kernel = ObjectCode.from_cubin(compiled.asm["cubin"]).get_kernel(compiled.metadata.name)
    scratch = torch.empty(max(1, launch.grid * compiled.metadata.global_scratch_size), dtype=torch.int8, device="cuda")
    args = [*layout(compiled, launch.arguments), scratch, ctypes.c_uint64(0)]
    call = cuda.prepare_launch(kernel, launch.grid, 32 * compiled.metadata.num_warps, args, compiled.metadata.shared)

    def bound(alive=launch):  # a map holds an address, not the tensor
        call()

    return bound


def launches(x, out) -> dict[str, Callable[[], object]]:
    """Ways to launch a copy of bf16 matrices: one tile, one kernel each for pointers, host and device descriptors."""
    config = {way: TileConfig(way, 4, 256, 1) for way in ("pointers", "host", "device")}
    kept = {way: descriptors.prepare("copy", x, out, config=config[way]) for way in config}
    host = kept["host"]

    def made():
        again = {name: TensorDescriptor.from_tensor(host.arguments[name].base, [4, 256]) for name in ("x", "out")}
        host.kernel[(host.grid,)](**{**host.arguments, **again}, **host.options)

    return {"pointers": kept["pointers"], "host, kept": host, "host, made each time": made,
            "host, all of prepare": lambda: descriptors.prepare("copy", x, out, config=config["host"])(),
            "device": kept["device"], **{f"{way}, bound": bind(kept[way]) for way in config},
            "torch copy_": lambda: out.copy_(x)}


def enqueue_us(calls: dict[str, Callable[[], object]], each: int = 200, batches: int = 25) -> dict[str, float]:
    """Microseconds of the CPU for one launch that nobody waits for: medians of interleaved batches of `each`, which fit
    into the driver's queue of 1,024."""
    times = {name: [] for name in calls}
    for batch in range(batches + 1):
        for name in list(calls)[::1 if batch % 2 else -1]:
            call = calls[name]
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(each):
                call()
            spent = time.perf_counter() - begun
            if batch:
                times[name].append(spent / each * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(found) for name, found in times.items()}


def node_us(call: Callable[[], object], nodes: int = 100, replays: int = 20) -> float:
    """Microseconds from node to node of a CUDA graph of such launches, on the GPU: the maps are copied into the graph
    as it is captured."""
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


def cost(rows: int = 8, columns: int = 256) -> list[dict]:
    """Rows {name, us, node_us, status}: each way checked, then the CPU's time for a launch, and the GPU's for one in a
    CUDA graph where that is another kernel."""
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    out = torch.empty_like(x)
    calls, found = launches(x, out), []
    for name, call in calls.items():
        x.copy_(torch.randn(rows, columns, device="cuda"))
        out.fill_(float("nan"))
        call()
        found.append({"name": name, "status": "ok" if torch.equal(x, out) else "wrong"})
    alone = enqueue_us(calls)
    nodes = {name: node_us(calls[name]) for name in ("pointers", "host, kept", "device", "torch copy_")}
    return [{**row, "us": alone[row["name"]], "node_us": nodes.get(row["name"])} for row in found]


def source() -> str:
    """Hash of what is measured."""
    return results.source_hash(bind, layout, launches, enqueue_us, node_us, cost, descriptors.Launch)
