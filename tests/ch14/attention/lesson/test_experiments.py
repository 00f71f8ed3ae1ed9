"""The experiments, the sweep and the command line of flash attention, as far as they go without a GPU."""

import pytest
import torch

from ch14 import attention
from ch14.attention import AttentionConfig
from ch14.attention.lesson import experiments, sweep
from ch14.attention.lesson.command import COMMAND
from tilelab.measure import bench
from tilelab.runtime import device


def test_flops_of_a_mask():
    assert experiments.count_flops((1, 1, 1, 4, 4, 64, True)) == 4 * 64 * 10
    assert experiments.count_flops((2, 3, 1, 4, 5, 64, False)) == 4 * 64 * 2 * 3 * 20


def test_a_check_passes_a_right_result_and_finds_a_wrong_one(monkeypatch):
    case, config = (1, 2, 1, 40, 33, 64, False), AttentionConfig(32, 16, 4, 2)
    row = experiments.verify(config, case, torch.float16)
    assert row["status"] == "ok" and row["error"] <= row["tolerance"]
    monkeypatch.setattr(
        attention, "attention", lambda q, k, v, *, out, **_: out.copy_(attention.spec(q, k, v) * 0.99)
    )
    row = experiments.verify(config, case, torch.float16)
    assert row["status"] == "wrong" and row["error"] == pytest.approx(0.01, rel=0.1)


@pytest.fixture
def stand_ins(monkeypatch):
    """A Hopper GPU on which every check passes, and every kernel is as fast as cuDNN."""

    class Timing:
        def __init__(self, name):
            self.name = name

        def row(self):
            return {"name": self.name, "ms": 1.0, "ratio": 1.0, "status": "ok", "reason": ""}

    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a", 132))
    monkeypatch.setattr(
        bench, "compare", lambda candidates, *_, **__: {name: Timing(name) for name in candidates}
    )
    monkeypatch.setattr(experiments, "choose_peer", lambda case: "cuDNN")
    monkeypatch.setattr(experiments.build, "compile_ahead", lambda jobs: None)
    for module in (experiments, sweep):
        monkeypatch.setattr(module, "verify", lambda *_: {"status": "ok", "reason": "", "error": 0.0})


def test_rows_name_their_case(stand_ins):
    rows = [row for row in experiments.measure_ladder.__wrapped__() if row["causal"]]
    expected = ["eager", "efficient", "flash", "cuDNN", "plain", "roles", "overlap", "ping-pong"]
    expected += ["persistent"]
    assert [row["name"] for row in rows] == expected
    assert all(row["shape"] == [*experiments.LONG] and row["ms"] == 1.0 for row in rows)
    assert [row["config"] for row in rows[4:]] == [*map(str, attention.configs().values())]
    rows = experiments.measure_shapes.__wrapped__()
    assert len(rows) == 2 * len(experiments.SHAPES + experiments.OTHERS)
    assert {row["name"] for row in rows} == {"best"}
    rows = experiments.measure_small_head.__wrapped__()
    assert [row["name"] for row in rows[-4:]] == ["cuDNN", "plain", "two groups", "four groups"]
    assert [row["tiles"] for row in rows[-3:]] == [256, 128, 64]
    space, (first, second) = sweep.AttentionSpace((1, 2, 64, 64)), sweep.grid()[:2]
    assert (space.label(first) | space.measure(first))["name"] == "sweep"
    assert [row["ratio"] for row in space.measure_finalists([first, second])] == [1.0, 1.0]


def test_the_sweep_names_each_configuration_once_and_says_why_one_cannot_run():
    grid = sweep.grid()
    space = sweep.AttentionSpace((4, 16, 4096, 128), compile_for="sm_100a")
    labels = [space.label(config)["kernel"] for config in grid]
    assert len(set(labels)) == len(grid)
    assert {bool(space.reject(config)) for config in grid} == {True, False}
    for shape in ((4, 16, 4096), (1, 1, 64, 96), (1, 1, 1 << 20, 64)):
        with pytest.raises(ValueError, match="D 64 or 128"):
            sweep.AttentionSpace(shape)


def test_command_line_refuses(capsys):
    assert COMMAND.main(["--target", "sm_120a", "--step", "overlap"]) == 2
    assert "wgmma" in capsys.readouterr().out
