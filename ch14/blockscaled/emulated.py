"""Multiply block-scaled matrices on tensor cores without block scales: decode A and B to bf16, then multiply in bf16.

C = t (A B), where t is the product of NVFP4's tensor scales and 1 for other formats. Decoding is exact, because an
element of fp4 or fp8 times a scale has at most 6 significant bits, and bf16 has 8. (An MX scale only moves the
exponent. It can move an element out of bf16's range, 2^-133 to 2^128.) The scale t multiplies the sums in float32, as
two factors (`native_kernels.order_factors`), before the only rounding to C. So |C - exact| <= (u + 2^-23) |exact| +
|t| e. Here u is 2^-8 for bf16 and 2^-11 for fp16, and 2^-23 covers two products with t. The loss e of adding K products
in float32 is the same for any bf16 GEMM.
"""

from __future__ import annotations

import dataclasses

import torch
import triton

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import WgmmaConfig
from ch14 import mx_formats
from ch14.blockscaled.native_kernels import factors_kernel
from ch14.gemm import bind_config
from ch14.gemm.configs import GemmConfig, rank_configs
from ch14.gemm.configs import configs as gemm_configs
from ch14.gemm.configs import job as gemm_job
from ch14.gemm.configs import parse as gemm_parse
from ch14.gemm.kernels import gemm_persistent_kernel
from ch14.mx_formats import Packed, Transposed, number_formats
from tilelab.runtime import build, device, operands, triton_launch
from tilelab.runtime.operands import Launch
from tilelab.runtime.plans import Plan, Planner

FORMS = tuple(name for name in mx_formats.FUSED if number_formats.lookup(name).scale != "fp32")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # of C
INSTEAD = "dequantise with ch14.mx_formats and use torch.mm"


def configs() -> dict[str, WgmmaConfig | GemmConfig]:
    """Return the configurations of ch10.wgmma_gemm and the persistent ones of ch14.gemm by name."""
    gemms = {name: config for name, config in gemm_configs().items() if config.kernel == "persistent"}
    return wgmma_gemm.configs() | gemms


def _suits_wgmma(target: str, c_dtype: torch.dtype, scaled: bool) -> bool:
    """Return whether ch10's kernel can multiply: on sm_90a, to bfloat16, without a scale of a tensor."""
    return target == "sm_90a" and c_dtype == torch.bfloat16 and not scaled


def spec(
    a: Packed,  # (M, K)
    b: Transposed,  # (K, N)
) -> torch.Tensor:  # (M, N)
    """Return A @ B in float64, of the numbers that the codes and scales stand for."""
    # NVFP4's tensor scale is applied in float64: its product with an element would be rounded in float32.
    left, right = (
        number_formats.dequantise(_without_tensor_scale(each).unpack()).double() for each in (a, b.T)
    )
    return left @ right.T * _tensor_scale(a) * _tensor_scale(b.T)


def _without_tensor_scale(matrix: Packed) -> Packed:
    return matrix if matrix.pair is None else dataclasses.replace(matrix, pair=torch.ones_like(matrix.pair))


def _tensor_scale(matrix: Packed) -> torch.Tensor | float:
    return 1.0 if matrix.pair is None else matrix.pair[0].double()


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels."""
    return not isinstance(gemm_persistent_kernel, triton.JITFunction)


def require_form(name: str, form: str) -> None:
    """Raise ValueError for a format whose decoded elements bf16 does not hold exactly."""
    if form not in FORMS:
        raise ValueError(
            f"{name} is in {form}; the emulated path takes {', '.join(FORMS)}, whose elements times "
            "scales bf16 holds exactly."
        )


def packed_operands(a, b) -> tuple[Packed, Packed]:
    """Return A and B^T as Packed; raise ValueError for operands of other types or with other K."""
    if not isinstance(a, Packed) or not isinstance(b, Transposed):
        raise ValueError(
            "a must be a Packed of ch14.mx_formats and b the transpose (.T) of one; they are "
            f"{type(a).__name__} and {type(b).__name__}."
        )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a (M, K) and b (K, N) differ in K: a is {' x '.join(map(str, a.shape))} and b is "
            f"{' x '.join(map(str, b.shape))}."
        )
    for name, tensor in operand_memory(a, b.T).items():
        operands.require_tensor(name, tensor, "a block-scaled GEMM", on=a.values.device)
    return a, b.T


def operand_memory(a: Packed, weight: Packed) -> dict[str, torch.Tensor]:
    """Return the tensors of both operands by a name for error messages."""
    return {
        f"the {part} of {name}": tensor
        for name, matrix in (("a", a), ("b", weight))
        for part, tensor in matrix.tensors().items()
    }


def check_out(out, a: Packed, weight: Packed, op: str, **requirements) -> None:
    """Raise ValueError unless `out` is None or a tensor for A B that lies in memory of its own."""
    if out is not None:
        operands.require_tensor(
            "out",
            out,
            op,
            dtype=tuple(DTYPES),
            shape=(a.shape[0], weight.shape[0]),
            on=a.values.device,
            **requirements,
        )
        operands.require_disjoint({"out": out}, operand_memory(a, weight))


def _check_operands(a, b, out) -> tuple[Packed, Packed]:
    a, weight = packed_operands(a, b)
    for name, matrix in (("a", a), ("b", weight)):
        require_form(name, matrix.format.name)
    (m, k), n = a.shape, weight.shape[0]
    group = max(a.format.block[1], weight.format.block[1])
    if k % group:
        raise ValueError(f"K is {k}; it must be a multiple of {group}, the elements of a block.")
    if max(m, n, k) > 2**30:
        raise ValueError(
            f"M, N and K are {m:,}, {n:,} and {k:,}; each must be at most 2^30, because coordinates of a "
            "tile have 32 bits."
        )
    operands.require_gpu(a.values, "the emulated GEMM", "has_tma", INSTEAD, is_interpreted())
    check_out(out, a, weight, "the emulated GEMM")
    if out is not None:
        operands.require_rows("out", out, unit_bytes=1)
    return a, weight


def _is_describable(c: torch.Tensor) -> bool:
    """Return whether a copy engine can write C where it is: in rows of whole 16 bytes."""
    (m, n), unit = c.shape, 16 // c.element_size()
    return n % 8 == 0 and c.data_ptr() % 16 == 0 and (m == 1 or c.stride(0) % unit == 0)


def _prepare_gemm(a, weight, c, scale_a, scale_b, chosen: GemmConfig | None):
    """Return a function of (a, weight, scale_a, scale_b, c) and its configuration: ch14.gemm's kernel with any C."""
    (m, k), n = a.shape, weight.shape[0]
    here, reason = device.current(), ""
    # As in ch14.gemm, the interpreter stands in for sm_90a with eight SMs.
    target, sms = (here.target, here.sms) if here.has_tma else ("sm_90a", 8)
    candidates = [chosen] if chosen else rank_configs("course", m, n, k, "bf16", target, sms)
    if not c.numel():  # no descriptor describes a matrix without elements
        return lambda *tensors: None, candidates[0]
    for config in candidates:
        try:  # to compile, so that a refusal comes here and not at the first launch
            return bind_config(config, a, weight, c, scale_a, scale_b, (m, n, k), True, sms), config
        except torch.AcceleratorError:
            raise
        except Exception as error:  # too much shared memory for a C of four bytes, or with scales on sm_100a
            reason = f"{config.name}: {device.first_line(error)[:200]}"
    raise device.Unsupported(f"no configuration of ch14.gemm multiplies {m}×{n}×{k} on {target} ({reason}).")


def _prepare_multiply(left, right, c, factor_a, factor_b, config):
    """Return a function of (left, right, factor_a, factor_b, c) and its configuration."""
    suits_wgmma = _suits_wgmma(device.current().target, c.dtype, factor_a is not None or factor_b is not None)
    if not isinstance(config, WgmmaConfig):
        config = operands.choose_config(
            config, configs(), GemmConfig, lambda: "best" if suits_wgmma else None, gemm_parse
        )
    if isinstance(config, GemmConfig | None):
        return _prepare_gemm(left, right, c, factor_a, factor_b, config)
    if not suits_wgmma:
        raise device.Unsupported(
            "ch10.wgmma_gemm needs sm_90a, a bfloat16 C and no tensor scales: use ch14.gemm's."
        )
    plan = wgmma_gemm.planner.make(left, right.T, c, config)
    return lambda left, right, factor_a, factor_b, c: plan.launch(left, right, c), plan.config  # by addresses


def _prepare_factors(pair_a, pair_b):
    """Return a function of both pairs that returns the factors of a product with their scales, in float32."""
    if pair_a is None or pair_b is None:
        return lambda pair_a, pair_b: (pair_a, pair_b)
    names = "a_tensor_ptr", "b_tensor_ptr", "first_ptr", "second_ptr"
    arguments = dict(zip(names, (pair_a, pair_b, *torch.empty(2, 4, device=pair_a.device))))
    order = triton_launch.prepare(factors_kernel, (1,), arguments, dict(zip(names, range(4))), num_warps=1)

    def find_factors(pair_a, pair_b):
        factors = torch.empty(2, 4, dtype=torch.float32, device=pair_a.device)
        first, second = factors.unbind()  # each starts at a multiple of 16 bytes, like a pair
        order(pair_a, pair_b, first, second)
        return first, second

    return find_factors


def _plan(values_a, scales_a, pair_a, values_b, scales_b, pair_b, out, kind_a, kind_b, config) -> Plan:
    """Check the operands and compile the kernels. A kind is the (format, shape, tiled) of a Packed."""
    a, weight = (
        Packed(form, shape, values, scales, pair, tiled)
        for (form, shape, tiled), values, scales, pair in (
            (kind_a, values_a, scales_a, pair_a),
            (kind_b, values_b, scales_b, pair_b),
        )
    )
    _check_operands(a, weight.T, out)
    (m, k), n, where = a.shape, weight.shape[0], a.values.device
    out = torch.empty(m, n, dtype=torch.bfloat16, device=where) if out is None else out
    c_dtype, is_direct, interpreted = out.dtype, _is_describable(out), is_interpreted()
    wide = -(-n // 8) * 8  # rows of C take whole 16 bytes; the added columns are products with zeros

    def make_work_space():
        left, right = (torch.empty(rows, k, dtype=torch.bfloat16, device=where) for rows in (m, wide))
        if wide > n:
            right[n:].zero_()
        return left, right

    left, right = make_work_space()
    decode_a, decode_b = (
        mx_formats.dequantise_planner.make(
            matrix.values, matrix.scales, _without_tensor_scale(matrix).pair, to, *kind, "best"
        ).launch
        for matrix, to, kind in ((a, left, kind_a), (weight, right[:n], kind_b))
    )
    find_factors = _prepare_factors(a.pair, weight.pair)
    if interpreted:  # in float32: Triton's own interpreter multiplies and rounds bf16 wrongly
        left, right, is_direct, c_dtype = left.float(), right.float(), False, torch.float32
    c = out if is_direct else torch.empty(m, wide, dtype=c_dtype, device=where)
    multiply, config = _prepare_multiply(left, right, c, *find_factors(a.pair, weight.pair), config)

    def launch(values_a, scales_a, pair_a, values_b, scales_b, pair_b, out):
        left, right = make_work_space()
        one = None if pair_a is None and pair_b is None else torch.ones(2, dtype=torch.float32, device=where)
        decode_a(values_a, scales_a, one, left)
        decode_b(values_b, scales_b, one, right)
        if interpreted:
            left, right = left.float(), right.float()
        c = out if is_direct else torch.empty(m, wide, dtype=c_dtype, device=where)
        multiply(left, right, *find_factors(pair_a, pair_b), c)
        if not is_direct:
            out.copy_(c[:, :n])

    return Plan(launch, (m, n), torch.bfloat16, where, config)


planner = Planner(
    _plan, tuple(f"the {part} of {name}" for name in "ab" for part in ("values", "scales", "pair"))
)


def describe_operands(a: Packed, weight: Packed) -> tuple[tuple, tuple, tuple]:
    """Return the tensors and the kinds of two operands, as `planner` takes them."""
    return (
        (a.values, a.scales, a.pair, weight.values, weight.scales, weight.pair),
        (a.format.name, a.shape, a.tiled),
        (weight.format.name, weight.shape, weight.tiled),
    )


def prepare(
    a: Packed,  # (M, K)
    b: Transposed,  # (K, N)
    *,
    out: torch.Tensor | None = None,  # (M, N)
    config: str | WgmmaConfig | GemmConfig = "best",
) -> Launch:
    """Check the operands, compile, and return a Launch that computes C (M, N) = A (M, K) B (K, N).

    a is a Packed and b the transpose (.T) of one, each in any of FORMS, with scales in rows or tiles. M and N are
    anything, K is whole blocks. `out` is bfloat16 (the default), float16 or float32, rounded once from float32. A
    launch takes work space for both operands in bf16, and for C if its rows are no multiple of 16 bytes. `config` is a
    WgmmaConfig, a GemmConfig, "best" or a name of `configs`. Raises ValueError for operands that do not fit and
    tilelab.runtime.device.Unsupported for hardware that cannot run it.
    """
    tensors, *kinds = describe_operands(*packed_operands(a, b))
    return planner.prepare(tensors, out, *kinds, config)


def run(
    a: Packed,  # (M, K)
    b: Transposed,  # (K, N)
    *,
    out: torch.Tensor | None = None,  # (M, N)
    config: str | WgmmaConfig | GemmConfig = "best",
) -> torch.Tensor:  # (M, N)
    """Return C, by a plan of an earlier call if there is one. Arguments as for `prepare`."""
    tensors, *kinds = describe_operands(a, b.T)
    return planner.run(tensors, out, *kinds, config)


def job(
    config: WgmmaConfig | GemmConfig,
    target: str,
    mnk: tuple[int, int, int] = (4096, 4096, 4096),
    c_dtype: torch.dtype = torch.bfloat16,
    scaled: bool = False,
) -> build.Job:
    """Return how the GEMM is compiled, for tilelab.runtime.build; `scaled` where a tensor has a scale."""
    if isinstance(config, WgmmaConfig):
        return wgmma_gemm.job(config, target)
    made = gemm_job(config, target, sms=_sms(target), mnk=mnk, scaled=scaled)
    c_desc = made.signature["c_desc"].replace("bf16", DTYPES[c_dtype])
    return dataclasses.replace(made, signature=made.signature | {"c_desc": c_desc})


def _sms(target: str) -> int:
    return next((gpu.sms for gpu in device.KNOWN.values() if gpu.target == target and gpu.sms), 132)


def jobs(
    form: str, target: str, mnk: tuple[int, int, int], c_dtype: torch.dtype = torch.bfloat16
) -> list[build.Job]:
    """Return how decoding and GEMM are compiled for A and B in `form`, for a target with TMA."""
    (m, n, k), scaled = mnk, number_formats.lookup(form).scale == "e4m3"
    size = m, -(-n // 8) * 8, k
    config = (
        wgmma_gemm.find_best(*size)[0]
        if _suits_wgmma(target, c_dtype, scaled)
        else rank_configs("course", *size, "bf16", target, _sms(target))[0]
    )
    return [
        mx_formats.job("best", target, form, operation="dequantise"),
        job(config, target, size, c_dtype, scaled),
    ]
