"""The measurements behind the notebook `07_ch14_descriptors`.

Each experiment returns a results.Record: measured now on a GPU with TMA, else the recorded one. `rules` and
`launch_cost` hold what belongs to rules and launches.
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
import pathlib

import torch

from ch14 import descriptors
from ch14.descriptors import kernels
from ch14.descriptors.configs import OPS, TileConfig, configs
from ch14.descriptors.lesson import launch_cost, tile_copy
from tilelab.measure import bench, check
from tilelab.records import results
from tilelab.runtime import device, provenance

PEER = {"copy": "torch copy_", "add": "torch add", "gather": "torch index_select"}
LARGE = (16384, 16384)  # bf16: 512 MiB per array
SHAPES = {"copy": (LARGE,), "add": (LARGE,), "gather": ((32768, 8192), (1 << 20, 256))}


def source() -> str:
    """Return the hash of what the experiments on kernels measure."""
    return provenance.source_hash(kernels, descriptors.prepare, TileConfig.programs)


_experiment = functools.partial(results.experiment, source=source)


def runnable_configs(op: str, target: str | None = None) -> dict[str, TileConfig]:
    """Return the variants of `op` that run on `target`, by default the GPU here or what the interpreter stands for."""
    target = target or device.current().target or "sm_100a"
    return {name: config for name, config in configs(op).items() if not config.rejection(target)}


def make_inputs(op: str, rows: int, columns: int, dtype=torch.bfloat16, n: int | None = None) -> dict:
    """Return random arguments of `descriptors.prepare` by name, with `out`.

    For gather, `index` is a permutation of the rows, or `n` random numbers, some of them out of range.
    """
    where = "cuda" if device.current().capability else "cpu"

    def random():
        if dtype.is_floating_point:
            return torch.randn(rows, columns, device=where).to(dtype)
        return torch.randint(-128, 128, (rows, columns), device=where).to(dtype)

    inputs = {"x": random(), "out": torch.empty(n or rows, columns, dtype=dtype, device=where)}
    if op == "add":
        inputs["y"] = random()
    elif op == "gather":
        index = torch.randint(-2, rows + 2, (n,), device=where) if n else torch.randperm(rows, device=where)
        inputs["index"] = index.int()
    return inputs


def _prepare(op: str, config, **inputs):
    if isinstance(config, tile_copy.CopyConfig):
        return tile_copy.prepare_copy(inputs["x"], inputs["out"], config)
    return descriptors.prepare(op, config=config, **inputs)


def verify(op: str, config, rows: int, columns: int, dtype=torch.bfloat16, n: int | None = None) -> dict:
    """Check a configuration on fresh data: all elements, and the memory around them. Return {status, reason, ulps}.

    Moved elements must have the same bits; sums must be within half a unit in the last place of float64. The output
    lies in padded rows, but for flat tiles.
    """
    inputs, bits = make_inputs(op, rows, columns, dtype, n), descriptors.BITS[dtype.itemsize]
    flat = op != "gather" and not configs(op).get(config, config).block_m
    inside = (slice(2, -2), slice(None) if flat else slice(16, 16 + columns))
    size = (len(inputs.pop("out")) + 4, columns + 32 * (not flat))
    room = torch.randn(*size, device=inputs["x"].device).to(dtype)
    out = room[inside]
    if dtype.is_floating_point:
        out.fill_(float("nan"))
    before = room.clone()
    as_moved = inputs if op == "add" else inputs | {"x": inputs["x"].view(bits)}
    expected = descriptors.spec(op, **as_moved)
    _prepare(op, config, **inputs, out=out)()
    error = check.ulps(out, expected) if op == "add" else 0.0
    wrong = 0 if op == "add" else int((out.view(bits) != expected).sum())
    before[inside] = out
    reason = ""
    if not torch.equal(before.view(bits), room.view(bits)):
        reason = "memory outside of the output was overwritten"
    elif wrong or error > 0.5:
        reason = f"the error is {error:.3g} units in the last place"
        reason = f"{wrong} elements are wrong" if wrong else reason
    ulps = error if error < float("inf") else None
    return {"status": "wrong" if reason else "ok", "reason": reason, "ulps": ulps}


# ---- speed


def bytes_moved(op: str, rows: int, columns: int) -> int:
    """Return the bytes that bf16 arrays of this shape take to read and to write, each once."""
    return rows * columns * 2 * (3 if op == "add" else 2) + (4 * rows if op == "gather" else 0)


def time_against_torch(op: str, chosen: dict, rows: int, columns: int, **timing) -> list[dict]:
    """Time configurations and torch interleaved, in bf16; return a row of bench.Timing for each configuration."""
    peers = {
        "copy": lambda x, out: lambda: out.copy_(x),
        "add": lambda x, out, y: lambda: torch.add(x, y, out=out),
        "gather": lambda x, out, index: lambda: torch.index_select(x, 0, index, out=out),
    }
    names = list(make_inputs(op, 1, 8))

    def candidate(config):
        return lambda *tensors: _prepare(op, config, **dict(zip(names, tensors)))

    def make_tensors():
        return list(make_inputs(op, rows, columns).values())

    candidates = {PEER[op]: peers[op], **{name: candidate(config) for name, config in chosen.items()}}
    timing |= {"nbytes": bytes_moved(op, rows, columns)}
    timings = bench.compare(candidates, make_tensors, PEER[op], **timing)
    labels = {
        name: {"op": op, "config": str(each), "shape": [rows, columns]} for name, each in chosen.items()
    }
    return [label | timings[name].row() for name, label in labels.items()]


@_experiment("ch14_descriptors_speed")
def measure_speed():
    """Measure the variants of every operation against torch, with 1 to 1.5 GiB moved."""
    cases = [(op, runnable_configs(op), *shape) for op in OPS for shape in SHAPES[op]]
    return [row for case in cases for row in time_against_torch(*case)]


@results.experiment("ch14_descriptors_launch", launch_cost.source)
def measure_launch_cost():
    """Measure what the CPU pays for a launch, in every way."""
    return launch_cost.measure_cost()


def find_words(package: str, words: list[str]) -> dict[str, bool]:
    """Return whether each word occurs in a file of an installed package, source or library."""
    folder = pathlib.Path(importlib.util.find_spec(package).origin).parent
    found = dict.fromkeys(words, False)
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".so", ".c") and path.is_file() and path.stat().st_size:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                for word in words:
                    found[word] = found[word] or text.find(word.encode()) >= 0
    return found
