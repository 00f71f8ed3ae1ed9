"""Conversions between float32 and bfloat16 in a kernel: the bits of torch's, interpreted and compiled."""

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
