"""The emulator of Gluon: a small kernel that copies is right, and each broken rule is named.

`tests/ch14/attention/test_exercises.py` breaks kernels with roles and asynchronous products.
"""

import pytest
import torch
from cases import cases

import ch14  # noqa: F401  selects Triton's interpreter where there is no GPU
from tilelab.cells import lesson
from tilelab.emulator import gluon as gluon_emulator

COPY = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def scale_tile(x_desc, out_desc, factor, LAYOUT: gl.constexpr):
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [gl.program_id(0) * 4, 0], full, tile)
    mbarrier.wait(full, 0)
    tile.store(tile.load(LAYOUT) * factor)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [gl.program_id(0) * 4, 0], tile)
    tma.store_wait(0)
"""


class Descriptor:
    """What the emulator reads of a host descriptor."""

    def __init__(self, base, block_shape):
        self.base, self.shape, self.block_shape, self.layout = base, base.shape, block_shape, None


def scale(change=("", ""), seed=0):
    assert change[0] in COPY
    kernel = lesson.define(COPY.replace(*change))["scale_tile"]
    x = torch.arange(30.0).view(10, 3)
    out = torch.full_like(x, torch.nan)
    with gluon_emulator.with_seed(seed):
        gluon_emulator.run(
            kernel, (3,), Descriptor(x, [4, 8]), Descriptor(out, [4, 8]), 2.0, LAYOUT=None, num_warps=4
        )
    return x, out


@pytest.mark.parametrize("seed", gluon_emulator.SEEDS)
def test_a_tile_that_hangs_over_the_end_is_clipped(seed):
    x, out = scale(seed=seed)
    assert torch.equal(out, 2 * x)


@cases(
    "change, said",
    (("    mbarrier.init(full, count=1)\n", ""), "before mbarrier.init"),
    (
        ("    mbarrier.expect(full, x_desc.block_type.nbytes)\n", ""),
        "nothing moves any more.*mbarrier.wait.full, 0",
    ),
    (("expect(full, x_desc.block_type.nbytes)", "expect(full, 4)"), "nothing moves any more"),
    (("mbarrier.wait(full, 0)", "mbarrier.wait(full, 1)"), "before TMA has landed"),
    (("    mbarrier.wait(full, 0)\n", "    mbarrier.arrive(full, count=1)\n"), "one too many|before TMA has"),
    (("factor)\n    fence_async_shared()", "factor)"), "without fence_async_shared"),
    (("    tma.store_wait(0)\n", ""), "before tma.store_wait"),
    (("    tma.store_wait(0)\n", "    tile.store(tile.load(LAYOUT))\n"), "still uses"),
    ((".index(0)\n", ".index(1)\n"), "index 1 of 1"),
    (("[gl.program_id(0) * 4, 0], full", "[0], full"), "1 coordinates"),
)
def test_a_broken_rule_is_named(change, said):
    with pytest.raises(gluon_emulator.GluonError, match=said):
        scale(change)


def test_an_error_of_python_is_raised_as_it_is():
    with pytest.raises(NameError):
        scale(("factor)", "facto)"))
