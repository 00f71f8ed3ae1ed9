"""Mixture of experts: products of groups of rows, each with its expert's matrix, in one launch that no host waits for.

Read `kernels` first, then `configs`. `native` launches the kernels in CUDA C++ on Hopper.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 3.3; MegaBlocks (arXiv 2211.15841); DeepGEMM.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.moe import kernels, native, operator
from ch14.moe.configs import BLOCK, FEW_ROWS, GroupedConfig, best_config, configs, gradient_config, job, parse
from tilelab.runtime import device, operators, triton_launch
from tilelab.runtime.operands import (
    Launch,
    choose_config,
    require_disjoint,
    require_gpu,
    require_rows,
    require_tensor,
    row_stride,
)
from tilelab.runtime.plans import Plan, Planner

__all__ = ["spec", "grouped_gemm", "masked_grouped_gemm", "moe", "prepare", "configs", "GroupedConfig", "job"]

DTYPES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
IS_INTERPRETED = not isinstance(kernels.grouped_kernel, triton.JITFunction)
MOST_GROUPS = 4096
MOST_ROWS = 2**31 - 2**16  # as the ragged descriptor of C counts them; it is also the most tiles of a kernel
INSTEAD = "use torch.nn.functional.grouped_mm"


def ragged_descriptor(matrix: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Return a descriptor of (rows, columns) whose coordinates say where the rows of a group end.

    `kernels.ragged_coordinates` explains the dimensions: wrap, shift, row and column.
    """
    row = row_stride(matrix)
    shape = [MOST_ROWS, MOST_ROWS, 2**30, matrix.shape[1]]
    return TensorDescriptor(matrix, shape, [2**34 - row, row, row, 1], box)


def _dequantise(values: torch.Tensor, scales: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Return values (..., R, C) times their scales in float64. Each block of `rows` x 128 values has one scale."""
    if scales is None:
        return values.double()
    scales = scales.double().repeat_interleave(rows, -2).repeat_interleave(BLOCK, -1)
    return values.double() * scales[..., : values.shape[-2], : values.shape[-1]]


def spec(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (groups, K, N)
    offsets: torch.Tensor,  # (groups,)
    scale_a: torch.Tensor | None = None,  # (M, K / 128)
    scale_b: torch.Tensor | None = None,  # (groups, K / 128, N / 128)
) -> torch.Tensor:  # (M, N), float64
    """Return for each group its rows of A times its matrix of B, in float64. Rows of no group are zero."""
    a, b = _dequantise(a, scale_a, 1), _dequantise(b, scale_b, BLOCK)
    c, begin = a.new_zeros(a.shape[0], b.shape[2]), 0
    for matrix, end in zip(b, offsets.tolist()):
        c[begin:end] = a[begin:end] @ matrix
        begin = max(begin, end)
    return c


def _require_countable(name: str, rows: int) -> None:
    if rows > MOST_ROWS:
        raise ValueError(f"{name} has {rows:,} rows; a kernel counts at most {MOST_ROWS:,}.")


def _check_operands(a, b, ends, scale_a, scale_b, kind: str) -> tuple[str, bool]:
    """Return the name of the dtype, and whether K is contiguous in b; raise ValueError for what no kernel can read."""
    masked = kind == "masked"
    op, name = ("masked_grouped_gemm", "counts") if masked else ("grouped_gemm", "offsets")
    require_tensor("a", a, op, dtype=tuple(DTYPES), ndim=2 + masked)
    _require_countable("a", math.prod(a.shape[:-1]))
    require_tensor("b", b, op, dtype=a.dtype, ndim=3, on=a.device, not_empty=True)
    groups, inner, n = b.shape
    k = a.shape[-1]
    if inner != k:
        raise ValueError(f"the inner extents differ: a is {tuple(a.shape)} and b is {tuple(b.shape)}.")
    if groups > MOST_GROUPS:
        raise ValueError(f"b has {groups:,} groups; a kernel counts at most {MOST_GROUPS:,}.")
    if masked and a.shape[0] != groups:
        raise ValueError(f"a must have as many groups as b; they have {a.shape[0]} and {groups}.")
    require_tensor(name, ends, op, dtype=torch.int32, shape=(groups,), on=a.device, contiguous=True)
    if masked:
        require_tensor("a", a, op, contiguous=True)
    if a.numel():
        require_rows("a", a.flatten(0, -2))
    k_major = b.stride(1) == 1 and (b.stride(2) >= k or n == 1)
    for matrix in (b.mT if k_major else b)[:1]:
        require_rows("b", matrix)
    if groups > 1 and (b.stride(0) * b.element_size() % 16 or b.stride(0) <= 0):
        raise ValueError(
            f"a matrix of b must take a multiple of 16 bytes; its stride is {b.stride(0)} elements."
        )
    if n % 8:
        raise ValueError(f"N must be a multiple of 8, so a row of C takes a multiple of 16 bytes; N is {n}.")
    if DTYPES[a.dtype] == "bf16":
        if scale_a is not None or scale_b is not None:
            raise ValueError("scale_a and scale_b belong to float8 operands; a is bfloat16.")
        return "bf16", k_major
    if not k_major or k % BLOCK:
        raise ValueError(
            f"float8 needs b with K contiguous (pass weight.transpose(1, 2)) and K a multiple of {BLOCK}; K is {k}."
        )
    shapes = (*a.shape[:-1], k // BLOCK), (groups, k // BLOCK, math.ceil(n / BLOCK))
    for label, scale, shape in zip(("scale_a", "scale_b"), (scale_a, scale_b), shapes):
        require_tensor(label, scale, op, dtype=torch.float32, shape=shape, on=a.device)
    return "fp8", k_major


def _choose(config, rows: float, n: int, dtype: str, kind: str, target: str) -> GroupedConfig:
    best = best_config(rows, n, dtype, kind == "swiglu", target)
    if best is None:
        raise device.Unsupported(f"no configuration of the grouped kernel runs on {target}: {INSTEAD}.")
    found = parse(config) if isinstance(config, str) and config != "best" else config
    found = choose_config(found, {}, GroupedConfig, lambda: best)
    if dtype == "bf16":
        fits = found.block_k <= BLOCK and not found.halves
    elif kind == "swiglu":  # a tile covers one scale of gates and one of values
        fits = found.block_k == BLOCK and found.block_n == 2 * BLOCK
    else:  # a tile covers one scale, and so does a step of K
        fits = found.block_k == BLOCK and found.block_n <= BLOCK
    if not fits:
        raise ValueError(
            f"the configuration {found} does not fit {dtype}{' with SwiGLU' * (kind == 'swiglu')}."
        )
    return found


def _require_few_tiles(config: GroupedConfig | native.Config, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise ValueError if the tiles could not be numbered, even if each offset made its group as large as A."""
    tiles = len(b) * (a.shape[-2] // config.block_m + 2) * math.ceil(b.shape[2] / config.block_n)
    if tiles > MOST_ROWS:
        raise ValueError(
            f"{len(b):,} groups of up to {a.shape[-2]:,} rows may need {tiles:,} tiles; a kernel numbers at most "
            f"{MOST_ROWS:,}: divide the groups."
        )


def _plan(a, b, ends, scale_a, scale_b, out_scale, out, config, kind: str) -> Plan:
    """Check the arguments and bind a kernel. `kind` is "rows", "masked" or "swiglu".

    With "swiglu" the columns of b are gates and then values, and with `out_scale` the result is quantised.
    """
    dtype, k_major = _check_operands(a, b, ends, scale_a, scale_b, kind)
    swiglu = kind == "swiglu"
    groups, k, n = b.shape
    n //= 1 + swiglu
    if swiglu and (n % (BLOCK if dtype == "fp8" else 8) or not k_major):
        raise ValueError(f"SwiGLU needs gates and values of whole blocks, and K contiguous; N is {2 * n}.")
    require_gpu(a, "grouped_gemm", instead=INSTEAD, interpreted=IS_INTERPRETED)
    shape = (*a.shape[:-1], n)
    out_dtype = torch.float8_e4m3fn if out_scale is not None else torch.bfloat16
    if out is not None:
        require_tensor("out", out, "grouped_gemm", dtype=out_dtype, shape=shape, on=a.device, contiguous=True)
        ends_name = "counts" if kind == "masked" else "offsets"
        read = {"a": a, "b": b, ends_name: ends, "scale_a": scale_a, "scale_b": scale_b}
        require_disjoint({"out": out}, read)
    else:
        out = torch.empty(shape, dtype=out_dtype, device=a.device)
    if not out.numel():
        return Plan(lambda *tensors: None, shape, out_dtype, a.device, None)
    here = device.current()
    # Without a GPU the interpreter stands in for one of sm_90a with eight SMs, so that tiles and waves still occur.
    target, sms = (here.target, here.sms) if here.target and here.has_tma else ("sm_90a", 8)
    rows = out.numel() / n / groups
    fp8, is_hopper = dtype == "fp8", k_major and here.has_wgmma
    if config == "best" and is_hopper and not (swiglu and not fp8 and rows > FEW_ROWS):
        config = native.choose_config(a.numel() // k, groups, n, k, fp8, swiglu, kind == "masked")
    elif isinstance(config, str):
        config = native.configs(fp8, swiglu).get(config, config)
    if isinstance(config, native.Config):
        if not is_hopper:
            raise device.Unsupported(f"the configuration {config} needs WGMMA, and K contiguous in b.")
        _require_few_tiles(config, a, b)
        call = native.prepare(a, b, ends, out, scale_a, scale_b, config, swiglu, out_scale)

        def launch_native(a, b, ends, scale_a, scale_b, out_scale, out):
            call(a, b, ends, out, scale_a, scale_b, out_scale)

        return Plan(launch_native, shape, out_dtype, a.device, config, chosen="by the extents")
    config = _choose(config, rows, n, dtype, kind, target)
    _require_few_tiles(config, a, b)
    launch = bind(config, a, b, ends, scale_a, scale_b, out_scale, out, k_major, kind, sms)
    return Plan(launch, shape, out_dtype, a.device, config, chosen="by the extents")


def bind(
    config: GroupedConfig, a, b, ends, scale_a, scale_b, out_scale, out, k_major: bool, kind: str, sms: int
):
    """Compile the grouped kernel and return a function of (a, b, ends, both scales, out_scale, out)."""
    masked, swiglu = kind == "masked", kind == "swiglu"
    groups, k, n = b.shape
    n //= 1 + swiglu
    stored = b.mT if k_major else b
    row, each = stored.stride(1), stored.stride(0) if groups > 1 else stored.shape[1] * stored.stride(1)
    extents, strides = list(stored.shape), [each, row, 1]
    if swiglu:
        extents, strides = [groups, 2, n, k], [each, n * row, row, 1]
    rows_a, rows_c = a.flatten(0, -2), out.flatten(0, -2)
    boxes = config.boxes(k_major, swiglu)
    arguments: dict[str, Any] = {
        "a_desc": TensorDescriptor(a, list(rows_a.shape), [row_stride(rows_a), 1], boxes["a_desc"]),
        "b_desc": TensorDescriptor(b, extents, strides, boxes["b_desc"]),
        "c_desc": ragged_descriptor(rows_c, boxes["c_desc"]),
        "c_scale_ptr": out_scale,
        "ends_ptr": ends,
        "scale_a_ptr": scale_a,
        "scale_b_ptr": scale_b,
        "groups": groups,
        "N": n,
        "K": k,
        "capacity": a.shape[-2],
        "stride_cs": 0 if out_scale is None else out_scale.stride(1),
    }
    of_a, of_b = (scale.stride() if scale is not None else (0, 0, 0) for scale in (scale_a, scale_b))
    skip = of_a[0] - a.shape[1] * of_a[1] if masked else 0  # from one group's rows to the next group's
    arguments |= {"stride_sa_group": skip, "stride_sa_m": of_a[-2], "stride_sa_k": of_a[-1]}
    arguments |= {"stride_sb_group": of_b[0], "stride_sb_k": of_b[1], "stride_sb_n": of_b[2]}
    names = ("a_desc", "b_desc", "ends_ptr", "scale_a_ptr", "scale_b_ptr", "c_scale_ptr", "c_desc")
    follows = {name: place for place, name in enumerate(names) if arguments[name] is not None}
    constants = config.constants_for(groups, sms, k_major, masked, swiglu)
    constants["PDL"] &= not IS_INTERPRETED
    options: dict[str, Any] = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    options |= {"launch_pdl": True} if constants["PDL"] else {}
    most = (
        groups * math.ceil(a.shape[1] / config.block_m) if masked else a.shape[0] // config.block_m + groups
    )
    most *= math.ceil(n * (1 + swiglu) / config.block_n)
    programs = min(constants["PROGRAMS"], most)
    return triton_launch.prepare(
        kernels.grouped_kernel, (programs,), arguments, follows, **constants, **options
    )


_NAMES = ("a", "b", "{}", "scale_a", "scale_b", "the scales of out")
planner = Planner(_plan, [name.format("offsets") for name in _NAMES])
masked_planner = Planner(_plan, [name.format("counts") for name in _NAMES])


def _plan_gradient(a, b, offsets, out) -> Plan:
    """Check the arguments of the weight gradient, A (rows, M) and B (rows, N), and bind its kernel."""
    op = "grouped_weight_gradient"
    require_tensor("a", a, op, dtype=torch.bfloat16, ndim=2)
    _require_countable("a", len(a))
    require_tensor("b", b, op, dtype=torch.bfloat16, ndim=2, on=a.device)
    require_tensor("offsets", offsets, op, dtype=torch.int32, ndim=1, on=a.device, contiguous=True)
    (rows, m), n, groups = a.shape, b.shape[1], len(offsets)
    if b.shape[0] != rows:
        raise ValueError(f"a and b must have a row for each other; they have {rows} and {b.shape[0]}.")
    if m % 8 or n % 8:
        raise ValueError(f"both extents of a gradient must be multiples of 8; they are {m} and {n}.")
    if not rows:
        return Plan(lambda *tensors: tensors[-1].zero_(), (groups, m, n), torch.bfloat16, a.device, None)
    require_rows("a", a)
    require_rows("b", b)
    require_gpu(a, op, instead=INSTEAD, interpreted=IS_INTERPRETED)
    out = torch.empty(groups, m, n, dtype=torch.bfloat16, device=a.device)
    here = device.current()
    tile = gradient_config(m, n, here.target if here.has_tma else "sm_90a")  # type: ignore[arg-type]
    arguments: dict[str, Any] = {
        "a_desc": ragged_descriptor(a, [1, 1, tile.block_k, tile.block_m]),
        "b_desc": ragged_descriptor(b, [1, 1, tile.block_k, tile.block_n]),
        "c_desc": TensorDescriptor(
            out, [groups, m, n], [m * n, n, 1], [1, tile.block_m, tile.block_n // tile.epilogue_subtile]
        ),
        **{"ends_ptr": offsets, "groups": groups, "rows": rows, "M": m, "N": n},
    }
    tiles = groups * math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n)
    constants = tile.constants_for(groups, here.sms or 8, b_k_major=False, masked=False, swiglu=False)
    kept = "BLOCK_M BLOCK_N BLOCK_K GROUP_M EPILOGUE_SUBTILE PROGRAMS FUSED".split()
    constants = {name: constants[name] for name in kept}
    programs = min(tiles, constants["PROGRAMS"])
    constants |= dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    follows = {"a_desc": 0, "b_desc": 1, "ends_ptr": 2, "c_desc": 3}
    launch = triton_launch.prepare(
        kernels.weight_gradient_kernel, (programs,), arguments, follows, **constants
    )
    return Plan(launch, (groups, m, n), torch.bfloat16, a.device, None)


gradient_planner = Planner(_plan_gradient, ("a", "b", "offsets"))


def _rows(a, b, offsets, scale_a=None, scale_b=None, config="best"):
    return planner.run((a, b, offsets, scale_a, scale_b, None), None, config, "rows")


def _masked(a, b, counts, scale_a=None, scale_b=None, config="best"):
    return masked_planner.run((a, b, counts, scale_a, scale_b, None), None, config, "masked")


def _gradient(a, b, offsets):
    return gradient_planner.run((a, b, offsets), None)


def _check_moe(
    x, gate_up, down, topk_ids, topk_weights, scale_gate_up=None, scale_down=None, in_memory=True
) -> None:
    """Raise ValueError for what the kernels cannot read; without `in_memory`, for what torch's operations cannot."""
    where = x.device if isinstance(x, torch.Tensor) else None
    rest: dict[str, Any] = dict(op="moe", on=where, in_memory=in_memory)
    weights: dict[str, Any] = dict(rest, contiguous=in_memory, not_empty=True)
    require_tensor("x", x, dtype=torch.bfloat16, ndim=2, **rest)
    if in_memory:
        require_rows("x", x)
    tokens, hidden = x.shape
    fp8 = isinstance(gate_up, torch.Tensor) and gate_up.dtype == torch.float8_e4m3fn
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    require_tensor("gate_up", gate_up, dtype=dtype, ndim=3, **weights)
    groups, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[2] != hidden or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be experts x 2 I x {hidden}; it is {tuple(gate_up.shape)}.")
    unit = BLOCK if fp8 else 8
    if hidden % unit or inner % unit:
        raise ValueError(
            f"hidden and I must be multiples of {unit} with {dtype}; they are {hidden} and {inner}."
        )
    require_tensor("down", down, dtype=dtype, shape=(groups, hidden, inner), **weights)
    require_tensor("topk_ids", topk_ids, dtype=(torch.int32, torch.int64), ndim=2, **rest)
    shape = tuple(topk_ids.shape)
    if shape[0] != tokens:
        raise ValueError(f"topk_ids must have a row for each of the {tokens} tokens; it has {shape[0]}.")
    _require_countable("x, copied for each choice,", topk_ids.numel())
    floats = (torch.float32, torch.bfloat16)
    require_tensor("topk_weights", topk_weights, dtype=floats, shape=shape, **rest)
    scales = ("scale_gate_up", scale_gate_up, gate_up), ("scale_down", scale_down, down)
    for name, scale, weight in scales:
        if (scale is None) == fp8:
            raise ValueError(f"{name} must be given for float8 weights, and for no others; they are {dtype}.")
        if fp8:
            blocks = groups, weight.shape[1] // BLOCK, weight.shape[2] // BLOCK
            require_tensor(name, scale, dtype=torch.float32, shape=blocks, **rest)


def _is_fused(fp8: bool, rows: float, config) -> bool:
    """Return whether SwiGLU runs in the epilogue of the first product, for groups of so many rows on average.

    With float8 on Hopper, a fused tile has no registers for the columns that make the plain one fast. On an H200 both
    ways took equal time for 8 rows per group. For 32, the plain product and a kernel for SwiGLU took 13 to 20 % less.
    """
    return not (fp8 and rows > 8 and config == "best" and device.current().has_wgmma)


def _moe(x, gate_up, down, topk_ids, topk_weights, scale_gate_up=None, scale_down=None, config="best"):
    """Return the experts' weighted results in five kernels, or six: rank, permute, two products, combine."""
    _check_moe(x, gate_up, down, topk_ids, topk_weights, scale_gate_up, scale_down)
    (tokens, hidden), (groups, wide, _), top_k = x.shape, gate_up.shape, topk_ids.shape[1]
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    rows, fp8 = tokens * top_k, scale_gate_up is not None
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()

    def make(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=x.device)

    def make_scales(columns):  # a column for each block, whose rows lie side by side
        pitch = math.ceil(rows / 4) * 4
        return make(columns // BLOCK, pitch, dtype=torch.float32)[:, :rows].T if fp8 else None

    counts = torch.zeros(groups, dtype=torch.int32, device=x.device)
    ranks, places, ends = make(rows), make(rows), make(groups)
    kernels.rank_kernel[(math.ceil(rows / 512),)](topk_ids, ranks, counts, rows, groups, BLOCK=512)
    permuted, scales = make(rows, hidden, dtype=gate_up.dtype), make_scales(hidden)
    block = min(1024, 1 << (hidden - 1).bit_length())
    kernels.permute_kernel[(tokens, math.ceil(hidden / block))](
        *(x, permuted, scales, topk_ids, ranks, counts, ends, places, groups, hidden, x.stride(0)),
        *(scales.stride(1) if fp8 else 0, top_k, max(16, 1 << (groups - 1).bit_length()), block),
    )
    of_gate_up, of_down = (scale.mT if fp8 else None for scale in (scale_gate_up, scale_down))
    inner_scales, product = make_scales(wide // 2), (permuted, gate_up.mT, ends, scales, of_gate_up)
    if _is_fused(fp8, rows / groups, config):
        inner = planner.run((*product, inner_scales), None, config, "swiglu")
    else:
        both, inner = (
            planner.run((*product, None), None, config, "rows"),
            make(rows, wide // 2, dtype=down.dtype),
        )
        block_i = min(1024, 1 << (wide // 2 - 1).bit_length())
        kernels.swiglu_kernel[(rows, math.ceil(wide / 2 / block_i))](
            both, inner, inner_scales, wide // 2, inner_scales.stride(1), block_i
        )
    result = planner.run((inner, down.mT, ends, inner_scales, of_down, None), None, config, "rows")
    kernels.combine_kernel[(tokens, math.ceil(hidden / block))](
        result, places, topk_weights, out, hidden, TOP_K=top_k, BLOCK_N=block
    )
    return out


grouped_operator, masked_operator, gradient_operator, moe_operator = operator.register(
    _rows, _masked, _gradient, _moe
)


def prepare(
    a: torch.Tensor,  # (M, K), or masked (groups, capacity, K)
    b: torch.Tensor,  # (groups, K, N)
    ends: torch.Tensor,  # (groups,)
    *,
    scale_a: torch.Tensor | None = None,  # (M, K / 128), or masked (groups, capacity, K / 128)
    scale_b: torch.Tensor | None = None,  # (groups, K / 128, N / 128)
    out: torch.Tensor | None = None,  # (M, N), or masked (groups, capacity, N)
    config: str | GroupedConfig | native.Config = "best",
) -> Launch:
    """Check the arguments of `grouped_gemm` or, for three dimensions, of the masked one; return a Launch."""
    tensors = a, b, ends, scale_a, scale_b, None
    if isinstance(a, torch.Tensor) and a.ndim == 3:
        return masked_planner.prepare(tensors, out, config, "masked")
    return planner.prepare(tensors, out, config, "rows")


def grouped_gemm(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (groups, K, N)
    offsets: torch.Tensor,  # (groups,)
    *,
    scale_a: torch.Tensor | None = None,  # (M, K / 128)
    scale_b: torch.Tensor | None = None,  # (groups, K / 128, N / 128)
    out: torch.Tensor | None = None,  # (M, N)
    config: str | GroupedConfig | native.Config = "best",
) -> torch.Tensor:  # (M, N)
    """Return C (M, N), whose rows offsets[g - 1] to offsets[g] are those rows of A times b[g], as torch's grouped_mm.

    a, b: bfloat16, or float8_e4m3fn with float32 scales of 1 x 128 and 128 x 128. The rows of a are sorted by group. b
    may be stored either way: weight.transpose(1, 2) of a weight (groups, N, K), which float8 needs, or (groups, K, N).
    A row takes a multiple of 16 bytes, and N is a multiple of 8.
    offsets: int32 in the GPU's memory, the row after the last of each group. A group may have no rows, but offsets must
    not decrease. No host waits for them, so none is checked: below 0 one counts as 0, beyond the rows as their number,
    and a row of two groups, where offsets decrease, gets the result of either. Nothing outside of C is written. Rows
    after the last group are not computed: there C keeps what its memory holds.
    out: bfloat16, contiguous.
    config: "best", a name of `configs`, a GroupedConfig, or on Hopper a configuration of `native`.

    Under torch.compile and where autograd records, this is torch.ops.tiles.grouped_gemm, which has a backward pass for
    bfloat16. Raises ValueError for bad arguments, and Unsupported for hardware that cannot run it.
    """
    if operators.is_traced(a, b, offsets, scale_a, scale_b):
        return operators.store(grouped_operator(a, b, offsets, scale_a, scale_b, config), out)
    return planner.run((a, b, offsets, scale_a, scale_b, None), out, config, "rows")


def masked_grouped_gemm(
    a: torch.Tensor,  # (groups, capacity, K)
    b: torch.Tensor,  # (groups, K, N)
    counts: torch.Tensor,  # (groups,)
    *,
    scale_a: torch.Tensor | None = None,  # (groups, capacity, K / 128)
    scale_b: torch.Tensor | None = None,  # (groups, K / 128, N / 128)
    out: torch.Tensor | None = None,  # (groups, capacity, N)
    config: str | GroupedConfig | native.Config = "best",
) -> torch.Tensor:  # (groups, capacity, N)
    """Return for each group its first counts[g] rows of a times b[g]; other rows keep what their memory holds.

    The shapes do not depend on the routing, as CUDA graphs want it. Other arguments as for `grouped_gemm`; there is no
    backward pass.
    """
    if operators.is_traced(a, b, counts, scale_a, scale_b):
        return operators.store(masked_operator(a, b, counts, scale_a, scale_b, config), out)
    return masked_planner.run((a, b, counts, scale_a, scale_b, None), out, config, "masked")


def _differentiable_moe(x, gate_up, down, topk_ids, topk_weights, config):
    """Return what `_moe` does in operations that autograd records."""
    if not torch.compiler.is_compiling():  # which cannot trace a refusal
        _check_moe(x, gate_up, down, topk_ids, topk_weights, in_memory=False)
    groups, (tokens, top_k) = gate_up.shape[0], topk_ids.shape
    is_here = (topk_ids >= 0) & (topk_ids < groups)
    group, order = torch.where(is_here, topk_ids, groups).flatten().sort(stable=True)
    offsets = torch.searchsorted(
        group, torch.arange(groups, device=x.device, dtype=group.dtype), right=True, out_int32=True
    )
    gate, up = grouped_gemm(x[order // top_k], gate_up.mT, offsets, config=config).chunk(2, -1)
    sorted_result = grouped_gemm(F.silu(gate) * up, down.mT, offsets, config=config)
    result = sorted_result[order.argsort()].view(tokens, top_k, x.shape[1])
    result = torch.where(is_here[..., None], result, 0).float()
    weights = torch.where(is_here, topk_weights.float(), 0)
    return (result * weights[..., None]).sum(1).to(x.dtype)


def moe(
    x: torch.Tensor,  # (tokens, hidden)
    gate_up: torch.Tensor,  # (experts, 2 I, hidden)
    down: torch.Tensor,  # (experts, hidden, I)
    topk_ids: torch.Tensor,  # (tokens, top_k)
    topk_weights: torch.Tensor,  # (tokens, top_k)
    *,
    scale_gate_up: torch.Tensor | None = None,  # (experts, 2 I / 128, hidden / 128)
    scale_down: torch.Tensor | None = None,  # (experts, hidden / 128, I / 128)
    config: str = "best",
) -> torch.Tensor:  # (tokens, hidden)
    """Return for each token the sum over its experts e of weight * (silu(x G_e^T) * (x U_e^T)) D_e^T.

    The weights lie as in Hugging Face's models: the first I rows of gate_up[e] are the gates G_e, the others U_e. They
    are bfloat16, or float8_e4m3fn with float32 scales of 128 x 128; then x and the values between both products are
    quantised with scales of 1 x 128. An id below 0 or beyond the experts is skipped. Nothing waits for the GPU.

    Under torch.compile this is torch.ops.tiles.moe. Where autograd records, in bfloat16, it is made of `grouped_gemm`
    and torch's operations.
    """
    tensors = x, gate_up, down, topk_ids, topk_weights, scale_gate_up, scale_down
    if torch.is_grad_enabled() and any(
        isinstance(each, torch.Tensor) and each.requires_grad for each in tensors
    ):
        if scale_gate_up is None:
            return _differentiable_moe(*tensors[:5], config)
    if operators.is_traced(*tensors):
        return moe_operator(*tensors, config)
    return _moe(*tensors, config)
