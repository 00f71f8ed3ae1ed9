"""Block-scaled GEMM where the tensor cores know no block scales: decode A and B to bf16 in one pass, multiply in bf16.

C = t (A B^T), t the product of NVFP4's scales of the tensors, 1 for the other formats. Decoding is exact: an element of
fp4 or fp8 times a scale has at most 6 significant bits, bf16 has 8 (an MX scale moves the exponent alone, and can move
an element out of bf16's range, 2^-133 to 2^128). t is left out of it: it multiplies the sums in float32, before the one
rounding to C. So |C - exact| <= (u + 2^-23) |exact| + |t| e: u = 2^-8 for bf16 and 2^-11 for fp16, 2^-23 for the two
products with t, and e what any bf16 GEMM loses as it adds K products in float32.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import choose
from ch14 import mx_formats
from ch14.descriptors import check_dense, context, span
from ch14.gemm import gemm_persistent_kernel
from ch14.gemm.configs import job as gemm_job
from ch14.gemm.configs import ranked
from ch14.mx_formats import Packed, number_formats
from tilelab import build, device

FORMS = tuple(name for name in mx_formats.FUSED if number_formats.lookup(name).scale != "fp32")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # of C


def spec(a: Packed, b: Packed) -> torch.Tensor:
    """C (M, N) = A (M, K) @ B (N, K)^T in float64, of what the codes and scales stand for."""
    # Without NVFP4's scale of the tensor: in float32 its product with an element would be rounded.
    decoded = [number_formats.dequantise(_unscaled(each).unpacked()).double() for each in (a, b)]
    return decoded[0] @ decoded[1].T * _scale(a) * _scale(b)


def _unscaled(of: Packed) -> Packed:
    return of if of.pair is None else dataclasses.replace(of, pair=torch.ones_like(of.pair))


def _scale(of: Packed) -> torch.Tensor | float:
    return 1.0 if of.pair is None else of.pair[0].double()


def _interpreted() -> bool:
    return not isinstance(gemm_persistent_kernel, triton.JITFunction)


def check_form(name: str, form: str) -> None:
    """ValueError for a format whose decoded elements bf16 does not hold."""
    if form not in FORMS:
        raise ValueError(f"{name} is in {form}, and the emulated path takes {', '.join(FORMS)}: elements times scales "
                         "that bf16 holds exactly.")


def _check(a, b, out) -> None:
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, Packed):
            raise ValueError(f"{name} must be a Packed of ch14.mx_formats; it is a {type(given).__name__}.")
        check_form(name, given.format.name)
        if given.values.is_meta:
            raise ValueError(f"{name} must be in memory; it is on the meta device.")
    (m, k), (n, inner), where = a.shape, b.shape, a.values.device
    group = max(a.format.block[1], b.format.block[1])
    if k != inner or k % group:
        raise ValueError(f"a (M, K) and b (N, K) share a K that is a multiple of {group}, the elements of a block; a "
                         f"is {m} x {k} and b is {n} x {inner}.")
    if max(m, n, k) > 2**30:
        raise ValueError(f"M, N and K are at most 2^30: coordinates of a tile are 32 bits; here they are {m:,}, {n:,} "
                         f"and {k:,}.")
    if where != b.values.device:
        raise ValueError(f"a and b must be on one device; they are on {where} and {b.values.device}.")
    if not _interpreted():
        if where.type != "cuda":
            raise device.Unsupported(f"the emulated GEMM needs its matrices on a GPU; they are on {where}: move them "
                                     "there, or set TRITON_INTERPRET=1 before the first import to run it without one.")
        device.require("has_tma", "the emulated GEMM", "dequantise with ch14.mx_formats and use torch.mm")
    if out is None:
        return
    check_dense("out", out, "the emulated GEMM")
    if tuple(out.shape) != (m, n) or out.dtype not in DTYPES or out.device != where:
        raise ValueError(f"out must be {m} x {n} of bfloat16, float16 or float32 on {where}; it is {tuple(out.shape)} "
                         f"of {str(out.dtype)[6:]} on {out.device}.")
    if (n > 1 and out.stride(1) != 1) or (m > 1 and out.stride(0) < n):
        raise ValueError(f"the rows of out must be contiguous and lie apart; its strides are {out.stride()}.")
    tensors = {f"{name}'s {what}": getattr(given, what) for name, given in (("a", a), ("b", b))
               for what in ("values", "scales", "pair")}
    for name, given in tensors.items():
        if given is not None and span(out)[0] < span(given)[1] and span(given)[0] < span(out)[1]:
            raise ValueError(f"out lies in the memory that {name} span: give it memory of its own.")


def _stored(c: torch.Tensor) -> bool:
    """Whether a copy engine can write C where it is: rows of whole 16 bytes."""
    (m, n), unit = c.shape, 16 // c.element_size()
    return n % 8 == 0 and c.data_ptr() % 16 == 0 and (m == 1 or c.stride(0) % unit == 0)


def _row_stride(matrix: torch.Tensor) -> int:
    return matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]  # of a single row torch reports any


def _scaled_gemm(a, b, c, scale_a, scale_b):
    """(launcher, its name) of c = scale_a scale_b a b^T: `ch14.gemm`'s kernel, whose epilogue has scales and any C."""
    (m, k), n = a.shape, b.shape[0]
    here = device.current()
    # As in ch14.gemm: the interpreter stands in for sm_90a with eight SMs.
    target, sms = (here.target, here.sms) if here.has_tma else ("sm_90a", 8)
    refused = ""
    for config in ranked("course", m, n, k, "bf16", target, sms):
        constants = config.constants(sms, True)
        constants["EARLY_LAUNCH"] &= not _interpreted()
        options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
        options |= {"launch_pdl": True} if constants["EARLY_LAUNCH"] else {}
        descriptors = [block and TensorDescriptor(matrix, list(matrix.shape), [_row_stride(matrix), 1], block)
                       for matrix, block in zip((a, b, b, c), config.blocks(True))]
        given = (*descriptors, scale_a, scale_b, m, n, k)
        grid = (min(constants["PROGRAMS"], config.tiles(m, n)),)

        def launch(given=given, grid=grid, options=constants | options):
            if not _interpreted():
                context()
            gemm_persistent_kernel[grid](*given, **options)

        try:
            if not _interpreted():  # a refusal comes here, not at the first launch
                context()
                gemm_persistent_kernel.warmup(*given, grid=grid, **constants, **options)._init_handles()
            return launch, f"ch14.gemm {config.name}"
        except torch.AcceleratorError:
            raise
        except Exception as error:  # too much shared memory for a C of four bytes, or with scales on sm_100a
            refused = f"{config.name}: {device.first_line(error)[:200]}"
    raise device.Unsupported(f"no configuration of ch14.gemm multiplies {m} x {n} x {k} on {target} ({refused}).")


def prepare(a: Packed, b: Packed, *, out: torch.Tensor | None = None):
    """A function that computes C (M, N) = A (M, K) B (N, K)^T and returns it; checks and work space are made here.

    a and b are in any of FORMS, one each, scales by rows or in tiles; M and N are anything, K is whole blocks. `out` is
    bfloat16 (or what is given: float16, float32), rounded once from float32. Work space: both operands in bf16, and C
    where its rows are not a multiple of 16 bytes. The function's `out` is C, its `kernel` names the GEMM: ch10's WGMMA
    kernel on sm_90a, unless C is not bfloat16 or a tensor has a scale; else ch14's. One launch in flight at a time.
    Raises ValueError for what it cannot take and tilelab.device.Unsupported for hardware that cannot run it.
    """
    _check(a, b, out)
    (m, k), n, where = a.shape, b.shape[0], a.values.device
    out = torch.empty(m, n, dtype=torch.bfloat16, device=where) if out is None else out
    wide = -(-n // 8) * 8  # rows of C in 16 bytes: columns that nobody asked for are products with zeros
    left = torch.empty(m, k, dtype=torch.bfloat16, device=where)
    right = torch.zeros(wide, k, dtype=torch.bfloat16, device=where)
    steps = [mx_formats.prepare_dequantise(_unscaled(a), left), mx_formats.prepare_dequantise(_unscaled(b), right[:n])]
    c = out if _stored(out) else torch.empty(m, wide, dtype=out.dtype, device=where)
    scaled = a.pair is not None or b.pair is not None
    if _interpreted():  # its products of bf16 are wrong, and it rounds to bf16 otherwise
        narrow, (left, right) = (left, right), (left.float(), right.float())
        steps += [lambda: left.copy_(narrow[0]), lambda: right.copy_(narrow[1])]
        c = torch.empty(m, wide, dtype=torch.float32, device=where)
    if device.current().has_wgmma and c.dtype == torch.bfloat16 and not scaled:
        multiply = wgmma_gemm.prepare(left, right, c)
        kernel = f"ch10.wgmma_gemm {multiply.config}"
    else:
        multiply, kernel = _scaled_gemm(left, right, c, a.pair, b.pair)
    steps.append(multiply)
    if c is not out:
        steps.append(lambda: out.copy_(c[:, :n]))

    def launch():
        for step in steps:
            step()
        return out

    launch.out, launch.kernel = out, kernel
    return launch


def jobs(form: str, target: str, mnk: tuple[int, int, int], c_dtype: torch.dtype = torch.bfloat16) -> list[build.Job]:
    """The decoding and the GEMM as they are launched for A and B in `form`, for tilelab.build. ValueError for another
    format, tilelab.device.Unsupported for a target without TMA."""
    check_form("a", form)
    if not device.target_limits(target).has_tma:
        raise device.Unsupported(f"the emulated GEMM needs TMA (sm_90a or newer); the target is {target}: dequantise "
                                 "with ch14.mx_formats and use torch.mm.")
    if c_dtype not in DTYPES:
        raise ValueError(f"C is bfloat16, float16 or float32; here it is {c_dtype!r:.40}.")
    scaled, (m, n, k) = number_formats.lookup(form).scale == "e4m3", mnk
    wide = -(-n // 8) * 8
    sms = next((gpu.sms for gpu in device.KNOWN.values() if gpu.target == target and gpu.sms), 132)
    decode = mx_formats.job(form, mx_formats.MxConfig(2048), target, back=True)
    if target == "sm_90a" and c_dtype == torch.bfloat16 and not scaled:
        return [decode, wgmma_gemm.job(choose(m, wide, k, sms))]
    config = ranked("course", m, wide, k, "bf16", target, sms)[0]
    job = gemm_job(config, target, sms=sms, mnk=(m, wide, k), scaled=scaled)
    c_desc = job.signature["c_desc"].replace("bf16", DTYPES[c_dtype])
    return [decode, dataclasses.replace(job, signature=job.signature | {"c_desc": c_desc})]
