"""How a shape gets its configuration: families of tiles, the model of their time, and its correction."""

import json
import math
import time

import pytest

from ch10.wgmma_gemm import choice
from ch10.wgmma_gemm.configs import STEPS, count_usable_sms, fits, parse, rejection
from tilelab.measure import layer_shapes
from tilelab.runtime import choice as shared

H200 = "NVIDIA H200"
SHAPES = ((1, 6144, 4096), (200, 6144, 4096), (240, 5120, 32768), (3000, 6144, 4096), (5, 104, 72), (1, 8, 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_candidate_can_run(shape):
    found = choice.candidates(*shape)
    assert found and len(set(found.values())) >= len(found) - 12
    for config in found.values():
        assert rejection(config) == "" and fits(config, shape[2]) and parse(config.name) == config


def test_a_tile_is_as_wide_as_its_tokens():
    found = choice.candidates(200, 6144, 4096)
    seen = {config.block_n for config in found.values() if config.swap and config.block_n < 160}
    assert seen == {56, 72, 104}
    assert found["specialised 64×tokens+0, cluster 4×1"].block_n == 200
    wide = found["specialised 128×tokens+1, cluster 1×2"]
    assert (wide.block_n, wide.cluster_n, wide.tiles(200, 6144)) == (104, 2, 96)


def test_clusters_leave_some_sms_without_work():
    found = [count_usable_sms(size, 132) for size in (1, 2, 3, 4, 5, 6, 8)]
    assert found == [132, 132, 117, 116, 110, 102, 104]
    assert all(sms % size == 0 for size, sms in zip((1, 2, 3, 4, 5, 6, 8), found))
    assert count_usable_sms(2, 8) == 8 and count_usable_sms(4, 3) == 4


def test_prediction_has_the_right_sign():
    shape = 4096, 4096, 4096, 132
    at = {name: choice.predict_us(config, *shape) for name, config in STEPS.items()}
    assert at["tile"] > at["ring"] > at["tile_128x256"] > at["persistent"]
    assert choice.predict_us(STEPS["ring"], 4096, 4096, 4104, 132) > 1.02 * at["ring"]
    assert choice.count_resident_ctas(STEPS["tile"]) == 3 and choice.count_resident_ctas(STEPS["ring"]) == 1
    # 80 tiles on 66 pairs of SMs: some pairs have two, and take longer than 40 tiles of twice the size
    small, large = (
        choice.candidates(2, 5120, 8192)[f"specialised {rows}×tokens+0, cluster 1×1"] for rows in (64, 128)
    )
    assert choice.predict_us(small, 2, 5120, 8192, 132) > choice.predict_us(large, 2, 5120, 8192, 132)
    slower = choice.predict_us(large, 2, 5120, 8192, 132, choice.rates_of("NVIDIA H100 80GB HBM3"))
    assert slower > 1.2 * choice.predict_us(large, 2, 5120, 8192, 132)


@pytest.mark.parametrize("shape", (*SHAPES, (666, 56, 20784), (4096, 4096, 4096)), ids=str)
def test_all_families_at_once_are_predicted_as_one_by_one(shape):
    us, traits = choice.predict(*shape, 132, H200)
    found = {name: time for name, time in zip(choice.NAMES, us) if time < math.inf}
    expected = {
        name: choice.predict_us(each, *shape, 132) for name, each in choice.candidates(*shape).items()
    }
    assert found == pytest.approx(expected) and (traits[0] > 0).all()


def test_the_choice_says_what_it_rests_on():
    ranked, why = choice.rank(200, 6144, 4096, 132, H200)
    assert why.startswith("by the model and its errors near ") and "on an" not in why
    assert ranked[0].block_n <= 208
    assert choice.rank(200, 6144, 4096, 132, "NVIDIA H100 80GB HBM3")[1].endswith(" on an NVIDIA H200")
    begun = time.thread_time()  # without the time that another process on this core takes
    choice.rank(201, 6144, 4096, 132, H200, most=1)
    assert time.thread_time() - begun < 0.01  # about 0.1 ms


def test_a_measured_shape_gets_the_family_that_was_fastest():
    table = shared.load("wgmma_gemm", H200)
    exact = other = 0
    for shape, errors in list(zip(table.shapes, table.errors))[::29]:
        configs = choice.candidates(*shape)
        times = {
            family: choice.predict_us(configs[family], *shape, 132) * 2.718281828**error
            for family, place in table.places.items()
            if family in configs and (error := errors[place]) is not None
        }
        best = min(times, key=times.__getitem__)
        exact += configs[best] == choice.rank(*shape, 132, H200)[0][0]
        other += 1
    assert exact >= 0.9 * other


def test_no_table_holds_a_shape_that_only_measures():
    """A figure on shapes that a choice was made with is no result."""
    apart = {
        pair
        for models in (layer_shapes.VALIDATION, layer_shapes.HELD_OUT)
        for layers in models.values()
        for pair in layers.values()
    }
    learned = {pair for layers in layer_shapes.LAYERS.values() for pair in layers.values()}
    held = {pair for layers in layer_shapes.HELD_OUT.values() for pair in layers.values()}
    assert len(held) >= 16 and not held & learned and len(layer_shapes.HELD_OUT_TOKENS) >= 12
    assert not held & {pair for layers in layer_shapes.VALIDATION.values() for pair in layers.values()}
    folder = shared.path("x", H200).parent
    for path in folder.glob("*_families.json"):
        shapes = json.loads(path.read_text())["shapes"]
        assert not apart & {(n, k) for _, n, k in shapes}, path.name
        assert not set(layer_shapes.HELD_OUT_OTHERS) & {tuple(shape) for shape in shapes}, path.name
