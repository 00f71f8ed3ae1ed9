"""Inputs, ladders and checks for the kernels of `notebooks/16_ch14_fp4_decode.ipynb`, the reader's among them.

A `prepare` of a cell takes the tensors that `make_packed` or `make_tokens` returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ch14.mx_formats import number_formats, packing
from tilelab import emulator
from tilelab.cells import lesson, triton_cell
from tilelab.emulator import gluon as gluon_emulator
from tilelab.measure.check import make_checker
from tilelab.records import results
from tilelab.runtime import device

__all__ = ["check", "define_lanes", "make_packed_ladder", "make_token_ladder", "tabulate_emulated"]

BF16 = torch.bfloat16
CUBE = (4096, 4096, 4096)  # (M, N, K) that is timed
TOKENS, WEIGHTS = 16, 8192  # tokens, and rows and columns of the weights
EXAMPLE = (256, 256, 512)  # for a compiler, where there is no GPU

STEPS = {
    "packed": ("scaled_dot:prepare_scaled_dot", "decode_blocks:prepare_decode_once"),
    "tokens": (
        "few_tokens:prepare_few_tokens",
        "few_tokens:prepare_few_tokens(shares=7)",
        "decode_in_lanes:prepare_decode_in_lanes(shares=7)",
    ),
}
for _name, _steps in STEPS.items():
    lesson.register(f"ch14_blockscaled_{_name}", "16_ch14_fp4_decode", *_steps)


def _where() -> str:
    return "cuda" if device.current().capability else "cpu"


def make_packed(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return codes and scales of A (M, K) and of B's transpose (N, K) in MXFP4, both in bf16, and out (M, N)."""
    m, n, k = case
    tensors, wide = [], []
    for rows in (m, n):
        sizes = torch.exp2(torch.randint(-3, 4, (rows, k // 32), device=where).float()).repeat_interleave(
            32, 1
        )
        made = number_formats.quantise(
            torch.randn(rows, k, device=where) * sizes, number_formats.lookup("mxfp4")
        )
        tensors += [packing.pack(made.codes, 4).contiguous(), made.scales.contiguous()]
        wide.append(number_formats.dequantise(made).to(BF16))
    return *tensors, *wide, torch.empty(m, n, dtype=BF16, device=where)


def _decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return in float64 what codes and scales of MXFP4 stand for."""
    elements = number_formats.decode(packing.unpack(codes, 4, 32 * scales.shape[1]), number_formats.E2M1)
    return elements.double() * number_formats.decode_e8m0(scales).double().repeat_interleave(32, 1)


def multiply_packed(a, a_scales, b, b_scales, *_) -> torch.Tensor:
    """Return the product in float64 of the matrices of `make_packed`."""
    return _decode(a, a_scales) @ _decode(b, b_scales).T


PACKED_CASES = {"cpu": [(128, 128, 256)], "cuda": [(128, 128, 256), (512, 384, 1024)]}


def make_packed_ladder() -> lesson.Ladder:
    """Return the ladder of products in MXFP4 at CUBE, beside torch.mm of the same numbers in bf16."""
    m, n, k = CUBE

    def prepare_mm(a, a_scales, b, b_scales, left, right, out):
        return lambda: torch.mm(left, right.T, out=out)

    def check_product(prepare):
        if not device.current().has_tma and prepare.__name__ == "prepare_scaled_dot":
            raise emulator.NotEmulated("Triton's interpreter has no tl.dot_scaled")
        return lesson.check_launch(prepare, PACKED_CASES, make_packed, multiply_packed)

    return lesson.Ladder(
        "ch14_blockscaled_packed",
        "torch.mm bf16",
        prepare_mm,
        lambda: make_packed(CUBE if device.current().capability else EXAMPLE, _where()),
        check_product,
        flops=2 * m * n * k,
    )


def make_tokens(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return x (M, K) in bf16, weights (N, K) as codes and scales of MXFP4 and in bf16, and out (M, N)."""
    m, n, k = case
    _, _, codes, scales, _, wide, _ = make_packed((1, n, k), where)
    x = torch.randn(m, k, device=where).to(BF16)
    return x, codes, scales, wide, torch.empty(m, n, dtype=BF16, device=where)


def multiply_tokens(x, codes, scales, *_) -> torch.Tensor:
    """Return x times the weights, transposed, in float64."""
    return x.double() @ _decode(codes, scales).T


TOKEN_CASES = {"cpu": [(3, 160, 512), (16, 64, 256)], "cuda": [(3, 160, 512), (16, 1000, 4096)]}
LANE_CASES = {"cpu": [(16, 64, 256), (16, 128, 384)], "cuda": [(16, 64, 256), (16, 1024, 4096)]}  # no masks


def make_token_ladder() -> lesson.Ladder:
    """Return the ladder of a few tokens times weights in MXFP4, beside torch.mm with the weights in bf16."""

    def prepare_mm(x, codes, scales, wide, out):
        return lambda: torch.mm(x, wide.T, out=out)

    def check_product(prepare):
        in_lanes = triton_cell.split_prepare(prepare)[0].__name__ == "prepare_decode_in_lanes"
        cases = LANE_CASES if in_lanes else TOKEN_CASES
        return lesson.check_launch(prepare, cases, make_tokens, multiply_tokens)

    shape = (TOKENS, WEIGHTS, WEIGHTS) if device.current().capability else (TOKENS, 256, 512)
    return lesson.Ladder(
        "ch14_blockscaled_tokens",
        "torch.mm bf16",
        prepare_mm,
        lambda: make_tokens(shape, _where()),
        check_product,
        nbytes=WEIGHTS * WEIGHTS * 17 // 32,
    )


def tabulate_emulated(record: results.Record) -> results.Table:
    """Return a row per format: the module's function and a kernel that decodes in its loop, as speeds × cuBLAS bf16."""
    found = {(row["format"], row["name"]): row for row in record.rows}
    rows = []
    for name in dict.fromkeys(row["format"] for row in record.rows):
        whole, naive = found[name, "emulated"], found[name, "naive"]
        rows.append(
            {
                "format": name,
                "decode once, × cuBLAS bf16": whole["ratio"],
                "±": whole["spread"],
                "of its time, decoding": f"{found[name, 'decoding']['ms'] / whole['ms']:.0%}",
                "decode in the loop, × cuBLAS bf16": naive.get("ratio", naive["status"]),
            }
        )
    return results.table(rows, f"8192 × 8192 × 8192; {record.label()}")


# ---- the reader's kernels


def define_lanes(texts: Sequence[str]):
    """Return `prepare_decode_in_lanes` of these texts of the notebook's cells."""
    name = "prepare_decode_in_lanes"
    return lesson.define("\n\n\n".join(triton_cell.collect(texts, name)))[name]


NEIGHBOURS_16_BITS_APART = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this one of its eight elements


def check_places(to_places, prepare_decode_in_lanes) -> None:
    """Raise AssertionError unless `to_places(tokens)` fits words in the order NEIGHBOURS_16_BITS_APART.

    The kernel runs in the emulator with this function in place of its own.
    """
    gluon_emulator.enable()

    def repack(case, where):
        x, codes, scales, wide, out = make_tokens(case, where)
        words = packing.unpack(codes, 4, 32 * scales.shape[1]).unflatten(1, (-1, 8))
        stored = words[..., list(NEIGHBOURS_16_BITS_APART)].flatten(1).contiguous()
        return x, packing.pack(stored, 4).contiguous(), codes, scales, wide, out

    def prepare(x, stored, codes, scales, wide, out):
        return prepare_decode_in_lanes(x, stored, scales, wide, out)

    with gluon_emulator.replacing(to_places=to_places):
        lesson.require_launch(
            prepare, LANE_CASES, repack, lambda x, _, *rest: multiply_tokens(x, *rest), where="cpu"
        )


@triton.jit
def _value_each(codes, out, VALUE: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(out + at, VALUE(tl.load(codes + at).to(tl.int32)))


def check_value(value_of) -> None:
    """Raise AssertionError unless `value_of(code)` gives the number of each of the 16 codes of e2m1."""

    def make(case, where):
        return torch.arange(16, dtype=torch.uint8, device=where) + case, torch.empty(16, device=where)

    def prepare(codes, out):
        return lambda: _value_each[(1,)](codes, out, VALUE=value_of)

    def spec(codes):
        return number_formats.decode(codes & 15, number_formats.E2M1).double()

    # A byte holds two codes, so bits above the code may be set.
    lesson.require_launch(prepare, {"cpu": [0, 176], "cuda": [0, 176]}, make, spec)


def _make_cancelling(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return tensors as `make_tokens` does, whose halves of K cancel but for eight columns, so that rounding shows.

    The scales are near 2^-40, which float16 does not hold.
    """
    x, codes, scales, wide, out = make_tokens(case, where)
    half = case[2] // 2
    x[:, half:] = -x[:, :half]
    codes[:, half // 2 : -4], scales[:, half // 32 :] = codes[:, : half // 2 - 4], scales[:, : half // 32]
    return x, codes, scales - 40, wide, out


def check_decode(kernel) -> None:
    """Raise AssertionError unless `kernel(x, packed, scales, out, M, N, K, TOKENS, BLOCK_N)` multiplies.

    The grid has a program per BLOCK_N rows of W, which need not be a multiple, and M is at most TOKENS.
    """
    lesson.require_written(kernel)

    def prepare(x, packed, scales, wide, out):
        (m, n), k = out.shape, x.shape[1]
        grid, sizes = (triton.cdiv(n, 64),), dict(TOKENS=16, BLOCK_N=64)
        return lambda: kernel[grid](x, packed, scales, out, m, n, k, **sizes, num_warps=4, num_stages=3)

    lesson.require_launch(
        prepare, TOKEN_CASES | {"cpu": [(3, 160, 512), (16, 64, 128)]}, make_tokens, multiply_tokens
    )
    long = dict.fromkeys(TOKEN_CASES, [(16, 64, 2048)])
    fault = lesson.check_launch(prepare, long, _make_cancelling, multiply_tokens)
    assert not fault, f"with scales near 2^-40, where large sums cancel, {fault}"
    report = lesson.compile_launch(prepare, make_tokens((16, 128, 512), "cpu"), "sm_90a")
    assert report.launchable, report.reason
    assert report.counts["wgmma"], (
        "it must multiply by wgmma: tl.dot with the weights, in bf16, as first operand"
    )


CHECKS = {"Exercise 1": check_places, "Exercise 2": check_value, "Exercise 3": check_decode}
check = make_checker(CHECKS)
