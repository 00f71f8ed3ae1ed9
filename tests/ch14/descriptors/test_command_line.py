"""What the command of ch14.descriptors compiles and measures, and the sweep."""

import commands
import pytest

from ch14.descriptors.configs import OPS, configs
from ch14.descriptors.lesson import experiments, sweep

MODULE = "ch14.descriptors"


@pytest.mark.compile
def test_what_a_target_cannot_run_is_a_row(capsys):
    status, out, _ = commands.run(capsys, MODULE, "--op gather --variant gather4 --target sm_90a")
    assert status == 2 and "unsupported" in out and "take rows_host" in out
    status, record = commands.run_json(capsys, MODULE, "--op gather --variant best --target sm_90a")
    assert status == 0 and all(row["tma_load"] for row in record["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_best_is_checked_and_timed(op, capsys):
    status, record = commands.run_json(capsys, MODULE, f"--op {op} --shape 2048,2048 --variant best")
    (row,) = record["rows"]
    assert status == 0 and row["status"] == "ok" and row["gbps"] > 0 and row["peer"] == experiments.PEER[op]


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
