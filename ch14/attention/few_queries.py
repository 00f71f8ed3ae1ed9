"""Launch attention with split keys: the work space and the two kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.attention.configs import MOST_SPLITS, AttentionConfig
from ch14.attention.hopper_kernel import TILE_LAYOUT
from ch14.attention.split_hopper_kernel import attention_split_hopper_kernel
from ch14.attention.split_kernels import (
    LENGTHS,
    OUT_STRIDES,
    Q_STRIDES,
    attention_merge_kernel,
    attention_split_kernel,
)
from tilelab.runtime import build, triton_launch

LOG2_E = 1.4426950408889634
IS_INTERPRETED = not isinstance(attention_split_kernel, triton.JITFunction)


def find_scale(scale: float | None, d: int) -> float:
    """Return the scale of the scores for powers of two."""
    return (d**-0.5 if scale is None else scale) * LOG2_E


def describe(tensor: torch.Tensor, rows: int, gluon: bool) -> TensorDescriptor | GluonDescriptor:
    """Return a descriptor of blocks of `rows` x D. A stride that is never taken, of one element, must be valid too."""
    d = tensor.shape[3]
    strides = [stride if size > 1 else d for size, stride in zip(tensor.shape[:3], tensor.stride())] + [1]
    kind, layout = (GluonDescriptor, [TILE_LAYOUT]) if gluon else (TensorDescriptor, [])
    return kind(tensor, list(tensor.shape), strides, [1, 1, rows, d], *layout)


def split_job(config: AttentionConfig, target: str, d: int, is_causal: bool, dtype: str) -> build.Job:
    """Return the build job of a split kernel."""
    gluon = config.kernel == "split_hopper"
    constants, options = _compile_split_options(config, is_causal)
    keys = f"tensordesc<{dtype}[1, 1, {config.block_n}, {d}]{f',{TILE_LAYOUT!r}' if gluon else ''}>"
    pointers = {"q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    if config.splits > 1:
        pointers["parts_ptr"] = "*fp32"
    else:
        constants["parts_ptr"] = None
    signature = pointers | {"k_desc": keys, "v_desc": keys, "scale": "fp32"}
    names = "split_hopper_kernel:attention_split_hopper", "split_kernels:attention_split"
    return build.Job(
        f"ch14.attention.{names[not gluon]}_kernel",
        signature
        | dict.fromkeys([*Q_STRIDES, *OUT_STRIDES], "i64")
        | dict.fromkeys(["KEYS", *LENGTHS], "i32"),
        constants,
        target,
        options.pop("num_warps"),
        options.pop("num_stages", 3),
        aligned=tuple(pointers),
        options=options,
        name=str(config),
    )


def merge_job(config: AttentionConfig, target: str, d: int = 128, dtype: str = "bf16") -> build.Job:
    """Return the build job of the kernel that merges the parts of a configuration with several splits."""
    constants, options = _compile_merge_options(config, d)
    signature = {"parts_ptr": "*fp32", "out_ptr": f"*{dtype}"}
    return build.Job(
        "ch14.attention.split_kernels:attention_merge_kernel",
        signature | dict.fromkeys(OUT_STRIDES, "i64") | dict.fromkeys([*LENGTHS, "rows"], "i32"),
        constants,
        target,
        options.pop("num_warps"),
        aligned=("parts_ptr", "out_ptr"),
        options=options,
        name=f"{config} · merge",
    )


def _compile_split_options(
    config: AttentionConfig, is_causal: bool, interpreted: bool = False
) -> tuple[dict, dict]:
    constants = {"CAUSAL": bool(is_causal), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    if config.kernel == "split_hopper":  # warps of the first role
        return constants | {"STAGES": config.num_stages}, {"num_warps": 4, "launch_pdl": not interpreted}
    # It does not start early itself: programs that arrive before an SM is free crowd onto those that are, and a launch
    # of one long wave then takes up to a third longer. Its partial results let the merge start early.
    early = {"EARLY": config.splits > 1 and not interpreted}
    return constants | early, {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _compile_merge_options(config: AttentionConfig, d: int, interpreted: bool = False) -> tuple[dict, dict]:
    most = next(most for most in (8, 32, MOST_SPLITS) if config.splits <= most)
    constants = {"D": d, "BLOCK_D": min(d, 8192 // most), "MOST_SPLITS": most}
    return constants | {"EARLY": not interpreted}, {"num_warps": 4, "launch_pdl": not interpreted}


def prepare(q, k, v, out, is_causal: bool, scale: float | None, config: AttentionConfig) -> Callable:
    """Return a function of q, k, v and out that launches the split kernel and, for several splits, the merge."""
    (b, h, s, d), hk, gluon = q.shape, k.shape[1], config.kernel == "split_hopper"
    kernel = attention_split_hopper_kernel if gluon else attention_split_kernel
    row_blocks = triton.cdiv(s * h // hk, config.block_m)
    lengths = dict(zip(LENGTHS, (hk, s, h // hk, row_blocks, config.splits)))
    programs = b * hk * row_blocks * config.splits
    size = programs * config.block_m * (d + 2)
    parts = torch.empty(size, dtype=torch.float32, device=q.device) if config.splits > 1 else None
    arguments = {
        "q_ptr": q,
        "out_ptr": out,
        "parts_ptr": parts,
        "scale": find_scale(scale, d),
        "KEYS": k.shape[2],
    }
    arguments |= {"k_desc": describe(k, config.block_n, gluon), "v_desc": describe(v, config.block_n, gluon)}
    strides = dict(zip(OUT_STRIDES, out.stride()[:3]))
    arguments |= lengths | strides | dict(zip(Q_STRIDES, q.stride()[:3]))
    constants, options = _compile_split_options(config, is_causal, IS_INTERPRETED)
    follows = {"q_ptr": 0, "k_desc": 1, "v_desc": 2, "out_ptr": 3} | (
        {} if parts is None else {"parts_ptr": 4}
    )
    split = triton_launch.prepare(kernel, (programs,), arguments, follows, **constants, **options)
    if parts is None:
        return split
    arguments = {"parts_ptr": parts, "out_ptr": out, "rows": config.block_m, **lengths, **strides}
    constants, options = _compile_merge_options(config, d, IS_INTERPRETED)
    follows = {"out_ptr": 3, "parts_ptr": 4}
    merge = triton_launch.prepare(
        attention_merge_kernel,
        (b * h * s * d // constants["BLOCK_D"],),
        arguments,
        follows,
        **constants,
        **options,
    )

    def launch(*tensors):
        parts = torch.empty(size, dtype=torch.float32, device=tensors[0].device)
        split(*tensors, parts)
        merge(*tensors, parts)

    return launch
