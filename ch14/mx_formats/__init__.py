"""Quantise bf16 to MXFP8, MXFP4, NVFP4 and DeepSeek's fp8 in one pass over the data, and dequantise it again.

Read `number_formats.py` first: it defines every format in plain torch, and the kernels agree with it bit for bit.
`packing.py` says how codes and scales lie in memory, `kernels.py` holds the Triton kernels, and `configs.py` says how
they are launched. This file holds the operators. MXFP6 and blocks of 128 x 128 exist in `number_formats.py` only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ch14.mx_formats import kernels, number_formats, operator
from ch14.mx_formats.configs import FUSED, MxConfig, choose_config, configs, format_with_kernels
from ch14.mx_formats.number_formats import BlockFormat
from ch14.mx_formats.packing import Packed, Transposed, empty, make_allocator
from tilelab.runtime import build, device, operators, triton_launch, workspace
from tilelab.runtime.operands import Launch, require_disjoint, require_rows, require_tensor
from tilelab.runtime.plans import Plan, Planner

__all__ = [
    "FUSED",
    "MxConfig",
    "Packed",
    "Transposed",
    "configs",
    "dequantise",
    "empty",
    "format_with_kernels",
    "job",
    "prepare",
    "prepare_dequantise",
    "prepare_quantise",
    "quantise",
    "spec",
]

_TRITON_TYPES = {torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.float32: "fp32"}
_LARGEST = torch.finfo(torch.float32).max
_MAX_GRID_Y = 32768  # rows beyond this many go into the third dimension of the grid


def spec(
    operation: str, *args: torch.Tensor | BlockFormat | str | number_formats.Quantised, **options: Any
) -> number_formats.Quantised | torch.Tensor:
    """Return what "quantise" makes of (matrix, BlockFormat, rule), or "dequantise" of a number_formats.Quantised.

    The arithmetic is in float32, one correctly rounded operation at a time, because a format defines every bit.
    """
    operations: dict[str, Callable[..., Any]] = {
        "quantise": number_formats.quantise,
        "dequantise": number_formats.dequantise,
    }
    if operation not in operations:
        raise ValueError(f"unknown operation {operation!r}; choose {' or '.join(operations)}.")
    return operations[operation](*args, **options)


@dataclass(frozen=True)
class _KernelCall:
    """One launch of a Triton kernel: `args` by position, `constants` (with num_warps) by name."""

    kernel: triton.JITFunction
    grid: tuple
    args: tuple
    constants: dict

    def __call__(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants)

    def bind(self, positions: Mapping[int, int]) -> Callable[..., None]:
        """Return a function of tensors that launches the kernel on them, without Triton's Python.

        `positions` says at which position of its call each address of `args` will be given.
        """
        arguments = dict(zip(self.kernel.arg_names, self.args))
        follows = {
            name: positions[argument.data_ptr()]
            for name, argument in arguments.items()
            if isinstance(argument, torch.Tensor)
        }
        return triton_launch.prepare(self.kernel, self.grid, arguments, follows, **self.constants)

    def job(self, target: str, name: str) -> build.Job:
        """Return how Triton compiles this launch: it knows multiples of 16, and makes a constant of an argument 1."""
        signature, aligned = {}, []
        constants = {key: value for key, value in self.constants.items() if key != "num_warps"}
        for key, argument in zip(self.kernel.arg_names, self.args):
            if isinstance(argument, torch.Tensor):
                signature[key], value = f"*{_TRITON_TYPES[argument.dtype]}", argument.data_ptr()
            elif argument == 1:
                constants[key] = 1
                continue
            else:
                signature[key], value = "i32" if argument < 2**31 else "i64", argument
            aligned += [key] if value % 16 == 0 else []
        return build.job_for(
            self.kernel,
            signature,
            constants,
            target,
            num_warps=self.constants["num_warps"],
            aligned=tuple(aligned),
            name=name,
        )


def _plan(packed: Packed, config: MxConfig, whole_groups: bool, x_stride: int) -> tuple[tuple, tuple, dict]:
    """Return the grid, the sizes (rows, columns, groups, x_stride) and the constants that all kernels take."""
    (rows, columns), group = packed.shape, packed.format.block[1]
    groups = triton.cdiv(columns, group)
    flat = whole_groups and not packed.tiled and x_stride == columns
    # Without gaps the matrix is one long row, and no program is left half empty at the end of a row.
    if flat:
        rows, columns, groups = 1, rows * columns, rows * groups
        x_stride = columns
    block = config.elements // group
    grid = (triton.cdiv(groups, block), min(rows, _MAX_GRID_Y), triton.cdiv(rows, _MAX_GRID_Y))
    constants = {
        "BLOCK": block,
        "GROUP": group,
        "SCALE": packed.format.scale,
        "TILED": packed.tiled,
        "FLAT": flat,
        "num_warps": config.num_warps,
    }
    return grid, (rows, columns, groups, x_stride), constants


def _can_convert(config: MxConfig) -> bool:
    """Return whether to use the hardware's fp8 conversion: sm_89 has it, and Triton's interpreter rounds otherwise."""
    is_compiled = isinstance(kernels.quantise_fp8_kernel, triton.JITFunction)
    return config.convert and is_compiled and (device.current().capability or (0, 0)) >= (8, 9)


def _can_saturate(config: MxConfig) -> bool:
    """Return whether to encode fp4 with instructions that Triton has no name for; sm_90 has all of them."""
    is_compiled = isinstance(kernels.quantise_fp4_kernel, triton.JITFunction)
    return config.saturate and is_compiled and (device.current().capability or (0, 0)) >= (9, 0)


def _quantise_call(
    x: torch.Tensor, out: Packed, rule: str, config: MxConfig, convert: bool, saturate: bool, backwards: bool
) -> _KernelCall:
    format, element = out.format, out.format.element
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and out.values.data_ptr() % 16 == 0
    whole = x.shape[1] % format.block[1] == 0 and aligned
    grid, sizes, constants = _plan(out, config, whole, x.stride(0) if x.shape[0] > 1 else x.shape[1])
    # For rule ceil the kernel adds CARRY to the bits of amax. The sum carries into the exponent if the mantissa of amax
    # is larger than the mantissa of the format's largest element.
    largest_mantissa = torch.tensor(element.max).view(torch.int32).item() & 0x7FFFFF
    constants["CARRY"] = 0x7FFFFF - largest_mantissa if rule == "ceil" else 0
    if element.bits == 8:
        constants |= {
            "MANTISSA": element.mantissa_bits,
            "EMIN": element.emin,
            "LIMIT": element.max,
            "EMAX": element.emax,
            "CVT": convert,
        }
        args = (x.view(torch.int16), out.values, out.scales, *sizes)
        return _KernelCall(kernels.quantise_fp8_kernel, grid, args, constants)
    bits, values = (
        (x.view(torch.int32), out.values.view(torch.int32)) if whole else (x.view(torch.int16), out.values)
    )
    inverse_tensor_scale = out.scales if out.pair is None else out.pair[1:]
    return _KernelCall(
        kernels.quantise_fp4_kernel,
        grid,
        (bits, values, out.scales, inverse_tensor_scale, *sizes),
        constants | {"WHOLE": whole, "SATURATE": saturate, "BACKWARDS": backwards},
    )


def _dequantise_call(packed: Packed, out: torch.Tensor, config: MxConfig, convert: bool) -> _KernelCall:
    format, element = packed.format, packed.format.element
    whole = packed.shape[1] % format.block[1] == 0
    grid, sizes, constants = _plan(packed, config, whole, packed.shape[1])
    to, constants = (out.view(torch.int16), *sizes[:3]), constants | {"CVT": convert}
    if element.bits == 8:
        return _KernelCall(
            kernels.dequantise_fp8_kernel,
            grid,
            (packed.values, packed.scales, *to),
            constants | {"MANTISSA": element.mantissa_bits, "EMIN": element.emin},
        )
    whole = whole and packed.values.data_ptr() % 4 == 0
    values = packed.values.view(torch.int32) if whole else packed.values
    tensor_scale = packed.scales if packed.pair is None else packed.pair
    return _KernelCall(
        kernels.dequantise_fp4_kernel,
        grid,
        (values, packed.scales, tensor_scale, *to),
        constants | {"WHOLE": whole},
    )


def _require_packed(name: str, packed: Packed, op: str, on: torch.device | None = None) -> None:
    if not isinstance(packed, Packed):
        raise ValueError(f"{name} must be a Packed, as quantise returns it; it is a {type(packed).__name__}.")
    for part, tensor in packed.tensors().items():
        require_tensor(f"{name}.{part}", tensor, op, on=on)


def _check_room(out: Packed, x: torch.Tensor, format: BlockFormat, tiled: bool) -> None:
    """Raise ValueError unless a Packed has room for x in `format`, and memory of its own."""
    if (out.format.name, out.shape, out.tiled) != (format.name, tuple(x.shape), tiled):
        raise ValueError(
            f"out must be {tuple(x.shape)} in {format.name} with tiled={tiled}; it is {out.shape} in "
            f"{out.format.name} with tiled={out.tiled}."
        )
    require_disjoint({f"out.{name}": tensor for name, tensor in out.tensors().items()}, {"x": x})


def _set_tensor_scale(pair: torch.Tensor, tensor_scale: float | torch.Tensor) -> None:
    scale = float(tensor_scale)
    if not 2.0**-126 <= scale <= _LARGEST:
        raise ValueError(
            f"tensor_scale must be at least 2^-126 and finite in float32; it is {tensor_scale!r:.40}."
        )
    # 1 / scale is that of the scale in float32. A quotient of float32 may be rounded to float64 first.
    scale = ctypes.c_float(scale).value
    pair.fill_(scale)
    pair[1:].fill_(1 / scale)


@dataclass
class KernelLaunch(Launch):
    """A Launch that consists of `steps`: kernels, and functions of torch."""

    steps: tuple = ()

    def jobs(self, target: str) -> list[build.Job]:
        """Return how its kernels are compiled for a target."""
        return [
            step.job(target, step.kernel.__name__) for step in self.steps if isinstance(step, _KernelCall)
        ]


def _launch(out, config: MxConfig, *steps) -> KernelLaunch:
    def run():
        for step in steps:
            step()

    return KernelLaunch(run, out, config, steps=steps)


def prepare_quantise(
    x: torch.Tensor,  # (R, C), bfloat16
    format: str | BlockFormat = "mxfp8_e4m3",
    *,
    rule: str = "floor",
    tiled: bool = False,
    tensor_scale: float | torch.Tensor | None = None,
    out: Packed | None = None,
    config: str | MxConfig = "best",
) -> KernelLaunch:
    """Prepare the quantisation of x, bfloat16 (R, C) with contiguous rows at any stride, to a Packed.

    rule: how an E8M0 scale is chosen (number_formats.RULES). tiled: lay the scales out in tiles of 128 x 4.
    tensor_scale: NVFP4's, from 2^-126 to float32's largest number; if None, each launch finds it by another pass over
    x, which must then be contiguous. Raise ValueError for arguments that do not fit together.
    """
    format = format_with_kernels(format)
    number_formats.check_rule(rule, format)
    config = choose_config(config, format)
    require_tensor("x", x, "quantise", dtype=torch.bfloat16, ndim=2)
    require_rows("x", x, unit_bytes=2)
    if out is None:
        out = empty(tuple(x.shape), format, x.device, tiled)
    _require_packed("out", out, "quantise", x.device)
    _check_room(out, x, format, tiled)
    if tensor_scale is not None:
        if format.scale != "e4m3":
            raise ValueError(f"tensor_scale must be None for {format.name}; only nvfp4 has a tensor's scale.")
        _set_tensor_scale(out.pair, tensor_scale)
    if not x.numel():
        return _launch(out, config)
    finds_scale = format.scale == "e4m3" and tensor_scale is None
    quantise_call = _quantise_call(
        x, out, rule, config, _can_convert(config), _can_saturate(config), finds_scale
    )
    if not finds_scale:
        return _launch(out, config, quantise_call)
    require_tensor("x", x, "quantise", contiguous=True)
    find_scale = _KernelCall(
        kernels.tensor_scale_kernel,
        (triton.cdiv(x.numel(), 4 * 16384),),
        (
            x.view(torch.int16).view(-1),
            out.pair,
            torch.zeros(2, dtype=torch.int32, device=x.device),
            x.numel(),
        ),
        {"BLOCK": 16384, "STEPS": 4, "num_warps": 16},
    )
    return _launch(out, config, find_scale, quantise_call)


@dataclass(frozen=True)
class _QuantisePlan:
    """`launch` takes x, values, scales and pair; `allocate` makes new memory for the result."""

    launch: Callable[..., None]
    allocate: Callable[[], Packed]


def _plan_quantise(
    x, values, scales, pair, _, format, rule, tiled, has_tensor_scale, config
) -> _QuantisePlan:
    """Check the arguments and compile the kernels. `values`, `scales` and `pair` are those of an out, or None."""
    format = format_with_kernels(format)
    out = None if values is None else Packed(format, tuple(x.shape), values, scales, pair, tiled)
    made = prepare_quantise(
        x,
        format,
        rule=rule,
        tiled=tiled,
        tensor_scale=1.0 if has_tensor_scale else None,
        out=out,
        config=config,
    )
    out, finds_scale = made.out, len(made.steps) > 1
    tensors = [x, out.values, out.scales] + ([] if out.pair is None else [out.pair, out.pair[1:]])
    positions = {tensor.data_ptr(): position for position, tensor in enumerate(tensors)}
    if finds_scale:
        positions[made.steps[0].args[2].data_ptr()] = len(tensors)  # the counters
    kernels = [step.bind(positions) for step in made.steps if isinstance(step, _KernelCall)]

    def launch(x, values, scales, pair):
        given = [x, values, scales]
        if pair is not None:
            given += pair, pair[1:]
        if finds_scale:
            given.append(workspace.make_counters(2, x.device))
        for kernel in kernels:
            kernel(*given)

    return _QuantisePlan(launch, make_allocator(out))


quantise_planner = Planner(_plan_quantise, ("x", "out.values", "out.scales", "out.pair"))


def _run_quantise(x, format, rule, tiled, tensor_scale, out, config) -> Packed:
    if (
        tensor_scale is None
        and isinstance(x, torch.Tensor)
        and not x.is_contiguous()
        and (format_with_kernels(format).scale == "e4m3")
    ):
        x = x.contiguous()  # another pass over it finds the scale of the tensor
    room = None, None, None
    if out is not None:
        require_tensor("x", x, "quantise")
        _require_packed("out", out, "quantise", x.device)
        _check_room(out, x, format_with_kernels(format), tiled)
        room = out.values, out.scales, out.pair
    plan = quantise_planner.find((x, *room), None, format, rule, tiled, tensor_scale is not None, config)
    out = plan.allocate() if out is None else out
    if tensor_scale is not None:
        _set_tensor_scale(out.pair, tensor_scale)
    plan.launch(x, out.values, out.scales, out.pair)
    return out


@operator.register_quantise
def quantise_operator(x, format="mxfp8_e4m3", rule="floor", tiled=False, tensor_scale=None, config="best"):
    return operator.list_tensors(_run_quantise(x, format, rule, tiled, tensor_scale, None, config))


def quantise(
    x: torch.Tensor,  # (R, C), bfloat16
    format: str | BlockFormat = "mxfp8_e4m3",
    *,
    rule: str = "floor",
    tiled: bool = False,
    tensor_scale: float | torch.Tensor | None = None,
    out: Packed | None = None,
    config: str | MxConfig = "best",
) -> Packed:
    """Quantise x, bfloat16 (R, C), with the same bits as `number_formats.quantise`. See `prepare_quantise`.

    Under torch.compile and where autograd records, this is torch.ops.tiles.quantise. It has no backward pass, and
    takes `format` and `config` by name and `tensor_scale` as a number.
    """
    if operators.is_traced(x) and out is None:
        name = format if isinstance(format, str) else format.name
        values, scales, pair = quantise_operator(x, name, rule, tiled, tensor_scale, config)
        pair = pair if pair.numel() else None
        return Packed(name, tuple(x.shape), values, scales, pair, tiled)  # type: ignore[arg-type]
    return _run_quantise(x, format, rule, tiled, tensor_scale, out, config)


def prepare_dequantise(
    packed: Packed, *, out: torch.Tensor | None = None, config: str | MxConfig = "best"
) -> KernelLaunch:
    """Prepare the conversion of a Packed to bfloat16 (R, C): element times scale in float32, rounded once."""
    _require_packed("packed", packed, "dequantise")
    config = choose_config(config, packed.format, "dequantise")
    if out is None:
        out = torch.empty(packed.shape, dtype=torch.bfloat16, device=packed.values.device)
    require_tensor(
        "out",
        out,
        "dequantise",
        dtype=torch.bfloat16,
        shape=packed.shape,
        on=packed.values.device,
        contiguous=True,
    )
    require_disjoint({"out": out}, {f"packed.{name}": tensor for name, tensor in packed.tensors().items()})
    if not out.numel():
        return _launch(out, config)
    return _launch(out, config, _dequantise_call(packed, out, config, _can_convert(config)))


def _plan_dequantise(values, scales, pair, out, format, shape, tiled, config) -> Plan:
    """Check the arguments and compile the kernel."""
    packed = Packed(format, shape, values, scales, pair, tiled)
    made = prepare_dequantise(packed, out=out, config=config)
    tensors = values, scales, pair, made.out
    positions = {tensor.data_ptr(): position for position, tensor in enumerate(tensors) if tensor is not None}
    kernels = [step.bind(positions) for step in made.steps]

    def launch(*tensors):
        for kernel in kernels:
            kernel(*tensors)

    return Plan(launch, shape, torch.bfloat16, values.device, made.config)


dequantise_planner = Planner(_plan_dequantise, ("packed.values", "packed.scales", "packed.pair"))


@operator.register_dequantise
def dequantise_operator(values, scales, pair, format, columns, tiled=False, config="best"):
    shape = values.shape[0], columns
    return dequantise_planner.run((values, scales, pair), None, format, shape, tiled, config)


def dequantise(
    packed: Packed,  # (R, C)
    *,
    out: torch.Tensor | None = None,  # (R, C), bfloat16
    config: str | MxConfig = "best",
) -> torch.Tensor:  # (R, C), bfloat16
    """Return the matrix that a Packed stands for, bfloat16 (R, C). See `prepare_dequantise`.

    Under torch.compile this is torch.ops.tiles.dequantise.
    """
    if not isinstance(packed, Packed):
        _require_packed("packed", packed, "dequantise")
    if operators.is_traced(packed.values):
        return operators.store(
            dequantise_operator(
                packed.values,
                packed.scales,
                packed.pair,
                packed.format.name,
                packed.shape[1],
                packed.tiled,
                config,
            ),
            out,
        )
    return dequantise_planner.run(
        (packed.values, packed.scales, packed.pair),
        out,
        packed.format.name,
        packed.shape,
        packed.tiled,
        config,
    )


def prepare(
    source: torch.Tensor | Packed,  # (R, C)
    *args: Any,
    out: torch.Tensor | Packed | None = None,  # (R, C)
    config: str | MxConfig = "best",
    **options: Any,
) -> KernelLaunch:
    """Prepare `dequantise` if the source is a Packed, else `quantise`. The arguments are those operators' own."""
    prepare_operator = prepare_dequantise if isinstance(source, Packed) else prepare_quantise
    return prepare_operator(source, *args, out=out, config=config, **options)


def job(
    config: str | MxConfig,
    target: str,
    format: str | BlockFormat = "mxfp8_e4m3",
    *,
    operation: str = "quantise",
    rule: str = "floor",
    tiled: bool = False,
    shape: tuple[int, int] = (128, 4096),
) -> build.Job:
    """Return how "quantise" or "dequantise" of a contiguous matrix is compiled for a target.

    The default shape stands for all large matrices of whole groups.
    """
    format = format_with_kernels(format)
    config = choose_config(config, format, operation)
    packed, matrix = (
        empty(shape, format, "meta", tiled),
        torch.empty(shape, dtype=torch.bfloat16, device="meta"),
    )
    capability = device.target_limits(target).capability
    convert = config.convert and capability >= (8, 9)
    if operation == "quantise":
        call = _quantise_call(
            matrix,
            packed,
            rule,
            config,
            convert,
            config.saturate and capability >= (9, 0),
            format.scale == "e4m3",
        )
    else:
        call = _dequantise_call(packed, matrix, config, convert)
    return call.job(target, f"{format.name} {config} {operation}")
