"""Attention of few queries: the keys are split among many programs, and a second kernel merges their results.

One query has no tile for every SM, and the time goes into reading K and V once. So the queries of all heads that share
a key head fill the rows of one tile, and each tile has `splits` programs, which take a part of the keys each.

A walk through the two kernels:

1. `attention_split_kernel` loads a box of QUERIES x GROUP rows by one descriptor of (B, HK, S, H / HK, D). TMA fills
   rows past the last query and the last head of the group with zeros.
2. `kernels.attend_blocks` goes through the program's part of the blocks of keys, as in the plain kernel.
3. With one split the program stores acc / row_sum. With several it stores acc, row_max and row_sum in float32.
4. `attention_merge_kernel` has one program per row of the result. It starts while the last splits still compute, and
   waits for them. Then it adds the parts, each times exp(its maximum - the largest maximum), always in the same order.

Source: Flash-Decoding (pytorch.org/blog/flash-decoding); FlashAttention-2, section 3.1 (arXiv 2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ch14.attention.kernels import LOWEST, attend_blocks

# Lengths are not specialised, so that a new number of keys compiles no new kernel.
SPLIT_LENGTHS = "KEYS kv_heads queries group query_blocks group_blocks splits".split()
MERGE_LENGTHS = "heads queries group query_blocks group_blocks splits box_queries box_heads".split()
MERGE_STRIDES = ["batch_stride", "head_stride", "query_stride"]


@triton.jit(do_not_specialize=SPLIT_LENGTHS)
def attention_split_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    parts_ptr,
    scale,
    KEYS,
    kv_heads,
    queries,
    group,
    query_blocks,
    group_blocks,
    splits,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    QUERIES: tl.constexpr = q_desc.block_shape[2]
    GROUP: tl.constexpr = q_desc.block_shape[3]
    D: tl.constexpr = q_desc.block_shape[4]
    BLOCK_M: tl.constexpr = QUERIES * GROUP
    if EARLY:
        gdc_launch_dependents()
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    first_head = tile % group_blocks * GROUP
    first_query = tile // group_blocks % query_blocks * QUERIES
    kv_head = tile // group_blocks // query_blocks % kv_heads
    batch = tile // group_blocks // query_blocks // kv_heads
    row = tl.arange(0, BLOCK_M)
    row_query = first_query + row // GROUP
    unmasked_end = KEYS // BLOCK_N * BLOCK_N
    end = KEYS
    if CAUSAL:
        unmasked_end = tl.minimum(unmasked_end, (first_query + 1) // BLOCK_N * BLOCK_N)
        end = tl.minimum(KEYS, first_query + QUERIES)
    blocks = tl.cdiv(end, BLOCK_N)
    begin = (split * (blocks // splits) + tl.minimum(split, blocks % splits)) * BLOCK_N
    end = begin + (blocks // splits + (split < blocks % splits)) * BLOCK_N
    unmasked_end = tl.maximum(begin, tl.minimum(unmasked_end, end))
    q = q_desc.load([batch, kv_head, first_query, first_head, 0]).reshape(BLOCK_M, D)
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
        out = (acc * (1.0 / row_sum)[:, None]).to(o_desc.dtype)
        o_desc.store([batch, kv_head, first_query, first_head, 0], out.reshape(1, 1, QUERIES, GROUP, D))
    else:  # a part is BLOCK_M x D sums, BLOCK_M maxima and BLOCK_M sums of exponentials
        part = parts_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_M * (D + 2))
        keep = (row_query < queries) & (first_head + row % GROUP < group)
        tl.store(part + row[:, None] * D + tl.arange(0, D)[None, :], acc, mask=keep[:, None])
        tl.store(part + BLOCK_M * D + row, row_max, mask=keep)
        tl.store(part + BLOCK_M * (D + 1) + row, row_sum, mask=keep)


@triton.jit(do_not_specialize=MERGE_STRIDES + MERGE_LENGTHS)
def attention_merge_kernel(
    parts_ptr,
    out_ptr,
    batch_stride: tl.int64,
    head_stride: tl.int64,
    query_stride: tl.int64,
    heads,
    queries,
    group,
    query_blocks,
    group_blocks,
    splits,
    box_queries,
    box_heads,
    D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    rows = box_queries * box_heads
    size = rows * (D + 2)
    query = tl.program_id(0) % queries
    head = tl.program_id(0) // queries % heads
    batch = tl.program_id(0) // queries // heads
    kv_head = tl.program_id(0) // queries // group  # counted through all batches
    member = head % group
    tile = (kv_head * query_blocks + query // box_queries) * group_blocks + member // box_heads
    row = query % box_queries * box_heads + member % box_heads
    parts = parts_ptr + tile.to(tl.int64) * splits * size
    column = tl.arange(0, D)
    every = tl.arange(0, MOST_SPLITS)
    if EARLY:
        gdc_wait()
    highest = tl.max(tl.load(parts + every * size + rows * D + row, mask=every < splits, other=LOWEST), 0)
    acc = tl.zeros((D,), tl.float32)
    row_sum = 0.0
    for first in range(0, splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        keep = split < splits
        part = parts + split * size
        weight = tl.exp2(tl.load(part + rows * D + row, mask=keep, other=LOWEST) - highest)
        row_sum += tl.sum(weight * tl.load(part + rows * (D + 1) + row, mask=keep, other=0.0), 0)
        sums = tl.load(part[:, None] + row * D + column[None, :], mask=keep[:, None], other=0.0)
        acc += tl.sum(weight[:, None] * sums, 0)
    out = out_ptr + batch * batch_stride + head * head_stride + query * query_stride + column
    tl.store(out, (acc / row_sum).to(out_ptr.dtype.element_ty))
