"""The measurements behind the notebook `ch14_descriptors`, and what its panel shows.

Each experiment returns a tilelab.results.Record: measured here and now on a GPU with TMA, else the recorded one. Those
of rules and launches are in `ch14.descriptors.rules` and `ch14.descriptors.launch_cost`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import mmap
import pathlib

import torch

from ch14 import descriptors
from ch14.descriptors import kernels as descriptors_kernels
from ch14.descriptors import launch_cost, tile_copy_experiments
from ch14.descriptors.configs import OPS, TileConfig, configs
from ch14.descriptors.configs import chosen as descriptors_chosen
from tilelab import bench, build, check, device, results
from tilelab.sweep import Sweep
from tilelab.tunable import TargetSpace, TunableKernel

PEER = {"copy": "torch copy_", "add": "torch add", "gather": "torch index_select"}
LARGE = (16384, 16384)  # bf16: 512 MiB an array
SHAPES = {"copy": (LARGE,), "add": (LARGE,), "gather": ((32768, 8192), (1 << 20, 256))}
RAGGED = ((1, 8), (37, 200), (100, 72), (257, 1032))
QUICK = {"rounds": 6, "warm_s": 0, "burst_ms": 2}


def kernels() -> str:
    """Hash of what the experiments on kernels measure."""
    every = [kernel for kind in descriptors_kernels.KERNELS.values() for kernel in kind.values()]
    return results.source_hash(*every, descriptors_kernels.share, descriptors_kernels.added,
                               descriptors_kernels.counts, descriptors.prepare, descriptors.Launch, TileConfig.programs)


_experiment = functools.partial(results.experiment, source=kernels)


def runnable(op: str, target: str | None = None) -> dict[str, TileConfig]:
    """The variants of `op` that run on `target`, by default the GPU here or what the interpreter stands in for."""
    target = target or device.current().target or "sm_100a"
    return {name: config for name, config in configs(op).items() if not config.rejection(target)}


def inputs(op: str, rows: int, columns: int, dtype=torch.bfloat16, n: int | None = None) -> dict[str, torch.Tensor]:
    """Random arguments of `descriptors.prepare`: for gather a permutation of the rows, or `n` of them and some that are
    not there."""
    where = "cuda" if device.current().capability else "cpu"

    def random():
        if dtype.is_floating_point:
            return torch.randn(rows, columns, device=where).to(dtype)
        return torch.randint(-128, 128, (rows, columns), device=where).to(dtype)

    if op == "gather":
        index = torch.randperm(rows, device=where) if n is None else torch.randint(-2, rows + 2, (n,), device=where)
        out = torch.empty(len(index), columns, dtype=dtype, device=where)
        return {"x": random(), "out": out, "index": index.int()}
    return {"x": random(), "out": torch.empty(rows, columns, dtype=dtype, device=where)} | (
        {"y": random()} if op == "add" else {})


def spec(op: str, x, out, y=None, index=None):
    """What `out` should hold."""
    return {"copy": lambda: descriptors.copy_spec(x), "add": lambda: descriptors.add_spec(x, y),
            "gather": lambda: descriptors.gather_spec(x, index)}[op]()


def verify(op: str, config, rows: int, columns: int, dtype=torch.bfloat16, n: int | None = None) -> dict:
    """{status, reason, ulps}: fresh data, bits or units in the last place against float64, every element, and what lies
    around the output, in padded rows but for flat tiles."""
    given, bits = inputs(op, rows, columns, dtype, n), descriptors.BITS[dtype.itemsize]
    flat = op != "gather" and not descriptors_chosen(op, config).block_m
    inside = (slice(2, -2), slice(None) if flat else slice(16, 16 + columns))
    room = torch.randn(len(given["out"]) + 4, columns + 32 * (not flat), device=given["x"].device).to(dtype)
    given["out"] = room[inside]
    if dtype.is_floating_point:
        given["out"].fill_(float("nan"))
    before = room.clone()
    expected = spec(op, **given) if op == "add" else spec(op, **{
        name: tensor if name == "index" else tensor.view(bits) for name, tensor in given.items()})
    descriptors.prepare(op, config=config, **given)()
    error, wrong = 0.0, 0
    if op == "add":
        error = check.ulps(given["out"], expected)
    else:
        wrong = int((given["out"].view(bits) != expected).sum())
    before[inside] = given["out"]
    reason = ""
    if not torch.equal(before.view(bits), room.view(bits)):
        reason = "memory outside of the output was overwritten"
    elif wrong or error > 0.5:
        reason = f"{wrong} elements are wrong" if wrong else f"the error is {error:.3g} units in the last place"
    return {"status": "wrong" if reason else "ok", "reason": reason, "ulps": error if error < float("inf") else None}


def checked() -> list[dict]:
    """Every variant that runs here on ragged shapes, here and now: cases, largest error, what was wrong."""
    live, rows = device.current().has_tma, []
    if live:
        build.compile_ahead([descriptors.job(op, config, device.current().target, element) for op in OPS
                    for config in runnable(op).values()
                    for element in (("fp32", "bf16", "fp16") if op == "add" else ("u8", "i16", "i32", "i64"))])
    for op in OPS:
        dtypes = [*descriptors.FLOATS, torch.uint8, torch.float8_e4m3fn, torch.int64]
        if op == "add":  # the interpreter rounds bfloat16 towards zero
            dtypes = [dtype for dtype in descriptors.FLOATS if live or dtype != torch.bfloat16]
        for name in runnable(op):
            cases = [verify(op, name, *shape, dtype, 19 if op == "gather" else None)
                     for shape in RAGGED[:None if live else 2] for dtype in dtypes
                     if shape[1] * dtype.itemsize % 16 == 0]
            wrong = [case for case in cases if case["status"] != "ok"]
            rows.append({"op": op, "name": name, "config": str(configs(op)[name]), "cases": len(cases),
                         "ulps": max(case["ulps"] or 0 for case in cases), "status": "wrong" if wrong else "ok",
                         "reason": wrong[0]["reason"] if wrong else ""})
    return rows


# ---- speed


def moved(op: str, rows: int, columns: int) -> int:
    """Bytes that bf16 arrays of this shape take to read and to write, each once."""
    return rows * columns * 2 * (3 if op == "add" else 2) + (4 * rows if op == "gather" else 0)


def _peer(op: str):
    return {"copy": lambda x, out: lambda: out.copy_(x),
            "add": lambda x, out, y: lambda: torch.add(x, y, out=out),
            "gather": lambda x, out, index: lambda: torch.index_select(x, 0, index, out=out)}[op]


def against_torch(op: str, chosen: dict, rows: int, columns: int, **timing) -> list[dict]:
    """Rows of bench.Timing, one a configuration, all of them and torch interleaved; bf16."""
    names = list(inputs(op, 1, 8))

    def candidate(config):
        return lambda *tensors: descriptors.prepare(op, config=config, **dict(zip(names, tensors)))

    found = bench.compare({PEER[op]: _peer(op), **{name: candidate(config) for name, config in chosen.items()}},
                          lambda: list(inputs(op, rows, columns).values()), PEER[op], nbytes=moved(op, rows, columns),
                          **timing)
    return [{"op": op, "config": str(config), "shape": [rows, columns], **found[name].row()} for name, config in
            chosen.items()]


@_experiment("ch14_descriptors_speed")
def speed():
    """The variants of every operation against torch, 1 to 1.5 GiB moved."""
    return [row for op in OPS for shape in SHAPES[op] for row in against_torch(op, runnable(op), *shape)]


LOOPS = {"a tile a program": {}, "16 tiles a program": {"span": 16, "stages": 3},
         "4 programs an SM": {"span": 0, "stages": 3, "ctas": 4}}


@_experiment("ch14_descriptors_made")
def made():
    """The same copy in the same loops, described by the host and by each program: what making a descriptor costs."""
    rows = []
    for loop, way in itertools.product(LOOPS, ("host", "device")):
        config = TileConfig(way, 2, 1024, 1, **LOOPS[loop])
        programs = config.programs(LARGE[0] * LARGE[1] // config.elements, device.current().sms)
        rows.append({"name": way, "loop": loop, "config": config, "programs": programs,
                     **verify("copy", config, 257, LARGE[1])})
    timed = against_torch("copy", {f"{row['name']}, {row['loop']}": row["config"] for row in rows}, *LARGE)
    return [{**of, **row, "config": str(row["config"])} for row, of in zip(rows, timed)]


@results.experiment("ch14_descriptors_launch", launch_cost.source)
def launch():
    """What the CPU pays for a launch, by every way."""
    return launch_cost.cost()


# ---- the sweep, and the panel


@dataclasses.dataclass(frozen=True)
class DescriptorSpace(TargetSpace):
    """Configurations of `op` for bf16 matrices (rows, columns)."""

    op: str
    rows: int
    columns: int
    compile_for: str | None = None

    def label(self, config):
        return {"name": config.way, "config": str(config), "kernel": str(config), "shape": [self.rows, self.columns],
                "dtype": self.op}

    def source(self):
        return kernels()

    def reject(self, config):
        return config.rejection(self.target)

    def job(self, config):
        return descriptors.job(self.op, config, self.target)

    def warm_up(self):
        torch.zeros(1, device="cuda")
        return {}

    def measure(self, config):
        right = verify(self.op, config, 257, self.columns, n=257 if self.op == "gather" else None)
        if right["status"] != "ok":
            return right
        row, = against_torch(self.op, {"it": config}, self.rows, self.columns, **QUICK)
        return {**right, **_figures(row)}

    def measure_finalists(self, chosen):
        rows = against_torch(self.op, {str(config): config for config in chosen}, self.rows, self.columns)
        return [_figures(row) for row in rows]


def _figures(row: dict) -> dict:
    return {key: row[key] for key in ("status", "reason", "ms", "peer", "peer_ms", "ratio", "gbps") if key in row}


def grid(op: str) -> list[TileConfig]:
    """Tiles from 0.5 to 16 KiB, by every way that is for all GPUs; loops short, long and to the end."""
    if op == "gather":
        looped = tiles = [(1, width) for width in (256, 512, 1024, 2048, 4096)]
        threads = [(1, 1024, 4), (1, 2048, 8), (1, 4096, 8), (2, 1024, 8), (4, 256, 4), (4, 512, 8), (4, 1024, 8),
                   (16, 256, 8)]
    else:
        tiles = [(1, 1024), (1, 2048), (2, 512), (2, 1024), (4, 256), (4, 512), (4, 2048), (8, 256), (8, 1024),
                 (64, 64), *((0, width) for width in (512, 1024, 2048, 4096))]
        looped = [(2, 1024), (4, 256), (4, 2048), (0, 1024), (0, 4096)]
        threads = [(1, 1024, 4), (1, 2048, 8), (1, 2048, 4), (1, 4096, 8), (2, 2048, 8), (8, 256, 8), (0, 1024, 4),
                   (0, 2048, 8), (0, 2048, 4), (0, 4096, 8), (0, 8192, 8)]
    # span, stages, programs an SM; what makes its own maps has many tiles for them
    loops = {"host": [(0, 3, 4), (0, 3, 16), (4, 2, 1), (16, 3, 1)],
             "device": [(0, 3, 4), (0, 3, 8), (0, 2, 16), (16, 3, 1), (64, 3, 1)]}
    return [*(TileConfig("host", *tile, warps) for tile in tiles for warps in (1, 4)),
            *(TileConfig(way, *tile, 1, *loop) for way in loops for tile in looped for loop in loops[way]),
            *(TileConfig("pointers", *tile) for tile in threads)]


@_experiment("ch14_descriptors_sweep")
def swept():
    """The grid of every operation, at each of its shapes, through the engine."""
    kept = ("name", "config", "kernel", "shape", "dtype", "status", "reason", "ms", "peer_ms", "ratio", "gbps",
            "registers", "smem", "final_ms", "final_ratio")
    return [{key: row[key] for key in kept if key in row} for op in OPS for shape in SHAPES[op]
            for row in Sweep(grid(op), DescriptorSpace(op, *shape)).finish()]


def _chosen_space(shape: tuple[int, ...], dtype: str, target: str | None) -> DescriptorSpace:
    return DescriptorSpace(dtype, *tile_copy_experiments.matrix(shape), target)


TUNABLE_KERNEL = TunableKernel(
    name="descriptors",
    shapes={"512 MiB an array": LARGE, "512 MiB, rows of 16 KiB": SHAPES["gather"][0],
            "512 MiB, rows of 512 B": SHAPES["gather"][1], "32 MiB an array": (4096, 4096)},
    dtypes=OPS,
    presets={"the course's": lambda op: list(configs(op).values()), "the grid": grid},
    axes={"tile": lambda c: " × ".join(map(str, c.block)),
          "way": lambda c: f"{c.way}, {c.num_warps} warp{'s' * (c.num_warps > 1)}",
          "span": lambda c: f"span {c.span}" if c.span else f"{c.ctas} an SM",
          "stages": lambda c: f"{c.stages} stage{'s' * (c.stages > 1)}"},
    space=_chosen_space, load_record=lambda: results.load_record("ch14_descriptors_sweep", kernels()),
    roofline=tile_copy_experiments.roofline(lambda config: 2 * config.elements), peer="torch")


# ---- what the compiler makes of them


def built(targets=device.TARGETS[1:], ops=OPS) -> list[dict]:
    """The variants compiled here for each target: what their PTX and, where this Triton's tool can read it, their SASS
    holds; needs no GPU."""
    jobs = [(op, name, descriptors.job(op, config, target)) for op in ops for name, config in configs(op).items()
            for target in targets]
    reports = build.disassemble([job for *_, job in jobs])
    rows = []
    for (op, name, _), report in zip(jobs, reports):
        row = {"op": op, **report.row(), "name": name, "gather4": report.ptx.count("tile::gather4"),
               "loads_16b": report.ptx.count("ld.global.v4")}
        try:
            counts = build.sass_counts(report.cubin) if report.cubin else {}
            row |= {opcode: counts[opcode] for opcode in ("UTMALDG", "UTMASTG", "LDG", "STG") if counts}
        except RuntimeError:  # the cuobjdump in Triton 3.6 cannot read sm_103a and sm_121a
            pass
        rows.append(row)
    return rows


def found_in(package: str, words: list[str]) -> dict[str, bool]:
    """Whether each word occurs in a file of an installed package, source or library."""
    folder = pathlib.Path(importlib.util.find_spec(package).origin).parent
    found = dict.fromkeys(words, False)
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".so", ".c") and path.is_file() and path.stat().st_size:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                for word in words:
                    found[word] = found[word] or text.find(word.encode()) >= 0
    return found
