import pytest
import torch

from ch14.descriptors.lesson.tile_copy import SETS, CopyConfig, copy_tma
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
        copy_tma(source, inside, config)
        assert torch.equal(inside, source)
        before[2:-2, 8:-8] = source
        assert torch.equal(room, before), "the copy wrote outside its destination"


ROOM = bits(12, 8)


@pytest.mark.parametrize(
    "source, destination, message",
    [
        (bits(8, 8)[0], bits(8, 8), "source must be a matrix"),
        (bits(8, 8), bits(8, 8).T, "destination must be stored row by row"),
        (bits(8, 12), bits(8, 12), "a row of source must take a multiple of 16 bytes; its stride is 24"),
        (bits(8, 24)[:, 4:12], bits(8, 8), "source must start at a multiple of 16 bytes"),
        (bits(8, 8), bits(16, 8), "destination must be 8 x 8; it is 16 x 8"),
        (bits(8, 8), bits(8, 8).view(torch.float16), "destination must be int16; it is float16"),
        ([1], bits(8, 8), "source must be a torch.Tensor; it is a list"),
        (bits(0, 8), bits(0, 8), "source must have at least one element"),
        (torch.zeros(8, 8, dtype=torch.complex64), bits(8, 8), "source must be float32, .*; it is complex64"),
        (ROOM[:8], ROOM[4:12], "destination lies in the memory of source"),
    ],
)
def test_bad_matrix_is_one_sentence(source, destination, message):
    with pytest.raises(ValueError, match=message):
        copy_tma(source, destination)


@pytest.mark.parametrize("block", [0, -8, 12, 8.0, "8", None])
def test_a_block_is_a_whole_power_of_two(block):
    for name, sizes in (("block_m", (block, 8)), ("block_n", (8, block))):
        with pytest.raises(ValueError, match=f"{name} must be a power of two; it is {block!r}"):
            CopyConfig(*sizes, 4, 1)


def test_a_single_row_has_any_stride():
    source, destination = bits(99).as_strided((1, 8), (9, 1)), bits(99).as_strided((1, 8), (11, 1))
    assert torch.equal(copy_tma(source, destination), source)


def test_padded_source():
    wide, destination = bits(37, 88), bits(37, 72)
    copy_tma(wide[:, 8:80], destination)
    assert torch.equal(destination, wide[:, 8:80])


def test_more_rows_of_tiles_than_a_grid_takes():
    source = bits(65536, 8)
    with pytest.raises(
        ValueError, match="at most 65,535 rows of tiles fit; source has 65536: use a taller tile"
    ):
        copy_tma(source, torch.empty_like(source), CopyConfig(1, 8, 4, 1))


@pytest.mark.compile
def test_copies_use_tma_and_stages_do_nothing_without_a_loop():
    tile = dict.fromkeys(("source", "destination"), "tensordesc<bf16[128, 128]>")
    jobs = [
        build.Job(
            "ch14.descriptors.lesson.tile_copy:copy_tma_kernel",
            tile,
            {"BLOCK_M": 128, "BLOCK_N": 128},
            target,
            num_stages=stages,
        )
        for target, stages in (("sm_90a", 1), ("sm_90a", 5), ("sm_120a", 1))
    ]
    reports = build.disassemble(jobs)
    assert all(
        report.launchable and report.counts["tma_load"] and report.counts["tma_store"] for report in reports
    )
    assert reports[0].ptx == reports[1].ptx


@pytest.mark.gpu
@pytest.mark.parametrize("config", EVERY, ids=str)
def test_large_copy_is_equal_bit_for_bit_and_stays_inside(config):
    source, room = bits(4099, 4104), bits(4103, 4104)
    before = room.clone()
    copy_tma(source.view(torch.bfloat16), room[2:-2].view(torch.bfloat16), config)
    before[2:-2] = source
    assert torch.equal(room, before)
