"""A box in shared memory: what is refused, what it should hold, and on a GPU what it holds."""

import pytest
import torch
from sentences import refused

from ch10.tile_pipeline.lesson import box_dump, experiments
from tilelab.runtime import tensor_map

ROOM = torch.zeros(16, 64)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(4, 4, dtype=torch.complex64), 0, 0, (4, 4)), "x must be uint8, .*; it is complex64"),
        ((ROOM, 0, 0, (4, 4, 4)), "box must have 2 extents"),
        (
            (ROOM, 0, 2, (4, 4)),
            "column must be a multiple of 4 elements .16 bytes., or the load is .*; it is 2",
        ),
        ((ROOM, 1 << 32, 0, (4, 4)), "row must be a whole number of 32 bits; it is 4294967296"),
        ((ROOM, 0, 4.0, (4, 4)), "column must be a whole number of 32 bits; it is 4.0"),
        ((ROOM, 0, 0, (4, 3)), "multiple of 16 bytes"),
        ((ROOM, 0, 0, (4, 4), "128B"), "rows of a box with swizzle 128B must take 128 bytes, not 16"),
        ((ROOM.int(), 0, 0, (4, 4), "none", "nan"), "fill must be zero for a tensor of integers"),
    ],
)
def test_bad_box_is_one_sentence(arguments, message):
    with refused(message):
        box_dump.dump_box(*arguments)


@pytest.mark.parametrize("swizzle", tensor_map.SWIZZLES)
def test_a_box_is_found_again(swizzle):
    x = torch.arange(20 * 64, dtype=torch.float32).view(20, 64)
    box = experiments.dump_shapes(torch.float32)[swizzle]
    wanted = box_dump.box_spec(x, -2, 50, box, "nan")
    plain = wanted.view(torch.uint8).flatten()
    lies = torch.empty_like(plain)
    lies[tensor_map.swizzle_offset(torch.arange(len(plain)), swizzle)] = plain
    assert torch.equal(
        box_dump.undo_swizzle(lies, torch.float32, box, swizzle).view(torch.uint8), wanted.view(torch.uint8)
    )
    assert wanted[:2].isnan().all() and wanted[22:].isnan().all() and wanted[2, 0] == 50


def test_a_box_outside_holds_the_fill():
    x = torch.ones(4, 8)
    for row, column in ((-9, 0), (4, 0), (0, -9), (0, 8), (100, 100)):
        assert not box_dump.box_spec(x, row, column, (4, 8)).any()
    assert box_dump.box_spec(x, 2, 4, (4, 8)).sum() == 8


@pytest.mark.gpu
def test_a_box_lies_where_the_model_says():
    rows = experiments.check_dumps().rows
    assert len(rows) == len(tensor_map.DTYPES) * len(tensor_map.SWIZZLES)
    assert not [row for row in rows if row["status"] != "ok"]
