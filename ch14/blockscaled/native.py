"""Block-scaled GEMM by Triton's tl.dot_scaled: out (M, N) = A (M, K) B^T, both operands in one block-scaled format.

Two kernels, one launcher. `native` is for Blackwell: tiles and scales come by TMA, the scales in the 128 x 4 layout
that its tensor cores read, and programs stay for many tiles. `naive` is what one writes first: pointers, scales row by
row, a tile a program; it also runs where tl.dot_scaled is an emulation. Kernels: `ch14.blockscaled.native_kernels`.
"""

from __future__ import annotations

import collections
import functools
import re
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.blockscaled.native_kernels import naive_kernel, native_kernel
from ch14.descriptors import check_dense, context, span
from ch14.mx_formats import Packed, fused, number_formats, packing
from tilelab import build, device

FORMS = {"mxfp8_e4m3": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}  # tl.dot_scaled's name of the elements
OUTPUTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KERNELS = {"tiled": "native", "pointers": "naive"}  # by how the scales lie and are read
ROWS, GROUPS = packing.TILE  # a tile of scales


def spec(a: Packed, b: Packed) -> torch.Tensor:
    """A B^T in float64: A (M, K) and B (N, K) as their codes and scales stand for them."""
    return number_formats.dequantise(a.unpacked()).double() @ number_formats.dequantise(b.unpacked()).double().T


@dataclass(frozen=True)
class NativeConfig:
    """A tile of block_m x block_n, steps of block_k elements, warps and stages of `kernel`, "native" or "naive".

    Of `native` alone: `parts` that a tile is stored in, and `fused` loops over tiles and K: the next tile begins while
    this one is stored, for which the compiler takes a second accumulator in tensor memory.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    kernel: str = "native"
    parts: int = 1
    fused: bool = False

    def __post_init__(self):
        for name, allowed in (("kernel", ("native", "naive")), ("block_m", (128, 256)), ("block_n", (128, 256)),
                              ("block_k", (64, 128, 256, 512)), ("num_warps", (4, 8)), ("num_stages", range(1, 9)),
                              ("parts", (1, 2, 4)), ("fused", (False, True))):
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(map(str, allowed))}; here it is {value!r:.40}.")
        if self.kernel == "naive" and (self.parts, self.fused) != (1, False):
            raise ValueError("parts and fused are the native kernel's; the naive one has one loop and one store.")

    def __str__(self):
        tile = f"{self.kernel} {self.block_m},{self.block_n},{self.block_k},{self.num_warps},{self.num_stages}"
        return tile + f" /{self.parts}" * (self.parts > 1) + " fused" * self.fused

    def constants(self, form: number_formats.BlockFormat, sms: int, whole: bool) -> dict:
        """The kernel's constexpr arguments; ValueError where the tile does not hold whole tiles of scales."""
        group = form.block[1]
        if self.kernel == "native" and self.block_k % (GROUPS * group):
            raise ValueError(f"a step holds whole tiles of scales: block_k is a multiple of {GROUPS * group} for "
                             f"{form.name}; here it is {self.block_k}.")
        found = dict(BLOCK_M=self.block_m, BLOCK_N=self.block_n, BLOCK_K=self.block_k, FORMAT=FORMS[form.name],
                     PACKED=8 // form.element.bits, GROUP=group, GROUP_M=8)
        native = dict(PARTS=self.parts, FUSED=self.fused, PROGRAMS=sms)
        return found | (native if self.kernel == "native" else dict(WHOLE=whole))

    def blocks(self, form: number_formats.BlockFormat) -> dict[str, list[int]]:
        """What each descriptor of the native kernel moves, in elements of one byte, and of C."""
        width, groups = self.block_k * form.element.bits // 8, self.block_k // form.block[1] // GROUPS
        found = {}
        for name, side in (("a", self.block_m), ("b", self.block_n)):
            # A box has at most 256 elements a side: the 512 bytes of a tile are two rows of it.
            found |= {f"{name}_desc": [side, width], f"{name}_scale_desc": [side // ROWS, groups, 2, 256]}
        return found | {"c_desc": [self.block_m, self.block_n // self.parts]}


def _form(form: str | number_formats.BlockFormat) -> number_formats.BlockFormat:
    form = form if isinstance(form, number_formats.BlockFormat) else number_formats.lookup(form)
    if form.name not in FORMS:
        raise ValueError(f"tl.dot_scaled is used for {', '.join(FORMS)} here; it is {form.name}.")
    return fused(form)


def configs(form: str | number_formats.BlockFormat, target: str | None = None, scales: str = "tiled") -> list[NativeConfig]:
    """Configurations of the kernel that reads its `scales` so, for a target (default: this machine's, else sm_100a),
    the likeliest first. Those of `native` were compiled and not measured. ValueError for what has none."""
    form, kernel = _form(form), _kernel(scales)
    target = target or device.current().target or "sm_100a"
    k = 1024 // form.element.bits  # 128 bytes: a row of the swizzle
    if kernel == "naive":
        return [NativeConfig(*tile, "naive") for tile in ((128, 128, 128, 8, 3), (128, 256, 64, 8, 4),
                                                          (256, 128, 64, 8, 4), (128, 128, 64, 4, 4))]
    if target in device.TARGETS and not device.target_limits(target).has_tcgen05:  # 99 KB of shared memory
        return [NativeConfig(128, 128, k, 8, 3, parts=2, fused=True), NativeConfig(128, 128, k, 8, 2, parts=2)]
    # 512 columns of tensor memory: two accumulators of 256 leave none for the scales, so wide tiles are not fused.
    stages = 3 if form.scale == "e4m3" else 4  # twice the scales
    return [NativeConfig(128, 256, k, 8, stages, parts=4), NativeConfig(128, 128, k, 8, 5, parts=2, fused=True),
            NativeConfig(128, 128, k, 8, 4, parts=4, fused=True)]  # where C takes more


def _kernel(scales: str) -> str:
    if not isinstance(scales, str) or scales not in KERNELS:
        raise ValueError(f"scales are tiled (native kernel) or pointers (naive kernel); here it is {scales!r:.40}.")
    return KERNELS[scales]


def _types(form: number_formats.BlockFormat, kernel: str) -> tuple[str, str]:
    """Triton's types of elements and scales in memory: the native kernel's are typed, for a cast in its loop would keep
    the compiler from a second accumulator."""
    typed = (form.element.bits == 8, form.scale == "e4m3")
    return tuple("fp8e4nv" if fp8 and kernel == "native" else "u8" for fp8 in typed)


def _interpreted() -> bool:
    return not isinstance(naive_kernel, triton.JITFunction)


def _check(a: Packed, b: Packed, out, kernel: str) -> None:
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, Packed):
            raise ValueError(f"{name} must be a Packed, as ch14.mx_formats.quantise makes it; it is a "
                             f"{type(given).__name__}.")
        if given.values.is_meta:
            raise ValueError(f"{name} must be in memory; it is on the meta device.")
        if given.tiled != (kernel == "native"):
            wanted, found = ("in tiles", "row by row") if kernel == "native" else ("row by row", "in tiles")
            raise ValueError(f"the {kernel} kernel reads scales {wanted}; those of {name} lie {found}: quantise with "
                             f"tiled={kernel == 'native'}, or use the other kernel.")
    form = _form(a.format)
    if a.format != b.format or a.values.device != b.values.device:
        raise ValueError(f"a and b must share a format and a device; they are {a.format.name} on {a.values.device} and "
                         f"{b.format.name} on {b.values.device}.")
    (m, k), (n, inner) = a.shape, b.shape
    unit = 32 if kernel == "native" else form.block[1]
    if k != inner or k % unit:
        raise ValueError(f"a is (M, K) and b (N, K), K one multiple of {unit}; here are {a.shape} and {b.shape}.")
    if max(m, n, k) >= 1 << 28:
        raise ValueError(f"M, N and K are less than 2^28; here they are {m:,}, {n:,} and {k:,}.")
    if kernel == "native" and n % 8:
        raise ValueError(f"N must be a multiple of 8, so that a row of out takes a multiple of 16 bytes; N is {n}.")
    parts = {f"the {what} of {name}": getattr(of, what) for name, of in (("a", a), ("b", b))
             for what in ("values", "scales", "pair") if getattr(of, what) is not None}
    if out is not None:
        check_dense("out", out, "this GEMM")
        if (tuple(out.shape), out.device) != ((m, n), a.values.device) or out.dtype not in OUTPUTS \
                or not out.is_contiguous():
            raise ValueError(f"out must be contiguous, {m} x {n} of {', '.join(str(d)[6:] for d in OUTPUTS)} on "
                             f"{a.values.device}; it is {tuple(out.shape)} of {str(out.dtype)[6:]} on {out.device}, "
                             f"strides {out.stride()}.")
        for name, given in parts.items():
            if span(out)[0] < span(given)[1] and span(given)[0] < span(out)[1]:
                raise ValueError(f"out lies in the memory that {name} span: give it memory of its own.")
    for name, given in (parts | ({} if out is None else {"out": out})).items():
        if kernel == "native" and "pair" not in name and given.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes for a descriptor: copy it first.")


@functools.cache
@functools.cache
def report(form: str, config: NativeConfig, target: str, out: torch.dtype) -> build.Report:
    """What the compiler makes of the kernel, in another process, asked once: here an assertion might end this one."""
    return build.build_one(job(form, config, target, out=out))


def refusal(made: build.Report, form: str, config: NativeConfig) -> str:
    """Why that build is not to be launched, one sentence; empty when it is what it says."""
    target, compiler = made.job.target, f"Triton {triton.__version__}"
    if not made.launchable:
        return (f"{form} by {config} does not run on {target} with {compiler} ({made.reason.rstrip('.')}): "
                "take another configuration, or ch14.blockscaled's emulated path.")
    if config.kernel == "native" and not made.counts["block_scale"]:
        name, count = product(made.ptx)
        return (f"{compiler} makes no block-scaled instruction of {form} for {target} but decodes it to 16 bits "
                f"({count} x {name}): use the naive kernel, or ch14.blockscaled's emulated path.")
    return ""


def _runnable(form: str, candidates: list[NativeConfig], where: torch.device, out: torch.dtype) -> NativeConfig:
    """The first of them that runs here; device.Unsupported says why none does."""
    here = device.current()
    if _interpreted():
        from triton.runtime.interpreter import InterpreterBuilder
        if not hasattr(InterpreterBuilder, "create_dot_scaled"):
            raise device.Unsupported(f"the interpreter of Triton {triton.__version__} has no tl.dot_scaled: without a "
                                     "GPU this kernel can be compiled, not run.")
        return candidates[0]
    if where.type != "cuda":
        raise device.Unsupported(f"dot_scaled needs its operands on a GPU; they are on {where}: move them there.")
    if candidates[0].kernel == "native":
        device.require("has_native_block_scale", "the native kernel", "use the naive one, or ch14.blockscaled's "
                       "emulated path")
    if here.target not in device.TARGETS:
        raise device.Unsupported(f"this kernel is compiled for {', '.join(device.TARGETS)}; here is {here.describe()}.")
    reasons = []
    for config in candidates:
        reasons.append(refusal(report(form, config, here.target, out), form, config))
        if not reasons[-1]:
            return config
    raise device.Unsupported(reasons[0])


def prepare(a: Packed, b: Packed, *, out: torch.Tensor | None = None, config: NativeConfig | None = None,
            scales: str = "tiled"):
    """A function that computes A B^T and returns `out`; checks, compilation and descriptors are done here.

    a (M, K) and b (N, K) in one of FORMS, with blocks along K. `scales` "tiled": the native kernel, for operands with
    tiled scales (zeros in their padding), K a multiple of 32 and N of 8; "pointers": the naive one, for scales row by
    row and K a multiple of a block. out: (M, N) contiguous, bfloat16 (the default), float16 or float32, rounded once
    from float32. Raises ValueError for what it cannot take and tilelab.device.Unsupported where the kernel cannot run.
    """
    kernel = _kernel(scales)
    _check(a, b, out, kernel)
    if config is not None and (not isinstance(config, NativeConfig) or config.kernel != kernel):
        raise ValueError(f"scales={scales!r} takes a NativeConfig of the {kernel} kernel; here it is {config!s:.60}.")
    (m, k), n, form = a.shape, b.shape[0], a.format
    config = _runnable(form.name, [config] if config else configs(form, scales=scales), a.values.device,
                       torch.bfloat16 if out is None else out.dtype)
    constants = config.constants(form, device.current().sms or 2, k % config.block_k == 0)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=a.values.device) if out is None else out
    bytes_a_row, groups = a.values.shape[1], k // form.block[1]
    values, scale = (torch.float8_e4m3fn if kind == "fp8e4nv" else torch.uint8 for kind in _types(form, kernel))
    given = []
    for of, rows in ((a, m), (b, n)):
        given += [of.values.view(values), of.scales.view(scale)]
        if kernel == "native":
            given[-1] = given[-1].view(-(-rows // ROWS), -(-groups // GROUPS), 2, 256)
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    sizes, pairs = (m, n, bytes_a_row, groups), (a.pair, b.pair)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    if kernel == "native":
        # Strides as of new memory: torch may report any for a single row.
        given = [TensorDescriptor(tensor, [*tensor.shape], [*torch.empty(tensor.shape, device="meta").stride()], block)
                 for tensor, block in zip([*given, out], config.blocks(form).values())]
        launched, grid, sizes = native_kernel, min(tiles, constants["PROGRAMS"]), sizes[:3]
    else:
        launched, grid, given = naive_kernel, tiles, [*given, out]

    def launch():
        if kernel == "native" and not _interpreted():
            context()
        launched[(grid,)](*given, *pairs, *sizes, **constants, **options)
        return out

    return launch


def job(form: str | number_formats.BlockFormat, config: NativeConfig, target: str, sms: int = 132,
        out: torch.dtype = torch.bfloat16) -> build.Job:
    """The kernel as it is launched on large matrices that its tiles divide, for tilelab.build."""
    if out not in OUTPUTS:
        raise ValueError(f"out is of {', '.join(str(d)[6:] for d in OUTPUTS)}; here it is {out!r:.40}.")
    form, native = _form(form), config.kernel == "native"
    constants = config.constants(form, sms, True)
    of_each = _types(form, config.kernel)
    types = dict(zip(("a", "a_scale", "b", "b_scale", "c"), (*of_each, *of_each, OUTPUTS[out])))
    if native:
        blocks = config.blocks(form)
        signature = {f"{name}_desc": f"tensordesc<{kind}{blocks[f'{name}_desc']}>" for name, kind in types.items()}
    else:
        signature = {f"{name}_ptr": f"*{kind}" for name, kind in types.items()}
    pairs = ("a_tensor_ptr", "b_tensor_ptr")
    if form.scale == "e4m3":
        signature |= dict.fromkeys(pairs, "*fp32")
    else:
        constants |= dict.fromkeys(pairs)
    signature |= dict.fromkeys(("M", "N", "row") + ("groups",) * (not native), "i32")
    aligned = tuple(name for name in signature if not name.endswith("desc"))
    return build.Job(f"ch14.blockscaled.native_kernels:{config.kernel}_kernel", signature, constants, target,
                     config.num_warps, config.num_stages, aligned, name=f"{form.name} {config}")


PRODUCT = re.compile(r"\b((?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)\.[\w.:]+)")
LOAD = re.compile(r"\bcp\.async\.bulk\.tensor\.(\d)d\.shared")


def product(ptx: str) -> tuple[str, int]:
    """The tensor core instruction that stands most often in it, in PTX's words, and how often; ("", 0) without one."""
    return next(iter(collections.Counter(PRODUCT.findall(ptx)).most_common(1)), ("", 0))


def built(targets=device.TARGETS[1:], kernels=("native", "naive")) -> list[dict]:
    """What every format becomes on those targets; runs anywhere. Rows {target, format, kernel, config, status,
    instruction, count, tma_operands, tma_scales, tcgen05_cp, smem, tmem, registers, spills, reason}.

    `count` and the rest of the counts are occurrences in the PTX; TMA loads are told apart by their dimensions, two for
    operands and four for scales. `tcgen05_cp` copies scales from shared to tensor memory. `tmem` in columns.
    """
    rows = []
    scales = {kernel: name for name, kernel in KERNELS.items()}
    jobs = {(target, form, kernel): (config := configs(form, target, scales[kernel])[0], job(form, config, target))
            for target in targets for form in FORMS for kernel in kernels}
    reports = {id(made.job): made for made in build.build([made for _, made in jobs.values()])}
    for (target, form, kernel), (config, wanted) in jobs.items():
        made = reports[id(wanted)]
        name, count = product(made.ptx)
        loads = collections.Counter(LOAD.findall(made.ptx))
        rows.append({"target": target, "format": form, "kernel": kernel, "config": str(config), "status": made.status,
                     "instruction": name, "count": count, "tma_operands": loads["2"], "tma_scales": loads["4"],
                     "tcgen05_cp": made.ptx.count("tcgen05.cp"), "smem": made.smem, "tmem": made.tmem,
                     "registers": made.registers, "spills": made.spills, "reason": refusal(made, form, config)})
    return rows
