"""Multiply block-scaled matrices, C (M, N) = A (M, K) B (K, N), by the path that suits the formats and the GPU.

native    tl.dot_scaled on tensor cores that know block scales           `ch14.blockscaled.native`
fp8       WGMMA with scales of 1 x 128 and 128 x 128, two-level sums      `ch14.fp8_gemm`
emulated  any other MX or NVFP4: both operands are decoded to bf16 first  `ch14.blockscaled.emulated`
decode    bf16 tokens times MXFP4 weights, decoded in registers           `ch14.fp4_decode`

`PATHS` says which formats and targets each path takes. `ch14.fp8_gemm` and `ch14.fp4_decode` are topics of their own.
The configurations and checks of the other paths are in emulated.py and native.py, and the native kernels in
native_kernels.py (the emulated path takes other chapters').
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import torch

from ch14 import fp4_decode, fp8_gemm
from ch14.blockscaled import emulated, native, operator
from ch14.fp4_decode import DecodeConfig
from ch14.fp8_gemm import Fp8Config
from ch14.mx_formats import Packed, Transposed, number_formats
from tilelab.runtime import build, device, operators
from tilelab.runtime.operands import Launch

__all__ = [
    "spec",
    "matmul",
    "prepare",
    "configs",
    "job",
    "choose_path",
    "explain_path",
    "PATHS",
    "NATIVE",
    "PAIR",
]

Operand: TypeAlias = Packed | Transposed | torch.Tensor | tuple[torch.Tensor, torch.Tensor]
PAIR = ("fp8_1x128", "fp8_128x128")


@dataclass(frozen=True)
class Path:
    """Hold one way to multiply: its module, the formats of A and B that it takes, and the targets that have it."""

    module: ModuleType
    forms: Collection[tuple[str, str]]
    targets: Collection[str]


# Targets with block-scaled instructions to which Triton compiles tl.dot_scaled. For sm_121a it does not use them.
NATIVE = ("sm_100a", "sm_103a", "sm_120a")
WITH_TMA = tuple(target for target in device.TARGETS if device.target_limits(target).has_tma)
# The paths by name. The first one that takes the formats and has the target is chosen.
PATHS = {
    "native": Path(native, {(form, form) for form in native.FORMS}, NATIVE),
    "fp8": Path(fp8_gemm, {PAIR}, ("sm_90a",)),
    "emulated": Path(emulated, {(a, b) for a in emulated.FORMS for b in emulated.FORMS}, WITH_TMA),
    "decode": Path(fp4_decode, {("bf16", "mxfp4")}, device.TARGETS),
}


def choose_path(form_a: str, form_b: str, mnk: tuple[int, int, int], target: str) -> str:
    """Return which of PATHS multiplies A (M, K) in `form_a` by B (K, N) in `form_b` on `target`.

    The forms are names of ch14.mx_formats.number_formats.FORMS, or "bf16" for tokens. Raises ValueError for formats
    and sizes that no path takes, and Unsupported for a target without the hardware.
    """
    device.target_limits(target)
    found = [name for name, path in PATHS.items() if (form_a, form_b) in path.forms]
    if not found:
        _refuse_formats(form_a, form_b)
    m, n, k = mnk
    blocks = [number_formats.lookup(form).block[1] for form in (form_a, form_b) if form != "bf16"]
    _require_multiple("K", k, max(blocks), "the side of a block")
    if "decode" in found:
        fp4_decode.padded_tokens(max(m, 1))
    if "fp8" in found:
        _require_multiple("N", n, fp8_gemm.N_MULTIPLE, "because TMA stores rows of whole 16 bytes")
    if "native" in found and (n % 8 or k % 32):  # TMA moves whole 16 bytes
        found.remove("native")
    for name in found:
        if target in PATHS[name].targets:
            return name
    if found == ["fp8"]:
        raise device.Unsupported(
            f"fp8 with float32 block scales needs WGMMA (sm_90a); the target is {target}: "
            "quantise to mxfp8_e4m3 or decode both operands."
        )
    raise device.Unsupported(
        f"a block-scaled GEMM needs TMA (sm_90a or newer); the target is {target}: {emulated.INSTEAD}."
    )


def _refuse_formats(form_a: str, form_b: str) -> None:
    """Raise ValueError for two formats that no path takes."""
    if form_a == "bf16":
        raise ValueError(
            f"a is in bfloat16, which goes with b in mxfp4 only, and b is in {form_b!r:.40}: quantise "
            "a with ch14.mx_formats.quantise."
        )
    forms = [number_formats.lookup(form) for form in (form_a, form_b)]
    if any(form.scale == "fp32" for form in forms):
        raise ValueError(f"A in {PAIR[0]} goes with B in {PAIR[1]}; they are in {form_a} and {form_b}.")
    for name, form in zip("ab", forms):
        emulated.require_form(name, form.name)


def _require_multiple(name: str, size: int, multiple: int, reason: str) -> None:
    if size < 1 or size % multiple:
        raise ValueError(f"{name} is {size}; it must be a multiple of {multiple}, {reason}.")


def explain_path(form: str, target: str, path: str) -> str:
    """Return a sentence on what `path` does with A and B in `form` on `target`, and why it is not another."""
    products = {
        "native": f"{form} in its tensor cores, scales included.",
        "fp8": "fp8, and its CUDA cores add the scaled blocks of K in float32.",
        "decode": "a few tokens by weights that are decoded to bf16 in registers.",
    }
    if path in products:
        return f"{target} multiplies {products[path]}"
    if target == "sm_90a":
        reason = "Hopper's tensor cores know no block scales"
    elif target not in NATIVE:
        reason = f"Triton compiles tl.dot_scaled to no block-scaled instruction for {target}"
    elif form == "fp4_e8m0_16":
        reason = "tl.dot_scaled takes E8M0 scales over 32 and E4M3 over 16"
    elif form not in native.FORMS:
        reason = f"the native kernel takes both in one of {', '.join(native.FORMS)}"
    else:
        reason = "the native kernel takes an N that is a multiple of 8 and a K of 32"
    return f"{form} is emulated on {target}, decoded to bf16 and multiplied there: {reason}."


def _form_and_shape(name: str, given) -> tuple[str, tuple[int, int]]:
    if isinstance(given, Packed) and name == "a":
        return given.format.name, given.shape
    if isinstance(given, Transposed) and name == "b":
        return given.T.format.name, given.shape
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(each, torch.Tensor) for each in given):
        return dict(zip("ab", PAIR))[name], tuple(given[0].shape)
    if isinstance(given, torch.Tensor) and given.dtype == torch.bfloat16 and given.ndim == 2 and name == "a":
        return "bf16", tuple(given.shape)
    kinds = "a Packed, a bfloat16 matrix of tokens" if name == "a" else "the transpose (.T) of a Packed"
    raise ValueError(
        f"{name} is a {type(given).__name__}; it must be {kinds} or a pair (float8 matrix, scales)."
    )


def _list_tensors(path: str, a, b) -> tuple:
    """Return the first arguments of a path's functions: a, b, scale_a and scale_b for fp8."""
    if path == "decode":
        return a, b.T.values, b.T.scales
    if path != "fp8":
        return a, b
    a, scale_a = (a.values.view(torch.float8_e4m3fn), a.scales) if isinstance(a, Packed) else a
    return a, b[0], scale_a, b[1]


@functools.lru_cache(4096)
def _choose(
    form_a: str, shape_a: tuple[int, int], form_b: str, shape_b: tuple[int, int], target: str, asked: str
) -> str:
    """Return the path for two operands; raise ValueError or Unsupported where they do not take the one that is asked
    for."""
    if asked not in ("best", *PATHS):
        raise ValueError(f"unknown path {asked!r:.40}; choose best, {', '.join(PATHS)}.")
    (m, k), (inner, n) = shape_a, shape_b
    if target not in device.TARGETS:
        raise device.Unsupported(
            f"block-scaled GEMMs are built for {', '.join(device.TARGETS)}; here is "
            f"{device.current().describe()}: {emulated.INSTEAD}."
        )
    if k != inner:
        raise ValueError(f"a (M, K) and b (K, N) differ in K: a is {m} x {k} and b is {inner} x {n}.")
    path = choose_path(form_a, form_b, (m, n, k), target)
    if asked in ("best", path) or (asked, path) == ("emulated", "native"):
        return path if asked == "best" else asked
    forms = " x ".join(dict.fromkeys((form_a, form_b)))
    if (asked, path) == ("native", "emulated"):
        raise device.Unsupported(f"{explain_path(forms, target, path)[:-1]}, so there is no native path.")
    raise ValueError(f"{forms} takes the path {path}; {asked} does not fit.")


def spec(
    a: Operand,  # (M, K)
    b: Operand,  # (K, N)
) -> torch.Tensor:  # (M, N)
    """Return A @ B in float64 of the numbers that codes and scales stand for. Operands as for `matmul`."""
    # A target that has all paths but the native one.
    path = _choose(*_form_and_shape("a", a), *_form_and_shape("b", b), "sm_90a", "best")
    return PATHS[path].module.spec(*_list_tensors(path, a, b))


def prepare(
    a: Operand,  # (M, K)
    b: Operand,  # (K, N)
    *,
    bias: torch.Tensor | None = None,  # (N,)
    activation: str | None = None,
    out: torch.Tensor | Packed | None = None,  # (M, N)
    config: Any = "best",
    path: str = "best",
) -> Launch:
    """Check the arguments of `matmul` and return a Launch that computes it on torch's current stream."""
    path, fused = _choose_here(a, b, bias, activation, path)
    return PATHS[path].module.prepare(*_list_tensors(path, a, b), **fused, out=out, config=config)


def _choose_here(a, b, bias, activation, asked: str) -> tuple[str, dict]:
    """Return the path on this machine and its arguments for the epilogue; ValueError for what the path cannot take."""
    target = device.current().target or "sm_90a"  # without a GPU the interpreter stands in for it
    path = _choose(*_form_and_shape("a", a), *_form_and_shape("b", b), target, asked)
    if path == "fp8":
        return path, {"bias": bias, "activation": activation}
    if bias is not None or activation is not None:
        raise ValueError(
            f"bias and activation are fused on the fp8 path only, and this is the {path} path: apply them "
            "to its result."
        )
    if path == "decode" and b.T.tiled:
        raise ValueError(
            "the decode path reads scales row by row, and those of b are tiled: quantise with tiled=False."
        )
    return path, {}


def _run(a, b, bias, activation, out, config, path):
    """Return the product for operands that nobody traces or differentiates."""
    path, fused = _choose_here(a, b, bias, activation, path)
    return PATHS[path].module.run(*_list_tensors(path, a, b), **fused, out=out, config=config)


@operator.register
def block_scaled_mm_operator(
    a, scale_a, pair_a, form_a, tiled_a, b, scale_b, pair_b, form_b, tiled_b, config="best", path="best"
):
    left = operator.pack(a, scale_a, pair_a, form_a, tiled_a)
    weight = operator.pack(b, scale_b, pair_b, form_b, tiled_b)
    return _run(left, weight.T, None, None, None, config, path)


def _list_memory(given) -> tuple:
    """Return the tensors of an operand."""
    packed = given.T if isinstance(given, Transposed) else given
    if isinstance(packed, Packed):
        return packed.values, packed.scales, packed.pair
    return given if isinstance(given, tuple) else (given,)


def _call_operator(a, b, bias, activation, config, path):
    """Return the product by the operator of torch.library for these kinds of operands."""
    if isinstance(a, Packed) and isinstance(b, Transposed):
        if bias is not None or activation is not None:
            raise ValueError("bias and activation are fused on the fp8 path only: apply them to the result.")
        parts = [(*_list_memory(each), each.format.name, each.tiled) for each in (a, b.T)]
        return block_scaled_mm_operator(*parts[0], *parts[1], config, path)
    if isinstance(a, torch.Tensor) and isinstance(b, Transposed):
        return fp4_decode.decode_operator(*_list_tensors("decode", a, b), config)
    return fp8_gemm.fp8_operator(*_list_tensors("fp8", a, b), bias, activation, config)


def matmul(
    a: Operand,  # (M, K)
    b: Operand,  # (K, N)
    *,
    bias: torch.Tensor | None = None,  # (N,)
    activation: str | None = None,
    out: torch.Tensor | Packed | None = None,  # (M, N)
    config: Any = "best",
    path: str = "best",
) -> torch.Tensor | Packed:  # (M, N)
    """Return C (M, N) = A (M, K) B (K, N), in bfloat16 where `out` is not given.

    a is a Packed of ch14.mx_formats and b the transpose of one (`weight.T`), as torch.mm takes a weight. Or a is
    bfloat16, up to 64 tokens, and b the transpose of an MXFP4 Packed. Or both are pairs (float8_e4m3fn, float32
    scales) as for `fp8_gemm.fp8`, where a may be a Packed too. The native path wants tiled scales, the decode path
    scales in rows. `bias` (N,) bfloat16, `activation` "silu" or "gelu", and a Packed `out` belong to the fp8 path.
    `config` is a configuration of the path, "best" or a name of its `configs`. `path` is one of PATHS or "best". Under
    torch.compile and where autograd records, this is torch.ops.tiles.fp8, decode or block_scaled_mm: `config` is a
    name, `out` no Packed, and there is no backward pass. Raises ValueError for arguments that do not fit and
    tilelab.runtime.device.Unsupported for hardware that cannot run it.
    """
    if operators.is_traced(*_list_memory(a), *_list_memory(b), bias):
        return operators.store(_call_operator(a, b, bias, activation, config, path), out)
    return _run(a, b, bias, activation, out, config, path)


def configs() -> dict[str, Any]:
    """Return the configurations of all paths by name."""
    naive = native.configs(kernel="naive")
    return functools.reduce(lambda named, path: named | path.module.configs(), PATHS.values(), naive)


def job(config: Any, target: str, *args: Any, **options: Any) -> build.Job:
    """Return how a configuration of any path is compiled, for tilelab.runtime.build. Options as for its own `job`."""
    owners = {Fp8Config: fp8_gemm, native.NativeConfig: native, DecodeConfig: fp4_decode}
    return owners.get(type(config), emulated).job(config, target, *args, **options)
