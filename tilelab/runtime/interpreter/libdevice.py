"""What do the functions of CUDA's libdevice return?

They are computed in float64 with numpy, torch and Python, and rounded once, so they may differ from a GPU's result in
the last bits. `lookup` finds a function by its symbol, such as `__nv_tanhf`.
"""

import functools
import math

import numpy as np
import torch

from tilelab.runtime.interpreter import formats


def high_product(x, y):
    """Return the upper half of the products of two integers."""
    if x.itemsize < 8:
        return (x.astype(f"{x.dtype.kind}8") * y >> 8 * x.itemsize).astype(x.dtype)
    found = [int(a) * int(b) >> 64 for a, b in np.broadcast(x, y)]
    return np.array(found, x.dtype).reshape(np.broadcast_shapes(x.shape, y.shape))


def _by_torch(function):
    return lambda *each: function(*(torch.tensor(x, dtype=torch.float64) for x in each)).numpy()


def _by_python(function):
    def call(*each):
        try:
            return function(*map(float, each))
        except (ValueError, OverflowError):
            return math.inf if function is math.gamma and each[0] > 0 else math.nan

    return lambda *each: np.frompyfunc(call, len(each), 1)(*each).astype(np.float64)


def _norm(*each):
    return np.sqrt(sum(x * x for x in each))


def _round_away(x):
    return np.copysign(np.floor(np.abs(x) + np.where(np.abs(x) < 0.5 - 2**-55, 0, 0.5)), x)


def _logb(x):
    return np.where(np.isfinite(x) & (x != 0), np.frexp(x)[1] - 1.0, np.where(x == 0, -np.inf, np.abs(x)))


FLOATS = {  # of float64; the name of the variant for float32 ends with f
    **{name: getattr(np, name) for name in (
        "sin cos tan sinh cosh tanh exp exp2 expm1 log log2 log10 log1p sqrt cbrt floor ceil trunc rint fmod copysign "
        "hypot ldexp fabs"
    ).split()},
    **{name: getattr(np, name.replace("a", "arc", 1)) for name in "asin acos atan asinh acosh atanh atan2".split()},
    **{name: _by_torch(getattr(torch.special, function)) for name, function in {
        "erf": "erf", "erfc": "erfc", "erfinv": "erfinv", "erfcx": "erfcx", "lgamma": "gammaln", "normcdf": "ndtr",
        "normcdfinv": "ndtri", "cyl_bessel_i0": "i0", "cyl_bessel_i1": "i1", "j0": "bessel_j0", "j1": "bessel_j1",
        "y0": "bessel_y0", "y1": "bessel_y1"}.items()},
    "erfcinv": _by_torch(lambda x: -torch.special.ndtri(x / 2) / math.sqrt(2)),
    "tgamma": _by_python(math.gamma),
    "remainder": _by_python(math.remainder),
    "pow": np.power,
    "powi": np.power,
    "exp10": lambda x: np.power(10.0, x),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "sinpi": lambda x: np.sin(np.pi * np.fmod(x, 2)),
    "cospi": lambda x: np.cos(np.pi * np.fmod(x, 2)),
    "nearbyint": np.rint,
    "llrint": np.rint,
    "round": _round_away,
    "llround": _round_away,
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "norm3d": _norm,
    "norm4d": _norm,
    "rnorm3d": lambda *each: 1 / _norm(*each),
    "rnorm4d": lambda *each: 1 / _norm(*each),
    "fdim": lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, np.maximum(x - y, 0)),
    "scalbn": np.ldexp,
    "logb": _logb,
    "ilogb": lambda x: np.where(np.isfinite(x) & (x != 0), _logb(x), np.where(np.isinf(x), 2**31 - 1, -(2**31))),
    "fdivide": np.divide,
}  # fmt: skip


def _signed(function):
    """Compute with integers of 64 bits."""
    return lambda *each: function(*(x.astype(np.int64) for x in each))


def _bits(x):
    return np.unpackbits(x[..., None].view(np.uint8), -1, bitorder="little")  # the lowest bit first


def _byte_perm(x, y, selector):
    pool = x.astype(np.uint32).astype(np.uint64) | y.astype(np.uint32).astype(np.uint64) << 32
    parts = (((pool >> (8 * (selector.astype(np.uint64) >> 4 * at & 7))) & 255) << 8 * at for at in range(4))
    return sum(parts).astype(np.uint32).view(np.int32)


INTEGERS = {  # with those that look at the bits of a number
    "popc": lambda x: _bits(x).sum(-1),
    "clz": lambda x: np.where(x == 0, 8 * x.itemsize, _bits(x)[..., ::-1].argmax(-1)),
    "ffs": lambda x: np.where(x == 0, 0, _bits(x).argmax(-1) + 1),
    "brev": lambda x: np.packbits(_bits(x)[..., ::-1], -1, bitorder="little").view(x.dtype)[..., 0],
    "byte_perm": _byte_perm,
    "mulhi": high_product,
    "mul64hi": high_product,
    "mul24": lambda x, y: (x << 8 >> 8) * (y << 8 >> 8),
    "sad": _signed(lambda x, y, z: np.abs(x - y) + z),
    "hadd": _signed(lambda x, y: x + y >> 1),
    "rhadd": _signed(lambda x, y: x + y + 1 >> 1),
    "abs": np.abs,
    "llabs": np.abs,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "finite": np.isfinite,
    "isfinite": np.isfinite,
    "signbit": np.signbit,
    "nextafter": np.nextafter,
    "saturate": lambda x: np.fmin(np.fmax(x, 0), 1),
    "double2hiint": lambda x: (x.view(np.int64) >> 32).astype(np.int32),
    "double2loint": lambda x: x.view(np.int64).astype(np.int32),
    "hiloint2double": lambda high, low: (high.astype(np.int64) << 32 | low.view(np.uint32)).view(np.float64),
}
VIEWS = {"int": np.int32, "uint": np.uint32, "float": np.float32, "longlong": np.int64, "double": np.float64}


def _rounded_to_whole(mode):
    return {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}[mode]


def _towards(mode, exact, inexact_above, kind):
    """Round numbers of a wider type to `kind` in a direction; `inexact_above` is the sign of what they lack."""
    near = exact.astype(kind)
    above = np.sign(near.astype(exact.dtype) - exact)
    above = np.where(above == 0, -inexact_above, above)
    down = (mode == "rd") | ((mode == "rz") & (exact > 0))
    wrong = (mode != "rn") & np.where(down, above > 0, above < 0)
    return np.where(wrong, np.nextafter(near, np.where(down, kind(-np.inf), kind(np.inf))), near)


def _directed(operation, mode):
    """Return add, sub, mul, div, sqrt, rcp, rsqrt or fma of float32 that rounds in a direction."""

    def compute(*each):
        each = [x.astype(np.float64) for x in each]
        if operation == "sub":
            each[1] = -each[1]
        if operation in ("add", "sub", "fma"):
            first, second = (each[0] * each[1], each[2]) if operation == "fma" else each
            total = first + second
            back = total - first
            return _towards(mode, total, np.sign((first - (total - back)) + (second - back)), np.float32)
        simple = {"mul": np.multiply, "div": np.divide, "sqrt": np.sqrt, "rcp": np.reciprocal}
        found = simple[operation](*each) if operation in simple else 1 / np.sqrt(each[0])
        return _towards(mode, found, 0, np.float32)

    return compute


@functools.cache
def lookup(symbol):
    """Return the function of arrays that a symbol of libdevice names, or None."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    stem, _, mode = name.rpartition("_")
    if name in ("fma", "fmaf", "fma_rn", "fmaf_rn"):
        return formats.fused
    if "_as_" in name:
        source, _, kind = name.partition("_as_")
        return lambda x: x.view(VIEWS[kind])
    if mode in ("rn", "rz", "rd", "ru"):
        source, two, kind = stem.partition("2")
        if two and kind in ("float", "double"):
            kind = {"float": np.float32, "double": np.float64}[kind]
            wide = np.float64 if source in ("int", "uint", "float", "double") else np.longdouble
            return lambda x: _towards(mode, x.astype(wide), 0, kind)
        if two:
            dtype = {"int": "int32", "uint": "uint32", "ll": "int64", "ull": "uint64"}[kind]
            return lambda x: formats.to_integer(_rounded_to_whole(mode)(x), getattr(formats.tl, dtype))
        if stem.startswith("f") and stem != "fma":
            return _directed("fma" if stem == "fmaf" else stem[1:], mode)
        arithmetic = {"dadd": np.add, "dsub": np.subtract, "dmul": np.multiply, "ddiv": np.divide}
        return {**arithmetic, "dsqrt": np.sqrt, "drcp": np.reciprocal}.get(stem) if mode == "rn" else None
    for each in (
        name,
        name.removesuffix("f"),
        name.removesuffix("d"),
        name.removesuffix("ll"),
        name.removeprefix("u"),
    ):
        if each in INTEGERS:
            return INTEGERS[each]
        if each in FLOATS:
            function = FLOATS[each]
            return lambda *given: function(
                *(x.astype(np.float64) if x.dtype.kind == "f" else x for x in given)
            )
    return None
