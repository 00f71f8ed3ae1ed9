"""A box in shared memory: what it holds on a GPU."""

import pytest
import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.lesson import box_dump, experiments, map_report
from tilelab.runtime import tensor_map


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
