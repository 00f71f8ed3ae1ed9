"""The machine's figures come from records, and the pictures can be read with and without them."""

import dataclasses

import pytest
from legible import assert_legible, texts

from ch07.start.lesson import figures
from ch07.start.lesson import machine as machine_module
from tilelab.records import results
from tilelab.runtime import device

FIGURES = "H200", "sm_90a", 132, 139.8, 60.0, 227.0, 4.17, 789.0, 4.8, 989, 11.4, 1226, 818
LABELS = "recorded on NVIDIA H200, 2026-11-22", "chapter 10's GEMM, since 2026-11-21"
MACHINE = machine_module.Machine(*FIGURES, *LABELS)
MEASURED = ("peak_tbps", "peak_tflops", "l2_tbps", "load_cycles", "product_cycles")
BARE = dataclasses.replace(MACHINE, **dict.fromkeys(MEASURED), gemm_label="")


@pytest.mark.parametrize("machine", [MACHINE, BARE], ids=["all figures", "ceilings only"])
def test_pictures_are_legible(machine):
    assert_legible(figures.draw_machine(machine))
    assert_legible(figures.draw_need(machine))
    for buffers in (2, 3, 4):
        assert_legible(figures.draw_overlap(machine, buffers))


def test_a_figure_without_a_record_is_left_out():
    said = " ".join(texts(figures.draw_machine(BARE)))
    assert "in a GEMM" not in said and "cycles" not in said and "datasheet" not in said
    assert "not measured" in " ".join(texts(figures.draw_overlap(BARE)))


def test_a_larger_tile_needs_fewer_bytes_per_operation():
    assert machine_module.bytes_per_operation(128, 128) == 1 / 64
    assert machine_module.bytes_per_operation(64, 64) == 2 * machine_module.bytes_per_operation(128, 128)
    assert machine_module.bytes_per_operation(128, 128, 1) == 1 / 128
    assert MACHINE.per_sm(4.17) == pytest.approx(31.59, abs=0.01)


def test_one_buffer_takes_turns_and_a_ring_overlaps():
    one = figures._schedule(1, 4, 1200, 800)
    assert one[-1][2] == 4 * 2000
    ring = [span for span in figures._schedule(3, 4, 1200, 800) if span[0] == "tensor core"]
    assert [begin for _, begin, _ in ring] == [1200, 2000, 2800, 3600]


def test_figures_of_the_machine_come_from_records_of_one_gpu(monkeypatch):
    asked = []
    load = results.load
    monkeypatch.setattr(results, "load", lambda name, gpu=None: asked.append((name, gpu)) or load(name, gpu))
    machine = machine_module.describe_machine()
    assert machine.copy_tbps > 0 and machine.tflops > 0
    found = {gpu for name, gpu in asked if name.startswith("ch10")}
    assert found == {device.Device(f"NVIDIA {machine.name}").slug}


def test_what_has_no_record_is_none(tmp_path, monkeypatch):
    ceilings = results.load("ceilings", "nvidia-h200")
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    results.save(ceilings)
    machine = machine_module.describe_machine()
    assert machine.l2_tbps is machine.load_cycles is None and machine.gemm_label == ""
