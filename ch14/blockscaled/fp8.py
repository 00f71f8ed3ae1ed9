"""Multiply fp8 matrices with block scales on Hopper: C (M, N) = A B, with float32 scales of 1 x 128 and 128 x 128.

Products of few tiles split their K steps among CTAs. The epilogue adds a bias, applies SiLU or GELU, and quantises to
MXFP8. The kernel is fp8.cu. Sources: DeepSeek-V3, section 3.3.2 (arXiv 2412.19437); PTX ISA, "wgmma".
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
from tilelab.runtime import build, cuda, device, operands, operators, provenance, tuned, workspace
from tilelab.runtime.operands import Launch
from tilelab.runtime.plans import Plan, Planner
from tilelab.runtime.tensor_map import make_tensor_map

SOURCE = pathlib.Path(__file__).with_name("fp8.cu")
BLOCK = 128  # A scale covers so many columns of K and of B. The widest swizzle has rows of 128 bytes.
N_MULTIPLE = 8  # TMA stores rows of whole 16 bytes, and C is bfloat16
ACTIVATIONS = (None, "silu", "gelu")
MAX_SPLITS = 64
FLOPS_PER_CLOCK = 8192  # of a Hopper SM in fp8, twice the rate of bf16
LEAST_STEPS = 28  # of K per split: with fewer, adding the splits takes longer than they save
LARGEST = 2**30  # extent: coordinates of a tensor map have 32 bits
INSTEAD = "compile it with --target sm_90a, or dequantise and multiply in bf16 (the path `emulated`)"


@dataclass(frozen=True)
class Fp8Config:
    """Hold the tile and the ring of the fp8 kernel; raise ValueError for what Hopper cannot hold.

    A tile has 64 x `consumers` rows and `block_n` columns. Each consumer is a warp group that multiplies into `scratch`
    accumulators alternately. The ring has `stages` of 128 columns of K. `splits` CTAs share the K steps of a tile. The
    raster keeps `group` rows of tiles together. `pdl` starts the kernel while the one before it drains. With
    `epilogue_warps`, so many warps beside the producer apply bias and activation and store C, in bf16 and without
    splits; with 0, the consumers do.
    """

    consumers: int = 2
    scratch: int = 2
    stages: int = 5
    block_n: int = 128
    splits: int = 1
    group: int = 8
    pdl: bool = False
    epilogue_warps: int = 0

    def __post_init__(self):
        for name, lowest, highest in (
            ("consumers", 1, 3),
            ("scratch", 1, 2),
            ("stages", 3, 16),
            ("splits", 1, MAX_SPLITS),
            ("group", 1, 4096),
            ("epilogue_warps", 0, 3),
        ):
            value = getattr(self, name)
            if type(value) is not int or not lowest <= value <= highest:
                raise ValueError(
                    f"{name} is {value!r:.40}; it must be a whole number from {lowest} to {highest:,}."
                )
        if self.block_n not in (64, 128):
            raise ValueError(f"block_n is {self.block_n!r:.40}; it must be 64 or 128.")
        if self.consumers == 3 and self.scratch == 2:
            raise ValueError("three consumers have registers for one scratch each, not for two.")
        if self.epilogue_warps and self.splits > 1:
            raise ValueError("epilogue warps cannot add the sums of splits: splits must be 1.")
        if self.smem_bytes > 232448:
            raise ValueError(
                f"{self} needs {self.smem_bytes:,} B of shared memory per block; Hopper has 232,448: take "
                "fewer stages."
            )

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def smem_bytes(self) -> int:
        """The ring with scales and barriers, and per consumer two parts of C and a flag.

        With epilogue warps, 16 rows of C twice for each, and for each warp of the consumers a slot with two barriers.
        """
        stage, warps = (self.block_m + self.block_n) * BLOCK + 4 * self.block_m + 16, 4 * self.consumers
        staged = self.consumers * 2 * 8192
        if self.epilogue_warps:
            staged = self.epilogue_warps * 2 * 2048 + warps * (16 * self.block_n * 4 + 16)
        return self.stages * stage + staged + 4 * self.consumers

    def tiles(self, m: int, n: int) -> int:
        return math.ceil(m / self.block_m) * math.ceil(n / self.block_n)

    def grid(self, m: int, n: int, sms: int) -> int:
        """Return the CTAs of a launch: at most one per SM, because each is persistent."""
        return min(self.tiles(m, n) * self.splits, sms)

    def constants(self, bias: bool = False, activation: str | None = None, mx: bool = False) -> dict:
        """Return the -D constants of fp8.cu; raise ValueError for an epilogue that it does not have."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r:.40}; choose None, silu or gelu.")
        if mx and self.block_n != 128:
            raise ValueError(f"an MXFP8 output needs tiles of 128 columns; {self} has {self.block_n}.")
        if mx and self.epilogue_warps:
            raise ValueError("epilogue warps store bf16: for an MXFP8 output, epilogue_warps must be 0.")
        return {
            "BLOCK_N": self.block_n,
            "CONSUMERS": self.consumers,
            "SCRATCH": self.scratch,
            "STAGES": self.stages,
            "SPLIT": int(self.splits > 1),
            "GROUP": self.group,
            "BIAS": int(bias),
            "ACTIVATION": ACTIVATIONS.index(activation),
            "MX": int(mx),
            "EPILOGUE_WARPS": self.epilogue_warps,
        }

    def __str__(self):
        words = [
            f"{self.block_m} × {self.block_n}",
            f"{self.consumers} consumer{'s' * (self.consumers > 1)}",
            f"{self.scratch} scratch",
            f"{self.stages} stages",
        ]
        words += [f"{self.epilogue_warps} epilogue warp{'s' * (self.epilogue_warps > 1)}"] * (
            self.epilogue_warps > 0
        )
        words += [f"{self.splits} splits"] * (self.splits > 1) + [f"group {self.group}"] + ["pdl"] * self.pdl
        return ", ".join(words)


SQUARE, TALL, LOW, THIN = Fp8Config(), Fp8Config(3, 1, 4), Fp8Config(2, 2, 7, 64), Fp8Config(1, 2, 11, 64)


def configs() -> dict[str, Fp8Config]:
    """Return configurations by name. `best_config` takes `thin` up to 64 rows, `low` up to 128, and for more rows the
    one that `predict_us` expects to be fastest."""
    return {"square": SQUARE, "tall": TALL, "low": LOW, "thin": THIN}


def best_config(m: int, n: int, k: int, sms: int, mx: bool = False) -> Fp8Config:
    """Return the configuration for a shape on `sms` SMs that no table of tuned shapes helps with.

    Few rows get a tile that holds them all and is narrow, so that there are many tiles. Where tiles are still few and K
    is long, `splits` fill the SMs. More rows get the tile whose waves take the least time: a taller one can save a
    wave, and a narrower one fills SMs that would be idle. An MXFP8 output (`mx`) needs 128 columns.
    """
    if m > 128:
        tiles = (SQUARE,) if mx else (SQUARE, TALL, LOW, THIN)
        config = min(tiles, key=lambda tile: predict_us(tile, m, n, k, sms))
        return dataclasses.replace(config, group=16 if m >= 4096 else 8, pdl=True)
    config = THIN if m <= 64 else LOW
    config = dataclasses.replace(config, block_n=128, stages=5) if mx else config
    splits = max(1, min(sms // config.tiles(m, n), k // BLOCK // LEAST_STEPS, MAX_SPLITS))
    return dataclasses.replace(config, splits=splits, pdl=True)


# The model of `predict_us`, in clocks of an SM at CLOCK_GHZ: a CTA multiplies with this share of the tensor core's
# rate, L2 delivers so many bytes per clock to each SM, and a tile takes so long to begin and to store.
CLOCK_GHZ, RATE_SHARE, L2_BYTES_PER_CLOCK, DRAM_BYTES_PER_US = 1.6, 0.68, 44, 4.2e6
TILE_CLOCKS, SPLIT_CLOCKS, LAUNCH_US = 1200, 1800, 2.5


def predict_us(config: Fp8Config, m: int, n: int, k: int, sms: int) -> float:
    """Return the time of a product in microseconds that a model of waves of tiles expects."""
    steps = math.ceil(k / BLOCK / config.splits)
    share = RATE_SHARE * (0.95 if config.scratch == 1 else 1)
    multiply = 2 * config.block_m * config.block_n * BLOCK / FLOPS_PER_CLOCK / share
    load = (min(config.block_m, m) + config.block_n) * BLOCK / L2_BYTES_PER_CLOCK
    fixed = TILE_CLOCKS + (config.splits > 1) * (SPLIT_CLOCKS + 100 * config.splits)
    waves = math.ceil(config.tiles(m, n) * config.splits / sms)
    compute = waves * (steps * max(multiply, load) + fixed) / CLOCK_GHZ / 1e3
    return max(compute, operand_bytes(m, n, k) / DRAM_BYTES_PER_US) + LAUNCH_US * (1 - config.pdl / 2)


def operand_bytes(m: int, n: int, k: int) -> int:
    """Return the bytes that a product moves at least: fp8 operands and their scales once, C in bf16 once."""
    return (m + n) * k + 4 * (m + math.ceil(n / BLOCK)) * (k // BLOCK) + 2 * m * n


def tuned_source() -> str:
    """Return the hash of the code that the rows of the tuned table are measured with."""
    return provenance.source_hash(SOURCE)


def find_best(m: int, n: int, k: int, sms: int, mx: bool = False) -> tuple[Fp8Config, str]:
    """Return the configuration for a shape, and how it was found: in the table of tuned shapes, or by its extents."""
    untuned = best_config(m, n, k, sms, mx)
    return tuned.find(
        "fp8",
        Fp8Config,
        m,
        n,
        k,
        "fp8",
        lambda config, *shape: predict_us(config, *shape, sms),
        lambda config: config.splits <= k // BLOCK and (config.block_n == 128 or not mx),
        tuned_source,
        untuned,
    ) or (untuned, "by the extents")


def spec(a, b, scale_a, scale_b, bias=None, activation=None):
    """Return the product in float64. Arguments as for `fp8`."""
    left = a.double() * scale_a.double().repeat_interleave(BLOCK, 1)
    right = (
        b.double() * scale_b.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    )
    c = left @ right if bias is None else left @ right + bias.double()
    return c if activation is None else getattr(F, activation)(c)


def _check_operands(a, b, scale_a, scale_b, bias) -> tuple[int, int, int]:
    """Return M, N and K; raise ValueError for operands that the kernel cannot read."""
    common = dict(op="fp8", dtype=torch.float8_e4m3fn, ndim=2, aligned=16, not_empty=True)
    operands.require_tensor("a", a, contiguous=True, **common)
    operands.require_tensor("b", b, on=a.device, **common)
    (m, k), (inner, n) = a.shape, b.shape
    if inner != k:
        raise ValueError(f"a (M, K) and b (K, N) differ in K: a is {m} x {k} and b is {inner} x {n}.")
    if k % BLOCK or n % N_MULTIPLE or max(m, n, k) > LARGEST:
        raise ValueError(
            f"M, N and K are {m}, {n} and {k}; K must be a multiple of {BLOCK}, the extent of a scale, N "
            f"a multiple of {N_MULTIPLE}, because TMA stores rows of whole 16 bytes, and all at most "
            "2^30: pad with zeros."
        )
    operands.require_tensor("b.T", b.T, "fp8", contiguous=True)
    operands.require_tensor(
        "scale_a", scale_a, "fp8", dtype=torch.float32, shape=(m, k // BLOCK), on=a.device
    )
    operands.require_tensor(
        "scale_b", scale_b, "fp8", dtype=torch.float32, shape=(k // BLOCK, math.ceil(n / BLOCK)), on=a.device
    )
    operands.require_tensor("scale_b.T", scale_b.T, "fp8", contiguous=True)
    if bias is not None:
        operands.require_tensor(
            "bias", bias, "fp8", dtype=torch.bfloat16, shape=(n,), on=a.device, contiguous=True, aligned=16
        )
    return m, n, k


def _check_out(out, out_scales, packed_as, m: int, n: int, read: dict) -> None:
    """Raise ValueError unless C can be stored in `out` without overwriting `read`. `_plan` describes the arguments."""
    where = read["a"].device
    if packed_as is None:
        written = {
            "out": operands.require_tensor(
                "out", out, "fp8", dtype=torch.bfloat16, shape=(m, n), on=where, contiguous=True, aligned=16
            )
        }
    else:
        form, tiled, shape = packed_as
        if packed_as != ("mxfp8_e4m3", False, (m, n)):
            raise ValueError(
                f"a Packed out must be {(m, n)} in mxfp8_e4m3 with rows of scales; it is {shape} in "
                f"{form}{', tiled' * tiled}."
            )
        if n % BLOCK:
            raise ValueError(
                f"N is {n}; for an MXFP8 output it must be a multiple of {BLOCK}: pad b with zeros."
            )
        written = {"out": out, "the scales of out": out_scales}
        for name, tensor in written.items():
            operands.require_tensor(name, tensor, "fp8", on=where, aligned=16)
    operands.require_disjoint(written, read)


def _plan(a, b, scale_a, scale_b, bias, out_scales, out, activation, config, packed_as) -> Plan:
    """Check the arguments, choose a configuration, and build its launch.

    For a Packed out, `out` and `out_scales` are its tensors, and `packed_as` is its (format, tiled, shape).
    """
    m, n, k = _check_operands(a, b, scale_a, scale_b, bias)
    Fp8Config().constants(activation=activation)
    if out is not None:
        _check_out(
            out,
            out_scales,
            packed_as,
            m,
            n,
            {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias},
        )
    operands.require_gpu(a, "the fp8 kernel", "has_wgmma", INSTEAD)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=a.device) if out is None else out
    packed, sms, chosen = packed_as is not None, device.current().sms, ""
    if isinstance(config, str) and config == "best":
        config, chosen = find_best(m, n, k, sms, packed)
    config = operands.choose_config(config, configs(), Fp8Config, lambda: None)
    constants = config.constants(bias is not None, activation, packed)
    tiles = config.tiles(m, n)
    rows = min(
        config.block_m, -(-m // 8) * 8
    )  # of A per load: rows past the end would cost the copy engine time
    # A tensor map needs rows of whole 16 bytes, here columns of scale_a.
    pitch, padded, groups = scale_a.stride(1), -(-m // 4) * 4, k // BLOCK
    mappable = scale_a.stride(0) == 1 and pitch >= m and pitch % 4 == 0 and scale_a.data_ptr() % 16 == 0
    scales = (
        scale_a
        if mappable
        else torch.empty_strided((m, groups), (1, padded), dtype=torch.float32, device=a.device)
    )
    box = (64, 128) if packed else (16 if config.epilogue_warps else 64, 64)
    maps = (
        make_tensor_map(a.view(torch.uint8), (rows, BLOCK), swizzle="128B"),
        make_tensor_map(b.T.view(torch.uint8), (config.block_n, BLOCK), swizzle="128B"),
        make_tensor_map(scales.T, (1, rows)),
        make_tensor_map(out, box, swizzle="128B"),
    )
    kernel = cuda.load_kernel(
        SOURCE, "fp8_blocks", tuple(f"-D{name}={value}" for name, value in constants.items())
    )
    # The kernel does not read the pointers that it has no use for.
    args = (*maps, *[scale_b] * 5, *map(ctypes.c_int, (m, n, k, config.splits, rows)))
    follows = (
        0,
        1,
        2,
        6,
        3,
        3 if bias is None else 4,
        5 if packed else 3,
        *((7, 8) if config.splits > 1 else (3, 3)),
    )
    run = cuda.prepare_launch(
        kernel,
        config.grid(m, n, sms),
        config.threads,
        args,
        config.smem_bytes,
        early=config.pdl,
        follows=(*follows, *[None] * 5),
    )

    def launch(a, b, scale_a, *rest):
        if not mappable:
            scale_a = torch.empty_strided(
                (m, groups), (1, padded), dtype=torch.float32, device=a.device
            ).copy_(scale_a)
        if config.splits == 1:
            return run(a, b, scale_a, *rest)
        parts = torch.empty(
            tiles * config.splits * config.block_m * config.block_n, dtype=torch.float32, device=a.device
        )
        return run(a, b, scale_a, *rest, parts, workspace.make_counters(tiles * config.consumers, a.device))

    return Plan(launch, (m, n), torch.bfloat16, a.device, config, chosen=chosen)


planner = Planner(_plan, ("a", "b", "scale_a", "scale_b", "bias", "the scales of out"))


def _split_out(out) -> tuple:
    """Return the tensor for C, that for its scales, and what `_plan` must know of a Packed."""
    if isinstance(out, mx_formats.Packed):
        return out.values, out.scales, (out.format.name, out.tiled, out.shape)
    return out, None, None


def prepare(a, b, scale_a, scale_b, *, bias=None, activation=None, out=None, config="best") -> Launch:
    """Check the arguments of `fp8`, compile the kernel, and return a Launch that computes it on torch's current stream.

    Arguments and errors as there. Scales of A that a tensor map cannot describe are copied at each launch.
    """
    c, out_scales, packed_as = _split_out(out)
    launch = planner.prepare((a, b, scale_a, scale_b, bias, out_scales), c, activation, config, packed_as)
    return launch if packed_as is None else dataclasses.replace(launch, out=out)


def fp8(a, b, scale_a, scale_b, *, bias=None, activation=None, out=None, config="best"):
    """Return activation(C + bias), C (M, N) = the sum over blocks of 128 along K of scale_a scale_b (A B).

    The matrices a (M, K) and b (K, N) are float8_e4m3fn. As for torch's scaled_mm, a is contiguous and b has K
    contiguous (pass weight.T). M is anything, K a multiple of 128 and N a multiple of 8. The float32 scale_a
    (M, K / 128) is copied unless it lies column by column, with columns at multiples of 16 bytes. The float32 scale_b
    (K / 128, N / 128 rounded up) has K contiguous (pass scales.T). The bias (N,) is bfloat16, `activation` None, "silu"
    or "gelu" (exact). `out` is bfloat16 (M, N), or a Packed of ch14.mx_formats in mxfp8_e4m3: then the bfloat16 result
    is quantised, bit for bit as mx_formats.quantise does, and N is a multiple of 128. `config` is an Fp8Config, "best"
    or a name of `configs`. The same launch gives the same bits. Under torch.compile, call ch14.blockscaled.matmul or
    torch.ops.tiles.fp8. Raises ValueError for arguments that do not fit and Unsupported without WGMMA.
    """
    if operators.is_traced(a, b, scale_a, scale_b, bias):
        return prepare(a, b, scale_a, scale_b, bias=bias, activation=activation, out=out, config=config)()
    return run(a, b, scale_a, scale_b, bias=bias, activation=activation, out=out, config=config)


def run(a, b, scale_a, scale_b, *, bias=None, activation=None, out=None, config="best"):
    """Return what `fp8` does, for tensors that nobody traces or differentiates."""
    c, out_scales, packed_as = _split_out(out)
    tensors = a, b, scale_a, scale_b, bias, out_scales
    plan = planner.find(tensors, c, activation, config, packed_as)
    if packed_as is not None:
        operands.require_disjoint({planner.names[5]: out_scales}, dict(zip(planner.names, tensors[:5])))
    c = planner.launch(plan, tensors, c)
    return c if packed_as is None else out


def job(
    config: Fp8Config,
    target: str = "sm_90a",
    bias: bool = False,
    activation: str | None = None,
    mx: bool = False,
) -> build.Job:
    """Return how `config` is compiled, for tilelab.runtime.build. Only sm_90a has these instructions."""
    return build.Job(
        f"{SOURCE}:fp8_blocks",
        {},
        config.constants(bias, activation, mx),
        target,
        config.threads // 32,
        smem_bytes=config.smem_bytes,
        name=str(config),
    )
