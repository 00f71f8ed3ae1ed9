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
import functools

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
from ch14.gemm.kernels import gemm_persistent_kernel
from ch14.mx_formats import Packed, Transposed, number_formats
from tilelab import build, device, operands
from tilelab.operands import Launch

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


def spec(a: Packed, b: Transposed) -> torch.Tensor:
    """Return C (M, N) = A (M, K) @ B (K, N) in float64, of the numbers that the codes and scales stand for."""
    # NVFP4's tensor scale is applied in float64: its product with an element would be rounded in float32.
    left, right = (number_formats.dequantise(_without_tensor_scale(each).unpack()).double() for each in (a, b.T))
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
        raise ValueError(f"{name} is in {form}; the emulated path takes {', '.join(FORMS)}, whose elements times "
                         "scales bf16 holds exactly.")


def packed_operands(a, b) -> tuple[Packed, Packed]:
    """Return A and B^T as Packed; raise ValueError for operands of other types or with other K."""
    if not isinstance(a, Packed) or not isinstance(b, Transposed):
        raise ValueError("a must be a Packed of ch14.mx_formats and b the transpose (.T) of one; they are "
                         f"{type(a).__name__} and {type(b).__name__}.")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a (M, K) and b (K, N) differ in K: a is {' x '.join(map(str, a.shape))} and b is "
                         f"{' x '.join(map(str, b.shape))}.")
    for name, tensor in operand_memory(a, b.T).items():
        operands.require_tensor(name, tensor, "a block-scaled GEMM", on=a.values.device)
    return a, b.T


def operand_memory(a: Packed, weight: Packed) -> dict[str, torch.Tensor]:
    """Return the tensors of both operands by a name for error messages."""
    return {f"the {part} of {name}": tensor for name, matrix in (("a", a), ("b", weight))
            for part, tensor in matrix.tensors().items()}


def check_out(out, a: Packed, weight: Packed, op: str, **requirements) -> None:
    """Raise ValueError unless `out` is None or a tensor for A B that lies in memory of its own."""
    if out is not None:
        operands.require_tensor("out", out, op, dtype=tuple(DTYPES), shape=(a.shape[0], weight.shape[0]),
                                on=a.values.device, **requirements)
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
        raise ValueError(f"M, N and K are {m:,}, {n:,} and {k:,}; each must be at most 2^30, because coordinates of a "
                         "tile have 32 bits.")
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
    """Return a launcher of c = scale_a scale_b a weight^T and its configuration: ch14.gemm's kernel with any C."""
    (m, k), n = a.shape, weight.shape[0]
    here, reason = device.current(), ""
    # As in ch14.gemm, the interpreter stands in for sm_90a with eight SMs.
    target, sms = (here.target, here.sms) if here.has_tma else ("sm_90a", 8)
    candidates = [chosen] if chosen else rank_configs("course", m, n, k, "bf16", target, sms)
    if not c.numel():  # no descriptor describes a matrix without elements
        return lambda: None, candidates[0]
    for config in candidates:
        try:  # to compile, so that a refusal comes here and not at the first launch
            launch = bind_config(config, a, weight, c, scale_a, scale_b, (m, n, k), True, sms)
            return functools.partial(launch, a, weight, scale_a, scale_b, c), config
        except torch.AcceleratorError:
            raise
        except Exception as error:  # too much shared memory for a C of four bytes, or with scales on sm_100a
            reason = f"{config.name}: {device.first_line(error)[:200]}"
    raise device.Unsupported(f"no configuration of ch14.gemm multiplies {m} x {n} x {k} on {target} ({reason}).")


def prepare(a: Packed, b: Transposed, *, out: torch.Tensor | None = None, config="best") -> Launch:
    """Check the operands, make work space, and return a Launch that computes C (M, N) = A (M, K) B (K, N).

    a is a Packed and b the transpose (.T) of one, each in any of FORMS, with scales in rows or tiles. M and N are
    anything, K is whole blocks. `out` is bfloat16 (the default), float16 or float32, rounded once from float32. The
    work space holds both operands in bf16, and C if its rows are no multiple of 16 bytes. Only one launch may be in
    flight. `config` is a WgmmaConfig, a GemmConfig, "best" or a name of `configs`. Raises ValueError for operands that
    do not fit and tilelab.device.Unsupported for hardware that cannot run it.
    """
    a, weight = _check_operands(a, b, out)
    (m, k), n, where = a.shape, weight.shape[0], a.values.device
    out = torch.empty(m, n, dtype=torch.bfloat16, device=where) if out is None else out
    wide = -(-n // 8) * 8  # rows of C take whole 16 bytes; the added columns are products with zeros
    left = torch.empty(m, k, dtype=torch.bfloat16, device=where)
    right = torch.zeros(wide, k, dtype=torch.bfloat16, device=where)
    steps = [mx_formats.prepare_dequantise(_without_tensor_scale(a), out=left),
             mx_formats.prepare_dequantise(_without_tensor_scale(weight), out=right[:n])]
    factor_a, factor_b = a.pair, weight.pair
    if a.pair is not None and weight.pair is not None:
        factor_a, factor_b = torch.empty(2, 4, device=where)  # each starts at a multiple of 16 bytes, like `pair`
        steps.append(lambda: factors_kernel[(1,)](a.pair, weight.pair, factor_a, factor_b, num_warps=1))
    c = out if _is_describable(out) else torch.empty(m, wide, dtype=out.dtype, device=where)
    if is_interpreted():  # in float32: Triton's own interpreter multiplies and rounds bf16 wrongly
        narrow, (left, right) = (left, right), (left.float(), right.float())
        steps += [lambda: left.copy_(narrow[0]), lambda: right.copy_(narrow[1])]
        c = torch.empty(m, wide, dtype=torch.float32, device=where)
    suits_wgmma = _suits_wgmma(device.current().target, c.dtype, a.pair is not None or weight.pair is not None)
    if not isinstance(config, WgmmaConfig):
        config = operands.choose_config(config, configs(), GemmConfig, lambda: "best" if suits_wgmma else None)
    if isinstance(config, GemmConfig | None):
        multiply, config = _prepare_gemm(left, right, c, factor_a, factor_b, config)
    elif suits_wgmma:
        multiply = wgmma_gemm.prepare(left, right.T, out=c, config=config)
        config = multiply.config
    else:
        raise device.Unsupported("ch10.wgmma_gemm needs sm_90a, a bfloat16 C and no tensor scales: use ch14.gemm's.")
    steps.append(multiply)
    if c is not out:
        steps.append(lambda: out.copy_(c[:, :n]))

    def run():
        for step in steps:
            step()

    return Launch(run, out, config)


def job(config: WgmmaConfig | GemmConfig, target: str, mnk: tuple[int, int, int] = (4096, 4096, 4096),
        c_dtype: torch.dtype = torch.bfloat16, scaled: bool = False) -> build.Job:
    """Return how the GEMM is compiled, for tilelab.build; `scaled` where a tensor has a scale."""
    if isinstance(config, WgmmaConfig):
        return wgmma_gemm.job(config, target)
    made = gemm_job(config, target, sms=_sms(target), mnk=mnk, scaled=scaled)
    c_desc = made.signature["c_desc"].replace("bf16", DTYPES[c_dtype])
    return dataclasses.replace(made, signature=made.signature | {"c_desc": c_desc})


def _sms(target: str) -> int:
    return next((gpu.sms for gpu in device.KNOWN.values() if gpu.target == target and gpu.sms), 132)


def jobs(form: str, target: str, mnk: tuple[int, int, int], c_dtype: torch.dtype = torch.bfloat16) -> list[build.Job]:
    """Return how decoding and GEMM are compiled for A and B in `form`, for a target with TMA."""
    (m, n, k), scaled = mnk, number_formats.lookup(form).scale == "e4m3"
    size = m, -(-n // 8) * 8, k
    config = wgmma_gemm.find_best(*size)[0] if _suits_wgmma(target, c_dtype, scaled) else rank_configs(
        "course", *size, "bf16", target, _sms(target))[0]
    return [mx_formats.job("best", target, form, operation="dequantise"), job(config, target, size, c_dtype, scaled)]
