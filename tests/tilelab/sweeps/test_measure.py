"""What a choice learns from is measured at shapes that it may know."""

import itertools
import json

import pytest

from tilelab.measure import layer_shapes
from tilelab.runtime import choice
from tilelab.sweeps import learn, measure


def test_no_shape_only_measures():
    shapes = list(itertools.islice(measure.list_shapes(1, 4), 400))
    assert len(set(shapes)) == 400 and not any(map(learn.is_held_out, shapes))
    assert not {m for m, _, _ in shapes} & set(layer_shapes.HELD_OUT_TOKENS)
    others = itertools.islice(measure.list_shapes(0, 4), 400)
    assert not {m for m, _, _ in shapes} & {m for m, _, _ in others}


def test_candidates_are_listed_without_a_gpu(capsys):
    assert measure.main(["--dry"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(len(line.split("; ")) > 4 + 8 for line in lines)


@pytest.mark.parametrize("arguments", (["--gpu", "1"], ["--gpu", "-1"], []))
def test_bad_use_is_one_sentence(arguments, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as stopped:
        measure.main(arguments)
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1


class FakeSpace:
    def job(self, config):
        return measure.build.Job(str(config), {}, {}, "sm_90a")

    def measure_quickly(self, config):
        return {"status": "ok", "ms": 0.01, "ratio": 1.0}

    def measure_finalists_quickly(self, configs):
        return [{"ms": 0.012, "ratio": 0.8}] * len(configs)


class BrokenSpace(FakeSpace):
    def measure_quickly(self, config):
        raise TypeError("a bug")


@pytest.fixture
def pretend(monkeypatch):
    """Return a function that lets a Space in place of both kernels be measured at two shapes."""

    def pretend(space):
        monkeypatch.setattr(measure, "make_space", lambda kernel, shape: space)

    monkeypatch.setattr(measure.device, "require", lambda *arguments: None)
    monkeypatch.setattr(measure.build, "build", lambda jobs: [])
    monkeypatch.setattr(measure, "list_shapes", lambda *share: iter([(64, 4096, 4096), (200, 4096, 4096)]))
    monkeypatch.setattr(measure.gc, "freeze", lambda: None)
    return pretend


def test_what_is_measured_is_learnt(tmp_path, monkeypatch, pretend):
    pretend(FakeSpace())
    assert measure.measure(0, 1, 60, tmp_path) == 4
    assert measure.measure(0, 1, 60, tmp_path) == 0, "these shapes are done"
    lines = map(json.loads, (tmp_path / "measured0.jsonl").read_text().splitlines())
    assert all(sorted(set(line["us"].values())) == [10, 12.5] for line in lines if "us" in line)
    monkeypatch.setenv("TILES_TUNED", str(tmp_path))
    choice.load.cache_clear()
    assert learn.main(["GPU", str(tmp_path / "measured0.jsonl")]) == 0
    assert choice.load("gemm", "GPU").shapes == [(64, 4096, 4096), (200, 4096, 4096)]
    choice.load.cache_clear()


def test_a_run_that_measures_nothing_fails(tmp_path, monkeypatch, pretend, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pretend(BrokenSpace())
    assert measure.main(["--out", str(tmp_path)]) == 1 and "a bug" in capsys.readouterr().err
