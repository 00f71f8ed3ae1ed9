"""What the field note says that parts of a block-scaled GEMM are worth, measured on Hopper: the epilogue's fusion, the
depth of the ring, the warps that share a tile, split-K.

An impact is the share of a time that is saved: 1 - fast / slow, both over the time of a peer that ran beside them. The
note gives percentages and does not say of what.
Source of the claims: "Blackwell BlockScaled GEMM Kernel Optimizations", section "Actual Bottlenecks".
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ch14 import mx_formats
from ch14.blockscaled import fp8
from ch14.blockscaled.checks import BF16, fp8_jobs, scaled, verify
from ch14.blockscaled.experiments import LONG, OF_FP8, SPLIT, best, course, experiment, hash_of, timed
from ch14.blockscaled.fp8 import Fp8Config
from ch14.mx_formats import quantise_kernels
from tilelab import bench, build

EPILOGUE_SHAPES = ((8192, 14336, 4096), (8192, 8192, 1024))  # after a short K what follows is more of the whole
FEW = (64, 7168, 16384)  # bound by memory
MANY = (4096, 4096, 16384)  # tiles enough for every SM, and a long K
CLAIMED = {"latency": (0.40, 0.50), "warps": (0.20, 0.30), "epilogue": (0.15, 0.25), "split-K": (0.10, 0.20)}
FUSED = dict(bias=True, activation="silu", packed=True)
STEPS = {"in passes": (2 + 2 + 2 + 2 + 33 / 32), "bias and SiLU fused": 2 + 2 + 33 / 32, "all fused": 33 / 32}


@triton.jit
def bias_silu_kernel(c_ptr, bias_ptr, out_ptr, N, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * N + column
    value = tl.load(c_ptr + at, mask=column < N, other=0.0).to(tl.float32)
    value += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, value / (1 + tl.exp(-value)), mask=column < N)


def bias_silu(c: torch.Tensor, bias: torch.Tensor, out: torch.Tensor):
    """A function that writes silu(c + bias) to `out`: all bf16, c and out (M, N) contiguous, bias (N,)."""
    (m, n), block = c.shape, 2048
    return lambda: bias_silu_kernel[triton.cdiv(n, block), m](c, bias, out, n, block, num_warps=4)


def c_bytes(name: str, m: int, n: int) -> float:
    """Bytes of C written and read on the way to MXFP8, by the steps in STEPS: bf16 is 2 an element, MXFP8 33 / 32."""
    return STEPS[name] * m * n


def _steps(name: str):
    """A candidate: the product and what follows it until C is MXFP8."""
    def prepare(a, b, scale_a, scale_b, c, bias):
        m, n = c.shape
        fused = dict(bias=bias, activation="silu") if name in ("bias and SiLU fused", "all fused") else {}
        room = mx_formats.empty((m, n), "mxfp8_e4m3", c.device)
        out = room if name == "all fused" else c
        launches = [] if name == "passes alone" else [fp8.prepare(a, b, scale_a, scale_b, out=out, **fused)]
        if name in ("in passes", "passes alone"):
            hidden = torch.empty_like(c)
            launches += [bias_silu(c, bias, hidden), mx_formats.prepare_quantise(hidden, room)]
        elif name == "bias and SiLU fused":
            launches.append(mx_formats.prepare_quantise(c, room))
        return lambda: [launch() for launch in launches]
    return prepare


@experiment("ch14_blockscaled_epilogue", hash_of(bias_silu_kernel, _steps, mx_formats, quantise_kernels, *OF_FP8))
def epilogue():
    """Bias, SiLU and MXFP8 at EPILOGUE_SHAPES: in passes, in part and wholly in the epilogue; the product and the
    passes apart. `c_bytes` are those of C on the way."""
    every = {*map(best, EPILOGUE_SHAPES)}
    build.compile_ahead(fp8_jobs(every) + fp8_jobs(every, FUSED))
    return [row for shape in EPILOGUE_SHAPES for row in _epilogue(shape)]


def _epilogue(shape: tuple[int, int, int]) -> list[dict]:
    (m, n, k), config = shape, best(shape)
    names = ("in passes", "bias and SiLU fused", "all fused", "product alone", "passes alone")
    found = bench.compare({name: _steps(name) for name in names},
                          lambda: [*scaled(*shape), torch.randn(n, device="cuda").to(BF16)], "in passes",
                          flops=2 * m * n * k, rounds=12)
    right = verify(shape, **FUSED)
    rows = []
    for name in names:
        row = found[name].row() | {"shape": list(shape)}
        row |= {"c_bytes": c_bytes(name, m, n)} if name in STEPS else {}
        if name == "passes alone":
            del row["tflops"]
        rows.append(row | (right | {"config": str(config)} if name == "all fused" else {}))
    return rows


def rings(config: Fp8Config) -> dict[str, Fp8Config]:
    """The configuration with every number of stages that there is room for."""
    made = {}
    for stages in range(3, 17):
        with contextlib.suppress(ValueError):
            made[f"{stages} stages"] = dataclasses.replace(config, stages=stages)
    return made


def groups(sms: int = 132) -> list[tuple[str, str, tuple[int, int, int], dict[str, Fp8Config]]]:
    """(claim, what, shape, configurations), the first of each the one that the others are held against."""
    warps = {f"{4 * consumers} warps, {scratch} scratch": Fp8Config(consumers=consumers, scratch=scratch, stages=4)
             for consumers, scratch in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1))}
    square = Fp8Config()
    split = {f"{splits} split{'s' * (splits > 1)}": dataclasses.replace(square, splits=splits) for splits in (1, 2, 4)}
    return [("latency", "tiles of 128 x 128, bound by the tensor core", LONG, rings(square)),
            ("latency", "64 rows in all, bound by memory", FEW, rings(fp8.best(*FEW, sms))),
            ("warps", "64 rows of a tile for each four", LONG, warps),
            ("split-K", "tiles for a quarter of the SMs", SPLIT, split),
            ("split-K", "tiles for every SM", MANY, split)]


@experiment("ch14_blockscaled_impacts", hash_of(*OF_FP8))
def impacts():
    """Every group of `groups`, a row a configuration; the peer is the first of the group."""
    every = groups()
    build.compile_ahead(fp8_jobs({config for *_, configs in every for config in configs.values()}))
    rows = []
    for claim, what, shape, configs in every:
        checks = {name: verify((min(shape[0], 300), 384, 1664), config) for name, config in configs.items()}
        found = timed({name: course(config) for name, config in configs.items()}, shape, checks, rounds=8, warm_s=0.15)
        rows += [row | {"claim": claim, "what": what, "config": str(configs[row["name"]])} for row in found]
    return rows


def verdict(claim: str, share: float) -> str:
    """How a measured share of time lies to the claimed band, to the whole percent."""
    low, high = CLAIMED[claim]
    share = round(share, 2)
    if share < 0:
        return "it costs"
    return "as claimed" if low <= share <= high else "less" if share < low else "more"


def saved(slow: dict, fast: dict) -> float:
    """The share of time from one row to the other, by their ratios to a peer that ran beside each: the clock moves."""
    return 1 - slow["ratio"] / fast["ratio"]


def verdicts(impacts: Sequence[dict], epilogue: Sequence[dict], thin: Sequence[dict],
             bf16: Sequence[dict] = ()) -> list[dict]:
    """The note's bands beside what these experiments measured, a row each: the time that is saved from the first of a
    pair to the other. `bf16` are rows of `stages_note.hopper_rows`: chapter 10's kernel at 4096 cubed."""
    compared, ratio = [], operator.itemgetter("ratio")  # claim, where, slow, fast
    if bf16:
        few, most = min(bf16, key=lambda row: row["stages"]), max(bf16, key=ratio)
        compared.append(("latency", "chapter 10's bf16, tiles of 128 x 128", *(
            row | {"name": f"{row['stages']} stages", "shape": [4096] * 3} for row in (few, most))))
    for claim, what in dict.fromkeys((row["claim"], row["what"]) for row in impacts):
        first, *others = [row for row in impacts if (row["claim"], row["what"]) == (claim, what) and row.get("ratio")]
        compared.append((claim, what, first, max(others, key=ratio)))
    for shape in dict.fromkeys(tuple(row["shape"]) for row in epilogue):
        by = {row["name"]: row for row in epilogue if tuple(row["shape"]) == shape}
        compared += [("epilogue", f"{what}, K = {shape[2]}", by["in passes"], by[name]) for what, name in (
            ("bias + SiLU, MXFP8 output", "all fused"), ("bias + SiLU alone, quantised apart", "bias and SiLU fused"))]
    here = [row for row in thin if tuple(row["shape"]) == SPLIT and row.get("ratio")]
    split = next(row for row in here if row["name"] == "course")
    whole = [row for row in here if "unsplit" in row["name"]]
    same = next(row for row in whole if row["config"] == re.sub(r"\d+ splits, ", "", split["config"]))
    compared += [("split-K", "against the same tile, unsplit", same, split),
                 ("split-K", "against the fastest unsplit tile", max(whole, key=ratio), split)]
    rows = []
    for claim, (low, high) in CLAIMED.items():
        for of, what, slow, fast in compared:
            if of == claim:
                share = saved(slow, fast)
                rows.append({"claim": claim, "note": f"{low:.0%} to {high:.0%}".replace("% to", " to"), "where": what,
                             "shape": slow["shape"], "from": slow["name"], "to": fast["name"],
                             "time saved": f"{share:.0%}", "verdict": verdict(claim, share)})
    return rows
