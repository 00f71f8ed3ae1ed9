import dataclasses
import itertools

import pytest

from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig, candidates, choose, parse, predicted_us, rejection, resident

GOOD = {"kernel": "specialised", "block_m": 128, "block_n": 256, "stages": 4, "consumers": 2, "parts": 4}


@pytest.mark.parametrize("change, said", [
    ({"kernel": "magic"}, "the kernels are one_group, specialised, split; here it is 'magic'."),
    ({"leaves_out": "tea"}, "leaves_out is one of nothing, phase"),
    ({"block_n": 512}, "block_n is a whole number from 1 to 256; here it is 512."),
    ({"stages": True}, "stages is a whole number from 1 to 16; here it is True."),
    ({"consumers": 3}, "consumers is a whole number from 1 to 2"),
    ({"group": 4097}, "group is a whole number from 1 to 4,096"),
    ({"swap": "0"}, "swap is True or False; here it is '0'."),
    ({"early": 1}, "early is True or False; here it is 1."),
    ({"block_m": 64}, "each of 2 consumers takes a multiple of 64 rows, as a product does; block_m is 64."),
    ({"block_n": 72}, "block_n is a multiple of 16 in each of its 4 parts; it is 72."),
    ({"swap": True}, "a transposed C is staged whole: parts is 1; here it is 4."),
    ({"stages": 1}, "specialised has 2 stages at least"),
    ({"cluster": 4}, "specialised has clusters of 1 or 2; here of 4."),
    ({"kernel": "one_group"}, "one_group has one consumer, no cluster, and neither persists nor starts early."),
    ({"kernel": "one_group", "consumers": 1, "early": True}, "neither persists nor starts early"),
    ({"kernel": "split", "parts": 1}, "split has clusters of 2, 4 or 8"),
    ({"kernel": "split", "cluster": 2}, "stores C in one part"),
    ({"kernel": "split", "cluster": 2, "parts": 1, "leaves_out": "proxy_fence"}, "split has no proxy fence"),
])
def test_bad_configuration_is_one_sentence(change, said):
    with pytest.raises(ValueError) as caught:
        WgmmaConfig(**{**GOOD, **change})
    assert said in str(caught.value) and str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_what_a_configuration_needs():
    wide = WgmmaConfig(**GOOD)
    assert (wide.threads, wide.accumulators, wide.box, wide.stage_bytes) == (384, 128, 64, 49152)
    assert wide.smem_bytes == 4 * 49152 + 2 * 128 * 64 * 2 + 64  # ring, two parts of C, full and empty barriers
    assert dataclasses.replace(wide, block_n=224, parts=7).box == 32
    assert dataclasses.replace(wide, block_n=208, parts=1).box == 16
    deep = WgmmaConfig("specialised", 64, 64, 6, depth=2)
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
    swapped = WgmmaConfig("specialised", 64, 16, 4, swap=True)
    assert swapped.tiles(16, 4096) == 64
    assert WgmmaConfig("split", 64, 128, 4, cluster=4).grid(64, 4096, 132) == 128


@pytest.mark.parametrize("config, said", [
    (WgmmaConfig("specialised", 128, 256, 5, consumers=2), "it needs 311,376 B of shared memory a block; sm_90a has"),
    (WgmmaConfig("specialised", 64, 128, 5, ctas=2), "2 CTAs an SM leave 115,712 B of shared memory each"),
    (WgmmaConfig("specialised", 128, 256, 2, parts=4), "registers each and need about 40 beside their 256 sums"),
    (WgmmaConfig("specialised", 64, 128, 2, ctas=3), "a product of 128 columns needs 90 registers; a thread starts"),
])
def test_what_cannot_run_is_refused_with_a_reason(config, said):
    assert said in rejection(config)


def test_the_course_s_own_run():
    assert [str(config) for config in (*STEPS.values(), *candidates()) if rejection(config)] == []
    assert len({str(config) for config in candidates()}) == len(candidates())


def test_each_step_changes_one_thing():
    names = [field.name for field in dataclasses.fields(WgmmaConfig)]
    changed = [[name for name in names if getattr(a, name) != getattr(b, name)]
               for a, b in itertools.pairwise(STEPS.values())]
    assert changed == [["stages"], ["kernel"], ["consumers"], ["block_n", "parts"], ["cluster"], ["persistent"],
                       ["early"], ["group"]]


def test_the_choice_follows_the_shape():
    tile = {m: (choose(m, 4096, 4096, 132).block_m, choose(m, 4096, 4096, 132).block_n) for m in (1, 32, 64, 512, 4096)}
    assert tile == {1: (64, 16), 32: (64, 32), 64: (64, 64), 512: (128, 128), 4096: (128, 256)}
    assert choose(8192, 8192, 8192, 132).block_n == 192
    assert choose(1, 4096, 8, 132).kernel != "split"  # one K step cannot be shared


def test_prediction_has_the_right_sign():
    shape = 4096, 4096, 4096, 132
    at = {name: predicted_us(config, *shape) for name, config in STEPS.items()}
    assert at["tile"] > at["ring"] > at["wide"] > at["persistent"]
    assert predicted_us(STEPS["ring"], 4096, 4096, 4104, 132) > 1.02 * at["ring"]
    assert resident(STEPS["tile"]) == 3 and resident(STEPS["ring"]) == 1


def test_a_configuration_is_read_from_text():
    assert parse("specialised,128,256,4,consumers=2,parts=4") == WgmmaConfig(**GOOD)
    assert parse("split, 64,128 ,4, cluster=2, early=1").early is True


@pytest.mark.parametrize("text", [
    "128,256", "specialised,128,256,4,consumers=two", "specialised,128,256,4,consumers=2,consumers=1", "a,b,c,d,e",
    "specialised,128,256,4,swap=2", "specialised,128,256,4,leaves_out=phase", "specialised,128,256,１", "", ",,,,"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="a configuration is KERNEL,BLOCK_M,BLOCK_N,STAGES and NAME=NUMBER for"):
        parse(text)
