"""Kernels that the interpreter gets right since it is mended; compiled ones are right without."""

import pytest
import torch
import triton
import triton.language as tl

import ch14  # noqa: F401, mends the interpreter where there is no GPU
from tilelab.runtime import device

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
    assert torch.equal(
        convert(every, torch.float32).view(torch.int32)[~every.isnan()],
        every.float().view(torch.int32)[~every.isnan()],
    )
    # Each bfloat16 with the lower halves that lie about a tie, and with others.
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xC000], dtype=torch.int32)
    x = (every.view(torch.int16).int()[:, None] << 16 | lower).view(torch.float32).flatten()
    found, wanted = convert(x, torch.bfloat16), x.bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.view(torch.int16)[~x.isnan()], wanted.view(torch.int16)[~x.isnan()])


@pytest.mark.skipif(
    (device.current().capability or (9, 0)) < (8, 9), reason="this GPU cannot convert to float8"
)
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_float8_is_rounded_to_nearest_even_and_saturates(dtype):
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(midpoints, torch.tensor(end)) for end in (-1e30, 1e30)]
    x = torch.cat([numbers, midpoints, *beside, 1.5 * numbers[[0, -1]], 1e30 * numbers[[0, -1]]])
    x = torch.cat([x, torch.zeros(-len(x) % 8192)])
    largest = torch.finfo(dtype).max
    assert torch.equal(
        convert(x, dtype).view(torch.uint8), x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    )


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_products_are_those_of_the_values(dtype):
    """Each value of the format, subnormal ones too, times 1; and products whose sums are exact in float32."""
    if dtype.itemsize == 1 and (device.current().capability or (9, 0)) < (8, 9):
        pytest.skip("this GPU has no products of float8")
    bits = (
        torch.arange(128, dtype=torch.uint8)
        if dtype.itemsize == 1
        else torch.arange(256, dtype=torch.int16) * 127
    )
    finite = bits.view(dtype).float()
    finite = finite[finite.isfinite()]
    values = torch.cat([finite, -finite]).repeat(5)[:1024].reshape(32, 32)
    numbers = torch.arange(1024).reshape(32, 32) % 15 - 7
    for pair in ((values, torch.eye(32)), (numbers, numbers.T)):
        a, b = (matrix.contiguous().to(WHERE, dtype) for matrix in pair)
        out = torch.empty(32, 32, device=WHERE)
        dot_kernel[(1,)](a, b, out, 32)
        assert torch.equal(out.double(), a.double() @ b.double())


def test_functions_call_functions_in_launch_after_launch():
    x = torch.arange(-8, 8, device=WHERE).float()
    out = torch.empty_like(x)
    for _ in range(2):
        double_twice_kernel[(1,)](x, out, 16)
        assert torch.equal(out, 4 * x.clamp(min=0))
        x += 1
