"""Flash attention, forward: O = softmax(Q K^T / sqrt(D)) V on tiles that tensor descriptors move, sm_90a and newer.

Two kernels, one launcher: `plain` (Triton; one program, one loop) and `hopper` (Gluon, `ch14.attention.hopper_kernel`: warp
groups with roles). Neither writes the scores to memory: a running maximum and sum rescale the output as blocks of keys
go by. Source: FlashAttention-2, algorithm 1 (arXiv 2307.08691); FlashAttention-3 for Hopper (arXiv 2407.08608).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.attention.configs import HEAD_DIMS, AttentionConfig, best, configs, rejection
from ch14.attention.hopper_kernel import TILE_LAYOUT, attention_hopper_kernel
from ch14.descriptors import context, span
from tilelab import device

__all__ = ["spec", "attention", "prepare", "configs", "best", "AttentionConfig"]

DTYPES = (torch.bfloat16, torch.float16)
LOG2_E = 1.4426950408889634


def spec(q, k, v, causal: bool = False, scale: float | None = None):
    """softmax(scale q k^T) v in float64, for q (B, H, S, D) and k, v (B, HK, T, D); query head h reads key head
    h // (H // HK). `causal`: query i sees keys 0 to i. `scale` is 1 / sqrt(D) unless given."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (each.double().repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = scale * q.double() @ k.mT
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -math.inf)
    return scores.softmax(-1) @ v


@triton.jit
def attend_blocks(acc, total, top, q, k_desc, v_desc, batch, kv_head, row, begin, end, KEYS, scale,
                  MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    D: tl.constexpr = q.shape[1]
    for column in range(begin, end, BLOCK_N):
        k = k_desc.load([batch, kv_head, column, 0]).reshape(BLOCK_N, D)
        s = tl.dot(q, k.T)
        if MASKED:
            columns = column + tl.arange(0, BLOCK_N)[None, :]
            keep = columns < KEYS
            if CAUSAL:
                keep = keep & (columns <= row + tl.arange(0, BLOCK_M)[:, None])
            s = tl.where(keep, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        v = v_desc.load([batch, kv_head, column, 0]).reshape(BLOCK_N, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = higher
    return acc, total, top


# Lengths are not specialised: a new prompt length must not compile a new kernel.
@triton.jit(do_not_specialize=["KEYS", "row_blocks", "heads", "heads_per_kv"])
def attention_plain_kernel(q_desc, k_desc, v_desc, o_desc, scale, KEYS, row_blocks, heads, heads_per_kv,
                           CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    D: tl.constexpr = q_desc.block_shape[3]
    head = tl.program_id(0) // row_blocks
    row = tl.program_id(0) % row_blocks * BLOCK_M
    if CAUSAL:  # the longest first
        row = (row_blocks - 1) * BLOCK_M - row
    batch = head // heads
    kv_head = head % heads // heads_per_kv
    whole = KEYS // BLOCK_N * BLOCK_N  # blocks that need no mask end here
    last = KEYS
    if CAUSAL:
        whole = tl.minimum(whole, (row + 1) // BLOCK_N * BLOCK_N)
        last = tl.minimum(KEYS, row + BLOCK_M)
    q = q_desc.load([batch, head % heads, row, 0]).reshape(BLOCK_M, D)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc, total, top = attend_blocks(acc, total, top, q, k_desc, v_desc, batch, kv_head, row, 0, whole, KEYS, scale,
                                    False, CAUSAL, BLOCK_M, BLOCK_N)
    acc, total, top = attend_blocks(acc, total, top, q, k_desc, v_desc, batch, kv_head, row, whole, last, KEYS, scale,
                                    True, CAUSAL, BLOCK_M, BLOCK_N)
    out = acc * (1.0 / total)[:, None]
    o_desc.store([batch, head % heads, row, 0], out.to(o_desc.dtype).reshape(1, 1, BLOCK_M, D))


def _interpreted() -> bool:
    return not isinstance(attention_plain_kernel, triton.JITFunction)


def _check(q, k, v, out, scale, config):
    for name, given in (("q", q), ("k", k), ("v", v), ("out", out)):
        if given is None and name == "out":
            continue
        if not isinstance(given, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor; it is a {type(given).__name__}.")
        if given.ndim != 4 or not given.numel():
            raise ValueError(f"{name} must be (batch, heads, length, head dimension), not empty; its shape is "
                             f"{tuple(given.shape)}.")
        if given.dtype != q.dtype or given.dtype not in (*DTYPES, *([torch.float32] if _interpreted() else [])):
            raise ValueError(f"q, k, v and out must share one dtype of bfloat16 and float16; {name} is "
                             f"{str(given.dtype)[6:]}, q {str(q.dtype)[6:]}.")
        if given.device != q.device:
            raise ValueError(f"q, k, v and out must be on one device; {name} is on {given.device}, q on {q.device}.")
        if given.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"attention has no backward pass and {name} requires grad: detach it or use "
                             "torch.no_grad().")
        if given.is_neg():
            raise ValueError(f"{name} is a view that negates what memory holds: resolve it first.")
        unit = 16 // given.element_size()
        if given.stride(3) != 1 or given.data_ptr() % 16 or any(
                size > 1 and (stride % unit or stride <= 0) for size, stride in zip(given.shape[:3], given.stride())):
            raise ValueError(f"{name} must begin at a multiple of 16 bytes, with its last dimension contiguous and the "
                             f"strides of the others multiples of {unit} elements from {unit}, as a descriptor takes; "
                             f"its strides are {given.stride()}.")
    (b, h, s, d), (kb, hk, t, kd) = q.shape, k.shape
    if k.shape != v.shape or kb != b or kd != d:
        raise ValueError(f"k and v must share one shape, of q's batch {b} and head dimension {d}; they are "
                         f"{tuple(k.shape)} and {tuple(v.shape)}.")
    if d not in HEAD_DIMS:
        raise ValueError(f"the head dimension must be 64 or 128; here it is {d}.")
    if h % hk:
        raise ValueError(f"q's heads must be a multiple of k's; here they are {h} and {hk}.")
    if scale is not None and not (isinstance(scale, (int, float)) and 2.0**-100 <= scale <= 2.0**100):
        raise ValueError(f"scale must be a Python number from 2^-100 to 2^100; here it is {scale!r:.40}.")
    if config is not None and not isinstance(config, AttentionConfig):
        raise ValueError(f"config must be an AttentionConfig or None; it is a {type(config).__name__}.")
    if max(s, t) > 2**30 or b * h * -(-s // 16) >= 2**31:
        raise ValueError("a length is at most 2^30, and batch x heads x length / 16 below 2^31; here is "
                         f"{tuple(q.shape)} and {t} keys.")
    if _interpreted():
        if q.dtype == torch.bfloat16:
            raise device.Unsupported("Triton's interpreter gets bfloat16 products wrong: use float16 without a GPU.")
    elif not q.is_cuda:
        raise device.Unsupported(f"attention needs its tensors on a GPU; they are on {q.device}: move them there, or "
                                 "set TRITON_INTERPRET=1 before the first import to run it without one.")
    else:
        device.require("has_tma", "attention", "use torch's scaled_dot_product_attention")
    if out is not None:
        if out.shape != q.shape:
            raise ValueError(f"out must have q's shape {tuple(q.shape)}; it is {tuple(out.shape)}.")
        extents = sorted((stride, size) for size, stride in zip(out.shape, out.stride()) if size > 1)
        if any(inner * size > outer for (inner, size), (outer, _) in zip(extents, extents[1:])):
            raise ValueError(f"out overlaps itself: its strides are {out.stride()}; give it memory of its own.")
        for name, given in (("q", q), ("k", k), ("v", v)):
            if span(out)[0] < span(given)[1] and span(given)[0] < span(out)[1]:
                raise ValueError(f"out lies in the memory that {name} spans: give it memory of its own.")


def _describe(tensor, rows: int, gluon: bool):
    """A descriptor of blocks of `rows` x D. A dimension of one element may have any stride; a descriptor wants 16 B."""
    d = tensor.shape[3]
    strides = [stride if size > 1 else d for size, stride in zip(tensor.shape[:3], tensor.stride())] + [1]
    block = [1, 1, rows, d]
    if not gluon:
        return TensorDescriptor(tensor, list(tensor.shape), strides, block)
    return GluonDescriptor(tensor, list(tensor.shape), strides, block, TILE_LAYOUT)


def prepare(q, k, v, causal: bool = False, *, scale: float | None = None, out=None,
            config: AttentionConfig | None = None):
    """A function that computes `attention` and returns `out`; descriptors are built once. Arguments as there."""
    _check(q, k, v, out, scale, config)
    here, d = device.current(), q.shape[3]
    target = here.target if here.has_tma else "sm_90a"  # the interpreter stands in for it
    config = config or best(d, None if _interpreted() else target)
    if reason := rejection(config, target):
        raise device.Unsupported(f"configuration {config} cannot run on {target}: {reason}")
    gluon = config.kernel == "hopper"
    if gluon and _interpreted():
        raise device.Unsupported("the interpreter runs Triton, not Gluon: use a plain configuration without a GPU.")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    rows = config.block_m // 2 if gluon else config.block_m
    descriptors = [_describe(q, rows, gluon), _describe(k, config.block_n, gluon), _describe(v, config.block_n, gluon),
                   _describe(out, rows, gluon)]
    row_blocks = triton.cdiv(q.shape[2], config.block_m)
    scalars = ((d ** -0.5 if scale is None else scale) * LOG2_E, k.shape[2], row_blocks, q.shape[1],
               q.shape[1] // k.shape[1])
    constants = dict(CAUSAL=bool(causal), BLOCK_M=config.block_m, BLOCK_N=config.block_n)
    items = ((row_blocks + 1) // 2 if gluon and causal else row_blocks) * q.shape[0] * q.shape[1]
    grid = (min(items, here.sms) if config.persistent else items,)
    if gluon:  # num_warps of a Gluon kernel: those of its first role
        scalars = scalars[:1] + (items,) + scalars[1:]
        options = dict(STAGES=config.num_stages, OVERLAP=config.overlap, PING_PONG=config.ping_pong, num_warps=4)
    else:
        options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    kernel = attention_hopper_kernel if gluon else attention_plain_kernel
    if not _interpreted():  # compile and load without computing, so that a refusal comes here
        try:
            kernel.warmup(*descriptors, *scalars, grid=grid, **constants, **options)._init_handles()
        except torch.AcceleratorError:
            raise  # the context is lost
        except Exception as error:
            raise device.Unsupported(f"configuration {config} cannot run on {target}: {type(error).__name__}: "
                                     f"{device.first_line(error)[:200]}") from error

    def launch():
        if not _interpreted():
            context()
        kernel[grid](*descriptors, *scalars, **constants, **options)
        return out

    return launch


def attention(q, k, v, causal: bool = False, *, scale: float | None = None, out=None,
              config: AttentionConfig | None = None):
    """softmax(scale q k^T) v without the scores ever in memory; the sums are kept in float32.

    q (B, H, S, D), k and v (B, HK, T, D), bfloat16 or float16, D 64 or 128, H a multiple of HK (grouped queries: head h
    reads key head h // (H // HK)), any S and T. `causal`: query i sees keys 0 to i, as torch's is_causal. Each tensor's
    last dimension is contiguous; the strides of the others are multiples of 16 bytes, so (B, S, H, D) transposed will
    do. NaN or infinity in V also reaches queries that do not see it, where a block of keys holds both. `scale`:
    1 / sqrt(D) unless given. `out`: of q's shape. Raises ValueError for what it cannot take and
    tilelab.device.Unsupported for hardware that cannot run it.
    """
    return prepare(q, k, v, causal, scale=scale, out=out, config=config)()
