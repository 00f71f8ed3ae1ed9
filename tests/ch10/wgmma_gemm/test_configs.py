import dataclasses
import itertools
import re

import pytest
from cases import cases
from sentences import refused

from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig, parse, rejection

GOOD = {"kernel": "specialised", "block_m": 128, "block_n": 256, "num_stages": 4, "consumers": 2}
GOOD |= {"epilogue_subtile": 4}


@cases(
    "change, said",
    ({"kernel": "magic"}, "unknown kernel 'magic'; choose one_group, specialised, split."),
    ({"block_n": 512}, "block_n must be from 1 to 256; it is 512."),
    ({"consumers": 4}, "consumers must be from 1 to 3; it is 4."),
    ({"consumers": 3}, "block_m must be a multiple of 64 for each of 3 consumers"),
    ({"group_m": 4097}, "group_m must be from 1 to 4,096"),
    ({"block_m": 64}, "block_m must be a multiple of 64 for each of 2 consumers"),
    ({"block_n": 72}, "block_n must be a multiple of 16 in each of 4 subtiles; it is 72."),
    ({"swap": True, "block_n": 72}, "block_n must be a multiple of 8 in each of 4 subtiles; it is 72."),
    ({"cluster_n": 3}, "cluster_n must be from 1 to 2; it is 3."),
    ({"num_stages": 1}, "the kernel specialised needs 2 stages"),
    ({"cluster": 3}, "cluster must be 1, 2 or 4 for the kernel specialised; it is 3."),
    ({"kernel": "one_group"}, "for the kernel one_group; they are 2, 1, False and False."),
    ({"kernel": "one_group", "consumers": 1, "pdl": True}, "they are 1, 1, False and True."),
    ({"kernel": "split", "epilogue_subtile": 1}, "cluster must be at least 2 for the kernel split; it"),
    ({"kernel": "split", "cluster": 2}, "cluster_n 1 for the kernel split; they are False, 4 and 1."),
)
def test_bad_configuration_is_one_sentence(change, said):
    with refused(re.escape(said)):
        WgmmaConfig(**{**GOOD, **change})


def test_a_configuration_is_found_by_its_name():
    config = WgmmaConfig("split", 64, 64, 6, cluster=2, boxes_per_stage=2, group_m=8, swap=True, pdl=True)
    name = "64×64×128 · 6 stages · split · 1 consumer · cluster of 2 · groups of 8 · swapped · early"
    assert config.name == str(config) == name and parse(name) == config
    for config in STEPS.values():
        assert parse(config.name) == config
    for text in ("fast", "128×128×64 · 4 stages · quick", "4 stages"):
        with pytest.raises(ValueError, match="configuration|kernel"):
            parse(text)


def test_what_a_configuration_needs():
    wide = WgmmaConfig(**GOOD)
    assert (wide.threads, wide.accumulators, wide.box, wide.stage_bytes) == (384, 128, 64, 49152)
    # ring, two parts of C, full and empty barriers
    assert wide.smem_bytes == 4 * 49152 + 2 * 128 * 64 * 2 + 64
    assert dataclasses.replace(wide, block_n=224, epilogue_subtile=7).box == 32
    assert dataclasses.replace(wide, block_n=208, epilogue_subtile=1).box == 16
    deep = WgmmaConfig("specialised", 64, 64, 6, boxes_per_stage=2)
    assert (deep.stage_bytes, deep.steps(4096), deep.steps(4097)) == (32768, 32, 33)
    assert STEPS["tile"].threads == 128 and STEPS["tile"].smem_bytes == 32768 + 32768 + 8
    split = WgmmaConfig("split", 64, 128, 2, cluster=2)
    assert split.smem_bytes == 2 * 24576 + 32  # the sums, 64 rows of 136 floats, lie in the ring
    assert dataclasses.replace(split, block_n=256).smem_bytes == 2 * 40960 + 32


def test_tiles_and_grids():
    cluster = STEPS["cluster"]
    assert cluster.tiles(4096, 4096) == 512 and cluster.tiles(129, 8) == 2 and cluster.tiles(1, 8) == 2
    assert cluster.grid(4096, 4096, 132) == 512 and STEPS["persistent"].grid(4096, 4096, 132) == 132
    assert STEPS["persistent"].grid(4096, 4096, 133) == 132  # whole clusters
    four = dataclasses.replace(STEPS["persistent"], cluster=4)
    assert four.tiles(513, 8) == 8 and four.grid(4096, 4096, 132) == 116  # a cluster lies in one GPC
    swapped = WgmmaConfig("specialised", 64, 16, 4, swap=True)
    assert swapped.tiles(16, 4096) == 64
    assert WgmmaConfig("split", 64, 128, 4, cluster=4).grid(64, 4096, 132) == 128


@cases(
    "config, said",
    (WgmmaConfig("specialised", 128, 256, 5, consumers=2), "it needs 311,376 B of shared memory per"),
    (WgmmaConfig("specialised", 128, 256, 2, epilogue_subtile=4), "it needs about 40 beside its 256"),
    (WgmmaConfig("specialised", 192, 208, 2, consumers=3), "a wgmma of 208 columns needs 130 registers"),
)
def test_what_cannot_run_is_refused_with_a_reason(config, said):
    assert said in rejection(config)


def test_three_consumers_have_registers_for_192_columns():
    """Threads start with 128 registers, and a consumer gets 152: 96 sums and 40 others fit."""
    three = WgmmaConfig("specialised", 192, 192, 4, consumers=3, epilogue_subtile=6)
    assert (three.threads, three.accumulators, three.box, rejection(three)) == (512, 96, 32, "")


def test_the_course_s_own_run():
    assert [str(config) for config in STEPS.values() if rejection(config)] == []


def test_each_step_changes_one_thing():
    names = [field.name for field in dataclasses.fields(WgmmaConfig)]
    changed = [
        [name for name in names if getattr(a, name) != getattr(b, name)]
        for a, b in itertools.pairwise(STEPS.values())
    ]
    expected = [["num_stages"], ["kernel"], ["consumers"], ["block_n", "epilogue_subtile"], ["cluster"]]
    expected += [["persistent"], ["pdl"], ["group_m"]]
    assert changed == expected
