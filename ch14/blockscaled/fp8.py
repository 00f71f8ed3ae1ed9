"""fp8 GEMM with block scales on Hopper's tensor cores: C (M, N) = A B^T, a scale for each 1 x 128 elements of
A and each 128 x 128 of B, in two-level accumulation; few tiles share their K steps among CTAs, and the epilogue adds a
bias, takes SiLU or GELU and quantises to MXFP8.

The kernel is in blockscaled_fp8.cu. Source: DeepSeek-V3, section 3.3.2 (arXiv 2412.19437); PTX ISA, "wgmma".
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import pathlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ch14 import mx_formats
from ch14.descriptors import check_dense, span
from tilelab import build, cuda, device
from tilelab.tensor_map import tensor_map

SOURCE = pathlib.Path(__file__).with_name("fp8.cu")
BLOCK = 128  # columns of K that share a scale, rows of B too; as wide as a row of the widest swizzle
ACTIVATIONS = (None, "silu", "gelu")
MOST_SPLITS = 64
INSTEAD = "compile it with --target sm_90a, or dequantise and multiply in bf16 (the path `emulated`)"


@dataclass(frozen=True)
class Fp8Config:
    """Tiles of 64 x `consumers` rows and `block_n` columns: as many warp groups multiply, into `scratch` accumulators
    by turns, from a ring of `stages` of 128 columns of K; `splits` CTAs share the K steps of a tile, and the raster
    keeps `group` rows of tiles together. `early` lets the kernel start while the one before it drains."""

    consumers: int = 2
    scratch: int = 2
    stages: int = 5
    block_n: int = 128
    splits: int = 1
    group: int = 8
    early: bool = False

    def __post_init__(self):
        for name, least, most in (("consumers", 1, 3), ("scratch", 1, 2), ("stages", 3, 16), ("splits", 1, MOST_SPLITS),
                                  ("group", 1, 4096)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} is a whole number from {least} to {most:,}; here it is {value!r:.40}.")
        if type(self.block_n) is not int or self.block_n not in (64, 128):
            raise ValueError(f"block_n is 64 or 128; here it is {self.block_n!r:.40}.")
        if type(self.early) is not bool:
            raise ValueError(f"early is True or False; here it is {self.early!r:.40}.")
        if self.consumers == 3 and self.scratch == 2:
            raise ValueError("three consumers have registers for one scratch each, not for two.")
        if self.smem_bytes > 232448:
            raise ValueError(f"{self} needs {self.smem_bytes:,} B of shared memory a block; Hopper has 232,448: take "
                             "fewer stages.")

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def smem_bytes(self) -> int:
        """The ring, two parts of C a consumer, scales and barriers of each stage, a word a consumer."""
        stage = (self.block_m + self.block_n) * BLOCK + 4 * self.block_m + 16
        return self.stages * stage + self.consumers * (2 * 8192 + 4)

    def tiles(self, m: int, n: int) -> int:
        """How many tiles cover C."""
        return math.ceil(m / self.block_m) * math.ceil(n / self.block_n)

    def grid(self, m: int, n: int, sms: int) -> int:
        """CTAs of a launch: as many as run at one time, or fewer."""
        return min(self.tiles(m, n) * self.splits, sms)

    def constants(self, bias: bool = False, activation: str | None = None, mx: bool = False) -> dict:
        """What blockscaled_fp8.cu is compiled with; ValueError for an epilogue that it does not have."""
        _check_activation(activation)
        if mx and self.block_n != 128:
            raise ValueError(f"MXFP8 leaves in tiles of 128 columns; the configuration {self} has {self.block_n}.")
        return {"BLOCK_N": self.block_n, "CONSUMERS": self.consumers, "SCRATCH": self.scratch, "STAGES": self.stages,
                "SPLIT": int(self.splits > 1), "GROUP": self.group, "BIAS": int(bias),
                "ACTIVATION": ACTIVATIONS.index(activation), "MX": int(mx)}

    def __str__(self):
        words = [f"{self.block_m} × {self.block_n}", f"{self.consumers} consumer{'s' * (self.consumers > 1)}",
                 f"{self.scratch} scratch", f"{self.stages} stages"]
        words += [f"{self.splits} splits"] * (self.splits > 1) + [f"group {self.group}"] + ["early"] * self.early
        return ", ".join(words)


TALL, SQUARE = Fp8Config(3, 1, 4), Fp8Config()
LOW, THIN = Fp8Config(2, 2, 7, 64), Fp8Config(1, 2, 11, 64)


def configs() -> dict[str, Fp8Config]:
    """Configurations by name: `best` takes `square` for many rows, `low` up to 128 and `thin` up to 64; `tall` is there
    to be held against them."""
    return {"square": SQUARE, "tall": TALL, "low": LOW, "thin": THIN}


def best(m: int, n: int, k: int, sms: int, mx: bool = False) -> Fp8Config:
    """The configuration for a shape: of few rows a tile that holds them all, narrow, so that there are many tiles;
    where they are few and long, `splits` that fill the SMs. What is over soon starts early. `mx` wants 128 columns."""
    if m > 128:
        return SQUARE
    config, steps = THIN if m <= 64 else LOW, k // BLOCK
    config = dataclasses.replace(config, block_n=128, stages=5) if mx else config
    splits = max(1, min(sms // config.tiles(m, n), steps // 32, MOST_SPLITS))
    return dataclasses.replace(config, splits=splits, early=steps <= 32)


def spec(a, b, scale_a, scale_b, bias=None, activation=None):
    """The product in float64. Arguments as of `prepare`."""
    blocks = a.shape[1] // BLOCK
    left = a.double().unflatten(1, (blocks, BLOCK)) * scale_a.double()[:, :, None]
    right = b.double().unflatten(1, (blocks, BLOCK)) * scale_b.double().repeat_interleave(BLOCK, 0)[:, :, None]
    product = left.flatten(1) @ right.flatten(1).T
    product = product if bias is None else product + bias.double()
    return product if activation is None else getattr(F, activation)(product)


def _check_activation(activation) -> None:
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        raise ValueError(f"the activations are None, silu and gelu; here it is {activation!r:.40}.")


def _check_operands(a, b, scale_a, scale_b, bias) -> None:
    for name, given, dtype in (("a", a, torch.float8_e4m3fn), ("b", b, torch.float8_e4m3fn),
                               ("scale_a", scale_a, torch.float32), ("scale_b", scale_b, torch.float32),
                               ("bias", bias, torch.bfloat16)):
        if given is None and name == "bias":
            continue
        check_dense(name, given, "fp8")
        if given.dtype != dtype or given.ndim != (1 if name == "bias" else 2) or not given.numel():
            raise ValueError(f"{name} must be a {'vector' if name == 'bias' else 'matrix'} of {str(dtype)[6:]}, not "
                             f"empty; it is {tuple(given.shape)} of {str(given.dtype)[6:]}.")
        if given.device != a.device:
            raise ValueError(f"all tensors must be on one device; {name} is on {given.device}, a on {a.device}.")
        if name != "scale_a" and not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {given.stride()}.")
        if name in ("a", "b", "bias") and given.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes; it starts {given.data_ptr() % 16} bytes "
                             "past one: copy it first.")
    (m, k), (n, inner) = a.shape, b.shape
    if inner != k:
        raise ValueError(f"a (M, K) and b (N, K) differ in K: a is {m} x {k} and b is {n} x {inner}.")
    if k % BLOCK or n % BLOCK or max(m, n, k) > 2**30:
        raise ValueError(f"K and N are multiples of {BLOCK}, the extent of a scale, and all at most 2^30; M, N and K "
                         f"are {m}, {n} and {k}: pad with zeros.")
    for name, given, shape in (("scale_a", scale_a, (m, k // BLOCK)), ("scale_b", scale_b, (n // BLOCK, k // BLOCK)),
                               ("bias", bias, (n,))):
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"{name} must be {' x '.join(map(str, shape))}; it is "
                             f"{' x '.join(map(str, given.shape))}.")
    if any(size > 1 and stride < 1 for size, stride in zip(scale_a.shape, scale_a.stride())):
        raise ValueError(f"scale_a must not repeat elements; its strides are {scale_a.stride()}.")


def _check_out(out, m: int, n: int, **given) -> None:
    packed = isinstance(out, mx_formats.Packed)
    if packed and (out.format.name != "mxfp8_e4m3" or out.tiled or out.shape != (m, n)):
        raise ValueError(f"a packed out is {m} x {n} in mxfp8_e4m3 with rows of scales; it is {out.shape[0]} x "
                         f"{out.shape[1]} in {out.format.name}{', tiled' * out.tiled}.")
    if not packed:
        check_dense("out", out, "fp8")
        if tuple(out.shape) != (m, n) or out.dtype != torch.bfloat16 or not out.is_contiguous():
            raise ValueError(f"out must be a contiguous bfloat16 matrix {m} x {n}, or a Packed of mxfp8_e4m3; it is "
                             f"{tuple(out.shape)} of {str(out.dtype)[6:]}.")
    for name, tensor in (("out", out.values), ("the scales of out", out.scales)) if packed else (("out", out),):
        if tensor.device != given["a"].device:
            raise ValueError(f"{name} must be on {given['a'].device}; here on {tensor.device}.")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes; here {tensor.data_ptr() % 16} past one.")
        begin, end = span(tensor)
        for other, read in given.items():  # tiles are stored while others are still read
            if read is not None and begin < span(read)[1] and span(read)[0] < end:
                raise ValueError(f"{name} lies in the memory that {other} spans: give it memory of its own.")
        given |= {name: tensor}  # a packed out is two tensors


def _chosen(config, m: int, n: int, k: int, sms: int, mx: bool) -> Fp8Config:
    if isinstance(config, str) and config in configs():
        config = configs()[config]
    elif isinstance(config, str) and config == "best":
        config = best(m, n, k, sms, mx)
    if not isinstance(config, Fp8Config):
        raise ValueError(f"config is an Fp8Config, best or one of {', '.join(configs())}; here it is {config!r:.60}.")
    return config


def prepare(a, b, scale_a, scale_b, *, bias=None, activation=None, out=None, config="best"):
    """A function that computes `fp8` on torch's current stream and returns out; checks and work space are made here.

    Arguments and errors as there. One launch in flight at a time where K is split: launches share the work space.
    """
    _check_operands(a, b, scale_a, scale_b, bias)
    _check_activation(activation)
    (m, k), n = a.shape, b.shape[0]
    if out is not None:
        _check_out(out, m, n, a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    device.require("has_wgmma", "the fp8 kernel", INSTEAD)
    if not a.is_cuda:
        raise ValueError(f"the tensors must be on the GPU; they are on {a.device}.")
    out = torch.empty(m, n, dtype=torch.bfloat16, device=a.device) if out is None else out
    packed, sms = isinstance(out, mx_formats.Packed), device.current().sms
    config = _chosen(config, m, n, k, sms, packed)
    constants = config.constants(bias is not None, activation, packed)
    tiles = config.tiles(m, n) if config.splits > 1 else 0
    rows = min(config.block_m, -(-m // 8) * 8)  # of A a load: what lies past the end costs the copy engine time
    parts = torch.empty(max(tiles * config.splits * config.block_m * config.block_n, 4), device=a.device)
    arrivals = torch.zeros(max(tiles * config.consumers, 1), dtype=torch.int32, device=a.device)
    # A tensor map wants rows of whole 16 bytes: scales that lie otherwise are copied first, at each launch.
    pitch = scale_a.stride(1)
    ready = scale_a.stride(0) == 1 and pitch >= m and pitch % 4 == 0 and scale_a.data_ptr() % 16 == 0
    scales = scale_a.T if ready else torch.empty(k // BLOCK, -(-m // 4) * 4, device=a.device)[:, :m]
    maps = (tensor_map(a.view(torch.uint8), (rows, BLOCK), swizzle="128B"),
            tensor_map(b.view(torch.uint8), (config.block_n, BLOCK), swizzle="128B"),
            tensor_map(scales, (1, rows)),
            tensor_map(out.values, (64, 128), swizzle="128B") if packed else tensor_map(out, (64, 64), swizzle="128B"))
    kernel = cuda.kernel(SOURCE, "fp8_blocks", tuple(f"-D{name}={value}" for name, value in constants.items()))
    args = (*maps, scale_b, scale_b if bias is None else bias, out.scales if packed else scale_b, parts,
            arrivals, *map(ctypes.c_int, (m, n, k, config.splits, rows)))
    launch = cuda.prepare_launch(kernel, config.grid(m, n, sms), config.threads, args, config.smem_bytes,
                                 early=config.early)

    def fp8_again(kept_alive=(a, b, out)):
        if not ready:
            scales.copy_(scale_a.T)
        launch()
        return out

    fp8_again.out, fp8_again.config = out, config
    return fp8_again


def fp8(a, b, scale_a, scale_b, *, bias=None, activation=None, out=None, config="best"):
    """out = activation(C + bias), C (M, N) = sum over blocks of 128 along K of scale_a scale_b (A B^T).

    a (M, K), b (N, K): float8_e4m3fn, contiguous, M anything, N and K multiples of 128. scale_a (M, K / 128) float32:
    column by column, columns a multiple of 16 bytes apart, as torch's scaled_mm wants it; what lies otherwise is copied
    first. scale_b (N / 128, K / 128) float32, contiguous. bias (N,) bfloat16. activation: None, "silu" or "gelu"
    (exact). out: bfloat16 (M, N), or an mx_formats.Packed of that shape in mxfp8_e4m3: then what would be stored is
    quantised, bit for bit as mx_formats.quantise does. config: an Fp8Config, "best" or a name of `configs`. The same
    launch gives the same bits. ValueError
    for what it cannot take, tilelab.device.Unsupported where there is no WGMMA.
    """
    return prepare(a, b, scale_a, scale_b, bias=bias, activation=activation, out=out, config=config)()


def job(config: Fp8Config, target: str = "sm_90a", bias: bool = False, activation: str | None = None,
        mx: bool = False) -> build.Job:
    """The compilation of `config`; only sm_90a has these instructions."""
    return build.Job(f"{SOURCE}:fp8_blocks", {}, config.constants(bias, activation, mx), target, config.threads // 32,
                     smem_bytes=config.smem_bytes, name=str(config))
