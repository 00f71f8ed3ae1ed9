"""Flash attention, forward: softmax(Q K^T / sqrt(D)) V on tiles that TMA moves, for sm_90a and newer.

No kernel writes the scores to memory: a running maximum and sum rescale the output as blocks of keys go by. Read
`kernels` first (plain Triton, one program with one loop), then `hopper_kernel` (Gluon, warp groups with roles), then
`split_kernels` (few queries, whose keys are split among programs).
Source: FlashAttention-2 (arXiv 2307.08691); FlashAttention-3 for Hopper (arXiv 2407.08608).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton

from ch14.attention import few_queries, operator
from ch14.attention.configs import (
    HEAD_DIMS,
    AttentionConfig,
    best_config,
    configs,
    parse,
    rejection,
    use_pairs,
)
from ch14.attention.few_queries import describe, find_scale
from ch14.attention.hopper_kernel import TILE_LAYOUT, attention_hopper_kernel
from ch14.attention.kernels import attention_plain_kernel
from tilelab.runtime import build, device, operators, triton_launch
from tilelab.runtime.operands import (
    Launch,
    choose_config,
    require_disjoint,
    require_gpu,
    require_no_self_overlap,
    require_number,
    require_tensor,
)
from tilelab.runtime.plans import Plan, Planner

__all__ = ["spec", "attention", "prepare", "configs", "job", "AttentionConfig"]

LOG2_E = few_queries.LOG2_E
IS_INTERPRETED = not isinstance(attention_plain_kernel, triton.JITFunction)


def spec(
    q: torch.Tensor,  # (B, H, S, D)
    k: torch.Tensor,  # (B, HK, T, D)
    v: torch.Tensor,  # (B, HK, T, D)
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:  # (B, H, S, D)
    """Return softmax(scale q k^T) v in float64. `attention` describes the arguments."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (tensor.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = scale * q.double() @ k.mT
    if is_causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -math.inf
        )
    return scores.softmax(-1) @ v


def job(
    config: AttentionConfig, target: str, d: int = 128, is_causal: bool = False, dtype: str = "bf16"
) -> build.Job:
    """Return the build job of `config` for `target`, specialised as `attention` launches it.

    `few_queries.merge_job` is the job of the kernel that follows several splits.
    """
    if config.is_split:
        return few_queries.split_job(config, target, d, is_causal, dtype)
    hopper = config.kernel == "hopper"
    layout = f",{TILE_LAYOUT!r}" if hopper else ""
    queries, keys = (
        f"tensordesc<{dtype}[1, 1, {rows}, {d}]{layout}>" for rows in (_query_rows(config), config.block_n)
    )
    lengths = ["KEYS", "row_blocks", "heads", "heads_per_kv"] + ["items", "paired"] * hopper
    signature = {"q_desc": queries, "k_desc": keys, "v_desc": keys, "o_desc": queries, "scale": "fp32"}
    constants, options = _compile_options(config, is_causal)
    return build.Job(
        "ch14.attention."
        + ("hopper_kernel:attention_hopper_kernel" if hopper else "kernels:attention_plain_kernel"),
        signature | dict.fromkeys(lengths, "i32"),
        constants,
        target,
        options.pop("num_warps"),
        options.pop("num_stages", 3),
        options=options,
        name=str(config),
    )


def _compile_options(
    config: AttentionConfig, is_causal: bool, interpreted: bool = False
) -> tuple[dict, dict]:
    """Return the constexpr arguments of the kernel, and the options of its compilation."""
    constants = {"CAUSAL": bool(is_causal), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    early = {"launch_pdl": not interpreted}
    if config.kernel == "plain":
        return constants | {"EARLY": not interpreted}, early | {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
    constants |= {
        "Q_STAGES": 2,
        "STAGES": config.num_stages,
        "OVERLAP": config.overlap,
        "PING_PONG": config.ping_pong,
        "JOINT": config.four_groups,
    }
    return constants, early | {"num_warps": 4}  # Gluon counts the warps of the first role only


def _query_rows(config: AttentionConfig) -> int:
    return 64 if config.kernel == "hopper" else config.block_m


def _refuse_options(attn_mask, dropout_p) -> None:
    """Raise ValueError for options of scaled_dot_product_attention that would change the result."""
    if attn_mask is not None:
        raise ValueError(
            "attention has no attn_mask, only is_causal: use torch's scaled_dot_product_attention."
        )
    if dropout_p != 0:
        raise ValueError(f"attention has no dropout, so dropout_p must be 0.0; it is {dropout_p!r:.40}.")


def _check_operands(q, k, v, out, is_causal, scale) -> None:
    dtypes = [torch.bfloat16, torch.float16] + [torch.float32] * IS_INTERPRETED
    for name, tensor in {"q": q, "k": k, "v": v, **({} if out is None else {"out": out})}.items():
        first = name == "q"
        require_tensor(
            name,
            tensor,
            "attention",
            ndim=4,
            dtype=dtypes if first else q.dtype,
            aligned=16,
            on=None if first else q.device,
            shape=q.shape if name == "out" else None,
        )
        unit = 16 // tensor.element_size()
        if tensor.stride(3) != 1 or any(
            size > 1 and (stride % unit or stride <= 0)
            for size, stride in zip(tensor.shape[:3], tensor.stride())
        ):
            raise ValueError(
                f"{name} must be contiguous in its last dimension, and its other strides must be positive "
                f"multiples of {unit} elements, as a descriptor wants; they are {tensor.stride()}."
            )
    (b, h, s, d), (_, hk, t, _) = q.shape, k.shape
    if k.shape != v.shape or k.shape[0] != b or k.shape[3] != d:
        raise ValueError(
            f"k and v must be ({b}, key heads, keys, {d}), as q's batch and head dimension are; they are "
            f"{tuple(k.shape)} and {tuple(v.shape)}."
        )
    if d not in HEAD_DIMS:
        raise ValueError(f"the head dimension must be 64 or 128; it is {d}.")
    if not hk or h % hk:
        raise ValueError(f"the heads of q must be a multiple of those of k; they are {h} and {hk}.")
    if not isinstance(is_causal, bool | int):
        raise ValueError(f"is_causal must be True or False; it is a {type(is_causal).__name__}.")
    if scale is not None:
        require_number("scale", scale, 2.0**-100, 2.0**20, "from 2^-100 to 2^20")
    if max(s, t) > 2**30 or b * h * -(-s // 16) >= 2**31:  # the kernels count in 32-bit integers
        raise ValueError(
            "a length is at most 2^30, and batch x heads x length / 16 below 2^31; q is "
            f"{tuple(q.shape)}, and there are {t} keys."
        )
    if out is not None:
        require_no_self_overlap("out", out)
        require_disjoint({"out": out}, {"q": q, "k": k, "v": v})
    require_gpu(
        q, "attention", instead="use torch's scaled_dot_product_attention", interpreted=IS_INTERPRETED
    )


def _plan(q, k, v, out, is_causal, scale, config) -> Plan:
    """Check the arguments, build the descriptors and compile the kernel."""
    _check_operands(q, k, v, out, is_causal, scale)
    here, d = device.current(), q.shape[3]
    target = here.target if here.target and here.has_tma else "sm_90a"  # which the interpreter stands in for
    case = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], d, is_causal
    chosen = "by the model" if config == "best" else ""
    config = choose_config(
        config,
        configs(d),
        AttentionConfig,
        lambda: best_config(d, None if IS_INTERPRETED else target, case, here.sms or 132),
        parse,
    )
    if reason := rejection(config, target):
        raise device.Unsupported(f"configuration {config} cannot run on {target}: {reason}")
    if "hopper" in config.kernel and IS_INTERPRETED:
        raise device.Unsupported("the interpreter runs no Gluon: use a plain configuration without a GPU.")
    new = operator.make_out(q)
    plan = functools.partial(
        Plan,
        shape=q.shape,
        dtype=q.dtype,
        device=q.device,
        config=config,
        chosen=chosen,
        strides=new.stride(),
    )
    if not q.numel() or not k.numel():  # the sum over no keys is zero
        return plan(lambda q, k, v, out: out.zero_())
    operands = q, k, v, new if out is None else out, is_causal, scale, config
    try:  # to compile and load, so that a refusal is raised here
        return plan((few_queries.prepare if config.is_split else _prepare_whole)(*operands))
    except torch.AcceleratorError:
        raise  # the CUDA context is lost
    except Exception as error:
        raise device.Unsupported(
            f"configuration {config} cannot run on {target}: {type(error).__name__}: "
            f"{device.first_line(error)[:200]}"
        ) from error


def bind(
    q: torch.Tensor,  # (B, H, S, D)
    k: torch.Tensor,  # (B, HK, T, D)
    v: torch.Tensor,  # (B, HK, T, D)
    out: torch.Tensor,  # (B, H, S, D)
    is_causal: bool,
    scale: float | None,
    config: AttentionConfig,
) -> tuple[triton.JITFunction, tuple[int], dict, dict]:
    """Return the kernel of `config`, its grid, its arguments by name, and its constants with the compiler's options."""
    gluon, rows, (b, h, s, d) = config.kernel == "hopper", _query_rows(config), q.shape
    row_blocks = triton.cdiv(s, config.block_m)
    paired = gluon and is_causal and use_pairs(row_blocks, b * h, device.current().sms)
    items = ((row_blocks + 1) // 2 if paired else row_blocks) * b * h
    arguments = {
        "q_desc": describe(q, rows, gluon),
        "k_desc": describe(k, config.block_n, gluon),
        "v_desc": describe(v, config.block_n, gluon),
        "o_desc": describe(out, rows, gluon),
        "scale": find_scale(scale, d),
        **({"items": items, "paired": int(paired)} if gluon else {}),
        "KEYS": k.shape[2],
        "row_blocks": row_blocks,
        "heads": h,
        "heads_per_kv": h // k.shape[1],
    }
    constants, options = _compile_options(config, is_causal, IS_INTERPRETED)
    grid = (min(items, device.current().sms) if config.persistent else items,)
    kernel = attention_hopper_kernel if gluon else attention_plain_kernel
    return kernel, grid, arguments, constants | options


FOLLOWS = {"q_desc": 0, "k_desc": 1, "v_desc": 2, "o_desc": 3}


def _prepare_whole(*operands) -> Callable:
    kernel, grid, arguments, options = bind(*operands)
    return triton_launch.prepare(kernel, grid, arguments, FOLLOWS, **options)


planner = Planner(_plan, "qkv")


@operator.register
def attention_operator(q, k, v, is_causal=False, scale=None, config="best"):
    return planner.run((q, k, v), None, is_causal, scale, config)


def prepare(
    q: torch.Tensor,  # (B, H, S, D)
    k: torch.Tensor,  # (B, HK, T, D)
    v: torch.Tensor,  # (B, HK, T, D)
    *,
    attn_mask: None = None,
    dropout_p: float = 0,  # no 0.0, which torch.compile would take for an input
    is_causal: bool = False,
    scale: float | None = None,
    out: torch.Tensor | None = None,  # (B, H, S, D)
    config: str | AttentionConfig = "best",
) -> Launch:
    """Check the arguments of `attention`, build the descriptors, compile the kernel, and return the launch."""
    _refuse_options(attn_mask, dropout_p)
    return planner.prepare((q, k, v), out, is_causal, scale, config)


def attention(
    q: torch.Tensor,  # (B, H, S, D)
    k: torch.Tensor,  # (B, HK, T, D)
    v: torch.Tensor,  # (B, HK, T, D)
    *,
    attn_mask: None = None,
    dropout_p: float = 0,  # no 0.0, which torch.compile would take for an input
    is_causal: bool = False,
    scale: float | None = None,
    out: torch.Tensor | None = None,  # (B, H, S, D)
    config: str | AttentionConfig = "best",
) -> torch.Tensor:  # (B, H, S, D)
    """Return softmax(scale q k^T) v, as torch's scaled_dot_product_attention does; the sums are kept in float32.

    q is (B, H, S, D), k and v are (B, HK, T, D), in bfloat16 or float16; D is 64 or 128. With grouped queries H is a
    multiple of HK, and head h reads key head h // (H // HK). The last dimension is contiguous and the other strides are
    multiples of 16 bytes, so a transposed (B, S, H, D) tensor will do; where q is one, so is the result. If
    `is_causal`, query i sees keys 0 to i, also where S and T differ: torch aligns the mask at the top left like this,
    and FlashAttention at the bottom right. `attn_mask` and `dropout_p` are torch's names for what this kernel lacks;
    only None and 0.0 are taken. `scale` is from 2^-100 to 2^20; the default is 1 / sqrt(D). A score of -inf
    hides a key. Finite scores may be up to 2^27 after scaling, because float32 rounds larger ones too coarsely. NaN or
    infinity in V also reaches queries that do not see that key, if they see another key of its block. With up to 64
    queries and no mask, programs share the keys (`split_kernels`); the same call still gives the same bits. Under
    torch.compile and where autograd records, this is torch.ops.tiles.attention, whose `config` is a name. It has no
    backward pass. Raises ValueError for bad arguments, Unsupported for hardware without TMA.
    """
    _refuse_options(attn_mask, dropout_p)
    if operators.is_traced(q, k, v):
        return operators.store(attention_operator(q, k, v, is_causal, scale, config), out)
    return planner.run((q, k, v), out, is_causal, scale, config)
