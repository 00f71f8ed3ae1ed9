"""The headline figures with two versions of torch, from copies of real records."""

import json
import pathlib
import shutil

import pytest
from cases import cases

from tilelab import ROOT
from tilelab.records import compare, headlines, results
from tilelab.runtime import device, files, provenance

H200 = ROOT / "results" / "nvidia-h200"
HERE = device.Device("NVIDIA H200", (9, 0), "sm_90a")


@pytest.fixture
def sets(tmp_path, monkeypatch):
    """results/nvidia-h200/ with the headlines of torch 2.11, and torch-2.13/ in it with ratios that are 2 % lower."""
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setattr(headlines, "PAGE", tmp_path / "stacks.md")
    folder = tmp_path / "nvidia-h200"
    second = folder / "torch-2.13"
    second.mkdir(parents=True)
    for name in headlines.EXPERIMENTS:
        shutil.copy(H200 / f"{name}.json", folder)
        record = results.read(folder / f"{name}.json")
        record["versions"] |= {"torch": "2.13.0+cu130", "triton": "3.7.1"}
        record["rows"] = [
            row | ({"ratio": 0.98 * row["ratio"]} if row.get("ratio") else {}) for row in record["rows"]
        ]
        (second / f"{name}.json").write_text(results.to_json(record))
    return folder, second


def read_table(page):
    """The cells of each headline."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"
    ]
    return {row[0]: row[1:6] for row in rows[2:]}  # without the name of the record


def test_every_headline_has_rows_with_a_ratio():
    for words, name, fields in headlines.HEADLINES:
        rows = [row for row in results.read(H200 / f"{name}.json")["rows"] if fields.items() <= row.items()]
        assert rows and all(row["ratio"] and row["spread"] for row in rows), words


def test_both_sets_side_by_side(sets):
    assert compare.main(["--stacks"]) == 0
    page = headlines.PAGE.read_text()
    assert "come from torch 2.11.0+cu130 with Triton 3.6.0." in page
    assert "torch 2.13.0+cu130 with Triton 3.7.1" in page
    table = read_table(page)
    assert list(table) == [words for words, *_ in headlines.HEADLINES]
    assert {row[3] for row in table.values()} == {"-2.0%"}
    rows, old, new, _, spread = table["attention at 8,192 tokens, against cuDNN"]
    recorded = [
        row
        for row in results.read(H200 / "ch14_attention_ladder.json")["rows"]
        if row["name"] == "persistent"
    ]
    assert int(rows) == len(recorded) == 2
    assert float(old) == pytest.approx(results.geometric_mean(row["ratio"] for row in recorded), abs=1e-3)
    assert float(new) == pytest.approx(0.98 * float(old), abs=1e-3)
    expected = pytest.approx(100 * sum(2 * row["spread"] / row["ratio"] for row in recorded) / 2, abs=0.06)
    assert float(spread[:-1]) == expected


def test_no_figure_stands_for_a_record_that_is_missing_or_of_other_code(sets):
    folder, second = sets
    first, other, third = headlines.EXPERIMENTS[:3]
    (second / f"{first}.json").unlink()
    record = json.loads((second / f"{other}.json").read_text())
    (second / f"{other}.json").write_text(json.dumps(record | {"source": "0" * 16}))
    record = json.loads((second / f"{third}.json").read_text())
    (second / f"{third}.json").write_text(json.dumps(record | {"rows": []}))
    table = list(read_table(headlines.make_page()).values())
    assert table[0] == ["", "", "not recorded", "", ""]
    assert table[1] == ["", "", "recorded from other code", "", ""]
    assert table[2] == ["0 of 3", "", "no ratio", "", ""]


@cases("torch, place", ("2.11.0+cu130", ""), ("2.13.1+cu130", "torch-2.13"), ("2.14.0a0", "torch-2.14"))
def test_another_torch_has_a_folder_of_its_own(sets, monkeypatch, capsys, torch, place):
    monkeypatch.setattr(device, "current", lambda: HERE)
    monkeypatch.setattr(provenance, "versions", lambda: {"torch": torch})
    assert compare.main(["--folder"]) == 0
    assert pathlib.Path(capsys.readouterr().out.strip()) == sets[0] / place


def test_a_gpu_without_records_has_one_folder(sets, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA B200", (10, 0), "sm_100a"))
    assert headlines.find_folder() == sets[0].parent / "nvidia-b200"


def test_tests_of_another_torch_are_kept_too(sets, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA B200", (10, 0), "sm_100a"))
    folder = sets[0].parent / "nvidia-b200"
    files.write_atomically(folder / "tests.json", json.dumps({"versions": {"torch": "2.10.1"}}))
    monkeypatch.setattr(provenance, "versions", lambda: {"torch": "2.13.1+cu130"})
    assert headlines.find_folder() == folder and headlines.find_folder("tests") == folder / "torch-2.13"
    monkeypatch.setattr(provenance, "versions", lambda: {"torch": "2.10.1"})
    assert headlines.find_folder("tests") == folder
    (folder / "tests.json").write_text("[]")
    with pytest.raises(ValueError, match=r"nvidia-b200/tests.json names no version of torch: delete it"):
        headlines.find_folder("tests")


def test_the_newest_second_set_is_shown(sets):
    folder, second = sets
    assert headlines.find_second_set(folder) == second
    shutil.copytree(second, folder / "torch-2.9")
    assert headlines.find_second_set(folder) == second


def test_without_a_second_set(sets, capsys):
    shutil.rmtree(sets[1])
    with pytest.raises(SystemExit) as stopped:
        compare.main(["--stacks"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(
        f": {sets[0]} holds no records of a second version of torch: python -m "
        "tilelab.course.record --experiments makes them.\n"
    )


def test_the_page_shows_todays_records():
    """docs/stacks.md is what the command writes today. Who has just recorded the tests on a GPU need not write it."""
    page, today = (headlines.PAGE.read_text(encoding="utf-8"), headlines.make_page())
    if device.current().capability is not None:
        page, today = (text.partition("## The tests")[0] for text in (page, today))
    assert page == today, "run python -m tilelab.records.compare --stacks"


def test_the_summaries_of_the_tests(tmp_path):
    assert headlines.summarise_tests(tmp_path) == "No summary is recorded."
    run = {"device": {"name": "NVIDIA B200"}, "versions": {"torch": "2.13.0", "triton": None}, "passed": 3000}
    run |= {"failed": 1, "failures": ["tests.test_a::test_b[x::y]"], "skipped": 2, "seconds": 9.6}
    run |= {"recorded": "2026-11-25T20:00:00Z"}
    path = tmp_path / "nvidia-b200" / "torch-2.13" / "tests.json"
    files.write_atomically(path, json.dumps(run))
    *_, row, empty, failed = headlines.summarise_tests(tmp_path).splitlines()
    assert row == "| 2026-11-25 | NVIDIA B200 | 2.13.0 | none | 3,000 | 1 | 2 | 10 |" and empty == ""
    assert failed == "- Failed on 2026-11-25, on NVIDIA B200 with torch 2.13.0: `test_b[x::y]`."
    later = run | {"failures": [], "failed": 0, "recorded": "2026-11-26T20:00:00Z"}
    files.write_atomically(tmp_path / "nvidia-b200" / "tests.json", json.dumps(later))
    *_, newest, older, empty, failed = headlines.summarise_tests(tmp_path).splitlines()
    assert newest.startswith("| 2026-11-26 |") and older == row
    assert failed.endswith("`test_b[x::y]`; not in the newest run, on NVIDIA B200 with torch 2.13.0.")
    no_torch = json.dumps(run | {"versions": {"torch": None, "triton": None}})
    for damaged in ("{", "[]", json.dumps({"passed": 1}), no_torch, json.dumps(run | {"failures": [1]})):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"torch-2.13/tests.json is no summary of tests \("):
            headlines.summarise_tests(tmp_path)


def test_a_folder_with_tests_alone_is_no_second_set(sets):
    files.write_atomically(sets[0] / "torch-9.9" / "tests.json", "{}")
    assert headlines.find_second_set(sets[0]) == sets[1]
