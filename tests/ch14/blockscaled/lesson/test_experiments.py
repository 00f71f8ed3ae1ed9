"""The experiments of `ch14_blockscaled`, as far as they go without a GPU, and its pictures."""

import itertools

import pytest

from ch14.blockscaled.lesson import experiments, figures, verification
from ch14.fp4_decode.lesson.experiments import measure_decode
from ch14.fp8_gemm.lesson import experiments as fp8_experiments
from ch14.fp8_gemm.lesson import impacts
from tilelab.runtime import device

EXPERIMENTS = (
    fp8_experiments.measure_shapes,
    fp8_experiments.measure_thin_products,
    experiments.measure_emulated,
    measure_decode,
    experiments.run_sanitizers,
    impacts.measure_epilogue,
    impacts.measure_impacts,
    fp8_experiments.measure_peers,
)


def test_paths_are_checked_without_a_gpu():
    if device.current().capability:
        pytest.skip("the whole of it is the GPU test")
    rows = verification.check_correctness()
    assert {row["path"] for row in rows} == {"emulated", "decode"} and [
        r for r in rows if r["status"] != "ok"
    ] == []


@pytest.mark.gpu
def test_all_paths_are_right():
    assert [row for row in verification.check_correctness() if row["status"] != "ok"] == []


def test_sources_are_told_apart():
    hashes = {experiment.__name__: experiment.source() for experiment in EXPERIMENTS}
    assert all(len(each) == 16 for each in hashes.values())
    assert hashes["measure_shapes"] == hashes["measure_thin_products"] == hashes["measure_impacts"]
    assert (
        len(
            {
                hashes[name]
                for name in (
                    "measure_shapes",
                    "measure_emulated",
                    "measure_decode",
                    "measure_epilogue",
                    "run_sanitizers",
                )
            }
        )
        == 5
    )


def test_an_experiment_that_was_never_recorded_says_so(monkeypatch, tmp_path):
    if device.current().has_wgmma:
        pytest.skip("here it would be measured")
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    for experiment in EXPERIMENTS:
        with pytest.raises(FileNotFoundError, match="no record of ch14_blockscaled_"):
            experiment()


def test_the_schedule_of_the_tensor_core():
    multiply, add = figures.PRODUCT, figures.ADDING
    assert (multiply, add) == (256, 64)  # 4,096 products of fp8 and 128 float32 instructions a clock
    alone = figures.schedule(1, 1, 500)[1]
    assert alone == pytest.approx(multiply / (multiply + add), abs=1e-3)
    for consumers, scratch, blocks in itertools.product((1, 2, 3), (1, 2), (1, 4, 9)):
        spans, busy = figures.schedule(consumers, scratch, blocks)
        assert busy == 1 or (consumers, scratch) == (1, 1)
        for unit in ("tensor core", "CUDA cores"):
            of = sorted((begin, end) for name, _, begin, end in spans if name == unit)
            assert len(of) == consumers * blocks and all(a[1] <= b[0] for a, b in itertools.pairwise(of))
        for group in range(consumers):
            products, sums = (
                [(begin, end) for name, of, begin, end in spans if (name, of) == (unit, group)]
                for unit in ("tensor core", "CUDA cores")
            )
            assert all(begin >= end for (_, end), (begin, _) in zip(products, sums))
            later = zip(sums, products[scratch:])  # a product waits until its scratch has been added
            assert all(begin >= end for (_, end), (begin, _) in later)


@pytest.mark.parametrize("picture", [figures.scales_picture, figures.schedule_picture])
def test_pictures_are_drawn(picture):
    drawn = picture()
    assert drawn._repr_png_()[:4] == b"\x89PNG"
    inside = drawn.bbox.extents
    for text in drawn.axes[0].texts:
        box = text.get_window_extent()
        assert box.x0 >= inside[0] and box.x1 <= inside[2] + 1, text.get_text()
