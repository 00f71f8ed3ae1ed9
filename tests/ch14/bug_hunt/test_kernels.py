"""The kernels of the hunts: all forms compute the same, and what compiles runs on a GPU."""

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.bug_hunt import kernels
from ch14.bug_hunt.hunts import FORMATS
from ch14.bug_hunt.lesson import experiments
from tilelab.measure import check
from tilelab.runtime import device


def test_every_form_computes_the_same():
    found = experiments.check_correctness(70, 40, 40)
    assert len(found) == 6 * 3 + 4 * 3 and [row for row in found if row["status"] != "ok"] == []


def scales(rows, columns):
    """Exponents from 2^-2 to 2^2 as e8m0, and what they stand for."""
    exponents = torch.randint(-2, 3, (rows, columns), device="cuda")
    return (exponents + 127).to(torch.uint8), torch.exp2(exponents.double())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_block_scaled_products_on_the_gpu(name):
    m, n, k = 256, 128, 256
    packed, group, kind, *_ = FORMATS[name]
    (a_scale, a_factor), (b_scale, b_factor) = scales(m, k // group), scales(n, k // group)
    if name == "mxfp8":
        a, b = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((m, k), (k, n)))
        a_value, b_value = a.double(), b.double()
    else:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda", dtype=torch.float64)
        values = torch.cat([values, -values])
        codes = [torch.randint(0, 16, shape, device="cuda", dtype=torch.uint8) for shape in ((m, k), (k, n))]
        # The low nibble comes first.
        a, b = codes[0][:, ::2] | codes[0][:, 1::2] << 4, codes[1][::2] | codes[1][1::2] << 4
        a_value, b_value = (values[code.long()] for code in codes)
    expected = (a_value * a_factor.repeat_interleave(group, 1)) @ (
        b_value * b_factor.repeat_interleave(group, 1).T
    )
    out = torch.full((m, n), float("nan"), device="cuda")
    operands = a.contiguous(), a_scale, b.contiguous(), b_scale, out, m, n, k
    constants = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "PACKED": packed, "GROUP": group}
    constants |= {"FORMAT": kind}
    kernels.scaled_kernel[m // 128, n // 128](*operands, **constants, num_warps=4, num_stages=2)
    assert check.relative_error(out, expected) < 2**-7  # bf16 has room for both formats' digits


@pytest.mark.gpu
@pytest.mark.parametrize("loads, warps", [("device", 4), ("host", 4), ("device", 8)])
def test_specialised_warps_on_the_gpu(loads, warps):
    if not device.current().has_wgmma:
        pytest.skip("the hunt's kernel is Hopper's")
    m, n, k = 256, 256, 512
    a, b = (torch.randn(shape, device="cuda").half() for shape in ((m, k), (k, n)))
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)
    matrices, tiles = (a, b, out), ([64, 64], [64, 128], [64, 128])
    if loads == "host":
        matrices = [TensorDescriptor.from_tensor(each, tile) for each, tile in zip(matrices, tiles)]
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    sizes = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64}
    constants = sizes | {"LOADS": loads, "LOOP": "over K", "WARP_SPECIALIZE": True}
    kernel = kernels.specialized_kernel[m // 64, n // 128]
    compiled = kernel(*matrices, m, n, k, **constants, num_warps=warps, num_stages=3)
    assert check.relative_error(out, a.double() @ b.double()) < check.TOLERANCE[torch.float16]
    assert f".reqntid {384 if warps == 4 else 256}" in compiled.asm["ptx"]
