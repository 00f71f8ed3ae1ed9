"""Block-scaled number formats in plain torch: the value of every code, and the quantising of a matrix.

These functions define the formats. The kernels of `ch14.mx_formats` agree with them bit for bit.

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
    """A small float: a sign, exponent bits and mantissa bits. Exponent 0 is subnormal.

    specials: "" (every code is a number), "nan" (all ones is NaN, and there is no infinity: e4m3fn), or "ieee" (the
    last exponent holds infinity and NaN: e5m2). dtype: the name in ml_dtypes.
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
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal number and of the subnormals."""
        return 1 - self.bias

    @property
    def codes(self) -> int:
        """The number of finite magnitudes. Their codes, without the sign, count up from 0."""
        not_numbers = {"": 0, "nan": 1, "ieee": 2**self.mantissa_bits}[self.specials]
        return 2 ** (self.bits - 1) - not_numbers

    @property
    def max(self) -> float:
        """The largest finite magnitude."""
        return float(magnitudes(self)[-1])

    @property
    def emax(self) -> int:
        """The exponent of the largest number, which OCP calls emax_elem."""
        return math.frexp(self.max)[1] - 1


E4M3 = Element("e4m3", 4, 3, "nan", "float8_e4m3fn")
E5M2 = Element("e5m2", 5, 2, "ieee", "float8_e5m2")
E3M2 = Element("e3m2", 3, 2, "", "float6_e3m2fn")
E2M3 = Element("e2m3", 2, 3, "", "float6_e2m3fn")
E2M1 = Element("e2m1", 2, 1, "", "float4_e2m1fn")
ELEMENTS = {element.name: element for element in (E4M3, E5M2, E3M2, E2M3, E2M1)}


@functools.cache
def magnitudes(element: Element) -> torch.Tensor:
    """Return the finite magnitudes, float32, in the order of their codes."""
    code = torch.arange(element.codes)
    exponent, mantissa = code >> element.mantissa_bits, code & (2**element.mantissa_bits - 1)
    significand = mantissa + torch.where(exponent > 0, 2**element.mantissa_bits, 0)
    power = exponent.clamp(min=1) - element.bias - element.mantissa_bits
    return (significand.double() * 2.0 ** power.double()).float()


@functools.cache
def _value_table(element: Element) -> torch.Tensor:
    half = torch.full((2 ** (element.bits - 1),), float("nan"))
    half[: element.codes] = magnitudes(element)
    if element.specials == "ieee":
        half[element.codes] = float("inf")
    return torch.cat([half, -half])


def decode(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the values, float32, of integer codes of any shape. NaN and infinity occur where the format has them."""
    return _value_table(element).to(codes.device)[codes.long()]


def encode(values: torch.Tensor, element: Element, saturate: bool = True) -> torch.Tensor:
    """Return the codes, uint8, of float values, rounded to nearest even. The sign of zero is kept.

    A value beyond the largest number becomes that number (OCP MX 6.3 and PTX's cvt.satfinite). Without `saturate` it
    becomes infinity, or NaN in a format without infinity; a format without either always saturates. Raise ValueError
    for NaN if the format has no NaN.
    """
    finite = magnitudes(element).to(values.device)
    numbers = torch.cat([finite, 2 * finite[-1:] - finite[-2:-1]])  # the next code is infinity or NaN
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    magnitude = values.abs().float()
    code = torch.searchsorted(midpoints, magnitude, out_int32=True)
    # At a midpoint the search finds the code below; take the even one.
    code += (code & 1) * (midpoints[code.clamp(max=len(midpoints) - 1)] == magnitude)
    if saturate or not element.specials:
        code = code.clamp(max=element.codes - 1)
    nan = magnitude.isnan()
    if element.specials:
        code = torch.where(nan, {"nan": 0x7F, "ieee": 0x7E}[element.specials], code)
    elif bool(nan.any()):
        raise ValueError(f"{element.name} has no NaN, and a value is NaN; use e4m3 or e5m2.")
    return code.to(torch.uint8) | torch.signbit(values).to(torch.uint8) << element.bits - 1


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return 2^(code - 127), float32. Code 255 is NaN; there is no zero and no sign. OCP MX 5.4.1."""
    bits = torch.where(codes == 0, 0x00400000, codes.int() << 23)  # 2^-127 is a subnormal of float32
    return torch.where(codes == 255, float("nan"), bits.view(torch.float32))


@dataclass(frozen=True)
class BlockFormat:
    """Elements in blocks of (rows, columns) that share a scale.

    scale: "e8m0", "e4m3" (the tensor then has a float32 scale of its own as well) or "fp32". source: who defines it.
    """

    name: str
    element: Element
    block: tuple[int, int]
    scale: str
    source: str

    @property
    def bits(self) -> float:
        """Bits per element, with its share of the block's scale."""
        return self.element.bits + (32 if self.scale == "fp32" else 8) / (self.block[0] * self.block[1])


_OCP, _DEEPSEEK = "OCP MX v1.0", "DeepSeek-V3"
FORMATS = {
    format.name: format
    for format in (
        BlockFormat("mxfp8_e4m3", E4M3, (1, 32), "e8m0", _OCP),
        BlockFormat("mxfp8_e5m2", E5M2, (1, 32), "e8m0", _OCP),
        BlockFormat("mxfp6_e3m2", E3M2, (1, 32), "e8m0", _OCP),
        BlockFormat("mxfp6_e2m3", E2M3, (1, 32), "e8m0", _OCP),
        BlockFormat("mxfp4", E2M1, (1, 32), "e8m0", _OCP),
        BlockFormat("nvfp4", E2M1, (1, 16), "e4m3", "NVIDIA"),
        BlockFormat(
            "fp4_e8m0_16", E2M1, (1, 16), "e8m0", "a CUTLASS option: neither OCP's (32) nor NVIDIA's (E4M3)"
        ),
        BlockFormat("fp8_1x128", E4M3, (1, 128), "fp32", f"{_DEEPSEEK}, activations"),
        BlockFormat("fp8_128x128", E4M3, (128, 128), "fp32", f"{_DEEPSEEK}, weights"),
    )
}
RULES = ("floor", "ceil")
DEEPGEMM_MIN_AMAX = 1e-4  # the smallest amax of a block, so that a block of zeros has a scale, too
NVFP4_RANGE = 448.0 * 6.0  # the largest scale times the largest element


@dataclass(frozen=True)
class Quantised:
    """A matrix (R, C) in a block format.

    codes: uint8 (R, C), one per byte. scales: one per block, uint8 codes of E8M0 or E4M3, or float32. tensor_scale: a
    float32 tensor of one value for NVFP4, else None.
    """

    format: BlockFormat
    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor | None = None


def lookup(name: str) -> BlockFormat:
    """Return a format by its name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"unknown format {name!r:.40}; choose one of {', '.join(FORMATS)}.")
    return FORMATS[name]


def check_rule(rule: str, format: BlockFormat) -> None:
    """Raise ValueError unless scales of `format` can be chosen by `rule`."""
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r:.40}; choose {' or '.join(RULES)}.")
    if rule == "ceil" and format.scale != "e8m0":
        raise ValueError(f"rule ceil is for E8M0 scales; the scales of {format.name} are {format.scale}.")


def split_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return x (R, C) as (rows of blocks, columns of blocks, elements per block), padded with zeros at the edges."""
    rows, columns = (-(-size // side) for size, side in zip(x.shape, block))
    padded = F.pad(x, (0, columns * block[1] - x.shape[1], 0, rows * block[0] - x.shape[0]))
    return padded.view(rows, block[0], columns, block[1]).transpose(1, 2).flatten(2)


def join_blocks(blocks: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Return the matrix of `shape` that `split_blocks` made these blocks of."""
    rows, columns = blocks.shape[:2]
    padded = blocks.view(rows, columns, *block).transpose(1, 2).reshape(rows * block[0], columns * block[1])
    return padded[: shape[0], : shape[1]].contiguous()


def e8m0_scale(amax: torch.Tensor, element: Element, rule: str = "floor") -> torch.Tensor:
    """Return E8M0 codes, uint8, for blocks whose largest magnitude is `amax`, float32; 255 if that is not finite.

    floor: 2^(floor(log2(amax)) - emax), OCP MX 6.3. An amax between scale * element.max and scale * 2^(emax + 1)
    saturates. ceil: the smallest power of two with which amax does not saturate (the rule of cuBLAS for its MX outputs;
    torchao calls it RCEIL). Exponents beyond the range of E8M0 are clamped.
    """
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - 1 - element.emax
    if rule == "ceil":
        exponent = exponent + (mantissa > math.frexp(element.max)[0])
    exponent = torch.where(amax == 0, -127, exponent)
    return torch.where(amax.isfinite(), exponent.clamp(-127, 127) + 127, 255).to(torch.uint8)


def tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """Return NVFP4's scale of a tensor, float32 of one value: its largest finite magnitude / (448 * 6).

    The largest block scale is then 448. The result is at least 2^-126, and 1 for a tensor of zeros or of no elements.
    """
    if not x.numel():
        return torch.ones(1, device=x.device)
    amax = torch.where(x.isfinite(), x, 0).abs().amax().float()
    scale = amax / torch.full_like(amax, NVFP4_RANGE)
    return torch.where(amax > 0, scale.clamp(min=2.0**-126), 1.0).reshape(1)


def quantise(
    x: torch.Tensor, format: BlockFormat | str, rule: str = "floor", scale: torch.Tensor | None = None
) -> Quantised:
    """Quantise a float matrix (R, C) to a format or its name. `scale` is NVFP4's scale of the tensor (default:
    `tensor_scale(x)`).

    All arithmetic is in float32, one correctly rounded operation at a time, so that a kernel can repeat it. A block
    that holds NaN or infinity gets the scale NaN and the codes zero (OCP MX does not define such blocks), so its
    elements decode to NaN. A block at the edge may be narrower.
    """
    format = format if isinstance(format, BlockFormat) else lookup(format)
    check_rule(rule, format)
    blocks = split_blocks(x.float(), format.block)
    amax = blocks.abs().amax(-1)
    not_finite, element = ~amax.isfinite(), format.element
    if format.scale == "e8m0":
        scales = e8m0_scale(amax, element, rule)
        multiplier = 1 / decode_e8m0(scales)  # exact
    elif format.scale == "fp32":
        amax = amax.clamp(min=DEEPGEMM_MIN_AMAX)
        # torch may multiply by the reciprocal of a Python number.
        largest = torch.full_like(amax, element.max)
        scales, multiplier = torch.where(not_finite, float("nan"), amax / largest), largest / amax
    else:
        scale = tensor_scale(x) if scale is None else scale
        reciprocal = 1 / scale
        sixth = torch.tensor(1 / 6, dtype=torch.float32, device=x.device)
        scales = encode(torch.where(not_finite, 0, amax * sixth * reciprocal), E4M3)
        multiplier = (reciprocal / decode(scales, E4M3)).clamp(max=torch.finfo(torch.float32).max)
        # A scale is zero where the block is too small beside amax of the tensor.
        multiplier = torch.where(scales == 0, 0, multiplier)
        scales = torch.where(not_finite, 0x7F, scales).to(torch.uint8)
    scaled = torch.where(not_finite[..., None], 0, blocks * multiplier[..., None])
    return Quantised(format, join_blocks(encode(scaled, element), format.block, x.shape), scales, scale)


def scale_values(quantised: Quantised) -> torch.Tensor:
    """Return the numbers, float32, by which the elements of each block are multiplied."""
    if quantised.format.scale == "fp32":
        return quantised.scales
    if quantised.format.scale == "e8m0":
        return decode_e8m0(quantised.scales)
    return decode(quantised.scales & 0x7F, E4M3) * quantised.tensor_scale  # the scale has no sign


def dequantise(quantised: Quantised) -> torch.Tensor:
    """Return the matrix (R, C), float32, that the codes and scales stand for."""
    block = quantised.format.block
    blocks = split_blocks(decode(quantised.codes, quantised.format.element), block)
    return join_blocks(blocks * scale_values(quantised)[..., None], block, quantised.codes.shape)
