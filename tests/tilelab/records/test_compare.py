"""The comparison of two sets of records: each test changes a copy of real records and reads what is listed."""

import json
import shutil
import types

import pytest
from cases import cases

from claims import trial
from tilelab import ROOT
from tilelab.records import compare, gpus, headlines, results

RESULTS = ROOT / "results"
H200 = RESULTS / "nvidia-h200"
SQUARE, COST, PEERS = "ch14_gemm_square", "ch14_compiled_host_time", "ch14_blockscaled_peers"
SPEEDUP = next(claim for note in trial.NOTES for claim in note.claims if claim.name == "speedup")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders `old` and `new` with copies of some records of the H200, and one claim that reads one of them."""
    monkeypatch.setattr(trial, "NOTES", [types.SimpleNamespace(claims=[SPEEDUP])])
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for experiment in (SQUARE, COST, PEERS, "ch14_gemm_claim"):
            shutil.copy(H200 / f"{experiment}.json", tmp_path / name)
    return tmp_path


def change(path, edit):
    """Let `edit` change a record in place."""
    record = json.loads(path.read_text(encoding="utf-8"))
    edit(record)
    path.write_text(results.to_json(record), encoding="utf-8")


def run(folders, capsys, *options):
    """The exit status, and the lines that are printed."""
    status = compare.main([str(folders / "old"), str(folders / "new"), *options])
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(2).startswith("A ratio may fall by both spreads and a margin: ")
    return status, lines


def scale_ratio(factor, row=0):
    def edit(record):
        record["rows"][row]["ratio"] *= factor

    return edit


def test_equal_records_are_fine(folders, capsys):
    status, said = run(folders, capsys)
    assert status == 0 and said[-1] == "Nothing became worse."
    assert said[0].startswith("NVIDIA H200: torch 2.11.0+cu130, Triton 3.6.0 -> torch 2.11.0+cu130")
    assert said[1].startswith("4 of 4 records are in both") and said[1].endswith("of none differs.")


@cases(
    "experiment, factor, is_worse",
    (SQUARE, 0.85, True),
    (SQUARE, 0.97, False),
    (SQUARE, 1.3, False),  # a speed
    (COST, 1.3, True),
    (COST, 1.1, False),
    (COST, 0.5, False),
)  # a cost, with a larger spread
def test_a_ratio_that_fell_by_more_than_its_spread(folders, capsys, experiment, factor, is_worse):
    for name in ("old", "new"):
        change(
            folders / name / f"{experiment}.json",
            lambda record: record["rows"][0].update(spread=0.05 if experiment == COST else 0.005),
        )
    change(folders / "new" / f"{experiment}.json", scale_ratio(factor))
    status, said = run(folders, capsys)
    assert status == is_worse
    if is_worse:
        assert said[2] == "Worse: 1 ratio." and said[3].startswith(f"ratio  {experiment}  ")
        assert f"({factor - 1:+.1%}, allowed {'+' if experiment == COST else '-'}" in said[3]


def test_the_margin_is_an_option(folders, capsys):
    change(folders / "new" / f"{SQUARE}.json", scale_ratio(0.97))
    assert run(folders, capsys, "--margin", "0")[0] == 1
    assert run(folders, capsys, "--margin", "3")[0] == 0


def test_a_ratio_without_a_spread_may_fall_further(folders, capsys):
    for name in ("old", "new"):
        change(folders / name / f"{SQUARE}.json", lambda record: record["rows"][0].pop("spread"))
    change(folders / "new" / f"{SQUARE}.json", scale_ratio(0.92))
    assert run(folders, capsys)[0] == 0
    change(folders / "new" / f"{SQUARE}.json", scale_ratio(0.92))
    assert run(folders, capsys)[0] == 1


def test_everything_that_is_worse_the_worst_first(folders, capsys):
    def lose(record):
        rows = record["rows"]
        rows[1] |= {"status": "wrong", "reason": "the error is 0.5"}
        rows[2]["ratio"] *= 0.8
        rows[3]["ratio"] *= 0.7
        rows[4] |= {"peer": "quack"}
        del rows[0]

    change(folders / "new" / f"{SQUARE}.json", lose)
    (folders / "new" / f"{COST}.json").unlink()
    status, said = run(folders, capsys)
    assert status == 1 and said[2] == "Worse: 1 status, 3 missing, 2 ratio."
    expected = [["status", SQUARE], ["missing", COST], ["missing", SQUARE], ["missing", SQUARE]]
    expected += [["ratio", SQUARE], ["ratio", SQUARE]]
    assert [line.split()[:2] for line in said[3:]] == expected
    assert "4096 x 4096 x 4096, k" in said[3] and said[3].endswith("ok -> wrong: the error is 0.5")
    assert said[4].endswith("recorded -> no record")
    assert "2048 x 2048 x 2048, k" in said[5] and said[5].endswith("6 rows -> 1 fewer")
    assert "cuBLAS ->" in said[6] and said[6].endswith("x quack")
    assert "2048 x 2048 x 2048, n" in said[7] and "(-30.0%" in said[7] and "(-20.0%" in said[8]


def test_what_becomes_better_or_was_never_there_is_no_problem(folders, capsys):
    change(
        folders / "old" / f"{SQUARE}.json",
        lambda record: record["rows"][0].update(status="failed", reason="why"),
    )
    change(folders / "old" / f"{SQUARE}.json", lambda record: record["rows"].pop())
    (folders / "old" / f"{COST}.json").unlink()
    assert run(folders, capsys)[0] == 0


def test_a_ratio_that_is_lost(folders, capsys):
    change(folders / "new" / f"{SQUARE}.json", lambda record: record["rows"][0].pop("ratio"))
    status, said = run(folders, capsys)
    assert status == 1 and said[3].startswith("missing") and said[3].endswith("x cuBLAS -> no ratio")


def test_a_claim_with_another_verdict(folders, capsys):
    def make_equally_fast(record):
        for row in record["rows"]:
            row["ratio"] = 1.0

    for name in ("old", "new"):
        change(
            folders / name / "ch14_gemm_claim.json",
            lambda record: [row.update(ratio=row.get("ratio", 1.0), spread=9.0) for row in record["rows"]],
        )
    change(folders / "new" / "ch14_gemm_claim.json", make_equally_fast)
    status, said = run(folders, capsys)
    assert status == 1 and "1 verdict" in said[2]
    (verdict,) = (line for line in said if line.startswith("verdict"))
    assert verdict.split()[1:3] == ["claim", "speedup"]
    assert verdict.endswith("holds on an H200 -> not on an H200")


def test_a_claim_that_can_no_longer_be_judged(folders, capsys):
    change(
        folders / "new" / "ch14_gemm_claim.json", lambda record: [row.pop("status") for row in record["rows"]]
    )
    status, said = run(folders, capsys)
    assert status == 1 and any("speedup" in line and "cannot be judged" in line for line in said)


def test_records_without_a_claim_are_not_judged(folders, monkeypatch):
    monkeypatch.setattr(compare, "_judge_claims", lambda *_: pytest.fail("nothing changed"))
    old = compare.read_records(str(folders / "old"))
    assert compare.find_changed_verdicts(old, {key: old[key] for key in list(old)[:2]}) == []


def test_two_versions_of_torch_are_named_first(folders, capsys):
    for path in (folders / "new").glob("*.json"):
        change(path, lambda record: record["versions"].update(torch="2.13.0+cu130", triton="3.7.1"))
    change(folders / "new" / f"{PEERS}.json", lambda record: record.update(source="0" * 16))
    status, said = run(folders, capsys)
    assert status == 0
    assert said[0] == ("NVIDIA H200: torch 2.11.0+cu130, Triton 3.6.0 -> torch 2.13.0+cu130, Triton 3.7.1.")
    assert said[1].endswith("the measured code of 1 differs.")


def test_folders_of_all_gpus_and_of_other_software(folders, capsys):
    """A results folder holds a folder for each GPU; the second set in results/<gpu>/torch-2.13/ is not a part of it."""
    for name in ("old", "new"):
        (folders / "results" / name).mkdir(parents=True)
        shutil.copytree(folders / name, folders / "results" / name / "nvidia-h200")
    second = folders / "results" / "new" / "nvidia-h200" / "torch-2.13"
    shutil.copytree(folders / "new", second)
    change(second / f"{SQUARE}.json", scale_ratio(0.1))
    assert run(folders / "results", capsys)[0] == 0
    assert compare.main([str(folders / "old"), str(second.parent)]) == 0
    assert compare.main([str(folders / "old"), str(second)]) == 1


def test_headlines_only(folders, capsys):
    change(folders / "new" / f"{SQUARE}.json", scale_ratio(0.1))
    with pytest.raises(SystemExit):
        run(folders, capsys, "--headlines")
    assert "old holds no records of the headlines" in capsys.readouterr().err
    for name in ("old", "new"):
        shutil.copy(H200 / f"{headlines.EXPERIMENTS[0]}.json", folders / name)
    assert run(folders, capsys, "--headlines")[0] == 0


def test_a_long_list_is_cut(folders, capsys):
    change(
        folders / "new" / f"{PEERS}.json",
        lambda record: [row.update(ratio=row["ratio"] / 2) for row in record["rows"]],
    )
    status, said = run(folders, capsys)
    assert status == 1 and len(said) == 3 + compare.SHOWN + 1 and said[-1] == "… and 22 more"


def refuse(capsys, *arguments):
    """The one line with which a comparison is refused, with status 2."""
    with pytest.raises(SystemExit) as stopped:
        compare.main(list(map(str, arguments)))
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    return said.removeprefix("python -m tilelab.records.compare: ").rstrip()


def test_refusals(folders, capsys):
    old, new, empty = folders / "old", folders / "new", folders / "empty"
    empty.mkdir()
    assert refuse(capsys, old, folders / "none") == f"{folders}/none is not a folder."
    assert refuse(capsys, empty, new) == f"{empty} holds no records."
    assert refuse(capsys, old, new, "--margin", "-1") == "--margin must be from 0 to 100; it is -1."
    change(new / f"{SQUARE}.json", lambda record: record["device"].update(name="NVIDIA B200"))
    assert refuse(capsys, old, new) == (
        f"OLD holds {SQUARE} of NVIDIA H200 and NEW of NVIDIA B200: figures of two GPUs cannot be compared."
    )
    (new / "odd.json").write_text("{}")
    assert refuse(capsys, old, new).startswith(
        f"{new}/odd.json is not a record: it has no valid experiment, "
    )


def list_records():
    return [results.read(path) for path in sorted(RESULTS.glob("*/*.json")) if path.stem != "tests"]


def test_every_row_of_every_record_is_paired_with_itself():
    for record in list_records():
        pairs = gpus.pair_rows(record, record)
        assert [row for _, row, _ in pairs] == record["rows"], record["experiment"]
        assert all(row is other for _, row, other in pairs), record["experiment"]


def test_rows_with_a_ratio_are_paired_in_any_order():
    for record in list_records():
        if any("ratio" in row for row in record["rows"]):
            pairs = gpus.pair_rows(record, record | {"rows": record["rows"][::-1]})
            assert all(row is other for _, row, other in pairs), record["experiment"]


def test_costs_are_the_records_whose_ratio_is_not_a_speed():
    """A speed is the peer's time over the own one; a cost the other way round. Formats compare bytes per second."""
    for record in list_records():
        name = record["experiment"]
        for row in record["rows"]:
            if row.get("ratio") and not name.startswith("ch14_mx_formats"):
                unit = "ms" if "ms" in row else "us"
                speed = row[f"peer_{unit}"] / row[unit]
                assert row["ratio"] == pytest.approx(1 / speed if name in compare.COSTS else speed), name
