"""Multiply block-scaled matrices with Triton's tl.dot_scaled: C (M, N) = A (M, K) B (K, N), both in one format.

`native` is for Blackwell: TMA moves tiles and scales, the scales lie in the tiles of 128 x 4 that its tensor cores
read, and programs are persistent. `naive` is the first kernel one would write: pointers, scales row by row, one tile
per program. It also runs where the compiler emulates tl.dot_scaled. The way the scales lie selects the kernel.
"""

from __future__ import annotations

import collections
import functools
import re
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.blockscaled.emulated import DTYPES as OUTPUTS
from ch14.blockscaled.emulated import check_out, is_interpreted, operand_memory, packed_operands
from ch14.blockscaled.emulated import spec as spec  # the same meaning on both paths
from ch14.blockscaled.native_kernels import naive_kernel, native_kernel
from ch14.mx_formats import Packed, Transposed, format_with_kernels, number_formats, packing
from tilelab.runtime import build, cuda, device, operands, spoken
from tilelab.runtime.operands import Launch

FORMS = {"mxfp8_e4m3": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}  # tl.dot_scaled's name of the elements
ROWS, GROUPS = packing.TILE  # of a tile of scales
EMULATED = "ch14.blockscaled's emulated path"


PHRASES = {
    "block_m block_n block_k": "{}×{}×{}",
    "num_warps": "{} warps",
    "num_stages": "{} stages",
    "kernel": "{}",
    "epilogue_subtile": "{} subtiles",
    "fused": "fused",
}


@dataclass(frozen=True)
class NativeConfig:
    """Hold the tile of a kernel, "native" or "naive": rows, columns, elements per K step, warps and stages.

    The native kernel stores a tile in `epilogue_subtile` parts. With `fused` loops over tiles and K, the next tile
    begins while this one is stored, for which the compiler takes a second accumulator in tensor memory.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    kernel: str = "native"
    epilogue_subtile: int = 1
    fused: bool = False

    def __post_init__(self):
        for name, allowed in (
            ("kernel", ("native", "naive")),
            ("block_m", (128, 256)),
            ("block_n", (128, 256)),
            ("block_k", (64, 128, 256, 512)),
            ("num_warps", (4, 8)),
            ("num_stages", range(1, 9)),
            ("epilogue_subtile", (1, 2, 4)),
            ("fused", (False, True)),
        ):
            operands.require_one_of(name, getattr(self, name), allowed)
        if self.kernel == "naive" and (self.epilogue_subtile, self.fused) != (1, False):
            raise ValueError("epilogue_subtile and fused belong to the native kernel; the naive has neither.")

    @property
    def name(self) -> str:
        """Return the spoken name, such as "128×256×256 · 8 warps · 4 stages · native · 4 subtiles"."""
        return spoken.say(self, PHRASES, always=("kernel",))

    def __str__(self) -> str:
        return self.name

    def constants(self, form: number_formats.BlockFormat, sms: int, whole: bool) -> dict:
        """Return the kernel's constexpr arguments; raise ValueError for a step that cuts through a tile of scales."""
        group = form.block[1]
        if self.kernel == "native" and self.block_k % (GROUPS * group):
            raise ValueError(
                f"block_k is {self.block_k}; for {form.name} it must be a multiple of {GROUPS * group}, "
                "because a step loads whole tiles of scales."
            )
        common = dict(
            BLOCK_M=self.block_m,
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            FORMAT=FORMS[form.name],
            PACKED=8 // form.element.bits,
            GROUP=group,
            GROUP_M=8,
        )
        native = dict(EPILOGUE_SUBTILE=self.epilogue_subtile, FUSED=self.fused, PROGRAMS=sms)
        return common | (native if self.kernel == "native" else dict(WHOLE=whole))

    def blocks(self, form: number_formats.BlockFormat) -> dict[str, list[int]]:
        """Return the box of each descriptor of the native kernel, in elements of one byte, and of C."""
        width, groups = self.block_k * form.element.bits // 8, self.block_k // form.block[1] // GROUPS
        boxes = {}
        for name, side in (("a", self.block_m), ("b", self.block_n)):
            # A side of a box has at most 256 elements, so a tile of 512 scales becomes two rows.
            boxes |= {f"{name}_desc": [side, width], f"{name}_scale_desc": [side // ROWS, groups, 2, 256]}
        return boxes | {"c_desc": [self.block_m, self.block_n // self.epilogue_subtile]}


def parse(text: str) -> NativeConfig:
    """Return the configuration of a name, as `NativeConfig.name` says it."""
    return NativeConfig(**spoken.read(text, PHRASES))


def _lookup(form: str | number_formats.BlockFormat) -> number_formats.BlockFormat:
    form = form if isinstance(form, number_formats.BlockFormat) else number_formats.lookup(form)
    if form.name not in FORMS:
        raise ValueError(f"tl.dot_scaled has no kernel for {form.name} here; choose {', '.join(FORMS)}.")
    return format_with_kernels(form)


def configs(
    form: str | number_formats.BlockFormat = "mxfp4", target: str | None = None, kernel: str = "native"
) -> dict[str, NativeConfig]:
    """Return configurations of a kernel by name, which is their text, the most promising first.

    The target defaults to this machine's, else sm_100a. The configurations of `native` were compiled but not measured.
    """
    form, target = _lookup(form), target or device.current().target or "sm_100a"
    k = 1024 // form.element.bits  # 128 bytes: a row of the swizzle
    if kernel == "naive":
        found = [
            NativeConfig(*tile, "naive")
            for tile in (
                (128, 128, 128, 8, 3),
                (128, 256, 64, 8, 4),
                (256, 128, 64, 8, 4),
                (128, 128, 64, 4, 4),
            )
        ]
    elif target in device.TARGETS and not device.target_limits(target).has_tcgen05:  # 99 KB of shared memory
        found = [
            NativeConfig(128, 128, k, 8, 3, epilogue_subtile=2, fused=True),
            NativeConfig(128, 128, k, 8, 2, epilogue_subtile=2),
        ]
    else:
        # Two accumulators of 256 take all 512 columns of tensor memory and leave none for scales, so wide tiles are
        # not fused. NVFP4 has twice the scales. The last configuration is for a C of four bytes.
        stages = 3 if form.scale == "e4m3" else 4
        found = [
            NativeConfig(128, 256, k, 8, stages, epilogue_subtile=4),
            NativeConfig(128, 128, k, 8, 5, epilogue_subtile=2, fused=True),
            NativeConfig(128, 128, k, 8, 4, epilogue_subtile=4, fused=True),
        ]
    return {str(config): config for config in found}


def _types(form: number_formats.BlockFormat, kernel: str) -> tuple[str, str]:
    """Return Triton's types of elements and scales in memory. The native kernel's are typed, because a cast in its loop
    would keep the compiler from a second accumulator."""
    typed = (form.element.bits == 8, form.scale == "e4m3")
    return tuple("fp8e4nv" if fp8 and kernel == "native" else "u8" for fp8 in typed)


def _check_operands(a, b, out) -> tuple[Packed, Packed, str]:
    """Return A, B^T and the kernel that reads their scales."""
    a, weight = packed_operands(a, b)
    form = _lookup(a.format)
    if a.format != weight.format or a.tiled != weight.tiled:
        layouts = " and ".join(f"{each.format.name}{' tiled' * each.tiled}" for each in (a, weight))
        raise ValueError(f"a and b must share a format and a layout of scales; they are {layouts}.")
    (m, k), n, kernel = a.shape, weight.shape[0], "native" if a.tiled else "naive"
    unit, aligned = (32, 16) if kernel == "native" else (form.block[1], 1)  # descriptors start at 16 bytes
    if k % unit or max(m, n, k) >= 1 << 28:
        raise ValueError(
            f"M, N and K are {m:,}, {n:,} and {k:,}; K must be a multiple of {unit}, and all below 2^28."
        )
    if kernel == "native" and n % 8:
        raise ValueError(f"N is {n}; it must be a multiple of 8: a row of out takes a multiple of 16 bytes.")
    for name, tensor in operand_memory(a, weight).items():
        operands.require_tensor(name, tensor, "dot_scaled", aligned=1 if "pair" in name else aligned)
    check_out(out, a, weight, "dot_scaled", contiguous=True, aligned=aligned)
    return a, weight, kernel


@functools.cache
def compile_config(form: str, config: NativeConfig, target: str, out: torch.dtype) -> build.Report:
    """Return the compiler's report. It runs once and in another process, because an assertion might end this one."""
    return build.build_one(job(config, target, form, out=out))


def rejection(made: build.Report, form: str, config: NativeConfig) -> str:
    """Return why a compiled kernel is not to be launched, in one sentence, empty where it is what it claims to be."""
    target, compiler = made.job.target, f"Triton {triton.__version__}"
    if not made.launchable:
        return (
            f"{form} by {config} does not run on {target} with {compiler} ({made.reason.rstrip('.')}): "
            f"take another configuration, or {EMULATED}."
        )
    if config.kernel == "native" and not made.counts["block_scale"]:
        name, count = tensor_core_instruction(made.ptx)
        return (
            f"{compiler} makes no block-scaled instruction of {form} for {target} but decodes it to 16 bits "
            f"({count} x {name}): use the naive kernel, or {EMULATED}."
        )
    return ""


def _choose_runnable(
    form: str, candidates: list[NativeConfig], where: torch.device, out: torch.dtype
) -> NativeConfig:
    """Return the first candidate that runs here; raise Unsupported, with the reason of the first, if there is none."""
    here = device.current()
    if is_interpreted():
        from triton.runtime.interpreter import InterpreterBuilder

        if not hasattr(InterpreterBuilder, "create_dot_scaled"):
            raise device.Unsupported(
                f"the interpreter of Triton {triton.__version__} has no tl.dot_scaled: without a "
                "GPU this kernel can be compiled, not run."
            )
        return candidates[0]
    if where.type != "cuda":
        raise device.Unsupported(f"dot_scaled needs operands on a GPU; they are on {where}: move them there.")
    if candidates[0].kernel == "native":
        device.require("has_native_block_scale", "the native kernel", f"use the naive one, or {EMULATED}")
    if here.target not in device.TARGETS:
        raise device.Unsupported(
            f"this kernel is compiled for {', '.join(device.TARGETS)}; here is {here.describe()}."
        )
    reasons = []
    for config in candidates:
        reasons.append(rejection(compile_config(form, config, here.target, out), form, config))
        if not reasons[-1]:
            return config
    raise device.Unsupported(reasons[0])


def run(
    a: Packed,  # (M, K)
    b: Transposed,  # (K, N)
    *,
    out: torch.Tensor | None = None,  # (M, N)
    config: str | NativeConfig = "best",
) -> torch.Tensor:  # (M, N)
    """Return C. Arguments and errors as for `prepare`."""
    return prepare(a, b, out=out, config=config)()


def prepare(
    a: Packed,  # (M, K)
    b: Transposed,  # (K, N)
    *,
    out: torch.Tensor | None = None,  # (M, N)
    config: str | NativeConfig = "best",
) -> Launch:
    """Check the operands, compile, build descriptors, and return a Launch that computes C (M, N) = A (M, K) B (K, N).

    a is a Packed and b the transpose (.T) of one, in one of FORMS with blocks along K. Scales in tiles (with zeros in
    their padding) take the native kernel, where K is a multiple of 32 and N of 8; scales in rows take the naive one.
    `out` (M, N) is contiguous, bfloat16 (the default), float16 or float32, rounded once from float32. `config` is a
    NativeConfig of the same kernel, "best" or a name of `configs`. Raises ValueError for operands that do not fit and
    tilelab.runtime.device.Unsupported where the kernel cannot run.
    """
    a, weight, kernel = _check_operands(a, b, out)
    (m, k), n, form, where = a.shape, weight.shape[0], a.format, a.values.device
    named = configs(form, kernel=kernel)
    config = operands.choose_config(config, named, NativeConfig, lambda: None, parse)
    if config is not None and config.kernel != kernel:
        raise ValueError(
            f"scales {'in tiles' if a.tiled else 'in rows'} take the {kernel} kernel; config is {config}."
        )
    out = torch.empty(m, n, dtype=torch.bfloat16, device=where) if out is None else out
    config = _choose_runnable(form.name, [config] if config else list(named.values()), where, out.dtype)
    options = config.constants(form, device.current().sms or 2, k % config.block_k == 0)
    if not out.numel():  # no descriptor describes a matrix without elements
        return Launch(lambda: None, out, config)
    row_bytes, groups = a.values.shape[1], k // form.block[1]
    values, scale = (
        torch.float8_e4m3fn if kind == "fp8e4nv" else torch.uint8 for kind in _types(form, kernel)
    )
    tensors = [
        part for matrix in (a, weight) for part in (matrix.values.view(values), matrix.scales.view(scale))
    ]
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    if kernel == "native":
        tensors[1::2] = [
            scales.view(-(-rows // ROWS), -(-groups // GROUPS), 2, 256)
            for scales, rows in zip(tensors[1::2], (m, n))
        ]
        # torch may report any stride for a single row; new memory has the strides that a descriptor needs.
        arguments = [
            TensorDescriptor(
                tensor, list(tensor.shape), [*torch.empty(tensor.shape, device="meta").stride()], box
            )
            for tensor, box in zip([*tensors, out], config.blocks(form).values())
        ]
        function, grid, sizes = native_kernel, min(tiles, options["PROGRAMS"]), (m, n, row_bytes)
    else:
        function, grid, sizes, arguments = naive_kernel, tiles, (m, n, row_bytes, groups), [*tensors, out]

    def run():
        if kernel == "native" and not is_interpreted():
            cuda.ensure_cuda_context()
        function[(grid,)](
            *arguments,
            a.pair,
            weight.pair,
            *sizes,
            **options,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    return Launch(run, out, config)


def job(
    config: NativeConfig,
    target: str,
    form: str | number_formats.BlockFormat = "mxfp4",
    sms: int = 132,
    out: torch.dtype = torch.bfloat16,
) -> build.Job:
    """Return how the kernel is compiled for large matrices that its tiles divide, for tilelab.runtime.build."""
    form, native = _lookup(form), config.kernel == "native"
    constants, kinds = config.constants(form, sms, True), _types(form, config.kernel)
    types = dict(zip(("a", "a_scale", "b", "b_scale", "c"), (*kinds, *kinds, OUTPUTS[out])))
    if native:
        blocks = config.blocks(form)
        signature = {
            f"{name}_desc": f"tensordesc<{kind}{blocks[f'{name}_desc']}>" for name, kind in types.items()
        }
    else:
        signature = {f"{name}_ptr": f"*{kind}" for name, kind in types.items()}
    pairs = ("a_tensor_ptr", "b_tensor_ptr")
    if form.scale == "e4m3":
        signature |= dict.fromkeys(pairs, "*fp32")
    else:
        constants |= dict.fromkeys(pairs)
    signature |= dict.fromkeys(("M", "N", "row_bytes") + ("groups",) * (not native), "i32")
    aligned = tuple(name for name in signature if not name.endswith("desc"))
    return build.Job(
        f"ch14.blockscaled.native_kernels:{config.kernel}_kernel",
        signature,
        constants,
        target,
        config.num_warps,
        config.num_stages,
        aligned,
        name=f"{form.name} {config}",
    )


PRODUCT = re.compile(r"\b((?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)\.[\w.:]+)")


def tensor_core_instruction(ptx: str) -> tuple[str, int]:
    """Return the tensor core instruction that occurs most often in PTX, and how often; ("", 0) without one."""
    return next(iter(collections.Counter(PRODUCT.findall(ptx)).most_common(1)), ("", 0))
