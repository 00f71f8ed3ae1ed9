import pytest
import torch
from builds import build_in_order

from ch14.descriptors.lesson.tile_copy import SETS, CopyConfig, prepare_copy
from tilelab.runtime import build, device

WHERE = "cuda" if device.current().capability else "cpu"
EVERY = list(dict.fromkeys(config for chosen in SETS.values() for config in chosen))


def bits(*shape):
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=WHERE)


@pytest.mark.parametrize("config", [CopyConfig(16, 64, 4, 1), CopyConfig(64, 16, 4, 3), *EVERY], ids=str)
def test_copy_tma_is_equal_bit_for_bit_and_stays_inside(config):
    for shape in ((1, 8), (100, 72)):
        source, room = bits(*shape), bits(shape[0] + 4, shape[1] + 16)
        before = room.clone()
        inside = room[2:-2, 8:-8]
        prepare_copy(source, inside, config)()
        assert torch.equal(inside, source)
        before[2:-2, 8:-8] = source
        assert torch.equal(room, before), "the copy wrote outside its destination"


def test_a_single_row_has_any_stride():
    source, destination = bits(99).as_strided((1, 8), (9, 1)), bits(99).as_strided((1, 8), (11, 1))
    prepare_copy(source, destination, SETS["course"][0])()
    assert torch.equal(destination, source)


def test_padded_source():
    wide, destination = bits(37, 88), bits(37, 72)
    prepare_copy(wide[:, 8:80], destination, SETS["course"][0])()
    assert torch.equal(destination, wide[:, 8:80])


@pytest.mark.compile
def test_copies_use_tma_and_stages_do_nothing_without_a_loop():
    tile = dict.fromkeys(("source", "destination"), "tensordesc<bf16[128, 128]>")
    kernel, constants = "ch14.descriptors.lesson.tile_copy:copy_tma_kernel", {"BLOCK_M": 128, "BLOCK_N": 128}
    jobs = [
        build.Job(kernel, tile, constants, target, num_stages=stages)
        for target, stages in (("sm_90a", 1), ("sm_90a", 5), ("sm_120a", 1))
    ]
    reports = build_in_order(jobs)
    assert all(
        report.launchable and report.counts["tma_load"] and report.counts["tma_store"] for report in reports
    )
    assert reports[0].ptx == reports[1].ptx


@pytest.mark.gpu
@pytest.mark.parametrize("config", EVERY, ids=str)
def test_large_copy_is_equal_bit_for_bit_and_stays_inside(config):
    source, room = bits(4099, 4104), bits(4103, 4104)
    before = room.clone()
    prepare_copy(source.view(torch.bfloat16), room[2:-2].view(torch.bfloat16), config)()
    before[2:-2] = source
    assert torch.equal(room, before)
