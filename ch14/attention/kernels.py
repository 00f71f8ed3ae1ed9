"""The plain kernel, for every GPU with TMA: flash attention in Triton, one program per tile and one loop over the keys.

The fast one, for Hopper, is in `hopper_kernel`.

A walk through `attention_plain_kernel`, which computes BLOCK_M rows of one head:

1. TMA loads the tile of Q. The running values of the softmax start: row_max = LOWEST, row_sum = 0, acc = 0.
2. `attend_blocks` goes through the blocks of BLOCK_N keys. It computes S = Q K^T and the new maximum of each row. Then
   it multiplies `acc` and `row_sum` by exp(old maximum - new maximum), and adds P V and the sum of P.
3. `attend_blocks` runs twice: without a mask up to `unmasked_end`, then with a mask over the blocks that the diagonal
   or the last key crosses.
4. acc / row_sum is stored by TMA, which clips the rows past the end of the head.

Source: FlashAttention-2, algorithm 1 (arXiv 2307.08691). `ch14.attention.hopper_kernel` is the kernel with roles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The running maximum starts at the lowest finite float32. Where the first scores of a row are all -inf, a start at -inf
# would give exp(-inf - -inf) = NaN. From here it is exp(-inf - LOWEST) = 0.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def attend_blocks(
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
    end,
    KEYS,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    D: tl.constexpr = q.shape[1]
    for column in range(begin, end, BLOCK_N):
        k = k_desc.load([batch, kv_head, column, 0]).reshape(BLOCK_N, D)
        s = tl.dot(q, k.T)
        if MASKED:
            columns = column + tl.arange(0, BLOCK_N)[None, :]
            keep = columns < KEYS
            if CAUSAL:
                keep = keep & (columns <= row_query[:, None])
            s = tl.where(keep, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_max[:, None])  # the hardware computes powers of two: scale holds log2(e)
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        v = v_desc.load([batch, kv_head, column, 0]).reshape(BLOCK_N, D)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    return acc, row_sum, row_max


# Lengths are not specialised, so a new prompt length does not compile a new kernel.
@triton.jit(do_not_specialize=["KEYS", "row_blocks", "heads", "heads_per_kv"])
def attention_plain_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    scale,
    KEYS,
    row_blocks,
    heads,
    heads_per_kv,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    D: tl.constexpr = q_desc.block_shape[3]
    if EARLY:  # this kernel may start before the one before it has ended
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0) // row_blocks
    row = tl.program_id(0) % row_blocks * BLOCK_M
    if CAUSAL:  # the last tile meets the most keys, so it starts first
        row = (row_blocks - 1) * BLOCK_M - row
    batch = head // heads
    kv_head = head % heads // heads_per_kv
    unmasked_end = KEYS // BLOCK_N * BLOCK_N
    end = KEYS
    if CAUSAL:
        unmasked_end = tl.minimum(unmasked_end, (row + 1) // BLOCK_N * BLOCK_N)
        end = tl.minimum(KEYS, row + BLOCK_M)
    q = q_desc.load([batch, head % heads, row, 0]).reshape(BLOCK_M, D)
    row_query = row + tl.arange(0, BLOCK_M)
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
        0,
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
    out = acc * (1.0 / row_sum)[:, None]
    o_desc.store([batch, head % heads, row, 0], out.to(o_desc.dtype).reshape(1, 1, BLOCK_M, D))
