import dataclasses
import json

import pytest

from tilelab import ROOT
from tilelab.records import gpus, results
from tilelab.runtime import device

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a")
B200 = device.Device("NVIDIA B200", (10, 0), "sm_100a")
ROWS = [
    {"name": "plain", "shape": [64, 64], "config": "a", "ratio": 0.5, "peer": "cuBLAS", "status": "ok"},
    {"name": "best", "shape": [64, 64], "config": "b", "ratio": 1.02, "peer": "cuBLAS", "status": "ok"},
]
THERE = [
    {**ROWS[1], "config": "z", "ratio": 0.9},
    {"name": "plain", "shape": [64, 64], "status": "rejected"},
    {"name": "more", "shape": [64, 64], "ratio": 2.0, "status": "ok"},
]


def record(here, rows, experiment="speed", source="aaaa"):
    return {
        "experiment": experiment,
        "device": dataclasses.asdict(here),
        "versions": {},
        "recorded": "2026-11-21T04:50:17Z",
        "source": source,
        "rows": rows,
    }


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    return tmp_path


@pytest.fixture
def two():
    """The H200's record, with the B200's beside it in results/, and one of no GPU."""
    for here, rows in ((H200, ROWS), (B200, THERE), (results.NO_GPU, ROWS)):
        results.save(record(here, rows))
    return results.Record(results.load("speed", "nvidia-h200"), live=False)


def test_a_column_for_each_gpu(two):
    shown = gpus.table(two, "ratio")
    assert shown.frame.columns.tolist() == ["name", "shape", "H200", "B200"]
    assert shown.frame.to_numpy().tolist() == [
        ["plain", "64 x 64", "0.5", "rejected"],
        ["best", "64 x 64", "1.02", "0.9"],
        ["more", "64 x 64", "", "2"],
    ]
    assert shown.caption == "speed, ratio: recorded on NVIDIA H200, 2026-11-21; B200, 2026-11-21"
    assert gpus.table(two, "ratio", by=["name"]).frame.columns.tolist() == ["name", "H200", "B200"]


def test_one_gpu_is_a_table_of_one_column(own_folder):
    results.save(record(H200, ROWS))
    alone = results.Record(results.load("speed"), live=False)
    assert gpus.table(alone, "ratio").frame.columns.tolist() == ["name", "shape", "H200"]
    assert gpus.picture(alone, "ratio", title="alone")._repr_png_()[:4] == b"\x89PNG"


def test_what_is_live_stands_for_its_own_record(two):
    live = results.Record(record(H200, [{**ROWS[0], "ratio": 0.7}]), live=True)
    shown = gpus.table(live, "ratio")
    assert shown.caption.startswith("speed, ratio: measured on NVIDIA H200, 2026-11-21; B200")
    assert shown.frame.H200.tolist() == ["0.7", "", ""]


def test_other_code_is_told(two):
    results.save(record(B200, THERE, source="bbbb"))
    assert gpus.table(two, "ratio").caption.endswith("; B200, 2026-11-21, of other code")


def test_a_sweep_is_told_apart_by_configuration_too(own_folder):
    rows = [{**ROWS[0], "config": config, "ratio": ratio} for config, ratio in (("a", 0.5), ("b", 0.6))]
    for here in (H200, B200):
        results.save(record(here, rows, "sweep"))
    shown = gpus.table(results.Record(results.load("sweep", "nvidia-h200"), live=False), "ratio")
    assert (
        shown.frame.columns.tolist() == ["name", "shape", "config", "H200", "B200"] and len(shown.frame) == 2
    )


def test_refusals(two):
    with pytest.raises(
        ValueError, match=r"^several rows of speed on NVIDIA H200 have the same shape: choose other"
    ):
        gpus.table(two, "ratio", by=["shape"])
    with pytest.raises(
        ValueError, match=r"^no row of speed has 'speed'; choose one of config, name, .*, status\.$"
    ):
        gpus.picture(two, "speed", title="")
    (results.results_folder() / "nvidia-b200" / "speed.json").write_text("{")
    with pytest.raises(ValueError, match="nvidia-b200/speed.json is not JSON"):
        gpus.table(two, "ratio")


def test_picture_says_what_did_not_run_and_where_points_are_from(two):
    picture = gpus.picture(two, "ratio", title="Two GPUs")
    axes = picture.axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["B200: rejected", "", ""]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["H200", "B200"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [
        "plain",
        "best",
        "more",
    ]  # the shape is one
    marks = {line.get_label(): sorted(line.get_xydata().tolist()) for line in axes.lines[:2]}
    assert marks == {"H200": [[0.5, 2], [1.02, 1]], "B200": [[0.9, 1], [2.0, 0]]}
    assert picture.get_supxlabel() == "recorded on NVIDIA H200, 2026-11-21; B200, 2026-11-21"
    picture.draw_without_rendering()
    said = axes.texts[0].get_window_extent(picture.canvas.get_renderer())
    assert said.x1 < axes.transData.transform((0.5, 0))[0], "what is said stands left of every point"


def test_names_of_a_record_are_text_and_not_markup(own_folder):
    bad = "<script>alert(1)</script>"
    rows = [{"name": bad, "shape": [1], "ratio": None, "status": bad, "reason": bad}, {**ROWS[0], bad: bad}]
    path = results.save(record(H200, rows))
    other = json.loads(path.read_text())
    other["device"]["name"] = f"NVIDIA {bad}"
    other["recorded"] = bad
    results.save(other)
    shown = gpus.table(results.Record(results.load("speed", "nvidia-h200"), live=False), "ratio")
    for markup in (shown._repr_html_(), results.Record(other, live=False)._repr_html_()):
        assert "<script" not in markup and "&lt;script&gt;" in markup
    assert bad in repr(shown)


def test_every_timed_record_can_be_shown():
    """Whatever GPU it is of: rows with a ratio are told apart without being asked how."""
    for path in (ROOT / "results").glob("nvidia-*/*.json"):
        kept = json.loads(path.read_text())
        if any("ratio" in row for row in kept.get("rows", [])):
            record = results.Record(kept, live=False)
            keys, matched = gpus._match_rows([record], "ratio", None)
            assert len(matched) == len(kept["rows"]), path.name
