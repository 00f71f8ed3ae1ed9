"""GEMM on tiles that tensor descriptors move: C = A B, Triton, sm_90a and newer.

Two kernels, one launcher: `plain` (a tile a program, descriptors built on the device, as the field note's kernel) and
`persistent` (host descriptors, grouped raster, epilogue in parts, tiles of 192 columns too). Source: Triton's
persistent matmul tutorial; CUTLASS's tile rasters.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.gemm.configs import SETS, GemmConfig, configs, parse, ranked, rejection
from tilelab import device
from tilelab.cuda import ensure_cuda_context
from tilelab.operands import address_range, row_stride

__all__ = ["spec", "gemm", "prepare", "configs", "GemmConfig", "rejection"]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
TORCH = {name: dtype for dtype, name in DTYPES.items()}


def spec(a, b, scale_a=None, scale_b=None):
    """C (M, N) = scale_a * scale_b * A (M, K) @ B (K, N) in float64."""
    c = a.double() @ b.double()
    for scale in (scale_a, scale_b):
        c = c if scale is None else c * scale.double()
    return c


@triton.jit
def tile_at(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    # GROUP_M rows of tiles sweep the columns together: what a wave of programs reads at one time stays in L2.
    width = GROUP_M * tiles_n
    first = (tile // width) * GROUP_M
    size = min(tiles_m - first, GROUP_M)
    return first + (tile % width) % size, (tile % width) // size


@triton.jit
def scaled(acc, scale_a_ptr, scale_b_ptr):
    if scale_a_ptr is not None:
        acc *= tl.load(scale_a_ptr)
    if scale_b_ptr is not None:
        acc *= tl.load(scale_b_ptr)
    return acc


@triton.jit
def halves(tile):
    # (rows, 2 x columns) -> left and right half
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, columns)), (0, 2, 1)))


@triton.jit
def store_tile(c_desc, acc, m, n, PARTS: tl.constexpr):
    # One store at a time is staged in shared memory: PARTS = 2 frees half of the staging tile for another ring stage.
    if PARTS == 1:
        c_desc.store([m, n], acc.to(c_desc.dtype))
    else:
        left, right = halves(acc)
        width: tl.constexpr = acc.shape[1] // 2
        if PARTS == 2:
            c_desc.store([m, n], left.to(c_desc.dtype))
            c_desc.store([m, n + width], right.to(c_desc.dtype))
        else:
            first, second = halves(left)
            third, fourth = halves(right)
            c_desc.store([m, n], first.to(c_desc.dtype))
            c_desc.store([m, n + width // 2], second.to(c_desc.dtype))
            c_desc.store([m, n + width], third.to(c_desc.dtype))
            c_desc.store([m, n + width + width // 2], fourth.to(c_desc.dtype))


@triton.jit
def load_b(b_desc, k, n, B_K_MAJOR: tl.constexpr):
    if B_K_MAJOR:
        tile = b_desc.load([n, k]).T
    else:
        tile = b_desc.load([k, n])
    return tile


@triton.jit
def gemm_plain_kernel(a_ptr, b_ptr, c_ptr, scale_a_ptr, scale_b_ptr, M, N, K, stride_a, stride_b, stride_c,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, B_K_MAJOR: tl.constexpr,
                      GROUP_M: tl.constexpr, PARTS: tl.constexpr):
    # A descriptor made on the device: tensormap.replace edits it in shared memory; it is copied to scratch and fenced.
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    if B_K_MAJOR:
        b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
    else:
        b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [stride_c, 1], [BLOCK_M, BLOCK_N // PARTS])
    tile_m, tile_n = tile_at(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M
    n = tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a_desc.load([m, k]), load_b(b_desc, k, n, B_K_MAJOR), acc)
    store_tile(c_desc, scaled(acc, scale_a_ptr, scale_b_ptr), m, n, PARTS)


@triton.jit
def gemm_persistent_kernel(a_desc, b_desc, b_rest_desc, c_desc, scale_a_ptr, scale_b_ptr, M, N, K,
                           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                           B_K_MAJOR: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
                           N_REST: tl.constexpr, PROGRAMS: tl.constexpr, EARLY_LAUNCH: tl.constexpr):
    # The tile is BLOCK_M x (BLOCK_N + N_REST): Triton's shapes are powers of two, and 192 columns are 128 + 64.
    if EARLY_LAUNCH:  # start while the previous kernel drains, and let the next one do so; wait before any load
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N + N_REST)
    steps = tl.cdiv(K, BLOCK_K)
    # `flatten` fuses both loops, so that the loads of the next tile run ahead of this tile's epilogue. The index is
    # then needed twice, at different times: a second counter keeps the epilogue's off the pipelined one. With two
    # accumulators ptxas would serialize every wgmma of the fused loop (its remark C7515), at 0.6 of the speed.
    stored = tl.program_id(0) - PROGRAMS
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=N_REST == 0):
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
        n = tile_n * (BLOCK_N + N_REST)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if N_REST > 0:
            rest = tl.zeros((BLOCK_M, N_REST), tl.float32)
        for step in range(steps):
            a = a_desc.load([tile_m * BLOCK_M, step * BLOCK_K])
            acc = tl.dot(a, load_b(b_desc, step * BLOCK_K, n, B_K_MAJOR), acc)
            if N_REST > 0:
                rest = tl.dot(a, load_b(b_rest_desc, step * BLOCK_K, n + BLOCK_N, B_K_MAJOR), rest)
        stored += PROGRAMS
        tile_m, tile_n = tile_at(stored, tiles_m, tiles_n, GROUP_M)
        n = tile_n * (BLOCK_N + N_REST)
        store_tile(c_desc, scaled(acc, scale_a_ptr, scale_b_ptr), tile_m * BLOCK_M, n, PARTS)
        if N_REST > 0:  # as wide as one part of the rest of the tile: one descriptor serves both
            store_tile(c_desc, scaled(rest, scale_a_ptr, scale_b_ptr), tile_m * BLOCK_M, n + BLOCK_N, 1)


def _interpreted() -> bool:
    return not isinstance(gemm_plain_kernel, triton.JITFunction)


def _check_matrix(name: str, matrix, itemsize: int) -> None:
    if matrix.data_ptr() % 16:
        raise ValueError(f"{name} must start at a multiple of 16 bytes for a tensor descriptor; it starts "
                         f"{matrix.data_ptr() % 16} bytes past one: copy it first.")
    if matrix.shape[0] > 1 and matrix.stride(0) * itemsize % 16:
        raise ValueError(f"a row of {name} must take a multiple of 16 bytes ({16 // itemsize} elements); its stride is "
                         f"{matrix.stride(0)} elements: pad it.")
    if matrix.shape[0] > 1 and matrix.stride(0) < matrix.shape[1]:
        raise ValueError(f"the rows of {name} overlap (stride {matrix.stride(0)} for {matrix.shape[1]} elements): "
                         "make it contiguous first.")


def _check(a, b, scale_a, scale_b, out):
    """Validated (dtype name, B as stored row by row, whether those rows run along K, out)."""
    for name, given in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("out", out)):
        if not isinstance(given, torch.Tensor) and (name in "ab" or given is not None):
            raise ValueError(f"{name} must be a torch.Tensor; it is a {type(given).__name__}.")
    for name, matrix in (("a", a), ("b", b)):
        if matrix.ndim != 2 or min(matrix.shape) < 1:
            raise ValueError(f"{name} must be a matrix with at least one element; its shape is {tuple(matrix.shape)}.")
        if matrix.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"gemm has no backward pass and {name} requires grad: detach it or use torch.no_grad().")
    (m, k), (rows, n) = a.shape, b.shape
    if rows != k:
        raise ValueError(f"the inner extents differ: a is {m} x {k} and b is {rows} x {n}.")
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise ValueError(f"a and b must share one dtype of bfloat16, float16 and float8_e4m3fn; they are "
                         f"{str(a.dtype)[6:]} and {str(b.dtype)[6:]}.")
    if a.device != b.device:
        raise ValueError(f"a and b must be on one device; they are on {a.device} and {b.device}.")
    dtype, itemsize = DTYPES[a.dtype], a.dtype.itemsize
    if _interpreted():
        if dtype == "bf16":
            raise device.Unsupported("Triton's interpreter gets bfloat16 products wrong: use float16 without a GPU.")
    elif not a.is_cuda:
        raise device.Unsupported(f"gemm needs its matrices on a GPU; they are on {a.device}: move them there, or set "
                                 "TRITON_INTERPRET=1 before the first import to run it without one.")
    else:
        device.require("has_tma", "gemm", "use torch.mm")
    if a.stride(1) != 1 and k > 1:
        raise ValueError(f"a must be stored row by row (stride 1 along K); its strides are {a.stride()}: use "
                         "a.contiguous().")
    _check_matrix("a", a, itemsize)
    b_k_major = b.stride(0) == 1 and (b.stride(1) >= k or n == 1)
    if not b_k_major and b.stride(1) != 1:
        raise ValueError(f"b must have stride 1 along K or along N; its strides are {b.stride()}: use b.contiguous().")
    if dtype == "fp8" and not b_k_major:
        raise ValueError("float8 tensor cores read B with K contiguous: store the weight as (N, K) and pass weight.T.")
    stored = b.T if b_k_major else b
    _check_matrix("b", stored, itemsize)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is None:
            continue
        if dtype != "fp8":
            raise ValueError(f"{name} is for float8 inputs; these are {dtype}.")
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != a.device:
            raise ValueError(f"{name} must be one float32 value on {a.device}; it is {tuple(scale.shape)} of "
                             f"{str(scale.dtype)[6:]} on {scale.device}.")
    out_dtype = torch.bfloat16 if dtype == "fp8" else a.dtype
    if out is None:
        if n % 8 and m > 1:
            raise ValueError(f"N must be a multiple of 8, so that a row of C takes a multiple of 16 bytes; N is {n}.")
        out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    if out.shape != (m, n) or out.dtype != out_dtype or out.device != a.device or out.stride(1) != 1:
        raise ValueError(f"out must be {m} x {n} of {str(out_dtype)[6:]} on {a.device}, rows contiguous; it is "
                         f"{' x '.join(map(str, out.shape))} of {str(out.dtype)[6:]} on {out.device} with strides "
                         f"{out.stride()}.")
    if n % 8:  # a descriptor store writes whole 16-byte chunks: past N it would overwrite what lies behind
        raise ValueError(f"N must be a multiple of 8, so that a row of C takes a multiple of 16 bytes; N is {n}.")
    _check_matrix("out", out, 2)
    spans = [("a", a), ("b", stored), ("scale_a", scale_a), ("scale_b", scale_b)]
    for name, matrix in ((name, given) for name, given in spans if given is not None):
        # Tiles are stored while others are still read.
        if address_range(out)[0] < address_range(matrix)[1] and address_range(matrix)[0] < address_range(out)[1]:
            raise ValueError(f"out lies in the memory that {name} spans: give it memory of its own.")
    return dtype, stored, b_k_major, out


@dataclass
class Prepared:
    """A GEMM ready to launch: call it to compute `out` again from the same a and b. One launch in flight at a time."""

    out: torch.Tensor
    config: GemmConfig
    launch: object
    skipped: list = field(default_factory=list)  # (GemmConfig, reason) for each that was passed over
    fell_back: str = ""

    def __call__(self):
        self.launch()
        return self.out


def prepare(a, b, *, scale_a=None, scale_b=None, out=None, config="best") -> Prepared:
    """Check everything, choose a configuration, build descriptors once; return a launcher.

    Arguments as for `gemm`. The choice is reported: `config`, `skipped` with reasons, and `fell_back`, a sentence when
    nothing of the set asked for could run.
    """
    dtype, stored, b_k_major, out = _check(a, b, scale_a, scale_b, out)
    (m, k), n = a.shape, b.shape[1]
    here = device.current()
    # Without a GPU the interpreter stands in for one of sm_90a with eight SMs, so that tiles and waves still occur.
    target, sms = (here.target, here.sms) if here.has_tma else ("sm_90a", 8)
    skipped, fell_back = [], ""
    if isinstance(config, str) and config in (*SETS, "best"):
        name = "course" if config == "best" else config
        candidates = ranked(name, m, n, k, dtype, target, sms)
        skipped += [(c, rejection(c, target, dtype)) for c in configs(name, dtype) if c not in candidates]
        fallback = ranked("conservative", m, n, k, dtype, target, sms) if name != "conservative" else []
    else:
        candidates = [config if isinstance(config, GemmConfig) else parse(str(config))]
        fallback = []
        if reason := rejection(candidates[0], target, dtype):
            raise device.Unsupported(f"configuration {candidates[0]} cannot run on {target}: {reason}")
    for candidate in (*candidates, *fallback):
        try:
            launch = _launcher(candidate, a, stored, out, scale_a, scale_b, (m, n, k), b_k_major, sms)
            _warm(launch)
        except torch.AcceleratorError:
            raise  # the context is lost: no other configuration could run either
        except Exception as error:
            if not fallback and len(candidates) == 1:
                reason = _sentence(error)
                raise device.Unsupported(f"configuration {candidate} cannot run on {target}: {reason}") from error
            skipped.append((candidate, _sentence(error)))
            continue
        if candidate in fallback and candidate not in candidates:
            fell_back = (f"none of the {config} configurations runs on {target}: fell back to {candidate} of the "
                         "conservative ones.")
        return Prepared(out, candidate, launch, skipped, fell_back)
    reasons = "; ".join(f"{c}: {reason}" for c, reason in skipped)
    raise device.Unsupported(f"no configuration of {config} runs on {target} ({reasons}).")


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {device.first_line(error)[:200]}"


def _warm(launch) -> None:
    """Compile and load without computing, so that a refusal comes here and not at the first launch."""
    if not _interpreted():
        launch(warmup=True)


def _launcher(config, a, stored, out, scale_a, scale_b, mnk, b_k_major, sms):
    """A function that launches `config`'s kernel; descriptors are made here, once."""
    constants = config.constants(sms, b_k_major)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    if config.kernel == "plain":
        kernel, programs = gemm_plain_kernel, config.tiles(*mnk[:2])
        args = (a, stored, out, scale_a, scale_b, *mnk, *map(row_stride, (a, stored, out)))
    else:
        kernel, programs = gemm_persistent_kernel, min(constants["PROGRAMS"], config.tiles(*mnk[:2]))
        a_block, b_block, rest_block, c_block = config.blocks(b_k_major)
        args = (_describe(a, a_block), _describe(stored, b_block),
                _describe(stored, rest_block) if rest_block else None, _describe(out, c_block), scale_a, scale_b, *mnk)
        constants["EARLY_LAUNCH"] &= not _interpreted()
        if constants["EARLY_LAUNCH"]:
            options["launch_pdl"] = True

    def launch(warmup=False):
        if config.kernel == "plain" and not _interpreted():
            # A ContextVar: a thread that never set it has no allocator, so set it where the launch happens.
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
        elif not _interpreted():
            ensure_cuda_context()
        if warmup:
            kernel.warmup(*args, grid=(programs,), **constants, **options)._init_handles()
        else:
            kernel[(programs,)](*args, **constants, **options)

    return launch


def _describe(matrix, block):
    return TensorDescriptor(matrix, list(matrix.shape), [row_stride(matrix), 1], block)


def gemm(a, b, *, scale_a=None, scale_b=None, out=None, config="best"):
    """C (M, N) = A (M, K) @ B (K, N), accumulated in float32 (float8 on Hopper: in its tensor core's shorter format).

    a, b: bfloat16, float16 or float8_e4m3fn on one GPU with TMA. A is stored row by row; B either way (weight.T is the
    usual K-contiguous case; float8 needs it). Rows take a multiple of 16 bytes, N a multiple of 8; any M.
    scale_a, scale_b: one float32 value each, float8 only. out: as A in dtype, bfloat16 for float8.
    config: "best" (by shape), a set ("conservative", "proposed", "course": its fastest by prediction), a GemmConfig or
    "BM,BN,BK,WARPS,STAGES". If nothing in a set runs here it warns and falls back to a conservative configuration.
    Raises ValueError for arguments it cannot take and tilelab.device.Unsupported for hardware or a configuration that
    cannot run.
    """
    prepared = prepare(a, b, scale_a=scale_a, scale_b=scale_b, out=out, config=config)
    if prepared.fell_back:
        warnings.warn(prepared.fell_back, stacklevel=2)
    return prepared()
