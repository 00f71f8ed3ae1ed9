"""Kernels that the interpreter gets right since it is mended; compiled ones are right without."""

import torch
import triton
import triton.language as tl

import ch14  # noqa: F401, mends the interpreter where there is no GPU
from tilelab import device

WHERE = "cuda" if device.current().capability else "cpu"


@triton.jit
def convert_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def double(x):
    return tl.where(x > 0, 2 * x, tl.zeros_like(x))  # zeros_like is itself a function of Triton's language


@triton.jit
def double_twice_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, double(double(tl.load(x + at))))


def convert(x, dtype):
    out = torch.empty(x.shape, dtype=dtype, device=WHERE)
    convert_kernel[(x.numel() // 8192,)](x.to(WHERE), out, 8192)
    return out.cpu()


def test_bfloat16_has_the_bits_of_torch():
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(convert(every, torch.float32).view(torch.int32)[~every.isnan()],
                       every.float().view(torch.int32)[~every.isnan()])
    # Each bfloat16 with the lower halves that lie about a tie, and with others.
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xC000], dtype=torch.int32)
    x = (every.view(torch.int16).int()[:, None] << 16 | lower).view(torch.float32).flatten()
    found, wanted = convert(x, torch.bfloat16), x.bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.view(torch.int16)[~x.isnan()], wanted.view(torch.int16)[~x.isnan()])


def test_functions_call_functions_in_launch_after_launch():
    x = torch.arange(-8, 8, device=WHERE).float()
    out = torch.empty_like(x)
    for _ in range(2):
        double_twice_kernel[(1,)](x, out, 16)
        assert torch.equal(out, 4 * x.clamp(min=0))
        x += 1
