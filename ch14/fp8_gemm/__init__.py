"""Multiply fp8 matrices with block scales on Hopper: C (M, N) = A B, with float32 scales of 1 x 128 and 128 x 128.

Products of few tiles split their K steps among CTAs. The epilogue adds a bias, applies SiLU or GELU, and quantises to
MXFP8. Read fp8.cu first, and then `configs`. Sources: DeepSeek-V3, section 3.3.2 (arXiv 2412.19437); PTX ISA, "wgmma".
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import pathlib

import torch
import torch.nn.functional as F

from ch14 import mx_formats
from ch14.fp8_gemm import operator
from ch14.fp8_gemm.configs import (
    BLOCK,
    Fp8Config,
    best_config,
    candidates,
    configs,
    operand_bytes,
    parse,
    predict_us,
)
from tilelab.runtime import (
    build,
    choice,
    cuda,
    device,
    first_call,
    operands,
    operators,
    provenance,
    tuned,
    workspace,
)
from tilelab.runtime.operands import Launch
from tilelab.runtime.plans import Plan, Planner
from tilelab.runtime.tensor_map import make_tensor_map

__all__ = [
    "spec",
    "fp8",
    "prepare",
    "configs",
    "Fp8Config",
    "best_config",
    "find_best",
    "operand_bytes",
    "parse",
    "job",
]

SOURCE = pathlib.Path(__file__).with_name("fp8.cu")
N_MULTIPLE = 8  # TMA stores rows of whole 16 bytes, and C is bfloat16
LARGEST = 2**30  # extent: coordinates of a tensor map have 32 bits
INSTEAD = "compile it with python -m ch14.fp8_gemm --compile, or dequantise and multiply in bf16 (the path `emulated`)"


def tuned_source() -> str:
    """Return the hash of the code that the rows of the tuned table are measured with."""
    return provenance.source_hash(SOURCE)


def rank(m: int, n: int, k: int, sms: int, mx: bool = False) -> tuple[list[Fp8Config], str]:
    """Return the configurations for a shape, the likely fastest first, and in words what the order rests on."""
    families = candidates(m, n, k, sms, mx)
    predicted = {name: predict_us(config, m, n, k, sms) for name, config in families.items()}

    def find_traits(m: int, n: int, k: int) -> dict[str, tuple[float, float]]:
        return {name: each.traits(m, n, choice.SMS) for name, each in candidates(m, n, k, choice.SMS).items()}

    ranked, why = choice.rank("fp8", device.current().name or "", predicted, m, n, k, find_traits)
    return [families[name] for name in ranked], why


def find_best(m: int, n: int, k: int, sms: int, mx: bool = False) -> tuple[Fp8Config, str]:
    """Return the configuration for a shape, and how it was found: in a table of tuned shapes, or by the model."""
    found = tuned.find_exact(
        *("fp8", Fp8Config, m, n, k, "fp8"),
        lambda config: config.splits <= k // BLOCK and (config.block_n == 128 or not mx),
        tuned_source,
    )
    if found:
        return found
    ranked, why = rank(m, n, k, sms, mx)
    return ranked[0], why


def spec(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
    scale_a: torch.Tensor,  # (M, K / 128)
    scale_b: torch.Tensor,  # (K / 128, N / 128)
    bias: torch.Tensor | None = None,  # (N,)
    activation: str | None = None,
) -> torch.Tensor:  # (M, N)
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
            raise ValueError(f"N is {n}; an MXFP8 output needs a multiple of {BLOCK}: pad b with zeros.")
        written = {"out": out, "the scales of out": out_scales}
        for name, tensor in written.items():
            operands.require_tensor(name, tensor, "fp8", on=where, aligned=16)
    operands.require_disjoint(written, read)


def _tune(a, b, scale_a, scale_b, out) -> tuple[Fp8Config, str]:
    """Measure the configurations that are likely to be fast for these operands, and keep the fastest."""
    (m, k), n, here = a.shape, b.shape[1], device.current()

    def compile_one(config):
        macros = [f"-D{name}={value}" for name, value in config.constants().items()]
        cuda.compile_file(SOURCE, here.target or "sm_90a", macros)

    def prepare_one(config, a, b, scale_a, scale_b, out):
        return prepare(a, b, scale_a, scale_b, out=out, config=config)

    ranked, _ = rank(m, n, k, here.sms or 132)
    tensors = a, b, scale_a, scale_b, out
    return first_call.choose(
        "fp8", (m, n, k), "fp8", ranked, compile_one, prepare_one, tensors, tuned_source()
    )


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
    if isinstance(config, str) and config in ("best", "tune"):
        wanted, (config, chosen) = config, find_best(m, n, k, sms, packed)
        if wanted == "tune" and chosen != "tuned" and not packed:
            config, chosen = _tune(a, b, scale_a, scale_b, out)
    config = operands.choose_config(config, configs(), Fp8Config, lambda: None, parse)
    constants = config.constants(bias is not None, activation, packed)
    tiles = config.tiles(m, n)
    rows = min(config.block_m, -(-m // 8) * 8)  # of A per load: more would cost the copy engine time
    # A tensor map needs rows of whole 16 bytes, here columns of scale_a.
    pitch, mappable_pitch, groups = scale_a.stride(1), -(-m // 4) * 4, k // BLOCK
    is_mappable = scale_a.stride(0) == 1 and pitch >= m and pitch % 4 == 0 and scale_a.data_ptr() % 16 == 0

    def make_mappable():
        return torch.empty_strided((m, groups), (1, mappable_pitch), dtype=torch.float32, device=a.device)

    box = (64, 128) if packed else (16 if config.epilogue_warps else 64, config.subtile_columns)
    arguments = {
        "a_map": make_tensor_map(a.view(torch.uint8), (rows, BLOCK), swizzle="128B"),
        "b_map": make_tensor_map(
            b.T.view(torch.uint8), (config.block_n // config.cluster, BLOCK), swizzle="128B"
        ),
        "scale_a_map": make_tensor_map((scale_a if is_mappable else make_mappable()).T, (1, rows)),
        "c_map": make_tensor_map(out, box, swizzle="128B" if packed else f"{2 * config.subtile_columns}B"),
        "scale_b": scale_b,
        "bias": bias,
        "c_scales": out_scales,
        "parts": None,
        "arrivals": None,
        **{name: ctypes.c_int(value) for name, value in zip("MNK", (m, n, k))},
        "splits": ctypes.c_int(config.splits),
        "rows": ctypes.c_int(rows),
    }
    # The tensors of a call in their order, by the parameter that each moves.
    tensors = ("a_map", "b_map", "scale_a_map", "scale_b", "bias", "c_scales", "c_map", "parts", "arrivals")
    run = cuda.prepare_launch(
        cuda.load_kernel(
            SOURCE, "fp8_blocks", tuple(f"-D{name}={value}" for name, value in constants.items())
        ),
        config.grid(m, n, sms),
        config.threads,
        arguments,
        config.smem_bytes,
        cluster=config.cluster,
        early=config.pdl,
        follows={name: position for position, name in enumerate(tensors)},
    )
    part = config.block_m * config.block_n

    def launch(a, b, scale_a, *rest):
        if not is_mappable:
            scale_a = make_mappable().copy_(scale_a)
        parts = arrivals = None
        if config.splits > 1:
            parts = torch.empty(tiles * config.splits * part, dtype=torch.float32, device=a.device)
            arrivals = workspace.make_counters(tiles * config.consumers, a.device)
        run(a, b, scale_a, *rest, parts, arrivals)

    return Plan(launch, (m, n), torch.bfloat16, a.device, config, chosen=chosen)


planner = Planner(_plan, ("a", "b", "scale_a", "scale_b", "bias", "the scales of out"))


@operator.register
def fp8_operator(a, b, scale_a, scale_b, bias=None, activation=None, config="best"):
    return planner.run((a, b, scale_a, scale_b, bias, None), None, activation, config, None)


def _split_out(out) -> tuple:
    """Return the tensor for C, that for its scales, and what `_plan` must know of a Packed."""
    if isinstance(out, mx_formats.Packed):
        return out.values, out.scales, (out.format.name, out.tiled, out.shape)
    return out, None, None


def prepare(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
    scale_a: torch.Tensor,  # (M, K / 128)
    scale_b: torch.Tensor,  # (K / 128, N / 128)
    *,
    bias: torch.Tensor | None = None,  # (N,)
    activation: str | None = None,
    out: torch.Tensor | mx_formats.Packed | None = None,  # (M, N)
    config: str | Fp8Config = "best",
) -> Launch:
    """Check the arguments of `fp8`, compile the kernel, and return a Launch that computes it on torch's current stream.

    Arguments and errors as there. Scales of A that a tensor map cannot describe are copied at each launch.
    """
    c, out_scales, packed_as = _split_out(out)
    launch = planner.prepare((a, b, scale_a, scale_b, bias, out_scales), c, activation, config, packed_as)
    return launch if packed_as is None else dataclasses.replace(launch, out=out)


def fp8(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
    scale_a: torch.Tensor,  # (M, K / 128)
    scale_b: torch.Tensor,  # (K / 128, N / 128)
    *,
    bias: torch.Tensor | None = None,  # (N,)
    activation: str | None = None,
    out: torch.Tensor | mx_formats.Packed | None = None,  # (M, N)
    config: str | Fp8Config = "best",
) -> torch.Tensor | mx_formats.Packed:  # (M, N)
    """Return activation(C + bias), C (M, N) = the sum over blocks of 128 along K of scale_a scale_b (A B).

    The matrices a (M, K) and b (K, N) are float8_e4m3fn. As for torch's scaled_mm, a is contiguous and b has K
    contiguous (pass weight.T). M is anything, K a multiple of 128 and N a multiple of 8. The float32 scale_a
    (M, K / 128) is copied unless it lies column by column, with columns at multiples of 16 bytes. The float32 scale_b
    (K / 128, N / 128 rounded up) has K contiguous (pass scales.T). The bias (N,) is bfloat16, `activation` None, "silu"
    or "gelu" (exact). `out` is bfloat16 (M, N), or a Packed of ch14.mx_formats in mxfp8_e4m3: then the bfloat16 result
    is quantised, bit for bit as mx_formats.quantise does, and N is a multiple of 128. `config` is an Fp8Config, "best",
    a name of `configs`, or "tune": a dozen configurations are measured at the first call of a shape, and the winner is
    kept in the user's cache. With a Packed out that is "best". The same launch gives the same bits. Under torch.compile
    and where autograd records, this is torch.ops.tiles.fp8: `config` is a name, `out` no Packed, and there is no
    backward pass. Raises ValueError for arguments that do not fit and Unsupported without WGMMA.
    """
    if operators.is_traced(a, b, scale_a, scale_b, bias):
        return operators.store(fp8_operator(a, b, scale_a, scale_b, bias, activation, config), out)
    return run(a, b, scale_a, scale_b, bias=bias, activation=activation, out=out, config=config)


def run(
    a, b, scale_a, scale_b, *, bias=None, activation=None, out=None, config="best"
) -> torch.Tensor | mx_formats.Packed:
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
