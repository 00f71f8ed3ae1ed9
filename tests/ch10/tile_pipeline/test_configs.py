"""What a TileConfig may be and says of itself, and which one a name means."""

import pytest
from cases import cases
from sentences import refused

from ch10.tile_pipeline.configs import TileConfig, choose_config, configs, parse
from ch10.tile_pipeline.lesson import experiments, sweep


@cases(
    "change, message",
    ({"op": "move"}, "unknown operation 'move'; choose copy, stencil, transpose, add_shared, accumulate"),
    ({"rows": 0}, "rows must be from 1 to 256; it is 0"),
    ({"columns": 257}, "columns must be .* it is 257"),
    ({"threads": 2048}, "threads must be from 32 to 1024; it is 2048"),
    ({"threads": 48}, "threads must be a multiple of 32; it is 48"),
    ({"stages": 7}, "stages must be from 1 to 6; it is 7"),
    ({"tiles_per_cta": 65}, "tiles_per_cta must be .* it is 65"),
    ({"producer": "warp"}, "producer is for stencil; copy has 'warp'"),
    ({"producer": "cta"}, "producer must be thread or warp; it is 'cta'"),
    ({"swizzle": "128B"}, "swizzle is for transpose; copy has '128B'"),
    ({"swizzle": "16B"}, "swizzle must be none or 32B or 64B or 128B; it is '16B'"),
    ({"block": 4}, "block is for transpose; copy has 4"),
    ({"block": 2}, "block must be 1 or 4; it is 2"),
    ({"raster": 2}, "raster is for transpose; copy has 2"),
    ({"raster": 1025}, "raster must be .* it is 1025"),
    ({"cluster": 2}, "cluster is for add_shared; copy has 2"),
    ({"cluster": 3}, "cluster must be 1 or 2 or 4; it is 3"),
    ({"l2_promotion": "512B"}, "l2_promotion must be none or .*; it is '512B'"),
    ({"op": "transpose", "columns": 32, "rows": 32, "stages": 2}, "stages is for copy and stencil and"),
    ({"op": "transpose"}, "the transpose's tiles must be squares of a multiple of 32; they are 4 x 256"),
    ({"op": "transpose", "rows": 48, "columns": 48}, "squares of a multiple of 32; they are 48 x 48"),
    ({"op": "stencil"}, "up to 254 rows and 32, .* columns; they are 4 x 256"),
    ({"op": "stencil", "columns": 48}, "they are 4 x 48"),
    ({"op": "stencil", "columns": 64}, "threads must be a multiple of its columns.* 32 threads compute"),
    ({"op": "stencil", "columns": 32, "threads": 96}, "96 threads compute 4 x 32"),
    ({"op": "stencil", "columns": 32, "rows": 32, "threads": 1024, "producer": "warp"}, "at most 1,024 thr"),
    ({"op": "add_shared", "rows": 6, "cluster": 4}, "an equal number of rows.*; 4 CTAs share 6 x 256"),
    ({"op": "add_shared", "columns": 20, "cluster": 2}, "2 CTAs share 4 x 20"),
)
def test_bad_configuration_is_one_sentence(change, message):
    with refused(message):
        TileConfig(**{"op": "copy", "rows": 4, "columns": 256, **change})


def test_a_transpose_that_would_spill_is_refused():
    with pytest.raises(ValueError, match="a thread of the transpose can hold 128 .* 32 threads hold 288"):
        TileConfig("transpose", 96, 96)


WARP = TileConfig("stencil", 16, 64, 128, 3, 4, "warp")
TURNED = TileConfig("transpose", 64, 64, 128, swizzle="32B", block=4, raster=2)


@cases(
    "config, name",
    (
        TileConfig("copy", 4, 256, l2_promotion="none"),
        "copy · 4×256 · 32 threads · 1 stage · 1 tile per CTA · L2 fetches none",
    ),
    (WARP, "stencil · 16×64 · 128 threads · 3 stages · 4 tiles per CTA · a warp loads"),
    (TURNED, "transpose · 64×64 · 128 threads · swizzle 32B · blocks of 4 · bands of 2"),
)
def test_a_configuration_is_named_and_found_by_its_name(config, name):
    assert config.name == str(config) == name and parse(name) == config


def test_every_name_is_read_back_and_others_are_refused():
    for op in experiments.OPS:
        for config in (*experiments.all_configs(op).values(), *sweep.grid(op)):
            assert parse(config.name) == config
    for text in ("copy", "copy · 4×256 · fast", "4×256"):
        with pytest.raises(ValueError, match="name"):
            parse(text)


def test_what_a_configuration_needs():
    assert (WARP.block_threads, WARP.box(), WARP.smem_bytes()) == (160, (18, 72), 3 * 5248)
    assert (TURNED.box(), TURNED.smem_bytes()) == ((64, 8), 16384 + 1024)
    assert TileConfig("copy", 3, 4, stages=2).smem_bytes() == 256  # a tile starts at a multiple of 128


def test_variants_belong_to_their_operation():
    assert all(config.op == op for op in experiments.OPS for config in experiments.all_configs(op).values())
    tall, wide = (choose_config("transpose", "best", shape) for shape in ((64, 64), (64, 65)))
    assert (tall, wide) == tuple(configs("transpose")[name] for name in ("down", "across"))
    assert list(configs("transpose", (64, 65))) == ["across", "down"]
    with pytest.raises(ValueError, match="unknown operation 'scale'; choose copy, "):
        configs("scale")
