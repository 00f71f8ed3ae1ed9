"""Measured times are added to the table of a GEMM's families."""

import json

import pytest

from tilelab.runtime import choice
from tilelab.sweeps import learn

SHAPE = 64, 4096, 4096
GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILES_TUNED", str(tmp_path))
    choice.load.cache_clear()
    yield
    choice.load.cache_clear()


@pytest.mark.parametrize("kernel", learn.MODULES)
def test_a_table_gives_back_what_was_added(kernel, tmp_path, capsys):
    times = {name: 1.1 * us for name, us in list(learn.predict(kernel, GPU, SHAPE).items())[:5]}
    row = {"kernel": kernel, "shape": SHAPE, "us": times, "families": {name: name for name in times}}
    held_out = row | {"shape": (64, 9216, 7168)}
    gone = row | {"us": {"x": 1.0}, "families": {"no family": "x"}}
    slow = row | {"us": {name: 1.2 * us for name, us in times.items()}}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, (row, {"rates": {}}, held_out, gone, slow))))
    assert learn.main([GPU, str(path)]) == 0
    assert f"{kernel}: 1 shapes in" in capsys.readouterr().out
    assert learn.read_table(kernel, GPU) == {SHAPE: pytest.approx(times, rel=1e-3)}
    assert choice.load(kernel, GPU).shapes == [SHAPE]
    assert learn.main([GPU, "--export", str(path)]) == 0
    choice.path(kernel, GPU).unlink()
    choice.load.cache_clear()
    assert learn.main([GPU, str(path)]) == 0
    assert learn.read_table(kernel, GPU) == {SHAPE: pytest.approx(times, rel=1e-3)}


@pytest.mark.parametrize("text", [None, "", "no JSON", '["a list"]', '{"kernel": "gemm", "shape": [1, 2]}'])
def test_a_file_without_times_is_one_sentence(text, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        learn.main([GPU, str(path)] if text != "" else [GPU])
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1
