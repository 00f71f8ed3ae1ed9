"""Block-scaled formats: bf16 to MXFP8, MXFP4, NVFP4 and DeepSeek's fp8 in one pass, and back. Triton, any GPU or none.

The meaning is in `mx_spec`, the bytes in `mx_packing`, the kernels in `mx_kernels` and `mx_back_kernels`; here they are
launched. MXFP6 and 128 x 128 blocks exist in the spec only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton

from ch14.descriptors import check_dense, span
from ch14.mx_formats import dequantise_kernels, number_formats, packing, quantise_kernels
from ch14.mx_formats.number_formats import BlockFormat, check_rule, lookup
from tilelab import build, device

FUSED = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp4_e8m0_16", "fp8_1x128")
POINTED = {torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.float32: "fp32"}  # as Triton names them
spec = number_formats.quantise


@dataclass(frozen=True)
class MxConfig:
    """`elements` a program takes, a power of two; `lanes` that share a group of fp4 (0: eight elements a lane);
    `convert`: fp8 by the hardware's conversion, else in arithmetic."""

    elements: int
    num_warps: int = 4
    lanes: int = 1
    convert: bool = True

    def __post_init__(self):
        for name, least, most in (("elements", 128, 65536), ("num_warps", 1, 32)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most or value & (value - 1):
                raise ValueError(f"{name} is a power of two from {least} to {most:,}; here it is {value!r:.40}.")
        if type(self.lanes) is not int or self.lanes not in (0, 1, 2, 4):
            raise ValueError(f"lanes that share a group are 1, 2 or 4, or 0; here it is {self.lanes!r:.40}.")
        if type(self.convert) is not bool:
            raise ValueError(f"convert is True or False; here it is {self.convert!r:.40}.")

    def __str__(self):
        return (f"{self.elements},{self.num_warps}" + (f",{self.lanes or 'spread'}" if self.lanes != 1 else "")
                + ("" if self.convert else ",arithmetic"))


def configs(form: str | BlockFormat) -> dict[str, MxConfig]:
    """Variants by name, the best first. ValueError for a format without kernels."""
    form = fused(form)
    if form.element.bits == 8:
        return {"cvt": MxConfig(4096), "arithmetic": MxConfig(4096, convert=False)}
    # A group a lane needs no shuffle, and its scale is computed once: as many groups as threads.
    return {"group_a_lane": MxConfig(128 * form.block[1]), "spread": MxConfig(4096, lanes=0)}


@dataclass(frozen=True)
class Packed:
    """A matrix of `shape` as it lies in memory: `values` uint8 (R, ceil(C * bits / 8)); `scales` a block each, (R, G)
    uint8, or float32 for fp8_1x128, or `tiled` in one dimension (mx_packing.tile_scales); `pair` float32: NVFP4's
    tensor scale and its reciprocal. All contiguous, on one device. `format` may be given by name. ValueError for a
    format without kernels, and for tensors that are not this."""

    format: BlockFormat
    shape: tuple[int, int]
    values: torch.Tensor
    scales: torch.Tensor
    pair: torch.Tensor | None = None
    tiled: bool = False

    def __post_init__(self):
        object.__setattr__(self, "format", fused(self.format))
        if self.format.scale != "e4m3" and self.pair is not None:
            raise ValueError(f"a scale of the tensor is NVFP4's; {self.format.name} has none.")
        for name, (shape, dtype) in _held(self.format, self.shape, self.tiled).items():
            given = getattr(self, name)
            check_dense(name, given, "a format")
            if (tuple(given.shape), given.dtype, given.device) != (shape, dtype, self.values.device):
                raise ValueError(f"{name} of {self.shape[0]} x {self.shape[1]} in {self.format.name} are {shape} of "
                                 f"{str(dtype)[6:]} on the device of values, {self.values.device}; here are "
                                 f"{tuple(given.shape)} of {str(given.dtype)[6:]} on {given.device}.")
            if not given.is_contiguous():
                raise ValueError(f"{name} must be contiguous; the strides are {given.stride()}.")

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def T(self) -> Transposed:
        """The transposed matrix (C, R), in the same memory: block-scaled GEMMs take it as b (K, N)."""
        return Transposed(self)

    def unpacked(self) -> number_formats.Quantised:
        """The same, a code a byte."""
        rows, columns = self.shape
        scales = self.scales
        if self.tiled:
            scales = packing.untile_scales(scales, rows, -(-columns // self.format.block[1]))
        return number_formats.Quantised(self.format, packing.unpack(self.values, self.format.element.bits, columns), scales,
                                 None if self.pair is None else self.pair[:1])


@dataclass(frozen=True)
class Transposed:
    """Present a Packed (R, C) as its transpose (C, R), in the same memory; `T` is the Packed."""

    T: Packed

    @property
    def shape(self) -> tuple[int, int]:
        return self.T.shape[::-1]


def fused(form: str | BlockFormat) -> BlockFormat:
    """The format; ValueError for one that has no kernel, and for one that only has the name of another."""
    form = form if isinstance(form, BlockFormat) else lookup(form)
    if form.name not in FUSED:
        raise ValueError(f"{form.name} has no kernel, only its spec (ch14.mx_formats.number_formats); those with one are "
                         f"{', '.join(FUSED)}.")
    other = [part for part in ("element", "block", "scale") if getattr(form, part) != getattr(lookup(form.name), part)]
    if other:
        raise ValueError(f"{form.name} with another {' and '.join(other)} has no kernel, only its spec (ch14.mx_formats.number_formats).")
    return form


def _held(form: BlockFormat, shape: tuple[int, int], tiled: bool) -> dict[str, tuple[tuple, torch.dtype]]:
    """What Packed holds for a matrix of `shape`: shape and dtype by name."""
    if not isinstance(shape, tuple) or len(shape) != 2 or any(type(side) is not int or side < 1 for side in shape):
        raise ValueError(f"a shape is two whole numbers (R, C), each at least 1; here it is {shape!r:.60}.")
    if form.scale == "fp32" and tiled:
        raise ValueError(f"tiles of 128 x 4 are for scales of one byte; those of {form.name} are float32.")
    (rows, columns), groups = shape, -(-shape[1] // form.block[1])
    scales = (packing.tiled_size(rows, groups),) if tiled else (rows, groups)
    held = {"values": ((rows, -(-columns * form.element.bits // 8)), torch.uint8),
            "scales": (scales, torch.float32 if form.scale == "fp32" else torch.uint8)}
    return held | ({"pair": ((2,), torch.float32)} if form.scale == "e4m3" else {})


def empty(shape: tuple[int, int], form: str | BlockFormat, where: str | torch.device = "cpu", tiled: bool = False,
          tensor_scale: float | torch.Tensor | None = None) -> Packed:
    """Room for a matrix of `shape`. Padding of tiled scales is zero. `tensor_scale` of NVFP4 is positive and finite.

    ValueError for a format without kernels and for a scale that the format does not have.
    """
    form = fused(form)
    held = {name: torch.empty(size, dtype=dtype, device=where)
            for name, (size, dtype) in _held(form, shape, tiled).items()}
    if tiled:
        held["scales"].zero_()
    if tensor_scale is not None:
        held["pair"] = _pair(tensor_scale, where)
    return Packed(form, shape, **held, tiled=tiled)


def _pair(scale, where: str | torch.device) -> torch.Tensor:
    """NVFP4's scale of the tensor and its reciprocal."""
    given = scale.item() if isinstance(scale, torch.Tensor) and scale.numel() == 1 else scale
    if not isinstance(given, (int, float)) or not 2.0**-126 <= given <= torch.finfo(torch.float32).max:
        raise ValueError("a scale of the tensor is one number, 2^-126 at least and finite in float32; here it is "
                         f"{given!r:.60}.")
    one = torch.tensor([given], dtype=torch.float32, device=where)
    return torch.cat([one, 1 / one])


def _check_matrix(x) -> None:
    check_dense("x", x, "quantise")
    if x.dtype != torch.bfloat16 or x.ndim != 2 or not x.numel():
        raise ValueError(f"x must be a bfloat16 matrix, not empty; it is {tuple(x.shape)} of {str(x.dtype)[6:]}.")
    if x.stride(1) != 1 or (x.stride(0) < x.shape[1] and x.shape[0] > 1):
        raise ValueError(f"the rows of x must be contiguous; its strides are {x.stride()}.")


def _check_packed(name: str, given) -> None:
    if not isinstance(given, Packed):
        raise ValueError(f"{name} must be a Packed, as quantise and empty make it; it is a {type(given).__name__}.")
    if given.values.is_meta:
        raise ValueError(f"{name} must be in memory; it is on the meta device.")


def _check_apart(of: Packed, **matrix: torch.Tensor) -> None:
    """ValueError where tensors share memory: programs write while others still read."""
    tensors = {**matrix, "values": of.values, "scales": of.scales, "pair": of.pair}
    spans = [(name, *span(tensor)) for name, tensor in tensors.items() if tensor is not None]
    for (one, begin, end), (other, start, stop) in itertools.combinations(spans, 2):
        if begin < stop and start < end:
            raise ValueError(f"{one} lies in the memory that {other} spans: give it memory of its own.")


def _chosen(config: MxConfig | None, form: BlockFormat, back: bool = False) -> MxConfig:
    if config is not None and not isinstance(config, MxConfig):
        raise ValueError(f"config must be an MxConfig or None; it is a {type(config).__name__}.")
    return config or (MxConfig(2048) if back else next(iter(configs(form).values())))


@dataclass(frozen=True)
class _Call:
    """A launch: calling it launches. `args` come by position."""

    kernel: triton.JITFunction
    grid: tuple
    args: tuple
    constants: dict

    def __call__(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants)

    def job(self, target: str, name: str) -> build.Job:
        """How it is compiled: Triton knows what is a multiple of 16, and makes a constant of a 1."""
        signature, aligned = {}, []
        constants = {key: value for key, value in self.constants.items() if key != "num_warps"}
        for key, given in zip(self.kernel.arg_names, self.args):
            if isinstance(given, torch.Tensor):
                signature[key], at = f"*{POINTED[given.dtype]}", given.data_ptr()
            elif given == 1:
                constants[key] = 1
                continue
            else:
                signature[key], at = "i32" if given < 2**31 else "i64", given
            aligned += [key] if at % 16 == 0 else []
        return build.job_for(self.kernel, signature, constants, target, num_warps=self.constants["num_warps"],
                             aligned=tuple(aligned), name=name)


def _launch(out: Packed, config: MxConfig, whole: bool, stride: int) -> tuple[tuple, tuple, dict]:
    """Grid, sizes (rows, columns, groups, x_stride) and what all kernels take by name."""
    (rows, columns), group = out.shape, out.format.block[1]
    groups = -(-columns // group)
    flat = whole and not out.tiled and stride == columns
    if flat:  # one row: no program is left half empty at the end of each
        rows, columns, groups = 1, rows * columns, rows * groups
        stride = columns
    block = config.elements // group
    grid = (triton.cdiv(groups, block), min(rows, 32768), triton.cdiv(rows, 32768))
    constants = {"BLOCK": block, "GROUP": group, "SCALE": out.format.scale, "TILED": out.tiled, "FLAT": flat,
                 "num_warps": config.num_warps}
    return grid, (rows, columns, groups, stride), constants


def _carry(form: BlockFormat, rule: str) -> int:
    """What added to an amax's bits makes its exponent one more where the mantissa is above that of the largest
    element."""
    mantissa = torch.tensor(form.element.max).view(torch.int32).item() & 0x7FFFFF
    return 0x7FFFFF - mantissa if rule == "ceil" else 0


def _lanes(form: BlockFormat, config: MxConfig) -> int:
    """Lanes that share a group, eight elements each at least."""
    most = form.block[1] // 8
    if config.lanes > most:
        raise ValueError(f"a group of {form.name} is shared by {most} lanes at most; here are {config.lanes}.")
    return config.lanes or most


def _fp8(form: BlockFormat) -> dict:
    return {"MANTISSA": form.element.mantissa_bits, "EMIN": form.element.emin}


def _converts(config: MxConfig, where: torch.device) -> bool:
    """Whether the hardware's conversions are there: not in the interpreter, whose own rounds otherwise."""
    compiled = isinstance(quantise_kernels.quantise_fp8_kernel, triton.JITFunction)
    return config.convert and compiled and torch.cuda.get_device_capability(where) >= (8, 9)


def _quantise_call(x: torch.Tensor, out: Packed, rule: str, config: MxConfig, convert: bool) -> _Call:
    form = out.format
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and out.values.data_ptr() % 16 == 0
    whole = x.shape[1] % form.block[1] == 0 and aligned
    grid, sizes, constants = _launch(out, config, whole, x.stride(0) if x.shape[0] > 1 else x.shape[1])
    constants |= {"CARRY": _carry(form, rule)}
    if form.element.bits == 8:
        constants |= _fp8(form) | {"LIMIT": form.element.max, "EMAX": form.element.emax, "CVT": convert}
        args = (x.view(torch.int16), out.values, out.scales, *sizes)
        return _Call(quantise_kernels.quantise_fp8_kernel, grid, args, constants)
    bits, values = (x.view(torch.int32), out.values.view(torch.int32)) if whole else (x.view(torch.int16), out.values)
    encode = out.scales if out.pair is None else out.pair[1:]
    return _Call(quantise_kernels.quantise_fp4_kernel, grid, (bits, values, out.scales, encode, *sizes),
                 constants | {"LANES": _lanes(form, config), "WHOLE": whole})


def _scale_calls(x: torch.Tensor, largest: torch.Tensor, pair: torch.Tensor) -> list[_Call]:
    """What finds NVFP4's scale of a contiguous x, where `largest`, int32, is zero."""
    return [_Call(quantise_kernels.amax_kernel, (triton.cdiv(x.numel(), 8192),),
                  (x.view(torch.int16).view(-1), largest, x.numel()), {"BLOCK": 8192, "num_warps": 8}),
            _Call(quantise_kernels.tensor_scale_kernel, (1,), (largest, pair), {"num_warps": 1})]


def prepare_quantise(x: torch.Tensor, out: Packed, rule: str = "floor", config: MxConfig | None = None,
                     own_scale: bool = False):
    """A function that quantises x, bfloat16 (R, C) with contiguous rows, into `out`; any C, rows at any stride.

    With `own_scale` each launch first finds NVFP4's scale of the tensor, which costs a pass over x; without, `out.pair`
    holds it. ValueError for what does not fit together and for a rule other than mx_spec.RULES.
    """
    _check_matrix(x)
    _check_packed("out", out)
    if tuple(x.shape) != out.shape or x.device != out.values.device:
        raise ValueError(f"x and the output must agree in shape and device; they are {tuple(x.shape)} on {x.device} "
                         f"and {out.shape} on {out.values.device}.")
    _check_apart(out, x=x)
    form = out.format
    check_rule(rule, form)
    config = _chosen(config, form)
    steps = [_quantise_call(x, out, rule, config, _converts(config, x.device))]
    if own_scale:
        if out.pair is None:
            raise ValueError("a scale of the tensor is NVFP4's: this format has none.")
        if not x.is_contiguous():
            raise ValueError(f"the scale of a tensor is found in a contiguous one; its strides are {x.stride()}.")
        largest = torch.zeros(1, dtype=torch.int32, device=x.device)
        steps = [largest.zero_, *_scale_calls(x, largest, out.pair), *steps]

    def launch():
        for step in steps:
            step()

    return launch


def quantise(x: torch.Tensor, form: str | BlockFormat = "mxfp8_e4m3", rule: str = "floor", tiled: bool = False,
             tensor_scale: float | torch.Tensor | None = None, config: MxConfig | None = None) -> Packed:
    """x, bfloat16 (R, C), in the format, bit for bit as `mx_spec.quantise` has it. NVFP4's scale of the tensor is found
    where it is not given. Errors as of `empty` and `prepare_quantise`."""
    form = fused(form)
    _check_matrix(x)
    out = empty(tuple(x.shape), form, x.device, tiled, tensor_scale)
    own_scale = form.scale == "e4m3" and tensor_scale is None
    prepare_quantise(x.contiguous() if own_scale else x, out, rule, config, own_scale)()
    return out


def prepare_dequantise(of: Packed, out: torch.Tensor, config: MxConfig | None = None):
    """A function that writes the matrix that `of` stands for to `out`, bfloat16 (R, C), contiguous. ValueError for what
    does not fit together."""
    _check_packed("of", of)
    check_dense("out", out, "dequantise")
    if out.dtype != torch.bfloat16 or tuple(out.shape) != of.shape or not out.is_contiguous() \
            or out.device != of.values.device:
        raise ValueError(f"out must be a contiguous bfloat16 matrix {of.shape} on {of.values.device}; it is "
                         f"{tuple(out.shape)} {str(out.dtype)[6:]} on {out.device}.")
    _check_apart(of, out=out)
    config = _chosen(config, of.format, back=True)
    return _dequantise_call(of, out, config, _converts(config, out.device))


def _dequantise_call(of: Packed, out: torch.Tensor, config: MxConfig, convert: bool) -> _Call:
    form = of.format
    whole = of.shape[1] % form.block[1] == 0
    grid, sizes, constants = _launch(of, config, whole, of.shape[1])
    rest, constants = (out.view(torch.int16), *sizes[:3]), constants | {"CVT": convert}
    if form.element.bits == 8:
        return _Call(dequantise_kernels.dequantise_fp8_kernel, grid, (of.values, of.scales, *rest),
                     constants | _fp8(form))
    whole = whole and of.values.data_ptr() % 4 == 0
    values, scale = of.values.view(torch.int32) if whole else of.values, of.scales if of.pair is None else of.pair
    return _Call(dequantise_kernels.dequantise_fp4_kernel, grid, (values, of.scales, scale, *rest),
                 constants | {"WHOLE": whole})


def dequantise(of: Packed, config: MxConfig | None = None) -> torch.Tensor:
    """The matrix that `of` stands for, bfloat16 (R, C): float32's product of element and scale, rounded once.
    ValueError for what is no Packed."""
    _check_packed("of", of)
    out = torch.empty(of.shape, dtype=torch.bfloat16, device=of.values.device)
    prepare_dequantise(of, out, config)()
    return out


def job(form: str | BlockFormat, config: MxConfig | None, target: str, rule: str = "floor", back: bool = False,
        tiled: bool = False, shape: tuple[int, int] = (128, 4096)) -> build.Job:
    """The kernel as it is launched on a contiguous matrix of `shape` (the default stands for all that are large and of
    whole groups), for tilelab.build. `config` None is that which such a launch takes."""
    form = fused(form)
    config = _chosen(config, form, back)
    of, matrix = empty(shape, form, "meta", tiled), torch.empty(shape, dtype=torch.bfloat16, device="meta")
    convert = config.convert and device.target_limits(target).capability >= (8, 9)
    call = _dequantise_call(of, matrix, config, convert) if back else _quantise_call(matrix, of, rule, config, convert)
    return call.job(target, f"{form.name} {config}{' back' if back else ''}")


def scale_jobs(target: str, shape: tuple[int, int] = (128, 4096)) -> list[build.Job]:
    """The kernels that find NVFP4's scale of such a matrix."""
    x, largest, pair = (torch.empty(size, dtype=dtype, device="meta") for size, dtype in (
        (shape, torch.bfloat16), (1, torch.int32), (2, torch.float32)))
    return [call.job(target, call.kernel.__name__) for call in _scale_calls(x, largest, pair)]
