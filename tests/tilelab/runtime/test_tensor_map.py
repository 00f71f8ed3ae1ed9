import re

import numpy
import pytest
import torch
from cases import cases
from sentences import refused

from tilelab.runtime import tensor_map
from tilelab.runtime.device import Unsupported, current
from tilelab.runtime.tensor_map import SWIZZLES, check_describable, swizzle_offset

GOOD = {"shape": (100, 64), "strides": (64, 1), "itemsize": 2, "address": 4096, "box": (16, 64)}


@pytest.mark.parametrize("swizzle, span", SWIZZLES.items())
def test_swizzling_moves_units_of_16_bytes_within_their_span(swizzle, span):
    offsets = numpy.arange(4096)
    places = swizzle_offset(offsets, swizzle)
    assert sorted(places) == list(offsets)
    assert (places % 16 == offsets % 16).all()
    assert (places // max(span, 16) == offsets // max(span, 16)).all()
    period = 8 * span or 16
    assert (swizzle_offset(offsets + period, swizzle) - period == places).all()


def test_a_column_of_units_meets_every_bank_under_the_128_byte_swizzle():
    column = numpy.arange(8) * 128
    assert len(set(swizzle_offset(column, "none") % 128)) == 1
    assert sorted(swizzle_offset(column, "128B") % 128 // 16) == list(range(8))
    assert len(set(swizzle_offset(column, "64B") % 128 // 16)) == 4
    assert len(set(swizzle_offset(column, "32B") % 128 // 16)) == 2


def test_swizzled_takes_numbers_and_tensors():
    assert swizzle_offset(128, "128B") == 128 + 16
    assert swizzle_offset(torch.tensor([0, 128, 256]), "32B").tolist() == [0, 144, 256]


@cases(
    "change",
    {},
    {"shape": (1, 64), "strides": (3, 1)},
    {"box": (256, 64)},
    {"swizzle": "128B"},
    {"fill": "nan"},
    {"shape": (7, 5, 64), "strides": (8192, 128, 1), "box": (1, 4, 8)},
    {"shape": (100, 61)},
)
def test_what_a_tensor_map_describes_passes(change):
    check_describable(**{**GOOD, **change})


@cases(
    "change, said",
    ({"swizzle": "256B"}, "unknown swizzle '256B'; choose one of none, 32B, 64B, 128B."),
    ({"l2_promotion": "32B"}, "unknown l2_promotion '32B'; choose one of none, 64B, 128B, 256B."),
    ({"fill": "one"}, "unknown fill 'one'; choose one of zero, nan."),
    ({"fill": "nan", "floating": False}, "fill must be zero for a tensor of integers"),
    ({"shape": (2,) * 6}, "1 to 5 dimensions; this tensor has 6"),
    ({"box": (16,)}, "2 extents, as many as the tensor; it is (16,)"),
    ({"box": (257, 64)}, "1 to 256 elements; the box is (257, 64)"),
    ({"box": (0, 64)}, "1 to 256 elements"),
    ({"shape": (0, 64)}, "1 to 2^32; the shape is (0, 64)"),
    ({"address": 4098}, "starts 2 past one: copy it first"),
    ({"strides": (64, 2)}, "must be contiguous (stride 1); the strides are (64, 2)"),
    ({"strides": (65, 1)}, "positive multiples of 16 bytes (8 elements) below 2^40; one is 130 bytes"),
    ({"strides": (-64, 1)}, "positive multiples of 16 bytes"),
    ({"strides": (0, 1)}, "one is 0 bytes: make it contiguous"),
    ({"strides": (1 << 40, 1)}, "below 2^40"),
    ({"box": (16, 4)}, "multiple of 16 bytes; 4 elements take 8"),
    ({"swizzle": "64B"}, "the innermost extent of a box takes at most as many bytes; it takes 128."),
)
def test_what_it_cannot_describe_is_said_in_a_sentence(change, said):
    with refused(re.escape(said)):
        check_describable(**{**GOOD, **change})


def test_a_tensor_is_checked_before_the_gpu_is_asked_for():
    with pytest.raises(ValueError, match="the tensor is complex64"):
        tensor_map.make_tensor_map(torch.zeros(8, 8, dtype=torch.complex64), (8, 8))
    with pytest.raises(ValueError, match="1 to 256"):
        tensor_map.make_tensor_map(torch.zeros(512, 8), (512, 8))


@pytest.mark.skipif(current().capability is not None, reason="says what lacks without a GPU")
def test_without_a_gpu_a_map_is_unsupported():
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        tensor_map.make_tensor_map(torch.zeros(8, 8), (8, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", tensor_map.DTYPES)
def test_the_driver_takes_every_dtype(dtype):
    x = torch.zeros(40, 64, device="cuda").to(dtype)
    for fill in ("zero", "nan") if dtype.is_floating_point else ("zero",):
        tensor_map.make_tensor_map(x, (8, 16), swizzle="128B" if dtype.itemsize <= 8 else "none", fill=fill)
    tensor_map.make_tensor_map(x[:1].as_strided((1, 64), (1, 1)), (8, 16))  # a stride that is never taken
