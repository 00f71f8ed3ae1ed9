"""What the driver and the profiler are asked about the microscope: random maps, random reads, one small kernel."""

import collections
import dataclasses
import json

import pytest
import torch

from ch10.tile_pipeline.lesson import map_report, microscope_audit
from ch10.tile_pipeline.lesson.microscope_audit import Read
from tilelab.measure import profiler
from tilelab.runtime import cubin, cuda, device, tensor_map

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232_448)


def test_random_maps_are_the_same_each_time_and_break_every_rule():
    maps = microscope_audit.make_random_maps()
    assert maps == microscope_audit.make_random_maps() and len(set(maps)) == 500
    broken = [made.broken_map_rules() for made in maps]
    assert 200 < sum(not rules for rules in broken) < 400
    assert len({sentence[:25] for rules in broken for sentence in rules}) >= 7
    assert {len(made.shape) for made in maps} == {1, 2, 3, 4, 5} and len({made.dtype for made in maps}) == 8
    assert {made.swizzle for made in maps} == set(tensor_map.SWIZZLES)


@pytest.mark.parametrize("smem_bytes", [232_448, 101_376])
def test_a_driver_that_refuses_what_the_rules_refuse_agrees(monkeypatch, smem_bytes):
    here = dataclasses.replace(HOPPER, smem_per_block=smem_bytes)
    monkeypatch.setattr(device, "current", lambda: here)

    def encode(made, address):
        good = not made.broken_map_rules() and made.box_bytes <= smem_bytes and address == 4096
        return ("CUDA_SUCCESS" if good else "CUDA_ERROR_INVALID_VALUE"), None, 0

    monkeypatch.setattr(map_report, "encode", encode)
    rows = microscope_audit.judge_maps(microscope_audit.make_random_maps(), 4096)
    assert len(rows) == 500 and all(row["agrees"] and row["status"] == "ok" for row in rows)
    assert any(row["too_large"] for row in rows) and len(json.dumps(rows)) < 250_000
    monkeypatch.setattr(map_report, "encode", lambda made, address: ("CUDA_SUCCESS", None, 0))
    wrong = [
        row
        for row in microscope_audit.judge_maps(microscope_audit.make_random_maps(), 4096)
        if not row["agrees"]
    ]
    assert wrong and all(row["rules"] or row["too_large"] for row in wrong) and wrong[0]["reason"]


def test_random_reads_have_lanes_at_multiples_of_their_bytes():
    reads = microscope_audit.make_random_reads()
    assert len(set(reads)) == len(reads) == 60
    for read in reads:
        assert len(read.lanes()) >= 4 and all(address % read.size == 0 for address in read.addresses())
        tensor_map.check_describable(
            read.box, (read.box[1], 1), read.itemsize, 0, read.box, swizzle=read.swizzle
        )
    assert {read.access for read in reads} == {"row", "column", "matrix"}
    assert {read.size for read in reads} >= {1, 4, 8, 16}
    assert {1, 4, 8, 32} <= {read.wavefronts() for read in reads}


def test_words_that_the_lanes_must_find():
    x = torch.arange(8 * 64, dtype=torch.int16).view(8, 64)
    found = microscope_audit.expected_words(Read(2, (8, 64), "none", "column", 0, (2, 3)), x).tolist()
    assert found == [row * 64 + 3 for row in range(2, 8)]
    pairs = x.view(torch.int32)
    found = microscope_audit.expected_words(Read(2, (8, 64), "none", "row", 16, (1, 8)), x).tolist()
    assert found == [int(pairs[1, 4 + 4 * lane]) for lane in range(7)]
    words = microscope_audit.expected_words(Read(2, (8, 64), "128B", "matrix", 0, (0, 8)), x)
    assert words.tolist() == pairs[:, 4:8].flatten().tolist()


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
def test_the_kernel_reads_as_wide_as_it_says(target):
    sass = cubin.sass(cuda.compile_file(microscope_audit.SOURCE, target), "read_box")
    loads = [
        line.split("*/")[1].split()[0] for line in sass.splitlines() if "*/" in line and (" LDS" in line)
    ]
    kinds = {"LDS", "LDS.U8", "LDS.U16", "LDS.64", "LDS.128", "LDSM.16.M88"}
    assert set(loads) == kinds and "STS" not in sass and "UTMALDG.2D" in sass
    if target == "sm_90a":  # elsewhere the compiler takes the first read out of the loop
        assert collections.Counter(loads) == dict.fromkeys(kinds, 1)


def test_rows_compare_the_profiler_with_the_microscope(monkeypatch):
    reads = microscope_audit.make_random_reads()
    lines = [",".join(f'"{name}"' for name in ("Kernel Name", *microscope_audit.WAVEFRONTS.values())), '""']
    for number, read in enumerate(reads):
        counted = read.wavefronts() * microscope_audit.REPEATS + 7
        loads = 0 if read.access == "matrix" else counted
        lines.append(
            ",".join(f'"{value}"' for value in ("read_box", loads + 2000 * (number == 0), counted + 9))
        )
    monkeypatch.setattr(profiler, "run_ncu", lambda options, command: "\n".join(lines))
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(device, "current", lambda: HOPPER)
    monkeypatch.setattr(microscope_audit, "check_read", lambda read: "")
    rows = microscope_audit.count_reads().rows
    assert [row["name"] for row in rows] == list(map(str, reads))
    assert all(row["status"] == "ok" for row in rows)
    assert [row["agrees"] for row in rows] == [False] + [True] * 59
    text = microscope_audit.describe([{"driver": "CUDA_SUCCESS", "agrees": True}], rows)
    assert "in 59 of 60 reads" in text
    assert f"instead of {rows[0]['expected']} for a {rows[0]['name']}." in text


@pytest.mark.gpu
def test_lanes_find_their_elements_on_this_gpu():
    found = {str(read): microscope_audit.check_read(read) for read in microscope_audit.make_random_reads()}
    assert {name: sentence for name, sentence in found.items() if sentence} == {}
