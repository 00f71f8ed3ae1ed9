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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.attention import operator
from ch14.attention.configs import (
    HEAD_DIMS,
    MOST_SPLITS,
    AttentionConfig,
    best_config,
    configs,
    parse,
    rejection,
)
from ch14.attention.hopper_kernel import TILE_LAYOUT, attention_hopper_kernel
from ch14.attention.kernels import attention_plain_kernel
from ch14.attention.split_hopper_kernel import GROUP_LAYOUT, attention_split_hopper_kernel
from ch14.attention.split_kernels import (
    MERGE_LENGTHS,
    MERGE_STRIDES,
    SPLIT_LENGTHS,
    attention_merge_kernel,
    attention_split_kernel,
)
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

LOG2_E = 1.4426950408889634
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
    config: AttentionConfig,
    target: str,
    d: int = 128,
    is_causal: bool = False,
    dtype: str = "bf16",
    group: int = 1,
) -> build.Job:
    """Return the build job of `config` for `target`, specialised as `attention` launches it.

    `group` heads share a key head, which only the split kernel needs to know. It is followed by a merge for several
    splits (`merge_job`).
    """
    if config.is_split:
        return _split_job(config, target, d, is_causal, dtype, group)
    hopper = config.kernel == "hopper"
    layout = f",{TILE_LAYOUT!r}" if hopper else ""
    queries, keys = (
        f"tensordesc<{dtype}[1, 1, {rows}, {d}]{layout}>" for rows in (_query_rows(config), config.block_n)
    )
    lengths = ["KEYS", "row_blocks", "heads", "heads_per_kv"] + ["items"] * hopper
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


def _split_job(
    config: AttentionConfig, target: str, d: int, is_causal: bool, dtype: str, group: int
) -> build.Job:
    constants, options = _compile_split_options(config, is_causal)
    gluon = config.kernel == "split_hopper"
    queries, keys = (
        f"tensordesc<{dtype}{[1, 1, *box, d]}{f',{layout!r}' if gluon else ''}>"
        for box, layout in ((_split_box(config, group), GROUP_LAYOUT), ([config.block_n], TILE_LAYOUT))
    )
    signature = {"q_desc": queries, "k_desc": keys, "v_desc": keys, "o_desc": queries, "parts_ptr": "*fp32"}
    if config.splits == 1:
        del signature["parts_ptr"]
        constants["parts_ptr"] = None
    return build.Job(
        "ch14.attention."
        + (
            "split_hopper_kernel:attention_split_hopper_kernel"
            if gluon
            else "split_kernels:attention_split_kernel"
        ),
        signature | {"scale": "fp32"} | dict.fromkeys(SPLIT_LENGTHS, "i32"),
        constants,
        target,
        options["num_warps"],
        options.get("num_stages", 3),
        aligned=("parts_ptr",) * (config.splits > 1),
        name=str(config),
    )


def merge_job(config: AttentionConfig, target: str, d: int = 128, dtype: str = "bf16") -> build.Job:
    """Return the build job of the kernel that merges the parts of a configuration with several splits."""
    constants, options = _compile_merge_options(config, d)
    return build.Job(
        "ch14.attention.split_kernels:attention_merge_kernel",
        {"parts_ptr": "*fp32", "out_ptr": f"*{dtype}"}
        | dict.fromkeys(MERGE_STRIDES, "i64")
        | dict.fromkeys(MERGE_LENGTHS, "i32"),
        constants,
        target,
        options.pop("num_warps"),
        aligned=("parts_ptr", "out_ptr"),
        options=options,
        name=f"{config} · merge",
    )


def _split_box(config: AttentionConfig, group: int) -> list[int]:
    """Return the queries and the heads of a tile of the split kernel."""
    heads = min(triton.next_power_of_2(group), config.block_m)
    return [config.block_m // heads, heads]


def _compile_split_options(config: AttentionConfig, is_causal: bool) -> tuple[dict, dict]:
    constants = {"CAUSAL": bool(is_causal), "BLOCK_N": config.block_n}
    constants |= {"EARLY": config.splits > 1 and not IS_INTERPRETED}
    if config.kernel == "split_hopper":
        return constants | {"STAGES": config.num_stages}, {"num_warps": config.num_warps}
    return constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _compile_merge_options(config: AttentionConfig, d: int) -> tuple[dict, dict]:
    constants = {"D": d, "AT_ONCE": 8 if config.splits <= 8 else 32, "MOST_SPLITS": MOST_SPLITS}
    return constants | {"EARLY": not IS_INTERPRETED}, {"num_warps": 4, "launch_pdl": not IS_INTERPRETED}


def _compile_options(config: AttentionConfig, is_causal: bool) -> tuple[dict, dict]:
    """Return the constexpr arguments of the kernel, and the options of its compilation."""
    constants = {"CAUSAL": bool(is_causal), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    if config.kernel == "plain":
        return constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}
    constants |= {
        "Q_STAGES": 2,
        "STAGES": config.num_stages,
        "OVERLAP": config.overlap,
        "PING_PONG": config.ping_pong,
        "JOINT": config.four_groups,
    }
    return constants, {"num_warps": 4}  # Gluon counts the warps of the first role only


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


def _describe(tensor, rows: int, gluon: bool):
    """Return a descriptor of blocks of `rows` x D. A stride that is never taken, of one element, must be valid too."""
    d = tensor.shape[3]
    strides = [stride if size > 1 else d for size, stride in zip(tensor.shape[:3], tensor.stride())] + [1]
    kind, layout = (GluonDescriptor, [TILE_LAYOUT]) if gluon else (TensorDescriptor, [])
    return kind(tensor, list(tensor.shape), strides, [1, 1, rows, d], *layout)


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
        return plan((_prepare_split if config.is_split else _prepare_whole)(*operands))
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
    items = ((row_blocks + 1) // 2 if gluon and is_causal else row_blocks) * b * h
    arguments = {
        "q_desc": _describe(q, rows, gluon),
        "k_desc": _describe(k, config.block_n, gluon),
        "v_desc": _describe(v, config.block_n, gluon),
        "o_desc": _describe(out, rows, gluon),
        "scale": (d**-0.5 if scale is None else scale) * LOG2_E,
        **({"items": items} if gluon else {}),
        "KEYS": k.shape[2],
        "row_blocks": row_blocks,
        "heads": h,
        "heads_per_kv": h // k.shape[1],
    }
    constants, options = _compile_options(config, is_causal)
    grid = (min(items, device.current().sms) if config.persistent else items,)
    kernel = attention_hopper_kernel if gluon else attention_plain_kernel
    return kernel, grid, arguments, constants | options


FOLLOWS = {"q_desc": 0, "k_desc": 1, "v_desc": 2, "o_desc": 3}


def _prepare_whole(*operands) -> Callable:
    kernel, grid, arguments, options = bind(*operands)
    return triton_launch.prepare(kernel, grid, arguments, FOLLOWS, **options)


def _prepare_split(q, k, v, out, is_causal, scale, config) -> Callable:
    """Return a function of q, k, v and out that launches the split kernel and, for several splits, the merge."""
    (b, h, s, d), hk, gluon = q.shape, k.shape[1], config.kernel == "split_hopper"
    kernel = attention_split_hopper_kernel if gluon else attention_split_kernel
    group = h // hk
    box = _split_box(config, group)
    lengths = {"queries": s, "group": group, "splits": config.splits}
    lengths |= {"query_blocks": triton.cdiv(s, box[0]), "group_blocks": triton.cdiv(group, box[1])}
    programs = b * hk * lengths["query_blocks"] * lengths["group_blocks"] * config.splits
    size = programs * config.block_m * (d + 2)
    parts = torch.empty(size, dtype=torch.float32, device=q.device) if config.splits > 1 else None
    arguments = {
        "q_desc": _describe_group(q, hk, box, gluon),
        "k_desc": _describe(k, config.block_n, gluon),
        "v_desc": _describe(v, config.block_n, gluon),
        "o_desc": _describe_group(out, hk, box, gluon),
        "parts_ptr": parts,
        "scale": (d**-0.5 if scale is None else scale) * LOG2_E,
        "KEYS": k.shape[2],
        "kv_heads": hk,
        **lengths,
    }
    constants, options = _compile_split_options(config, is_causal)
    if parts is None:
        options |= constants
        return triton_launch.prepare(kernel, (programs,), arguments, FOLLOWS, **options)
    split = triton_launch.prepare(
        kernel, (programs,), arguments, FOLLOWS | {"parts_ptr": 4}, **constants, **options
    )
    arguments = {"parts_ptr": parts, "out_ptr": out, "heads": h, **lengths}
    arguments |= dict(zip(("box_queries", "box_heads"), box))
    arguments |= dict(zip(MERGE_STRIDES, out.stride()))
    constants, options = _compile_merge_options(config, d)
    follows = {"out_ptr": 3, "parts_ptr": 4}
    merge = triton_launch.prepare(
        attention_merge_kernel, (b * h * s,), arguments, follows, **constants, **options
    )

    def launch(*tensors):
        parts = torch.empty(size, dtype=torch.float32, device=tensors[0].device)
        split(*tensors, parts)
        merge(*tensors, parts)

    return launch


def _describe_group(tensor, kv_heads: int, box: list[int], gluon: bool):
    """Return a descriptor of (B, HK, S, H / HK, D), in which a box holds some queries of some heads of a group."""
    b, h, s, d = tensor.shape
    shape = [b, kv_heads, s, h // kv_heads, d]
    batch, head, query, _ = tensor.stride()
    strides = [batch, head * (h // kv_heads), query, head, 1]
    strides = [stride if size > 1 else d for size, stride in zip(shape[:4], strides)] + [1]
    kind, layout = (GluonDescriptor, [GROUP_LAYOUT]) if gluon else (TensorDescriptor, [])
    return kind(tensor, shape, strides, [1, 1, *box, d], *layout)


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
    infinity in V also reaches queries that do not see that key, if they see another key of its block. Under
    torch.compile and where autograd records, this is torch.ops.tiles.attention, whose `config` is a name. It has no
    backward pass. Raises ValueError for bad arguments, Unsupported for hardware without TMA.
    """
    _refuse_options(attn_mask, dropout_p)
    if operators.is_traced(q, k, v):
        return operators.store(attention_operator(q, k, v, is_causal, scale, config), out)
    return planner.run((q, k, v), out, is_causal, scale, config)
