"""Block-scaled number formats in plain torch: what every code is worth, and what a matrix becomes. The meaning that the
kernels of `ch14.mx_formats` are checked against, bit for bit.

Sources: OCP Microscaling Formats (MX) Specification v1.0 (elements: 5.3, E8M0: 5.4, concrete formats: 5.2, conversion:
6.3); OCP 8-bit Floating Point Specification (OFP8) v1.0; NVIDIA, "Introducing NVFP4", and Transformer Engine's
core_nvfp4.cuh; DeepSeek-V3 technical report, 3.3.2, and DeepGEMM's per_token_cast_to_fp8.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Element:
    """A small float: sign, exponent bits (`bias`), mantissa bits; exponent 0 is subnormal.

    `specials`: "" (every code is a number), "nan" (all ones is NaN, no infinity: e4m3fn), or "ieee" (the last exponent
    holds infinity and NaN: e5m2). `dtype` is ml_dtypes' name.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: str
    dtype: str

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return 2**(self.exponent_bits - 1) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number, and of the subnormals."""
        return 1 - self.bias

    @property
    def codes(self) -> int:
        """How many finite magnitudes there are; their codes are 0 to this, without the sign."""
        taken = {"": 0, "nan": 1, "ieee": 2**self.mantissa_bits}[self.specials]
        return 2**(self.bits - 1) - taken

    @property
    def max(self) -> float:
        """The largest finite magnitude."""
        return float(_magnitudes(self)[-1])

    @property
    def emax(self) -> int:
        """Exponent of the largest number: OCP's emax_elem."""
        return math.frexp(self.max)[1] - 1


E4M3 = Element("e4m3", 4, 3, "nan", "float8_e4m3fn")
E5M2 = Element("e5m2", 5, 2, "ieee", "float8_e5m2")
E3M2 = Element("e3m2", 3, 2, "", "float6_e3m2fn")
E2M3 = Element("e2m3", 2, 3, "", "float6_e2m3fn")
E2M1 = Element("e2m1", 2, 1, "", "float4_e2m1fn")
ELEMENTS = {element.name: element for element in (E4M3, E5M2, E3M2, E2M3, E2M1)}


@functools.cache
def _magnitudes(element: Element) -> torch.Tensor:
    """Finite magnitudes in order of their codes, float32."""
    code = torch.arange(element.codes)
    exponent, mantissa = code >> element.mantissa_bits, code & (2**element.mantissa_bits - 1)
    significand = mantissa + torch.where(exponent > 0, 2**element.mantissa_bits, 0)
    power = exponent.clamp(min=1) - element.bias - element.mantissa_bits
    return (significand.double() * 2.0**power.double()).float()


@functools.cache
def _table(element: Element) -> torch.Tensor:
    """The value of every code, float32."""
    half = torch.full((2**(element.bits - 1),), float("nan"))
    half[:element.codes] = _magnitudes(element)
    if element.specials == "ieee":
        half[element.codes] = float("inf")
    return torch.cat([half, -half])


def decode(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Values, float32, of integer codes of any shape; NaN and infinity where the format has them."""
    return _table(element).to(codes.device)[codes.long()]


def encode(values: torch.Tensor, element: Element, saturate: bool = True) -> torch.Tensor:
    """Codes, uint8, of float values: to nearest, to the even code of two. The sign of zero is kept.

    Beyond the largest number: that number (OCP MX 6.3 and PTX's cvt.satfinite), or without `saturate` infinity, or NaN
    where there is none; formats without either saturate always. ValueError for NaN where the format has no NaN.
    """
    finite = _magnitudes(element).to(values.device)
    numbers = torch.cat([finite, 2 * finite[-1:] - finite[-2:-1]])  # the next one would be infinity's code, or NaN's
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    magnitude = values.abs().float()
    below = torch.searchsorted(midpoints, magnitude)
    above = torch.searchsorted(midpoints, magnitude, right=True)
    code = torch.where(below % 2 == 0, below, above)  # they differ at a midpoint: one of them is even
    if saturate or not element.specials:
        code = code.clamp(max=element.codes - 1)
    nan = magnitude.isnan()
    if element.specials:
        code = torch.where(nan, {"nan": 0x7F, "ieee": 0x7E}[element.specials], code)
    elif bool(nan.any()):
        raise ValueError(f"{element.name} has no NaN, and a value is NaN: scale it away or use e4m3 or e5m2.")
    return (code + torch.signbit(values) * 2**(element.bits - 1)).to(torch.uint8)


@functools.cache
def _e8m0_table() -> torch.Tensor:
    return torch.tensor([2.0**(code - 127) for code in range(255)] + [float("nan")], dtype=torch.float32)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """2^(code - 127), float32: 0 is 2^-127 (there is no zero), 255 is NaN, there is no sign. OCP MX 5.4.1."""
    return _e8m0_table().to(codes.device)[codes.long()]


@dataclass(frozen=True)
class BlockFormat:
    """Elements in blocks of (rows, columns) that share a scale: "e8m0", "e4m3" (with a float32 scale for the tensor
    above it) or "fp32". `source` says who defines it."""

    name: str
    element: Element
    block: tuple[int, int]
    scale: str
    source: str

    @property
    def bits(self) -> float:
        """Bits an element takes, its share of the block's scale included."""
        return self.element.bits + (32 if self.scale == "fp32" else 8) / (self.block[0] * self.block[1])


_OCP, _DEEPSEEK = "OCP MX v1.0", "DeepSeek-V3"
FORMATS = {made.name: made for made in (
    BlockFormat("mxfp8_e4m3", E4M3, (1, 32), "e8m0", _OCP),
    BlockFormat("mxfp8_e5m2", E5M2, (1, 32), "e8m0", _OCP),
    BlockFormat("mxfp6_e3m2", E3M2, (1, 32), "e8m0", _OCP),
    BlockFormat("mxfp6_e2m3", E2M3, (1, 32), "e8m0", _OCP),
    BlockFormat("mxfp4", E2M1, (1, 32), "e8m0", _OCP),
    BlockFormat("nvfp4", E2M1, (1, 16), "e4m3", "NVIDIA"),
    BlockFormat("fp4_e8m0_16", E2M1, (1, 16), "e8m0", "a CUTLASS option: neither OCP's (32) nor NVIDIA's (E4M3)"),
    BlockFormat("fp8_1x128", E4M3, (1, 128), "fp32", f"{_DEEPSEEK}, activations"),
    BlockFormat("fp8_128x128", E4M3, (128, 128), "fp32", f"{_DEEPSEEK}, weights"))}
RULES = ("floor", "ceil")
DEEPGEMM_FLOOR = 1e-4  # the least amax of a block: one of zeros has a scale too
NVFP4_RANGE = 448.0 * 6.0  # of the largest scale and the largest element


@dataclass(frozen=True)
class Quantised:
    """A matrix (R, C) in a block format: `codes` uint8 (R, C), one a byte; `scales` one a block, uint8 codes of E8M0
    or E4M3, or float32; `tensor_scale` a float32 tensor of one value, or None."""

    format: BlockFormat
    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor | None = None


def lookup(name: str) -> BlockFormat:
    """The format of that name; ValueError names those that exist."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"the formats are {', '.join(FORMATS)}; here it is {name!r:.40}.")
    return FORMATS[name]


def check_rule(rule: str, form: BlockFormat) -> None:
    """ValueError unless `rule` chooses E8M0 scales of `form`."""
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"the rules for an E8M0 scale are {' and '.join(RULES)}; here it is {rule!r:.40}.")
    if rule == "ceil" and form.scale != "e8m0":
        raise ValueError(f"the rule ceil is for E8M0 scales; those of {form.name} are {form.scale}.")


def _blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """(R, C) -> (rows of blocks, columns of blocks, elements of a block); what is missing is zero."""
    rows, columns = (-(-size // side) for size, side in zip(x.shape, block))
    whole = F.pad(x, (0, columns * block[1] - x.shape[1], 0, rows * block[0] - x.shape[0]))
    return whole.view(rows, block[0], columns, block[1]).transpose(1, 2).flatten(2)


def _matrix(blocks: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    rows, columns = blocks.shape[:2]
    whole = blocks.view(rows, columns, *block).transpose(1, 2).reshape(rows * block[0], columns * block[1])
    return whole[:shape[0], :shape[1]].contiguous()


def e8m0_scale(amax: torch.Tensor, element: Element, rule: str = "floor") -> torch.Tensor:
    """E8M0 codes, uint8, for blocks whose largest magnitude is `amax`, float32; 255 where that is not finite.

    floor: 2^(floor(log2(amax)) - emax), OCP MX 6.3: an amax between element.max and 2^(emax + 1), times the scale,
    saturates. ceil: the smallest power of two under which it does not (cuBLAS's rule for its MX outputs; RCEIL in
    torchao). Exponents beyond E8M0's are clamped.
    """
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - 1 - element.emax
    if rule == "ceil":
        exponent = exponent + (mantissa > math.frexp(element.max)[0])
    exponent = torch.where(amax == 0, -127, exponent)
    return torch.where(amax.isfinite(), exponent.clamp(-127, 127) + 127, 255).to(torch.uint8)


def tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """NVFP4's scale of a tensor: the largest finite magnitude / (448 * 6), so that the largest block scale is 448.

    A float32 tensor of one value; 1 where all is zero or nothing is there, and at least 2^-126.
    """
    if not x.numel():
        return torch.ones(1, device=x.device)
    amax = torch.where(x.isfinite(), x, 0).abs().amax().float()
    scale = amax / torch.full_like(amax, NVFP4_RANGE)
    return torch.where(amax > 0, scale.clamp(min=2.0**-126), 1.0).reshape(1)


def quantise(x: torch.Tensor, form: BlockFormat, rule: str = "floor", scale: torch.Tensor | None = None) -> Quantised:
    """A float matrix (R, C) in `form`. `scale` is NVFP4's for the tensor (default: `tensor_scale(x)`).

    All arithmetic is in float32, a correctly rounded operation at a time, so that a kernel can repeat it. A block that
    holds NaN or infinity gets the scale NaN and zeros for codes (OCP MX leaves such blocks open): all of it decodes to
    NaN. A block at the edge may be narrower. ValueError for another rule than `RULES`.
    """
    check_rule(rule, form)
    blocks = _blocks(x.float(), form.block)
    amax = blocks.abs().amax(-1)
    dead, element = ~amax.isfinite(), form.element
    if form.scale == "e8m0":
        scales = e8m0_scale(amax, element, rule)
        multiplier = 1 / decode_e8m0(scales)  # exact
    elif form.scale == "fp32":
        amax = amax.clamp(min=DEEPGEMM_FLOOR)
        largest = torch.full_like(amax, element.max)  # divided by a number, a tensor may be multiplied by its inverse
        scales, multiplier = torch.where(dead, float("nan"), amax / largest), largest / amax
    else:
        scale = tensor_scale(x) if scale is None else scale
        reciprocal = 1 / scale
        sixth = torch.tensor(1 / 6, dtype=torch.float32, device=x.device)
        scales = encode(torch.where(dead, 0, amax * sixth * reciprocal), E4M3)
        multiplier = (reciprocal / decode(scales, E4M3)).clamp(max=torch.finfo(torch.float32).max)
        multiplier = torch.where(scales == 0, 0, multiplier)  # too small beside the tensor's largest: zeros
        scales = torch.where(dead, 0x7F, scales).to(torch.uint8)
    scaled = torch.where(dead[..., None], 0, blocks * multiplier[..., None])
    return Quantised(form, _matrix(encode(scaled, element), form.block, x.shape), scales, scale)


def scale_values(of: Quantised) -> torch.Tensor:
    """What the elements of each block are multiplied by, float32."""
    if of.format.scale == "fp32":
        return of.scales
    if of.format.scale == "e8m0":
        return decode_e8m0(of.scales)
    return decode(of.scales & 0x7F, E4M3) * of.tensor_scale  # the scale has no sign


def dequantise(of: Quantised) -> torch.Tensor:
    """The matrix (R, C) that the codes and scales stand for, float32."""
    blocks = _blocks(decode(of.codes, of.format.element), of.format.block)
    return _matrix(blocks * scale_values(of)[..., None], of.format.block, of.codes.shape)
