"""A box in shared memory: what is refused, what it should hold, and on a GPU what it holds."""

import pytest
import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.lesson import box_dump, experiments, map_report
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
    with pytest.raises(ValueError, match=message) as caught:
        box_dump.dump_box(*arguments)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.gpu
@pytest.mark.parametrize("swizzle", tensor_map.SWIZZLES)
@pytest.mark.parametrize("dtype", tensor_map.DTYPES)
def test_a_box_lies_where_the_model_says(swizzle, dtype):
    box = 24, (tensor_map.SWIZZLES[swizzle] or 128) // dtype.itemsize
    x = experiments.make_random((61, 160), dtype)
    unit = tile_pipeline.UNIT // dtype.itemsize
    for row in (-25, -3, 5, 50, 70):
        for column in (-box[1], -unit, 0, unit, 160 - unit, 155 // unit * unit):
            # 155 columns: rows end within a unit of 16 bytes.
            load = map_report.BoxLoad(str(dtype)[6:], (61, 155), (160, 1), box, swizzle, corner=(row, column))
            found = box_dump.dump_box(x[:, :155], row, column, box, swizzle)
            memory = x.flatten().view(torch.uint8)
            assert map_report.count_wrong(load, memory.cpu(), found.cpu()) == 0, (row, column)
