"""What a TileConfig may be and says of itself, and which one a name means."""

import pytest

from ch10 import tile_pipeline
from ch10.tile_pipeline import experiments
from ch10.tile_pipeline.configs import TileConfig, configs
from tilelab import build


def sentence(caught):
    return "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize("change, message", [
    ({"op": "move"}, "the operations are copy, stencil, transpose, add_shared, accumulate; here it is 'move'"),
    ({"rows": 0}, "rows must be a whole number from 1 to 256; here it is 0"),
    ({"columns": 257}, "columns must be .* here it is 257"),
    ({"threads": 2048}, "threads must be a whole number from 32 to 1024; here it is 2048"),
    ({"threads": 48}, "threads must be a multiple of 32; here it is 48"),
    ({"stages": 7}, "stages must be a whole number from 1 to 6; here it is 7"),
    ({"stages": True}, "stages must be .* here it is True"),
    ({"span": 65}, "span must be .* here it is 65"),
    ({"producer": "warp"}, "only stencil can choose producer; here copy has 'warp'"),
    ({"producer": "cta"}, "producer is one of thread, warp; here it is 'cta'"),
    ({"swizzle": "128B"}, "only transpose can choose swizzle; here copy has '128B'"),
    ({"swizzle": "16B"}, "swizzle is one of none, 32B, 64B, 128B; here it is '16B'"),
    ({"block": 4}, "only transpose can choose block; here copy has 4"),
    ({"block": 2}, "block is one of 1, 4; here it is 2"),
    ({"raster": 2}, "only transpose can choose raster; here copy has 2"),
    ({"raster": 33}, "raster must be .* here it is 33"),
    ({"cluster": 2}, "only add_shared can choose cluster; here copy has 2"),
    ({"cluster": 3}, "cluster is one of 1, 2, 4; here it is 3"),
    ({"l2_promotion": "512B"}, "l2_promotion is one of none, 64B, 128B, 256B; here it is '512B'"),
    ({"op": "transpose", "columns": 32, "rows": 32, "stages": 2}, "only copy and stencil and accumulate can choose "
                                                                  "stages; here transpose has 2"),
    ({"op": "transpose"}, "the transpose's tiles are squares of a multiple of 32; here they are 4 x 256"),
    ({"op": "transpose", "rows": 48, "columns": 48}, "squares of a multiple of 32; here they are 48 x 48"),
    ({"op": "stencil"}, "1 to 254 rows and a multiple of 32 up to 224 columns; here they are 4 x 256"),
    ({"op": "stencil", "columns": 48}, "here they are 4 x 48"),
    ({"op": "stencil", "columns": 64}, "threads are a multiple of its columns.* here are 32 threads for 4 x 64"),
    ({"op": "stencil", "columns": 32, "threads": 96}, "here are 96 threads for 4 x 32"),
    ({"op": "stencil", "columns": 32, "rows": 32, "threads": 1024, "producer": "warp"},
     "at most 1,024 threads; here are 1024 and a producer's warp"),
    ({"op": "add_shared", "rows": 6, "cluster": 4}, "an equal number of whole rows.*; here 4 share 6 x 256"),
    ({"op": "add_shared", "columns": 20, "cluster": 2}, "here 2 share 4 x 20"),
])
def test_bad_configuration_is_one_sentence(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        TileConfig(**{"op": "copy", "rows": 4, "columns": 256, **change})
    assert sentence(caught)


def test_a_transpose_that_would_spill_is_refused():
    with pytest.raises(ValueError, match="a thread of the transpose holds at most 128 .* here 32 threads hold 288"):
        TileConfig("transpose", 96, 96)
    assert build.build_one(tile_pipeline.job(TileConfig("transpose", 128, 128, 128, block=4), "sm_90a")).spills == 0


def test_a_configuration_says_what_it_is():
    assert str(TileConfig("copy", 4, 256, stages=2, span=8)) == "copy 4 × 256, 32 threads, 2 stages, span 8"
    assert str(TileConfig("copy", 4, 256, l2_promotion="256B")) == ("copy 4 × 256, 32 threads, 1 stage, span 1, "
                                                                    "L2 256B")
    assert str(TileConfig("copy", 4, 256, l2_promotion="none")).endswith(", span 1, no promotion")
    warp = TileConfig("stencil", 16, 64, 128, 3, 4, "warp")
    assert str(warp) == "stencil 16 × 64, 128 threads, 3 stages, span 4, a warp loads"
    assert (warp.block_threads, warp.box(), warp.smem_bytes()) == (160, (18, 72), 3 * 5248)
    turned = TileConfig("transpose", 64, 64, 128, swizzle="32B", block=4, raster=2)
    assert str(turned) == "transpose 64 × 64, 128 threads, swizzle 32B, 4 × 4 a thread, bands of 2"
    assert (turned.box(), turned.smem_bytes()) == ((64, 8), 16384 + 1024)
    assert TileConfig("copy", 3, 4, stages=2).smem_bytes() == 256  # a tile starts at a multiple of 128
    assert str(TileConfig("add_shared", 8, 64, cluster=4)) == "add_shared 8 × 64, 32 threads, cluster of 4"


def test_variants_belong_to_their_operation():
    assert all(config.op == op for op in experiments.OPS for config in experiments.every(op).values())
    with pytest.raises(ValueError, match="the operations are copy, .*; here it is 'scale'"):
        configs("scale")
