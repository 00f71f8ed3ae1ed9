"""One block-scaled GEMM: C (M, N) = A (M, K) B (N, K)^T, its path chosen by formats and GPU.

native    tl.dot_scaled on tensor cores that know block scales           `ch14.blockscaled.native`
fp8       WGMMA with scales of 1 x 128 and 128 x 128, two-level sums      `ch14.blockscaled.fp8`
emulated  any other MX or NVFP4: both operands decoded to bf16 first      `ch14.blockscaled.emulated`
decode    bf16 tokens times MXFP4 weights, decoded in registers           `ch14.blockscaled.decode`
"""

from __future__ import annotations

import torch

from ch14.blockscaled import decode, emulated, fp8
from ch14.blockscaled import native as blockscaled_native
from ch14.mx_formats import Packed, number_formats
from tilelab import device

PATHS = ("native", "fp8", "emulated", "decode")
# Block-scaled instructions are what Triton makes of tl.dot_scaled there; for sm_121a, which has them, it does not.
NATIVE = ("sm_100a", "sm_103a", "sm_120a")
PAIR = ("fp8_1x128", "fp8_128x128")


def path(form_a: str, form_b: str, mnk: tuple[int, int, int], target: str) -> str:
    """Which of PATHS multiplies A (M, K) in `form_a` by B (N, K) in `form_b` on `target`.

    The forms are names of ch14.mx_formats.number_formats.FORMATS, or "bf16" for tokens. ValueError for formats that do not go together
    and sizes that no path takes, tilelab.device.Unsupported for a target without the hardware; one sentence each.
    """
    for name, given in (("form_a", form_a), ("form_b", form_b), ("target", target)):
        if not isinstance(given, str):
            raise ValueError(f"{name} is a name, a str; here it is a {type(given).__name__}.")
    limit = device.target_limits(target)
    if not isinstance(mnk, tuple) or len(mnk) != 3 or any(type(side) is not int or side < 1 for side in mnk):
        raise ValueError(f"mnk is three whole numbers (M, N, K), each at least 1; here it is {mnk!r:.60}.")
    m, n, k = mnk
    if form_a == "bf16":
        if form_b != "mxfp4":
            raise ValueError(f"tokens in bf16 are multiplied by weights in mxfp4; here they are in {form_b!r:.40}.")
        decode.tokens_for(m)
        _whole("K", k, decode.BLOCK)
        return "decode"
    forms = [number_formats.lookup(form) for form in (form_a, form_b)]
    if any(form.scale == "fp32" for form in forms):
        if (form_a, form_b) != PAIR:
            raise ValueError(f"A in {PAIR[0]} and B in {PAIR[1]} go together; here they are {form_a} and {form_b}.")
        _whole("K", k, 128)
        _whole("N", n, 128)
        if not limit.has_wgmma:
            raise device.Unsupported(f"fp8 with float32 block scales needs WGMMA (sm_90a); the target is {target}: "
                                     "quantise to mxfp8_e4m3 or decode both operands.")
        return "fp8"
    for name, form in zip("ab", forms):
        emulated.check_form(name, form.name)
    _whole("K", k, max(form.block[1] for form in forms))
    if not limit.has_tma:
        raise device.Unsupported(f"a block-scaled GEMM needs TMA (sm_90a or newer); the target is {target}: dequantise "
                                 "with ch14.mx_formats and use torch.mm.")
    native = target in NATIVE and form_a == form_b and form_a in blockscaled_native.FORMS
    return "native" if native and n % 8 == 0 and k % 32 == 0 else "emulated"  # rows of C and of tiles for TMA


def _whole(name: str, size: int, block: int) -> None:
    if size % block:
        raise ValueError(f"{name} must be a multiple of {block}, the side of a block; here it is {size}.")


def why(form: str, target: str, chosen: str) -> str:
    """A sentence: what `chosen` does for A and B in `form` on `target`, and why it is not another."""
    if chosen == "native":
        return f"{target} multiplies {form} in its tensor cores, scales included."
    if chosen == "fp8":
        return f"{target} multiplies fp8, and its CUDA cores add the blocks of K, scaled, in float32."
    if chosen == "decode":
        return f"{target} multiplies a few tokens by weights that are decoded to bf16 in registers."
    if target == "sm_90a":
        reason = "Hopper's tensor cores know no block scales"
    elif target not in NATIVE:
        reason = f"of tl.dot_scaled Triton makes no block-scaled instruction for {target}"
    elif form == "fp4_e8m0_16":
        reason = "tl.dot_scaled takes E8M0 scales over 32 and E4M3 over 16"
    elif form not in blockscaled_native.FORMS:
        reason = f"the native kernel takes both in one of {', '.join(blockscaled_native.FORMS)}"
    else:
        reason = "the native kernel takes an N that is a multiple of 8 and a K of 32"
    return f"{form} is emulated on {target}, decoded to bf16 and multiplied there: {reason}."


def _form(name: str, given) -> tuple[str, tuple[int, int]]:
    """Format and shape of an operand."""
    if isinstance(given, Packed):
        return given.format.name, given.shape
    for each in given if isinstance(given, tuple) else (given,):
        if isinstance(each, torch.Tensor) and each.is_nested:
            raise ValueError(f"{name} is made of dense matrices; here is a nested tensor.")
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(each, torch.Tensor) for each in given) \
            and given[0].ndim == 2:
        return dict(zip("ab", PAIR))[name], tuple(given[0].shape)
    if isinstance(given, torch.Tensor) and given.dtype == torch.bfloat16 and given.ndim == 2 and name == "a":
        return "bf16", tuple(given.shape)
    tokens = ", or a bfloat16 matrix of tokens" if name == "a" else ""
    what = type(given).__name__
    if isinstance(given, torch.Tensor):
        what = f"{tuple(given.shape)} of {str(given.dtype)[6:]}"
    raise ValueError(f"{name} is a Packed of ch14.mx_formats or a pair (float8 matrix, float32 scales){tokens}; here "
                     f"it is {what}.")


def _pair(given) -> tuple[torch.Tensor, torch.Tensor]:
    return (given.values.view(torch.float8_e4m3fn), given.scales) if isinstance(given, Packed) else given


def _found(a, b, target: str) -> tuple[str, str]:
    """The path, and the formats in words."""
    (form_a, (m, k)), (form_b, (n, inner)) = _form("a", a), _form("b", b)
    if k != inner:
        raise ValueError(f"a (M, K) and b (N, K) differ in K: a is {m} x {k} and b is {n} x {inner}.")
    return path(form_a, form_b, (m, n, k), target), " x ".join(dict.fromkeys((form_a, form_b)))


def _chosen(a, b, asked: str | None) -> str:
    if asked is not None and (not isinstance(asked, str) or asked not in PATHS):
        raise ValueError(f"the paths are {', '.join(PATHS)}; here it is {asked!r:.40}.")
    target = device.current().target or "sm_90a"  # for which the interpreter stands in
    if target not in device.TARGETS:
        raise device.Unsupported(f"block-scaled GEMMs are built for {', '.join(device.TARGETS)}; here is "
                                 f"{device.current().describe()}: dequantise with ch14.mx_formats and use torch.mm.")
    found, forms = _found(a, b, target)
    if asked in (None, found) or (asked, found) == ("emulated", "native"):
        return asked or found
    if (asked, found) == ("native", "emulated"):
        raise device.Unsupported(f"{why(forms, target, found)[:-1]}, so there is no native path.")
    raise ValueError(f"{forms} takes the path {found}; {asked} does not fit.")


def spec(a, b) -> torch.Tensor:
    """A B^T in float64, (M, N), of what the codes and scales stand for. Operands as for `prepare`."""
    found, _ = _found(a, b, "sm_90a")  # where no path is missing but the native one
    if found == "decode":
        return decode.spec(a, b.values, b.scales)
    if found == "fp8":
        (a, scale_a), (b, scale_b) = _pair(a), _pair(b)
        return fp8.spec(a, b, scale_a, scale_b)
    return emulated.spec(a, b)


def prepare(a, b, *, bias=None, activation=None, out=None, path: str | None = None):
    """A function that computes C (M, N) = A (M, K) B (N, K)^T on torch's current stream and returns it.

    a and b are each a ch14.mx_formats.Packed; or a is bfloat16, up to 64 tokens, and b an MXFP4 Packed; or both are
    pairs (float8_e4m3fn, float32 scales), of 1 x 128 for a (or a Packed) and of 128 x 128 for b. The native path wants
    tiled scales, the decode path scales by rows. `bias` (N,) bfloat16 and `activation` "silu" or "gelu" are of the fp8
    path, whose `out` may also be a Packed. C is bfloat16 where `out` is not given. `path` insists on one of PATHS.
    Raises ValueError for what does not fit together and tilelab.device.Unsupported for hardware that cannot run it.
    """
    chosen = _chosen(a, b, path)
    if chosen == "fp8":
        (a, scale_a), (b, scale_b) = _pair(a), _pair(b)
        return fp8.prepare(a, b, scale_a, scale_b, bias=bias, activation=activation, out=out)
    if bias is not None or activation is not None:
        raise ValueError(f"bias and activation are fused on the fp8 path alone; this is the {chosen} one: apply them "
                         "to what it returns.")
    if chosen == "decode":
        if b.tiled:
            raise ValueError("the decode path reads scales row by row; those of b lie in tiles: quantise with "
                             "tiled=False.")
        return decode.prepare(a, b.values, b.scales, out=out)
    return (blockscaled_native if chosen == "native" else emulated).prepare(a, b, out=out)


def matmul(a, b, **options):
    """C (M, N) = A (M, K) B (N, K)^T. Arguments and errors as of `prepare`."""
    return prepare(a, b, **options)()
