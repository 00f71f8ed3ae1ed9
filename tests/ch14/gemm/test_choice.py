"""How a shape gets its configuration: families of tiles, and the model of their time with its correction."""

import math
import time

import pytest

from ch14 import gemm
from ch14.gemm import choice
from ch14.gemm.configs import parse, rejection
from tilelab.runtime import choice as shared

H200 = "NVIDIA H200"
SHAPES = ((1, 6144, 4096), (200, 6144, 4096), (240, 5120, 32768), (3000, 6144, 4096), (5, 104, 72), (1, 8, 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_candidate_can_run(shape):
    found = choice.candidates(*shape, 132)
    assert found
    for config in found.values():
        assert rejection(config, "sm_90a", "bf16") == "" and parse(config.name) == config
        assert config.splits * config.block_k <= max(shape[2], config.block_k)


def test_a_tile_is_as_wide_as_its_tokens():
    found = choice.candidates(200, 6144, 4096, 132)
    assert {config.block_n for name, config in found.items() if "tokens×" in name} == {208}
    assert found["64×tokens/+1×64, 4 warps, swapped"].block_n == 112
    assert found["128×tokens rounded×64, 8 warps, swapped"].block_n == 256
    split = choice.candidates(200, 1344, 26112, 132)["64×tokens×64, 4 warps, swapped, split"]
    assert split.splits == 6 and split.tiles(200, 1344) * split.splits <= 132


@pytest.mark.parametrize("shape", (*SHAPES, (666, 56, 20784), (4096, 4096, 4096)), ids=str)
def test_all_families_at_once_are_predicted_as_one_by_one(shape):
    us, traits = choice.predict(*shape, 132, H200)
    found = {name: time for name, time in zip(choice.NAMES, us) if time < math.inf}
    configs = choice.candidates(*shape, 132).items()
    expected = {name: choice.predict_us(each, *shape, 132) for name, each in configs}
    assert found == pytest.approx(expected) and (traits[0] > 0).all()


def test_the_choice_says_what_it_rests_on():
    ranked, why = choice.rank(200, 6144, 4096, 132, H200)
    assert why.startswith("by the model and its errors near ") and "on an" not in why and ranked
    assert choice.rank(200, 6144, 4096, 132, "NVIDIA H100 80GB HBM3")[1].endswith(" on an NVIDIA H200")
    begun = time.thread_time()  # without the time that another process on this core takes
    choice.rank(201, 6144, 4096, 132, H200, most=1)
    assert time.thread_time() - begun < 0.01  # about 0.1 ms


def test_other_operands_get_the_choice_of_the_course():
    for case in (("bf16", False, "sm_90a"), ("fp8", True, "sm_90a"), ("bf16", True, "sm_100a")):
        config, why = gemm.find_best(200, 6144, 4096, *case, 132)
        assert why == "by the model" and not config.swap


def test_a_measured_shape_gets_the_family_that_was_fastest():
    table = shared.load("gemm", H200)
    exact = other = 0
    for shape, errors in list(zip(table.shapes, table.errors))[::29]:
        configs = choice.candidates(*shape, 132)
        times = {
            family: choice.predict_us(configs[family], *shape, 132) * 2.718281828**error
            for family, place in table.places.items()
            if family in configs and (error := errors[place]) is not None
        }
        exact += configs[min(times, key=times.__getitem__)] == choice.rank(*shape, 132, H200)[0][0]
        other += 1
    assert exact >= 0.85 * other  # not all families were measured everywhere
