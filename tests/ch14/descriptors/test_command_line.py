import json
import re

import pytest
from legible import assert_legible

from ch14.descriptors import __main__ as command
from ch14.descriptors.configs import OPS, configs
from ch14.descriptors.lesson import experiments, figures, sweep
from tilelab.runtime import device

JSON_KEYS = {"experiment", "device", "versions", "recorded", "source", "rows"}


@pytest.mark.compile
def test_a_target_is_compiled_and_said_in_json(capsys):
    assert (
        command.main(
            [
                "--op",
                "add",
                "--shape",
                "4096,4096",
                "--variant",
                "tile_host",
                "--target",
                "sm_100a",
                "--json",
                "-",
            ]
        )
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert set(record) == JSON_KEYS and record["source"] == experiments.source()
    (row,) = record["rows"]
    assert (row["name"], row["status"], row["target"]) == ("tile_host", "ok", "sm_100a") and row["tma_load"]


@pytest.mark.compile
def test_what_a_target_cannot_run_is_a_row(capsys):
    assert command.main(["--op", "gather", "--variant", "gather4", "--target", "sm_90a"]) == 2
    assert "unsupported" in (said := capsys.readouterr().out) and "take rows_host" in said
    assert command.main(["--op", "gather", "--variant", "best", "--target", "sm_90a"]) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "4096"], "--shape takes two sizes such as 16384,16384; it is '4096'"),
        (["--shape", "64,12"], "--shape takes rows from 1 and columns in multiples of 8, .*; it is 64,12"),
        (["--shape", "0,64"], "--shape takes rows from 1"),
        (["--variant", "rows_host"], "unknown --variant rows_host; choose one of tile_host, .*best, all"),
        (["--op", "scale"], "invalid choice: 'scale'"),
        (["--json", ""], "--json takes a file or -"),
    ],
)
def test_bad_usage_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert re.search(message, said), said


def test_an_unknown_target_is_one_line(capsys):
    assert command.main(["--target", "sm_121"]) == 2
    assert "choose sm_121a" in capsys.readouterr().err


def test_without_a_gpu_it_says_what_to_do_instead(capsys, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))
    assert command.main([]) == 2
    assert capsys.readouterr().err.endswith("compile them with --target sm_90a.\n")


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_best_is_checked_and_timed(op, capsys):
    assert command.main(["--op", op, "--shape", "2048,2048", "--variant", "best", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["status"] == "ok" and row["gbps"] > 0 and row["peer"] == experiments.PEER[op]


# ---- the sweep and the pictures


@pytest.mark.parametrize("op", OPS)
def test_what_is_swept_can_be_told_apart_and_launched(op):
    chosen, space = sweep.grid(op), sweep.DescriptorSpace((4096, 4096), op, "sm_90a")
    assert len(set(map(str, chosen))) == len(set(chosen)) == len(chosen) > 40
    assert {config.way for config in chosen} == {"host", "device", "pointers"}
    assert [space.reject(config) for config in chosen] == [""] * len(chosen)
    assert all(space.job(config).target == "sm_90a" for config in chosen)


def test_the_panel_s_subject():
    subject = sweep.DescriptorSpace
    for op in subject.dtypes:
        for preset in subject.presets.values():
            assert all(axis(config) for axis in subject.axes.values() for config in preset(op))
    assert subject((64, 64), "gather", "sm_90a").reject(configs("gather")["gather4"])
    for shape in ((64,), (64, 12), (0, 64)):
        with pytest.raises(ValueError, match="a shape is ROWS,COLUMNS, columns a multiple of 8"):
            subject(shape, "copy")


def test_pictures_draw():
    boxes = figures.draw_boxes([((4, 2048), (4, 256))])
    for picture in figures.draw_ways(), boxes:
        assert_legible(picture)
        assert len(picture.description) > 60
    assert "4 × 2048 makes 8 boxes of 4 × 256" in boxes.description
    with pytest.raises(ValueError, match="boxes of 4 × 256 do not make a block of 4 × 100"):
        figures.draw_boxes([((4, 100), (4, 256))])
