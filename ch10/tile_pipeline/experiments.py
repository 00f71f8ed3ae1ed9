"""The measurements behind the notebook `ch10_tile_pipeline`.

Each experiment returns a tilelab.results.Record: measured here and now on a GPU with TMA, else the recorded one.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline import box_dump, checks, reference
from ch10.tile_pipeline.configs import KERNELS, MOST_STAGES, PRODUCERS, TileConfig, configs
from tilelab import bench, build, check, device, results, tensor_map

OPS = tuple(KERNELS)
PEER = {"copy": "torch copy_", "stencil": "torch copy_", "transpose": "torch copy_", "add_shared": "torch add",
        "accumulate": "torch sum"}
CENTRE, EDGE = 0.5, 0.125
LARGE, WIDE, UNEVEN = (16384, 8192), (4096, 32768), (10_007, 13_331)  # 512 MiB of float32, or nearly
BATCHED = (32, 1024, 4096)
RAGGED = {2: ((1, 1), (3, 5), (33, 31), (64, 64), (100, 1000), (257, 513), (1000, 1003)),
          3: ((1, 5, 9), (3, 33, 70), (5, 64, 256), (7, 100, 513))}  # by dimensions
DUMP_ROWS = 24
QUICK = {"rounds": 8, "warm_s": 0, "burst_ms": 2}
STAGES = range(1, MOST_STAGES + 1)


def source(*things) -> str:
    """Hash of what is measured, and of what an experiment runs beside it."""
    return results.source_hash(tile_pipeline, tile_pipeline.SOURCE.with_name("configs.py"), checks, reference,
                               tile_pipeline.SOURCE, tensor_map, *things)


def dimensions(op: str) -> int:
    """Of x: 2 or 3."""
    return len(checks.DIMENSIONS[op].split(", "))


def every(op: str) -> dict[str, TileConfig]:
    """The variants of `op`, and small tiles with every ring, producer, swizzle and cluster there is."""
    small = {"copy": [TileConfig("copy", 4, 64, stages=stages, span=7) for stages in STAGES],
             "accumulate": [TileConfig("accumulate", 4, 64, stages=stages, span=7) for stages in STAGES],
             "stencil": [TileConfig("stencil", 8, 32, 64, stages, 7, producer)
                         for stages in STAGES for producer in PRODUCERS],
             "transpose": [TileConfig("transpose", tile, tile, 96, swizzle=swizzle, block=block, raster=3)
                           for tile in (32, 96) for swizzle in tensor_map.SWIZZLES for block in (1, 4)],
             "add_shared": [TileConfig("add_shared", 8, 64, 64, cluster=cluster) for cluster in (1, 2, 4)]}
    return {**configs(op), **{str(config): config for config in small[op]}}


_compiling = threading.Lock()  # experiments side by side want the same kernels: the second finds them made


def _compile(chosen) -> None:
    with _compiling:
        build.compile_ahead([tile_pipeline.job(config, device.current().target) for config in chosen])


def _compile_every() -> None:
    _compile([config for op in OPS for config in every(op).values()])


# ---- right or wrong


def random(shape: tuple[int, ...], dtype=torch.float32) -> torch.Tensor:
    """Random elements on the GPU, normal or any bits."""
    if dtype.is_floating_point:
        return torch.randn(shape, device="cuda").to(dtype)
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), device="cuda", dtype=torch.uint8)
    return bits.view(dtype)


def guarded(shape: tuple[int, ...], dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A random buffer, and a view of `shape` inside it that has other elements on all sides."""
    unit = max(1, tile_pipeline.UNIT // dtype.itemsize)
    *outer, rows, columns = shape
    buffer = random((*outer, rows + 4, (-(-columns // unit) + 2) * unit), dtype)
    return buffer, buffer[..., 2:-2, unit:unit + columns]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of a shape and dtype hold the same bits."""
    a, b = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor) for tensor in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _expected(op: str, x, y, fill: str) -> torch.Tensor:
    if op == "stencil":
        return reference.stencil_spec(x, CENTRE, EDGE, fill)
    if op == "add_shared":
        return reference.add_shared_spec(x, y)
    return getattr(reference, f"{op}_spec")(x)


def verify(op: str, config, shape: tuple[int, ...], dtype=torch.float32, fill: str = "zero") -> dict:
    """{status, reason, error}: fresh random elements, every result and what lies around the output.

    Bits for copy and transpose; else `check.relative_error` against float64, and NaN exactly where it belongs.
    """
    x, y = guarded(shape, dtype)[1], guarded(shape[1:], dtype)[1] if op == "add_shared" else None
    expected = _expected(op, x, y, fill)
    buffer, out = guarded(tuple(expected.shape), dtype)
    out.copy_(torch.full_like(out, float("inf")) if dtype.is_floating_point else ~expected)
    before = buffer.clone()
    tile_pipeline.prepare(op, x, out, y=y, centre=CENTRE, edge=EDGE, fill=fill, config=config)()
    torch.cuda.synchronize()
    unit = max(1, tile_pipeline.UNIT // dtype.itemsize)
    before[..., 2:-2, unit:unit + out.shape[-1]] = out
    error, reason = 0.0, ""
    if not same_bits(before, buffer):
        reason = "memory outside the output was overwritten"
    elif op in ("copy", "transpose"):
        if not same_bits(out, expected):
            reason = f"{int((out != expected).sum())} elements differ"
    elif not torch.equal(out.isnan(), expected.isnan()):
        reason = f"{int((out.isnan() != expected.isnan()).sum())} elements are NaN that should not be, or the reverse"
    else:
        error = check.relative_error(*(torch.where(expected.isnan(), 0.0, tensor) for tensor in (out, expected)))
        # A sum of many in any order: rounding adds up.
        tolerance = check.TOLERANCE[dtype] * max(1.0, shape[0] / 8 if op == "accumulate" else 1.0)
        if error > tolerance:
            reason = f"the error {error:.1e} is above {tolerance:.1e}"
    return {"status": "wrong" if reason else "ok", "reason": reason, "error": error if error < float("inf") else None}


def sanitizer_cases(share: int = 0, shares: int = 1) -> None:
    """Every operation on small and ragged cases, or every so-manyth, for a sanitizer to watch; AssertionError when one
    is wrong."""
    wrong, cases = [], [(op, name, config) for op in OPS for name, config in every(op).items()]
    for op, name, config in cases[share::shares]:
        for shape in ((33, 31), (100, 260)) if dimensions(op) == 2 else ((3, 33, 70), (5, 10, 256)):
            row = verify(op, config, shape)
            wrong += [f"{name} {shape}: {row['reason']}"] if row["status"] != "ok" else []
    if wrong:
        raise AssertionError("; ".join(wrong))


@results.experiment("ch10_tile_check", source)
def checked():
    """Every operation with every ring, producer, swizzle and cluster on ragged shapes: the number of cases, the largest
    error, what was wrong."""
    _compile_every()
    rows = []
    for op in OPS:
        for name, config in every(op).items():
            fills = tensor_map.FILLS if op == "stencil" else ("zero",)
            cases = [verify(op, config, shape, fill=fill) for shape in RAGGED[dimensions(op)] for fill in fills]
            wrong = [case for case in cases if case["status"] != "ok"]
            rows.append({"op": op, "name": name, "config": str(config), "cases": len(cases),
                         "error": max(case["error"] or 0 for case in cases),
                         "status": "wrong" if wrong else "ok", "reason": wrong[0]["reason"] if wrong else ""})
    return rows


def dump_boxes(dtype) -> dict[str, tuple[int, int]]:
    """The box that is looked at for each swizzle: rows as long as the swizzle, or of 128 bytes."""
    return {swizzle: (DUMP_ROWS, (span or 128) // dtype.itemsize) for swizzle, span in tensor_map.SWIZZLES.items()}


@results.experiment("ch10_tile_dump", lambda: source(box_dump))
def dumped():
    """Where each byte of a box lies in shared memory, and what fills it outside of the tensor, against
    tilelab.tensor_map.swizzle_offset: boxes inside, over each edge and outside, of every element and swizzle."""
    here = device.current().target
    jobs = [box_dump.dump_job(box, dtype.itemsize, here) for dtype in tensor_map.DTYPES
            for box in dump_boxes(dtype).values()]
    build.compile_ahead({job.name: job for job in jobs}.values())
    rows = []
    for dtype in tensor_map.DTYPES:
        x = random((61, 160), dtype)[:, :155]  # ends within a unit of 16 bytes
        for swizzle, box in dump_boxes(dtype).items():
            unit = tile_pipeline.UNIT // dtype.itemsize
            corners = itertools.product((-DUMP_ROWS - 1, -3, 5, 50, 70),
                                        (-box[1], -unit, 0, unit, 160 - unit, 155 // unit * unit, 170 // unit * unit))
            cases, wrong = 0, []
            for (row, column), fill in itertools.product(corners, tensor_map.FILLS):
                if fill == "nan" and not dtype.is_floating_point:
                    continue
                found = box_dump.unswizzled(box_dump.dump_box(x, row, column, box, swizzle, fill), dtype, box,
                                             swizzle)
                expected, cases = box_dump.box_spec(x, row, column, box, fill), cases + 1
                if not bool(((found == expected) | ((found != found) & (expected != expected))).all()):
                    wrong.append(f"the box at ({row}, {column}) filled with {fill}")
            rows.append({"dtype": str(dtype)[6:], "swizzle": swizzle, "box": list(box), "cases": cases,
                         "status": "wrong" if wrong else "ok", "reason": ", ".join(wrong[:3])})
    return rows


@results.experiment("ch10_tile_sanitizer", lambda: source(), can_run=check.can_sanitize)
def sanitized():
    """What compute-sanitizer finds in `sanitizer_cases`, tool by tool."""
    _compile_every()  # a tool has one CPU, and would compile them one after the other
    return check.sanitize("ch10.tile_pipeline.experiments", shares=4)


# ---- speed


def moved(op: str, shape: tuple[int, ...]) -> int:
    """Bytes that `op` has to read and write, float32."""
    *batch, rows, columns = shape
    count = {"add_shared": lambda b: 2 * b + 1, "accumulate": lambda b: b + 1}.get(op, lambda: 2)(*batch)
    return count * rows * columns * 4


def _inputs(op: str, shape: tuple[int, ...]):
    def padded(shape):
        tensor = tile_pipeline.empty(shape, torch.float32, "cuda")
        return tensor.copy_(torch.randn(shape, device="cuda"))

    def make():
        x = padded(shape)
        out = tile_pipeline.empty(checks.result_shape(op, x), x.dtype, "cuda")
        return [x, out] + ([padded(shape[1:])] if op == "add_shared" else [])

    return make


def _flat_copy(x, out):
    """torch's copy of as many bytes, contiguous, in the same memory."""
    count = x.numel()
    source, target = (tensor.as_strided((count,), (1,)) for tensor in (x, out))
    return lambda: target.copy_(source)


def _slices(x, out):
    def launched():
        torch.mul(x, CENTRE, out=out)
        for here, there in (((slice(1, None),), (slice(None, -1),)),
                            ((slice(None), slice(1, None)), (slice(None), slice(None, -1)))):
            out[here].add_(x[there], alpha=EDGE)
            out[there].add_(x[here], alpha=EDGE)

    return launched


def torch_s(op: str) -> dict:
    """What torch has for `op`: candidates by name, the peer first."""
    own = {"copy": {}, "stencil": {"torch slices": _slices},
           "transpose": {"torch x.T copy_": lambda x, out: lambda: out.copy_(x.T)},
           "add_shared": {"torch add": lambda x, out, y: lambda: torch.add(x, y, out=out)},
           "accumulate": {"torch sum": lambda x, out: lambda: torch.sum(x, 0, out=out)}}[op]
    return ({PEER[op]: _flat_copy} if PEER[op] == "torch copy_" else {}) | own


def _launcher(op: str, config):
    return lambda x, out, y=None: tile_pipeline.prepare(op, x, out, y=y, centre=CENTRE, edge=EDGE, config=config)


def against_torch(op: str, chosen: dict[str, TileConfig], shape: tuple[int, ...], **timing) -> list[dict]:
    """Rows of bench.Timing, one a configuration and one for torch's own way, all of them interleaved.

    `ratio` is to torch's copy of as many bytes for copy, stencil and transpose, else to torch's own way.
    """
    own = torch_s(op)
    found = bench.compare({**own, **{name: _launcher(op, config) for name, config in chosen.items()}},
                          _inputs(op, shape), PEER[op], nbytes=moved(op, shape), **timing)
    return [{"op": op, "config": str(chosen.get(name, "")), "shape": list(shape), **found[name].row()}
            for name in (*chosen, *own) if name != PEER[op]]


def _speed(pairs, **timing) -> list[dict]:
    """Rows of `against_torch` for (op, chosen, shape) triples, compiled before."""
    pairs = list(pairs)
    _compile([config for _, chosen, _ in pairs for config in chosen.values()])
    return [row for op, chosen, shape in pairs for row in against_torch(op, chosen, shape, **timing)]


@results.experiment("ch10_tile_speed", source)
def speed():
    """The variants of copy, stencil and transpose against torch's copy of as many bytes: 512 MiB, tall, wide and
    ragged."""
    return _speed((op, configs(op), shape) for op in ("copy", "stencil", "transpose")
                  for shape in (LARGE, WIDE, UNEVEN))


def bank_conflicts(config: TileConfig) -> dict[str, int]:
    """How many turns shared memory takes for what one would do, {"read", "write"}: the worst of the transpose's warps,
    computed from the addresses in tile_pipeline.cu."""
    wide, words = config.box()[1], config.block

    def address(row: int, column: int) -> int:
        within = tensor_map.swizzle_offset((row * wide + column % wide) * 4, config.swizzle)
        return column // wide * config.rows * wide * 4 + within

    def turns(places) -> int:
        per_bank = {}
        for row, column in places:
            for word in range(words):
                per_bank.setdefault((address(row, column) // 4 + word) % 32, set()).add(address(row, column))
        return max(map(len, per_bank.values()))

    def element(i: int) -> tuple[int, int]:
        """The element of x's tile that the i-th step reads first."""
        if config.block == 1:
            return i % config.rows, i // config.rows
        part, diagonal, down = i // 64, i // 8 % 8, i % 8
        return (part // (config.rows // 32) * 32 + down * 4, part % (config.rows // 32) * 32 + (down ^ diagonal) * 4)

    lanes = 32 // words  # that shared memory serves at a time
    steps = config.rows ** 2 // words ** 2
    groups = [[element(i) for i in range(first, first + lanes)] for first in range(0, steps, lanes)]
    return {"read": max(turns([(row + k, column) for row, column in group]) for group in groups for k in range(words)),
            "write": max(turns([(column + k, row) for row, column in group]) for group in groups for k in range(words))}


def swizzle_configs() -> dict[str, TileConfig]:
    """The transpose with each swizzle, element by element and in blocks of 4 x 4."""
    base = next(iter(configs("transpose").values()))
    return {f"{swizzle}, {block} × {block}": dataclasses.replace(base, swizzle=swizzle, block=block)
            for block in (1, 4) for swizzle in tensor_map.SWIZZLES}


@results.experiment("ch10_tile_swizzle", source)
def swizzles():
    """`swizzle_configs`, 512 MiB, with `bank_conflicts`."""
    chosen = swizzle_configs()
    return [{**row, **(bank_conflicts(chosen[row["name"]]) if row["name"] in chosen else {})}
            for row in _speed([("transpose", chosen, LARGE)])]


def stage_configs() -> dict[str, TileConfig]:
    """The stencil with rings of 1 to 6 stages and either producer, 8 tiles a CTA."""
    return {f"{stages}, {producer}": TileConfig("stencil", 16, 128, 128, stages, 8, producer)
            for producer in PRODUCERS for stages in STAGES}


@results.experiment("ch10_tile_stages", source)
def staged():
    """`stage_configs`, 512 MiB."""
    chosen = stage_configs()
    rows = _speed([("stencil", chosen, LARGE)])
    return [{**row, "stages": chosen[row["name"]].stages, "producer": chosen[row["name"]].producer}
            for row in rows if row["name"] in chosen]


@results.experiment("ch10_tile_multicast", source)
def multicast():
    """out[b] = x[b] + y, y's tiles loaded by each CTA or once for 2 or 4, against torch's addition."""
    return _speed([("add_shared", configs("add_shared"), BATCHED)])


@results.experiment("ch10_tile_reduction", source)
def reduction():
    """The sum over b of x[b], added up in L2, against torch's sum."""
    return _speed([("accumulate", configs("accumulate"), shape) for shape in (BATCHED, (8, 4096, 4096))])


def box_configs() -> dict[str, TileConfig]:
    """The copy with boxes of 4 to 16 KiB, flat to square, and every width that L2 fetches."""
    boxes = ((4, 256), (8, 128), (16, 64), (32, 32), (16, 256), (64, 64))
    return {f"{rows} × {columns}, {'no promotion' if wide == 'none' else wide}":
            TileConfig("copy", rows, columns, l2_promotion=wide)
            for rows, columns in boxes for wide in tensor_map.PROMOTIONS}


@results.experiment("ch10_tile_boxes", source)
def boxes():
    """`box_configs`, 512 MiB."""
    chosen = box_configs()
    return [{**row, "box": [chosen[row["name"]].rows, chosen[row["name"]].columns],
             "l2_promotion": chosen[row["name"]].l2_promotion} for row in _speed([("copy", chosen, LARGE)])]


# ---- compiled


def built() -> list[dict]:
    """The variants compiled here for each target, with the instructions that their SASS holds; needs no GPU."""
    jobs = [(op, name, tile_pipeline.job(config, target)) for op in OPS for name, config in configs(op).items()
            for target in device.TARGETS[1:]]
    reports = {(report.job.name, report.job.target): report for report in build.build([job for _, _, job in jobs])}
    return [{"op": op, **reports[job.name, job.target].row(), "name": name} for op, name, job in jobs]
