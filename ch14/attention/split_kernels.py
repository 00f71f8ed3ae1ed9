"""Attention of few queries: the keys are split among many programs, and a second kernel merges their results.

One query has no tile for every SM, and the time goes into reading K and V once. So the queries of all heads that share
a key head fill the rows of one tile, and each tile has `splits` programs, which take a part of the keys each.

A walk through the two kernels:

1. `attention_split_kernel` loads its rows of Q: row r of a key head is query r // group of head r % group of the group.
2. `kernels.attend_blocks` goes through the program's part of the blocks of keys, as in the plain kernel.
3. With one split the program stores acc / row_sum. With several it stores acc, row_max and row_sum in float32.
4. `attention_merge_kernel` has one program per row of the result, or several for many splits. It starts while the last
   splits still compute, and waits for them. Then it adds the parts, each times exp(its maximum - the largest maximum),
   always in the same order.

Source: Flash-Decoding (pytorch.org/blog/flash-decoding); FlashAttention-2, section 3.1 (arXiv 2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ch14.attention.kernels import LOWEST, attend_blocks

# Lengths and strides are not specialised, so that a new number of keys compiles no new kernel.
LENGTHS = ["kv_heads", "queries", "group", "row_blocks", "splits"]
Q_STRIDES, OUT_STRIDES = (
    [f"{tensor}_{dimension}" for dimension in ("batch", "head", "query")] for tensor in ("q", "out")
)


@triton.jit
def locate_rows(row, batch, kv_head, group, batch_stride, head_stride, query_stride):
    # Return the offsets of rows of a key head.
    return batch * batch_stride + (kv_head * group + row % group) * head_stride + row // group * query_stride


@triton.jit(do_not_specialize=["KEYS", *LENGTHS, *Q_STRIDES, *OUT_STRIDES])
def attention_split_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    parts_ptr,
    scale,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_query: tl.int64,
    out_batch: tl.int64,
    out_head: tl.int64,
    out_query: tl.int64,
    KEYS,
    kv_heads,
    queries,
    group,
    row_blocks,
    splits,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    D: tl.constexpr = k_desc.block_shape[3]
    if EARLY:
        gdc_launch_dependents()
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    kv_head = tile // row_blocks % kv_heads
    batch = tile // row_blocks // kv_heads
    first_row = tile % row_blocks * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    row_query = row // group
    keep = row_query < queries
    column = tl.arange(0, D)[None, :]
    unmasked_end = KEYS // BLOCK_N * BLOCK_N
    end = KEYS
    if CAUSAL:
        unmasked_end = tl.minimum(unmasked_end, (first_row // group + 1) // BLOCK_N * BLOCK_N)
        end = tl.minimum(KEYS, (first_row + BLOCK_M - 1) // group + 1)
    blocks = tl.cdiv(end, BLOCK_N)
    begin = (split * (blocks // splits) + tl.minimum(split, blocks % splits)) * BLOCK_N
    end = begin + (blocks // splits + (split < blocks % splits)) * BLOCK_N
    unmasked_end = tl.maximum(begin, tl.minimum(unmasked_end, end))
    q_row = locate_rows(row, batch, kv_head, group, q_batch, q_head, q_query)
    q_pointers = tl.multiple_of(q_ptr + q_row[:, None] + column, [16, 16])  # bytes, so that loads are wide
    q = tl.load(q_pointers, mask=keep[:, None], other=0.0)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    acc, row_sum, row_max = attend_blocks(
        acc,
        row_sum,
        row_max,
        q,
        k_desc,
        v_desc,
        batch,
        kv_head,
        row_query,
        begin,
        unmasked_end,
        KEYS,
        scale,
        False,
        CAUSAL,
        BLOCK_N,
    )
    acc, row_sum, row_max = attend_blocks(
        acc,
        row_sum,
        row_max,
        q,
        k_desc,
        v_desc,
        batch,
        kv_head,
        row_query,
        unmasked_end,
        end,
        KEYS,
        scale,
        True,
        CAUSAL,
        BLOCK_N,
    )
    if parts_ptr is None:
        out_row = locate_rows(row, batch, kv_head, group, out_batch, out_head, out_query)
        out = (acc * (1.0 / row_sum)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(tl.multiple_of(out_ptr + out_row[:, None] + column, [16, 16]), out, mask=keep[:, None])
    else:  # a part is BLOCK_M x D sums, BLOCK_M maxima and BLOCK_M sums of exponentials
        part = parts_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_M * (D + 2))
        row -= first_row
        tl.store(part + row[:, None] * D + column, acc, mask=keep[:, None])
        tl.store(part + BLOCK_M * D + row, row_max, mask=keep)
        tl.store(part + BLOCK_M * (D + 1) + row, row_sum, mask=keep)


@triton.jit(do_not_specialize=[*LENGTHS, *OUT_STRIDES, "rows"])
def attention_merge_kernel(
    parts_ptr,
    out_ptr,
    out_batch: tl.int64,
    out_head: tl.int64,
    out_query: tl.int64,
    kv_heads,
    queries,
    group,
    row_blocks,
    splits,
    rows,  # of a tile
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # columns of a program
    MOST_SPLITS: tl.constexpr,  # a power of two
    EARLY: tl.constexpr,
):
    size = rows * (D + 2)
    column = tl.program_id(0) % (D // BLOCK_D) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.program_id(0) // (D // BLOCK_D) % (queries * group)
    kv_head = tl.program_id(0) // (D // BLOCK_D) // (queries * group) % kv_heads
    batch = tl.program_id(0) // (D // BLOCK_D) // (queries * group) // kv_heads
    tile = (batch * kv_heads + kv_head) * row_blocks + row // rows
    split = tl.arange(0, MOST_SPLITS)
    part = parts_ptr + tile.to(tl.int64) * splits * size + split * size
    out = out_ptr + locate_rows(row, batch, kv_head, group, out_batch, out_head, out_query)
    row = row % rows
    keep = split < splits
    if EARLY:
        gdc_wait()
    row_max = tl.load(part + rows * D + row, mask=keep, other=LOWEST)
    row_sum = tl.load(part + rows * (D + 1) + row, mask=keep, other=0.0)
    sums = tl.load(part[:, None] + row * D + column[None, :], mask=keep[:, None], other=0.0)
    weight = tl.exp2(row_max - tl.max(row_max, 0))
    acc = tl.sum(weight[:, None] * sums, 0) / tl.sum(weight * row_sum, 0)
    tl.store(out + column, acc.to(out_ptr.dtype.element_ty))
