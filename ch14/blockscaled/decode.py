"""MXFP4 weights times a few bfloat16 tokens, as in decoding: out (M, N) = x (M, K) W^T, W (N, K) in MXFP4.

The work is to read W once. Programs own rows of W and a share of K, so that there are enough of them; the last one of a
row block adds the shares, always in one order: the same launch gives the same bits. Kernels:
`ch14.blockscaled.decode_kernels`. Source: OCP MX v1.0.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

import torch
import triton

from ch14.blockscaled.decode_kernels import decode_plain_kernel, decode_registers_kernel
from ch14.descriptors import check_dense, span
from ch14.mx_formats import number_formats, packing
from tilelab import build, device

BLOCK = 32  # weights that share a scale
MOST_TOKENS = 64


def spec(x, packed, scales):
    """x (M, K) @ W^T in float64, W (N, K) as the codes in `packed` (N, K / 2) and `scales` (N, K / 32) stand for."""
    codes = packing.unpack(packed, 4, 2 * packed.shape[1])
    weights = number_formats.dequantise(number_formats.Quantised(number_formats.lookup("mxfp4"), codes, scales, None))
    return x.double() @ weights.double().T


@dataclass(frozen=True)
class DecodeConfig:
    """A program takes `block_n` rows of W and `share` columns. `registers` holds `ahead` slabs of 128 columns, one of
    them being decoded; `plain` has `ahead` stages."""

    kernel: str
    block_n: int
    share: int
    num_warps: int
    ahead: int

    def __post_init__(self):
        if not isinstance(self.kernel, str) or self.kernel not in ("registers", "plain"):
            raise ValueError(f"the kernels are registers and plain; here it is {self.kernel!r:.40}.")
        for name, least, most in (("block_n", 16, 512), ("share", 128, 4096), ("num_warps", 1, 16), ("ahead", 1, 8)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most or value & (value - 1):
                raise ValueError(f"{name} is a power of two from {least} to {most}; here it is {value!r}.")
        if self.kernel == "registers" and self.block_n < 16 * self.num_warps:
            raise ValueError(f"a warp takes 16 rows at least: {self.num_warps} warps need block_n = "
                             f"{16 * self.num_warps}; here it is {self.block_n}.")
        if self.kernel == "registers" and 128 * self.ahead > self.share:
            raise ValueError(f"{self.ahead} slabs of 128 columns are more than a share of {self.share}.")

    def __str__(self):
        return f"{self.kernel},{self.block_n},{self.share},{self.num_warps},{self.ahead}"

    def grid(self, n: int, k: int) -> tuple[int, int]:
        """Blocks of rows and shares of K."""
        return -(-n // self.block_n), -(-k // self.share)


def tokens_for(m: int, kernel: str = "registers") -> int:
    """The tokens that a kernel computes for M: a power of two, 8 at least, 16 at least for `plain`. ValueError for an M
    that `decode` does not take."""
    if type(m) is not int or not 1 <= m <= MOST_TOKENS:
        raise ValueError(f"decode takes 1 to {MOST_TOKENS} tokens; here it is {m!r:.40}: for more dequantise the "
                         "weights and use torch.mm.")
    return max(16 if kernel == "plain" else 8, 1 << (m - 1).bit_length())


# block_n, share, num_warps, ahead: the fastest on an H200 at 8192 x 8192, up to 8 tokens and above.
FEW = (128, 2048, 8, 4)
MORE = (128, 1024, 8, 2)


def configs(m: int = 16) -> list[DecodeConfig]:
    """Variants for M tokens, the likeliest first. The tokens of a share take 64 KiB of shared memory at most."""
    most = 32768 // tokens_for(m)
    tried = [FEW, MORE, (128, 2048, 8, 2), (128, 2048, 4, 4), (64, 2048, 4, 4), (128, 1024, 4, 2), (256, 1024, 8, 2),
             (256, 2048, 16, 2)]
    made = [DecodeConfig("registers", n, min(share, most), *rest) for n, share, *rest in tried]
    return list(dict.fromkeys(made)) + [DecodeConfig("plain", 64, 1024, 4, 4), DecodeConfig("plain", 128, 2048, 4, 2)]


def best(m: int, n: int, k: int, here: device.Device) -> DecodeConfig:
    """The configuration for a shape: programs enough for the GPU, and shares as long as that allows."""
    if here.capability is None or here.capability < (9, 0):
        return DecodeConfig("plain", 64, 512, 4, 2)
    most = 32768 // tokens_for(m)
    block_n, share, warps, ahead = FEW if m <= 8 else MORE
    for rows, columns in ((block_n, share), (block_n, 1024), (64, 1024), (64, 512)):
        columns = min(columns, most)
        config = DecodeConfig("registers", rows, columns, max(4, warps * rows // block_n), ahead)
        if math.prod(config.grid(n, k)) >= 1.5 * here.sms:
            break
    return config


def _interpreted() -> bool:
    return not isinstance(decode_plain_kernel, triton.JITFunction)


def _check(x, packed, scales, out) -> None:
    for name, given, dtype in (("x", x, torch.bfloat16), ("packed", packed, torch.uint8),
                               ("scales", scales, torch.uint8), ("out", out, torch.bfloat16)):
        if given is None and name == "out":
            continue
        check_dense(name, given, "decode")
        if given.ndim != 2 or not given.numel() or given.dtype != dtype:
            raise ValueError(f"{name} must be a matrix of {str(dtype)[6:]}, not empty; it is {tuple(given.shape)} of "
                             f"{str(given.dtype)[6:]}.")
        if not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {given.stride()}.")
        if given.device != x.device:
            raise ValueError(f"x, packed, scales and out must be on one device; {name} is on {given.device}, x on "
                             f"{x.device}.")
        if given.is_meta:
            raise ValueError(f"{name} must be in memory; it is on the meta device.")
        if name in ("x", "packed") and given.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes; it starts {given.data_ptr() % 16} bytes "
                             "past one: copy it first.")
    (m, k), n = x.shape, packed.shape[0]
    tokens_for(m)
    if k % BLOCK or k > 2**24 or n > 2**30:
        raise ValueError(f"K must be a multiple of {BLOCK}, 2^24 at most, and N 2^30 at most; they are {k} and {n}.")
    if packed.shape[1] != k // 2 or tuple(scales.shape) != (n, k // BLOCK):
        raise ValueError(f"for K = {k} packed is N x {k // 2} and scales N x {k // BLOCK}; they are "
                         f"{tuple(packed.shape)} and {tuple(scales.shape)}.")
    if out is not None:
        if tuple(out.shape) != (m, n):
            raise ValueError(f"out must be {m} x {n}; it is {out.shape[0]} x {out.shape[1]}.")
        for name, given in (("x", x), ("packed", packed), ("scales", scales)):
            if span(out)[0] < span(given)[1] and span(given)[0] < span(out)[1]:
                raise ValueError(f"out lies in the memory that {name} spans: give it memory of its own.")


def _check_hardware(config: DecodeConfig, where: torch.device) -> None:
    here = device.current()
    if _interpreted():
        if config.kernel == "registers":
            raise device.Unsupported("the interpreter runs Triton, not Gluon: use a plain configuration without a GPU.")
    elif where.type != "cuda":
        raise device.Unsupported(f"decode needs its tensors on a GPU; they are on {where}: move them there, or set "
                                 "TRITON_INTERPRET=1 before the first import to run it without one.")
    elif config.kernel == "registers" and here.capability < (9, 0):
        raise device.Unsupported("the registers kernel needs products of bf16x2 (compute capability 9.0 or newer); "
                                 f"here is {here.describe()}: use a plain configuration.")


def prepare(x, packed, scales, *, out=None, config: DecodeConfig | None = None):
    """A function that computes `decode` and returns `out`; checks and work space are made here. Arguments as there.

    One launch in flight at a time: launches share the work space. A launch of the registers kernel begins before the
    kernel ahead of it in the stream has ended and asks for weights at once: what writes `packed` or `scales` in place
    must be followed by a new `prepare`. `x` may change between launches.
    """
    _check(x, packed, scales, out)
    if config is not None and not isinstance(config, DecodeConfig):
        raise ValueError(f"config must be a DecodeConfig or None; it is a {type(config).__name__}.")
    (m, k), n = x.shape, packed.shape[0]
    config = config or best(m, n, k, device.current())
    _check_hardware(config, x.device)
    tokens, grid = tokens_for(m, config.kernel), config.grid(n, k)
    if config.kernel == "registers" and tokens * config.share > 32768:
        raise ValueError(f"{tokens} tokens of a share of {config.share} columns take more than 64 KiB of shared "
                         f"memory: use a share of {32768 // tokens}.")
    if grid[1] > 65535:
        raise ValueError(f"there are at most 65,535 shares of K, an extent of a grid; a share of {config.share} makes "
                         f"{grid[1]:,}: take a longer one.")
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device) if out is None else out
    parts = torch.empty(grid[1] * tokens * n if grid[1] > 1 else 1, dtype=torch.float32, device=x.device)
    arrivals = torch.zeros(grid[0], dtype=torch.int32, device=x.device)
    constants = dict(BLOCK_N=config.block_n, TOKENS=tokens, SHARE=config.share, num_warps=config.num_warps)
    if config.kernel == "registers":
        kernel, given = decode_registers_kernel, (x, packed.view(torch.int32), scales, out)
        constants |= dict(AHEAD=config.ahead, launch_pdl=True)
    else:
        kernel, given = decode_plain_kernel, (x.view(torch.int16), packed, scales, out.view(torch.int16))
        constants |= dict(FLOAT32=_interpreted(), num_stages=config.ahead)

    def launch():
        kernel[grid](*given, parts, arrivals, m, n, k // BLOCK, **constants)
        return out

    return launch


def decode(x, packed, scales, *, out=None, config: DecodeConfig | None = None):
    """out (M, N) = x (M, K) @ W^T for M from 1 to 64 tokens, accumulated in float32.

    x: bfloat16. W (N, K) in MXFP4: packed (N, K / 2) uint8, two e2m1 a byte, the first in the lower half; scales
    (N, K / 32) uint8, E8M0, 255 is NaN. K is a multiple of 32, N anything. All contiguous, x and packed from a multiple
    of 16 bytes. A weight is rounded to bfloat16, which is exact but for infinity (4 x 2^127). The same launch gives the
    same bits. out: bfloat16. Raises ValueError for what it cannot take and tilelab.device.Unsupported for hardware that
    cannot run it.
    """
    return prepare(x, packed, scales, out=out, config=config)()


def job(config: DecodeConfig, target: str, m: int = 16) -> build.Job:
    """The kernel as it is launched, for tilelab.build."""
    registers = config.kernel == "registers"
    pointers = dict(x_ptr="*bf16" if registers else "*i16", packed_ptr="*i32" if registers else "*u8", scales_ptr="*u8",
                    out_ptr="*bf16" if registers else "*i16", parts_ptr="*fp32", arrivals_ptr="*i32")
    constants = dict(BLOCK_N=config.block_n, TOKENS=tokens_for(m, config.kernel), SHARE=config.share)
    constants |= dict(AHEAD=config.ahead) if registers else dict(FLOAT32=False)
    rest = {"options": {"launch_pdl": True}} if registers else {"num_stages": config.ahead}
    return build.Job(f"ch14.blockscaled.decode_kernels:decode_{config.kernel}_kernel",
                     pointers | dict.fromkeys(("M", "N", "blocks"), "i32"), constants, target, config.num_warps,
                     aligned=tuple(pointers), name=f"{config}", **rest)


def main_loop(report: build.Report) -> Counter:
    """Opcodes, without suffixes, in the shortest loop of a kernel's SASS that multiplies on the tensor core."""
    line = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)([^;]*);", re.MULTILINE)
    found = [(int(at, 16), opcode, rest) for at, opcode, rest in line.findall(report.sass)]
    loops = []
    for at, opcode, rest in found:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if opcode == "BRA" and target and int(target[1], 16) < at:
            body = Counter(name for place, name, _ in found if int(target[1], 16) <= place <= at)
            if body["HMMA"] + body["HGMMA"]:
                loops.append(body)
    return min(loops, key=Counter.total, default=Counter())


def weights_a_loop(config: DecodeConfig) -> float:
    """Weights that a lane has decoded when the main loop has gone round once."""
    slabs = config.ahead if config.kernel == "registers" else 1
    return config.block_n * 128 * slabs / (32 * config.num_warps)
