"""Measure on Hopper what the field note says that parts of a block-scaled GEMM are worth.

The parts are the epilogue's fusion and its warps, the depth of the ring, the warps that share a tile, and split-K. An
impact is the share of a time that is saved: 1 - fast / slow, both relative to a peer that ran beside them. The note
does not say what its percentages are relative to. Source of the claims: "Blackwell BlockScaled GEMM Kernel
Optimizations", section "Actual Bottlenecks".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ch14 import fp8_gemm, mx_formats
from ch14.fp8_gemm.configs import Fp8Config, choose_epilogue_warps, fill_ring
from ch14.fp8_gemm.lesson.experiments import (
    FP8_SOURCES,
    LONG,
    SPLIT,
    best_config,
    experiment,
    measure,
    prepare_course,
)
from ch14.fp8_gemm.lesson.verification import BF16, fp8_jobs, fp8_operands, verify_fp8
from ch14.mx_formats import kernels as mx_kernels
from tilelab.measure import bench
from tilelab.records import results
from tilelab.runtime import build, provenance
from tilelab.runtime.spoken import count

# With a short K the epilogue is a larger part of the time.
EPILOGUE_SHAPES = ((8192, 14336, 4096), (8192, 8192, 1024))
FEW = (64, 7168, 16384)  # bound by memory
MANY = (4096, 4096, 16384)  # enough tiles for every SM, and a long K
CLAIMED = {"latency": (0.40, 0.50), "warps": (0.20, 0.30), "epilogue": (0.15, 0.25), "split-K": (0.10, 0.20)}
Rows = Sequence[dict]
FUSED = dict(bias=True, activation="silu", packed=True)
# Bytes per element of C that are written and read until it is MXFP8: bf16 takes 2, MXFP8 33 / 32.
C_BYTES = {"in passes": 2 + 2 + 2 + 2 + 33 / 32, "bias and SiLU fused": 2 + 2 + 33 / 32, "all fused": 33 / 32}


@triton.jit
def bias_silu_kernel(c_ptr, bias_ptr, out_ptr, N, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.program_id(1).to(tl.int64) * N + column
    value = tl.load(c_ptr + offset, mask=column < N, other=0.0).to(tl.float32)
    value += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, value / (1 + tl.exp(-value)), mask=column < N)


def bias_silu(c: torch.Tensor, bias: torch.Tensor, out: torch.Tensor):
    """Return a launcher of out = silu(c + bias): all bf16, c and out (M, N) contiguous, bias (N,)."""
    (m, n), block = c.shape, 2048
    return lambda: bias_silu_kernel[triton.cdiv(n, block), m](c, bias, out, n, block, num_warps=4)


def _steps(name: str):
    """Return a candidate that multiplies and makes C MXFP8 by the steps of C_BYTES."""

    def prepare(a, b, scale_a, scale_b, c, bias):
        fused = dict(bias=bias, activation="silu") if name in ("bias and SiLU fused", "all fused") else {}
        room = mx_formats.empty(tuple(c.shape), "mxfp8_e4m3", c.device)
        out = room if name == "all fused" else c
        launches = (
            [] if name == "passes alone" else [fp8_gemm.prepare(a, b, scale_a, scale_b, out=out, **fused)]
        )
        if name in ("in passes", "passes alone"):
            hidden = torch.empty_like(c)
            launches += [bias_silu(c, bias, hidden), mx_formats.prepare_quantise(hidden, out=room)]
        elif name == "bias and SiLU fused":
            launches.append(mx_formats.prepare_quantise(c, out=room))
        return lambda: [launch() for launch in launches]

    return prepare


@experiment(
    "ch14_blockscaled_epilogue",
    functools.partial(provenance.source_hash, bias_silu_kernel, _steps, mx_formats, mx_kernels, *FP8_SOURCES),
)
def measure_epilogue():
    """Measure bias, SiLU and MXFP8 at EPILOGUE_SHAPES: in passes, partly and wholly fused, and each part alone."""
    configs = {*map(best_config, EPILOGUE_SHAPES)}
    build.compile_ahead(fp8_jobs(configs) + fp8_jobs(configs, FUSED))
    return [row for shape in EPILOGUE_SHAPES for row in _measure_epilogue_at(shape)]


def _measure_epilogue_at(shape: tuple[int, int, int]) -> list[dict]:
    m, n, k = shape
    names = (*C_BYTES, "product alone", "passes alone")
    found = bench.compare(
        {name: _steps(name) for name in names},
        lambda: [*fp8_operands(*shape), torch.randn(n, device="cuda").to(BF16)],
        "in passes",
        flops=2 * m * n * k,
        rounds=12,
    )
    rows = {name: found[name].row() | {"shape": list(shape)} for name in names}
    for name, size in C_BYTES.items():
        rows[name]["c_bytes"] = size * m * n
    del rows["passes alone"]["tflops"]
    rows["all fused"] |= verify_fp8(shape, **FUSED) | {"config": str(best_config(shape, mx=True))}
    return list(rows.values())


EPILOGUES = {"bf16": {}, "bias, SiLU and bf16": dict(bias=True, activation="silu")}
BESIDE = "the consumers, 4 stages"  # the peer, with the ring of the versions that have epilogue warps
WORKERS = {BESIDE: Fp8Config(num_stages=4), "the consumers, 5 stages": Fp8Config()} | {
    f"{warps} warp{'s' * (warps > 1)}": Fp8Config(num_stages=4, epilogue_warps=warps)
    for warps in (1, 2, 3, 4)
}
# Tiles as (consumers, columns), and the shapes at which they are timed: the choice was made at the first one only.
WARP_TILES = ((1, 64), (1, 128), (2, 64), (2, 128))
WARP_SHAPES = (EPILOGUE_SHAPES[1], (2048, 2048, 512), (6144, 5120, 1024), (4096, 7168, 2048))


def _with_epilogue(config: Fp8Config, options: dict):
    """Return a candidate on `fp8_operands`, with bfloat16 output."""

    def prepare(a, b, scale_a, scale_b, out):
        bias = torch.randn(b.shape[1], device=a.device).to(BF16) if options.get("bias") else None
        return fp8_gemm.prepare(
            a, b, scale_a, scale_b, bias=bias, activation=options.get("activation"), out=out, config=config
        )

    return prepare


@experiment(
    "ch14_blockscaled_epilogue_warps", functools.partial(provenance.source_hash, *FP8_SOURCES, _with_epilogue)
)
def measure_epilogue_warps():
    """Measure who does the epilogue, the consumers or 1 to 3 warps of their own, after a short K."""
    build.compile_ahead(job for options in EPILOGUES.values() for job in fp8_jobs(WORKERS.values(), options))
    rows = []
    for epilogue, options in EPILOGUES.items():
        checks = {name: verify_fp8((300, 384, 1664), config, **options) for name, config in WORKERS.items()}
        candidates = {name: _with_epilogue(config, options) for name, config in WORKERS.items()}
        found = measure(candidates, EPILOGUE_SHAPES[1], checks, rounds=12, warm_s=0.15)
        rows += [row | {"epilogue": epilogue, "config": str(WORKERS[row["name"]])} for row in found]
    return rows


def vary_epilogue_warps(consumers: int, columns: int) -> dict[str, Fp8Config]:
    """Return a tile without epilogue warps and with each number of them; all have the ring of the most."""
    most = min(4 * consumers, 7)
    ring = dataclasses.replace(fill_ring(consumers, 2, columns, epilogue_warps=most), pdl=False)
    return {
        count(warps, "warps"): dataclasses.replace(ring, epilogue_warps=warps) for warps in range(most + 1)
    }


@experiment(
    "ch14_blockscaled_tile_warps", functools.partial(provenance.source_hash, *FP8_SOURCES, _with_epilogue)
)
def measure_tile_warps():
    """Measure each number of epilogue warps beside four, for each tile of WARP_TILES, at WARP_SHAPES."""
    tiles = {tile: vary_epilogue_warps(*tile) for tile in WARP_TILES}
    build.compile_ahead(fp8_jobs(config for configs in tiles.values() for config in configs.values()))
    rows = []
    for (consumers, columns), configs in tiles.items():
        checks = {name: verify_fp8((300, 384, 1664), config) for name, config in configs.items()}
        first = {"4 warps": configs["4 warps"]} | configs
        candidates = {name: _with_epilogue(config, {}) for name, config in first.items()}
        for shape in WARP_SHAPES:
            found = measure(candidates, shape, checks, rounds=8, warm_s=0.05)
            tile = {"tile": f"{64 * consumers}×{columns}", "held_out": shape != WARP_SHAPES[0]}
            rows += [row | tile | {"config": str(configs[row["name"]])} for row in found]
    return rows


def compare_with_four(rows: Rows) -> list[dict]:
    """Return a row for each tile and shape of `measure_tile_warps`: the best and the chosen number of epilogue warps.

    `best`, `chosen` and `none` are speeds over four warps; `none` is without epilogue warps.
    """
    found = []
    for tile, *shape in dict.fromkeys((row["tile"], *row["shape"]) for row in rows if row.get("ratio")):
        timed = {
            row["name"]: row
            for row in rows
            if (row["tile"], row["shape"]) == (tile, shape) and row.get("ratio")
        }
        none = timed.pop("0 warps")
        best = max(timed, key=lambda name: timed[name]["ratio"])
        chosen = count(choose_epilogue_warps(int(tile.partition("×")[0])), "warps")
        named = {"tile": tile, "shape": shape, "held_out": none["held_out"]}
        named |= {"best is": best, "best": timed[best]["ratio"], "chosen is": chosen}
        named |= {"chosen": timed[chosen]["ratio"], "none": none["ratio"]}
        found.append(named | {"saved_percent": 100 * (1 - 1 / timed[best]["ratio"])})
    return found


def tabulate_tile_warps(record: results.Record) -> results.Table:
    """Return a table of what `measure_tile_warps` measures."""
    return results.table(compare_with_four(record.rows), f"speed over four epilogue warps; {record.label()}")


def tabulate_epilogue_warps(record: results.Record) -> results.Table:
    """Return a table of what `measure_epilogue_warps` measures."""
    columns = ["epilogue", "name", "ms", "peer_ms", "ratio", "spread", "status", "reason"]
    unknown = dict.fromkeys(("ratio", "peer_ms", "spread"))
    rows = [row | (unknown if row["name"] == BESIDE else {}) for row in record.rows]
    caption = f"{list(EPILOGUE_SHAPES[1])}; the peer is {BESIDE}; {record.label()}"
    return results.table(rows, caption, [each for each in columns if any(row.get(each) for row in rows)])


def vary_stages(config: Fp8Config) -> dict[str, Fp8Config]:
    """Return the configuration with each number of stages that there is room for."""
    found = {}
    for stages in range(3, 17):
        with contextlib.suppress(ValueError):
            found[f"{stages} stages"] = dataclasses.replace(config, num_stages=stages)
    return found


def group_configs(sms: int = 132) -> list[tuple[str, str, tuple[int, int, int], dict[str, Fp8Config]]]:
    """Return (claim, what, shape, configurations); the first configuration of a group is the peer of the others."""
    warps, split, square = {}, {}, Fp8Config()
    for consumers, scratch in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1)):
        name = f"{4 * consumers} warps, {scratch} scratch"
        warps[name] = Fp8Config(consumers=consumers, scratch=scratch, num_stages=4)
    for splits in (1, 2, 4):
        split[f"{splits} split{'s' * (splits > 1)}"] = dataclasses.replace(square, splits=splits)
    return [
        ("latency", "tiles of 128 x 128, bound by the tensor core", LONG, vary_stages(square)),
        ("latency", "64 rows in all, bound by memory", FEW, vary_stages(fp8_gemm.best_config(*FEW, sms))),
        ("warps", "64 rows of a tile for each four", LONG, warps),
        ("split-K", "tiles for a quarter of the SMs", SPLIT, split),
        ("split-K", "tiles for every SM", MANY, split),
    ]


@experiment("ch14_blockscaled_impacts", functools.partial(provenance.source_hash, *FP8_SOURCES))
def measure_impacts():
    """Measure every configuration of every group of `group_configs`."""
    build.compile_ahead(fp8_jobs({config for *_, configs in group_configs() for config in configs.values()}))
    rows = []
    for claim, what, shape, configs in group_configs():
        checks = {name: verify_fp8((min(shape[0], 300), 384, 1664), each) for name, each in configs.items()}
        candidates = {name: prepare_course(config) for name, config in configs.items()}
        found = measure(candidates, shape, checks, rounds=8, warm_s=0.15)
        rows += [row | {"claim": claim, "what": what, "config": str(configs[row["name"]])} for row in found]
    return rows


def verdict(claim: str, share: float) -> str:
    """Return where a measured share of time lies relative to the claimed band, to the whole percent."""
    low, high = CLAIMED[claim]
    share = round(share, 2)
    if share < 0:
        return "it costs"
    return "as claimed" if low <= share <= high else "less" if share < low else "more"


def verdicts(impacts: Rows, epilogue: Rows, thin: Rows, bf16: Rows = (), workers: Rows = ()) -> list[dict]:
    """Return a row per pair of measurements: the note's band, the time saved from one to the other, and the verdict.

    `bf16` are rows of `note_attempts.hopper_rows`: chapter 10's kernel at 4096 cubed. Of `workers`, the rows of
    `measure_tile_warps`, only the case counts in which another number than four saves most. The module's choice is a
    case of split-K only if it splits.
    """
    pairs, ratio = [], operator.itemgetter("ratio")  # (claim, where, slow row, fast row)
    if bf16:
        rows = (min(bf16, key=lambda row: row["stages"]), max(bf16, key=ratio))
        named = [row | {"name": f"{row['stages']} stages", "shape": [4096] * 3} for row in rows]
        pairs.append(("latency", "chapter 10's bf16, tiles of 128 x 128", *named))
    for key in dict.fromkeys((row["claim"], row["what"]) for row in impacts):
        first, *others = [row for row in impacts if (row["claim"], row["what"]) == key and row.get("ratio")]
        pairs.append((*key, first, max(others, key=ratio)))
    for shape in dict.fromkeys(tuple(row["shape"]) for row in epilogue):
        by_name = {row["name"]: row for row in epilogue if tuple(row["shape"]) == shape}
        whole, part = "bias + SiLU, MXFP8 output", "bias + SiLU alone, quantised apart"
        for what, name in ((whole, "all fused"), (part, "bias and SiLU fused")):
            pairs.append(("epilogue", f"{what}, K = {shape[2]}", by_name["in passes"], by_name[name]))
    if cases := compare_with_four(workers):
        most = max(cases, key=operator.itemgetter("best"))
        where = f"warps of the epilogue, tile of {most['tile'].replace('×', ' × ')}, the most of {len(cases)} cases"
        four, best = (
            {"name": name, "ratio": speed, "shape": most["shape"]}
            for name, speed in (("4 warps", 1.0), (most["best is"], most["best"]))
        )
        pairs.append(("warps", where, four, best))
    at_split = [row for row in thin if tuple(row["shape"]) == SPLIT and row.get("ratio")]
    for split in (row for row in at_split if row["name"] == "course" and "splits" in row["config"]):
        unsplit = [row for row in at_split if "unsplit" in row["name"]]
        alone = re.sub(r" · \d+ splits", "", split["config"])
        same_tile = next(row for row in unsplit if row["config"] == alone)
        pairs.append(("split-K", "against the same tile, unsplit", same_tile, split))
        pairs.append(("split-K", "against the fastest unsplit tile", max(unsplit, key=ratio), split))
    rows = []
    for claim, where, slow, fast in sorted(pairs, key=lambda pair: list(CLAIMED).index(pair[0])):
        # The ratios to the peers beside them, and not the times, because the clock moves.
        (low, high), share = CLAIMED[claim], 1 - slow["ratio"] / fast["ratio"]
        row = {"claim": claim, "note": f"{low:.0%} to {high:.0%}".replace("% to", " to"), "where": where}
        row |= {"shape": slow["shape"], "from": slow["name"], "to": fast["name"]}
        rows.append(row | {"time saved": f"{share:.0%}", "verdict": verdict(claim, share)})
    return rows
