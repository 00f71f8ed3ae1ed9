"""The measurements behind the notebook `03_ch10_tile_pipeline`.

Each experiment returns a results.Record: measured now on a GPU with TMA, else the recorded one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.configs import DIMENSIONS, KERNELS, MAX_STAGES, PRODUCERS, TileConfig, configs
from tilelab.measure import bench, check
from tilelab.records import results
from tilelab.runtime import build, device, provenance, tensor_map

OPS = tuple(KERNELS)
CENTRE, EDGE = 0.5, 0.125
LARGE, WIDE, UNEVEN = (16384, 8192), (4096, 32768), (10_007, 13_331)  # 512 MiB of float32, or nearly
BATCHED = (32, 1024, 4096)
RAGGED = {
    2: ((1, 1), (3, 5), (33, 31), (64, 64), (100, 1000), (257, 513), (1000, 1003)),
    3: ((1, 5, 9), (3, 33, 70), (5, 64, 256), (7, 100, 513)),
}  # by dimensions
QUICK = {"rounds": 8, "warm_s": 0, "burst_ms": 2}
STAGES = range(1, MAX_STAGES + 1)


def source(*things) -> str:
    """Return the hash of the code that is measured, and of `things` that an experiment runs beside it."""
    own = (tile_pipeline, tile_pipeline.SOURCE.with_name("configs.py"), tile_pipeline.SOURCE)
    return provenance.source_hash(*own, tensor_map, *things)


def all_configs(op: str) -> dict[str, TileConfig]:
    """Return the variants of `op`, and small tiles with each ring, producer, swizzle and cluster."""
    if op == "stencil":
        small = [
            TileConfig(op, 8, 32, 64, stages, 7, producer) for stages in STAGES for producer in PRODUCERS
        ]
    elif op == "transpose":
        small = [
            TileConfig(op, tile, tile, 96, swizzle=swizzle, block=block, raster=3)
            for tile in (32, 96)
            for swizzle in tensor_map.SWIZZLES
            for block in (1, 4)
        ]
    elif op == "add_shared":
        small = [TileConfig(op, 8, 64, 64, cluster=cluster) for cluster in (1, 2, 4)]
    else:
        small = [TileConfig(op, 4, 64, stages=stages, tiles_per_cta=7) for stages in STAGES]
    return {**configs(op), **{str(config): config for config in small}}


def every_config() -> list[tuple[str, str, TileConfig]]:
    """Return (operation, name, configuration) for `all_configs` of every operation."""
    return [(op, name, config) for op in OPS for name, config in all_configs(op).items()]


def _compile(configs: Iterable[TileConfig]) -> None:
    build.compile_ahead([tile_pipeline.job(config, device.current().target) for config in configs])


# ---- correctness


def make_random(shape: tuple[int, ...], dtype=torch.float32) -> torch.Tensor:
    """Return normal numbers on the GPU, or random bits of an integer dtype."""
    if dtype.is_floating_point:
        return torch.randn(shape, device="cuda").to(dtype)
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), device="cuda", dtype=torch.uint8)
    return bits.view(dtype)


def make_guarded(shape: tuple[int, ...], dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random buffer, and a view of `shape` inside it that has other elements on all sides."""
    unit = max(1, tile_pipeline.UNIT // dtype.itemsize)
    *outer, rows, columns = shape
    buffer = make_random((*outer, rows + 4, (-(-columns // unit) + 2) * unit), dtype)
    return buffer, buffer[..., 2:-2, unit : unit + columns]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold the same bits."""
    # Copies, because torch calls a tensor of one column contiguous whatever its strides are, and cannot view it then.
    return torch.equal(*(tensor.new_empty(tensor.shape).copy_(tensor).view(torch.uint8) for tensor in (a, b)))


def verify(op: str, config, shape: tuple[int, ...], dtype=torch.float32, fill: str = "zero") -> dict:
    """Return {status, reason, error} of a run on fresh random data; memory around the output counts, too.

    Copy and transpose must keep all bits. The others have a `check.relative_error` against float64, and must have NaN
    exactly where the spec has it.
    """
    arguments = {"y": make_guarded(shape[1:], dtype)[1]} if op == "add_shared" else {}
    arguments |= {"centre": CENTRE, "edge": EDGE, "fill": fill} if op == "stencil" else {}
    x = make_guarded(shape, dtype)[1]
    expected = tile_pipeline.spec(op, x, **arguments)
    buffer, out = make_guarded(tuple(expected.shape), dtype)
    out.copy_(torch.full_like(out, float("inf")) if dtype.is_floating_point else ~expected)
    before = buffer.clone()
    tile_pipeline.prepare(op, x, **arguments, out=out, config=config)()
    torch.cuda.synchronize()
    before.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(out)
    error, reason = 0.0, ""
    if not same_bits(before, buffer):
        reason = "memory outside the output was overwritten"
    elif op in ("copy", "transpose"):
        if not same_bits(out, expected):
            reason = f"{int((out != expected).sum())} elements differ"
    elif not torch.equal(out.isnan(), expected.isnan()):
        count = int((out.isnan() != expected.isnan()).sum())
        reason = f"{count} elements are NaN in out or in the spec alone"
    else:
        numbers = (torch.where(expected.isnan(), 0.0, tensor) for tensor in (out, expected))
        error = check.relative_error(*numbers)
        # Rounding adds up in a sum of many terms in any order.
        tolerance = check.TOLERANCE[dtype] * max(1.0, shape[0] / 8 if op == "accumulate" else 1.0)
        if error > tolerance:
            reason = f"the error {error:.1e} is above {tolerance:.1e}"
    error = error if error < float("inf") else None
    return {"status": "wrong" if reason else "ok", "reason": reason, "error": error}


def sanitizer_cases(share: int = 0, shares: int = 1) -> None:
    """Run every `shares`-th configuration on small, ragged shapes under a sanitizer; AssertionError if one is wrong."""
    for op, name, config in every_config()[share::shares]:
        for shape in ((33, 31), (100, 260)) if DIMENSIONS[op] == 2 else ((3, 33, 70), (5, 10, 256)):
            check.require_right({f"{name} {shape}": verify(op, config, shape)})


@results.experiment("ch10_tile_check", source)
def check_correctness():
    """Check every operation with each ring, producer, swizzle and cluster on ragged shapes."""
    _compile(config for *_, config in every_config())
    rows = []
    for op, name, config in every_config():
        fills = tensor_map.FILLS if op == "stencil" else ("zero",)
        cases = [verify(op, config, shape, fill=fill) for shape in RAGGED[DIMENSIONS[op]] for fill in fills]
        # The first wrong case, if there is one, gives the row its status and reason.
        worst = min(cases, key=lambda case: case["status"] == "ok")
        row = {"op": op, "name": name, "config": str(config), "cases": len(cases), **worst}
        rows.append(row | {"error": max(case["error"] or 0 for case in cases)})
    return rows


@results.experiment("ch10_tile_sanitizer", source, can_run=check.can_sanitize)
def run_sanitizers():
    """Run each tool of compute-sanitizer on `sanitizer_cases`."""
    # Compile here: a tool has one CPU, and would compile them one after the other.
    _compile(config for *_, config in every_config())
    return check.sanitize("ch10.tile_pipeline.lesson.experiments", shares=4)


# ---- speed


def bytes_moved(op: str, shape: tuple[int, ...]) -> int:
    """Return the bytes that `op` must read and write for x of this shape, float32."""
    *batch, rows, columns = shape
    matrices = 2 if not batch else batch[0] + 1 if op == "accumulate" else 2 * batch[0] + 1
    return matrices * rows * columns * 4


def _flat_copy(x, out):
    """Copy as many bytes with torch, contiguous, in the same memory."""
    source, target = (tensor.as_strided((x.numel(),), (1,)) for tensor in (x, out))
    return lambda: target.copy_(source)


def _stencil_of_slices(x, out):
    def run():
        torch.mul(x, CENTRE, out=out)
        for here, there in (
            ((slice(1, None),), (slice(None, -1),)),
            ((slice(None), slice(1, None)), (slice(None), slice(None, -1))),
        ):
            out[here].add_(x[there], alpha=EDGE)
            out[there].add_(x[here], alpha=EDGE)

    return run


def torch_candidates(op: str) -> dict:
    """Return torch's ways to compute `op` by name, the peer first: for add_shared and accumulate torch's own way, else
    a copy of as many bytes."""
    if op == "add_shared":
        return {"torch add": lambda x, out, y: lambda: torch.add(x, y, out=out)}
    if op == "accumulate":
        return {"torch sum": lambda x, out: lambda: torch.sum(x, 0, out=out)}
    own = {
        "copy": {},
        "stencil": {"torch slices": _stencil_of_slices},
        "transpose": {"torch x.T copy_": lambda x, out: lambda: out.copy_(x.T)},
    }[op]
    return {"torch copy_": _flat_copy, **own}


def compare_with_torch(op: str, configs: dict[str, TileConfig], shape: tuple, **timing) -> list[dict]:
    """Return rows of bench.Timing, one per configuration and one for torch's own way. All run interleaved.

    `ratio` is to the first of `torch_candidates`.
    """
    own = torch_candidates(op)
    peer, *others = own
    weights = {"centre": CENTRE, "edge": EDGE} if op == "stencil" else {}

    def prepare(config):
        return lambda x, out, y=None: tile_pipeline.prepare(op, x, y=y, **weights, out=out, config=config)

    def make_inputs():
        shapes = [shape, tile_pipeline.result_shape(op, shape)] + [shape[1:]] * (op == "add_shared")
        return [tile_pipeline.empty_padded(each, torch.float32, "cuda").normal_() for each in shapes]

    every = own | {name: prepare(config) for name, config in configs.items()}
    found = bench.compare(every, make_inputs, peer, nbytes=bytes_moved(op, shape), **timing)
    return [
        {"op": op, "config": str(configs.get(name, "")), "shape": list(shape), **found[name].row()}
        for name in (*configs, *others)
    ]


def _measure(op: str, named: dict[str, TileConfig], *shapes, describe=lambda config: {}) -> list[dict]:
    """Compile all, then return the rows of `compare_with_torch` for each shape, with `describe(config)` in them."""
    _compile(named.values())
    return [
        row | (describe(named[row["name"]]) if row["name"] in named else {})
        for shape in shapes
        for row in compare_with_torch(op, named, shape)
    ]


@results.experiment("ch10_tile_speed", source)
def measure_speed():
    """Time the variants of copy, stencil and transpose against torch's copy of as many bytes: 512 MiB, tall, wide and
    ragged."""
    ops = ("copy", "stencil", "transpose")
    return [row for op in ops for row in _measure(op, configs(op), LARGE, WIDE, UNEVEN)]


@results.experiment("ch10_tile_boxes", source)
def measure_boxes():
    """Time the copy with boxes of 4 to 16 KiB, flat to square, and each width that L2 fetches."""
    boxes = (4, 256), (8, 128), (16, 64), (32, 32), (16, 256), (64, 64)
    named = {
        f"{rows} × {columns}, {'no promotion' if width == 'none' else width}": TileConfig(
            "copy", rows, columns, l2_promotion=width
        )
        for rows, columns in boxes
        for width in tensor_map.PROMOTIONS
    }

    def describe(config):
        return {"box": [config.rows, config.columns], "l2_promotion": config.l2_promotion}

    return _measure("copy", named, LARGE, describe=describe)


@results.experiment("ch10_tile_multicast", source)
def measure_multicast():
    """Time out[b] = x[b] + y against torch, with tiles of y loaded by each CTA, or once for 2 or 4."""
    return _measure("add_shared", configs("add_shared"), BATCHED)
