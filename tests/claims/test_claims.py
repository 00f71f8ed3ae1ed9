"""Claims on trial: links lead somewhere, README and notebook say what the rules say today, and rules judge by rows."""

import json
import os
import pathlib
import re
import shutil

import nbformat
import pytest

from ch10.wgmma_gemm.configs import STEPS
from claims import answers, judge, trial
from claims.__main__ import main
from claims.judge import HOLDS, NO_RECORD, ONLY_IF, REFUTED, UNTESTED
from tilelab import results

ROOT = pathlib.Path(__file__).parents[2]
EVERY = trial.judge_all()
CLAIMS = {each.claim.name: each.claim for each in EVERY}


def by_name(found):
    return pytest.mark.parametrize("each", found, ids=lambda each: each.claim.name)


def test_thirty_claims_and_more_of_every_note():
    assert len(EVERY) >= 30 and len(CLAIMS) == len(EVERY) == len({each.claim.text for each in EVERY})
    assert len(trial.NOTES) == 5 and all(len(note.judgements) >= 5 for note in trial.NOTES)


@by_name(EVERY)
def test_a_claim_is_judged(each):
    found = each.finding
    assert found.verdict in judge.VERDICTS and bool(found.figure) == (found.verdict != NO_RECORD)
    assert bool(found.reason) == (found.verdict in (ONLY_IF, UNTESTED, NO_RECORD))
    assert each.claim.text.endswith(".") and not re.search(r"[|\n]", each.claim.text + found.figure + found.reason)
    assert len(re.findall(r"(?<!\\)\|", each.markdown(""))) == 5, "four columns"


@by_name(EVERY)
def test_its_cell_exists(each):
    claim = each.claim
    cells = json.loads(claim.path.read_text(encoding="utf-8"))["cells"]
    lines = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown").splitlines()
    assert f"## {claim.heading}" in lines, f"{claim.notebook} has no heading {claim.heading!r}"
    assert f"](notebooks/{claim.notebook}.ipynb#{claim.heading.replace(' ', '-')})" in each.markdown("notebooks/")


def test_the_readme_says_what_the_rules_say():
    text = trial.README.read_text(encoding="utf-8")
    assert trial.rewrite_table(text) == text, "run `python -m claims --write`"
    assert answers.rewrite_figures(text) == text, "run `python -m claims --write`"


def test_every_notebook_that_measures_has_its_answer_from_a_record():
    stems = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {notebook for notebook, *_ in answers.ANSWERS} == stems - {"01_claims"}
    for _, words, figures in answers.ANSWERS:
        assert "#" not in answers.fill_in(words, figures(judge.Evidence())), "and the record is there"


def test_figures_change_with_the_records_and_words_stay(monkeypatch, tmp_path):
    text = trial.README.read_text(encoding="utf-8")
    monkeypatch.setenv("TILES_RESULTS", os.fspath(tmp_path))
    assert answers.rewrite_figures(text) == text, "nothing is known better"
    shutil.copytree(ROOT / "results", tmp_path, dirs_exist_ok=True)
    path = tmp_path / results.PREFERRED / "ch14_gemm_llm.json"
    record = json.loads(path.read_text())
    for row in record["rows"]:
        row["ratio"] = 0.5
    path.write_text(results.to_json(record))
    changed = answers.rewrite_figures(text)
    assert ", 0.50 × on decoder shapes" in changed and changed.count("0.50") == text.count("0.50") + 1
    assert re.sub(r"[\d.]+ × on decoder", "", changed) == re.sub(r"[\d.]+ × on decoder", "", text)


def test_figures_have_the_digits_and_the_sign_that_words_ask_for():
    assert answers.fill_in("# of #.##, +#.# and +#.#", [2.6, 1 / 3, -0.04, -12.34]) == "3 of 0.33, +0.0 and -12.3"
    assert answers.fill_in("#.#", [-0.04]) == "0.0"


def test_a_record_without_the_row_is_one_sentence(monkeypatch, tmp_path):
    text = trial.README.read_text(encoding="utf-8")
    monkeypatch.setenv("TILES_RESULTS", os.fspath(tmp_path))
    shutil.copytree(ROOT / "results", tmp_path, dirs_exist_ok=True)
    for name in ("sweep_race", "ch14_descriptors_launch", "ch14_compiled_cells"):
        path = tmp_path / results.PREFERRED / f"{name}.json"
        record = json.loads(path.read_text())
        path.write_text(results.to_json(record | {"rows": []}))
        with pytest.raises(ValueError, match=r"^the records give no figures for .+ of \w+: \w+\(.*\)\.$"):
            answers.rewrite_figures(text)
        path.write_text(results.to_json(record))
    assert answers.rewrite_figures(text) == text


def test_an_answer_without_its_words_is_one_sentence():
    text = trial.README.read_text(encoding="utf-8").replace("on decoder shapes", "elsewhere")
    with pytest.raises(ValueError, match=r"^README.md's line about \w+ must hold '.+#.+', with a figure for each #\.$"):
        answers.rewrite_figures(text)


@pytest.mark.parametrize("note", trial.NOTES, ids=lambda note: note.title)
def test_the_notebook_says_what_the_rules_say(note):
    cells = json.loads(trial.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    shown = ["".join(output["data"].get("text/markdown", "")) for cell in cells for output in cell.get("outputs", ())
             if "data" in output]
    assert judge.make_table(note.judgements, "") in shown, "run `python -m claims --write`"


def test_without_records_nothing_is_invented(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", os.fspath(tmp_path))
    for before in EVERY:
        after = before.claim.judge()
        if before.records:
            assert after.finding == judge.Finding(NO_RECORD, "", before.records[0]), before.claim.name
        else:
            assert after.finding == before.finding, before.claim.name


def test_new_records_make_a_new_readme(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", os.fspath(tmp_path))
    shutil.copytree(ROOT / "results", tmp_path, dirs_exist_ok=True)
    assert [each.claim.judge().finding for each in EVERY] == [each.finding for each in EVERY]
    path = tmp_path / results.PREFERRED / "ch07_resample_ncu.json"
    record = json.loads(path.read_text())
    for row in record["rows"]:
        row["dram_percent"] /= 2
    path.write_text(results.to_json(record))
    moved = {each.claim.name for each in EVERY if each.claim.judge().finding != each.finding}
    assert moved == {each.claim.name for each in EVERY if "ch07_resample_ncu" in each.records}


def planted(experiment, which, **change):
    """Return evidence in which the rows of one record that `which` matches are changed."""
    evidence = judge.Evidence()
    load = evidence.load
    evidence.load = lambda asked: [row | change if asked == experiment and which.items() <= row.items() else row
                                   for row in load(asked)]
    return evidence


SQUARE = {"workload": "matmul", "name": "default"}
TWO_CONSUMERS, TILE_128X256 = ({"config": str(STEPS[step])} for step in ("two_consumers", "tile_128x256"))


@pytest.mark.parametrize("name, before, after, evidence", [
    ("tested_and_working", REFUTED, HOLDS, planted("ch14_gemm_claim", {"name": "proposed"}, status="ok")),
    ("closer_to_cublas", HOLDS, REFUTED, planted("ch14_gemm_claim", {"name": "proposed"}, ratio=0.2)),
    ("speedup", HOLDS, REFUTED, planted("ch14_gemm_claim", {"shape": [4096] * 3, "name": "proposed"}, factor=1.83)),
    ("more_warps", ONLY_IF, HOLDS, planted("ch10_gemm_ladder", TWO_CONSUMERS, ratio=1.0)),
    ("more_warps", ONLY_IF, REFUTED, planted("ch10_gemm_ladder", TILE_128X256, ratio=0.5)),
    ("autotune_fallback", REFUTED, HOLDS, planted("sweep_autotune_faults", {}, autotune="chooses: the right one")),
    ("fixed_in_3_5", REFUTED, HOLDS, planted("ch14_bug_hunt_matrix", {"stage": "TritonGPUAssignLatencies"}, stage="")),
    ("large_copies", REFUTED, HOLDS,
     planted("ch14_gemm_copy", {"config": "256,256,16,5", "name": "proposed"}, ratio=1.1)),
    ("with_tma", ONLY_IF, HOLDS, planted("ch07_bulk_fronts", {}, ratio=1.0)),
    ("with_tma", ONLY_IF, REFUTED, planted("ch07_bulk_speed", {"op": "copy"}, gbps=3000)),
    ("without_tma", REFUTED, HOLDS, planted("ch07_bulk_speed", {}, gbps=3000)),
    ("compile_gain", REFUTED, HOLDS, planted("ch14_compiled_cells", SQUARE, ratio=1.51)),
    ("autotune_engages_tma", REFUTED, HOLDS,
     planted("ch14_compiled_choices", {"name": "max-autotune"}, whose="Triton, persistent TMA")),
    ("attention", ONLY_IF, HOLDS, planted("ch14_attention_ladder", {"name": "flash"}, ratio=0.4)),
    ("attention", ONLY_IF, REFUTED, planted("ch14_attention_ladder", {}, ratio=1.0)),
    ("conservative_settings", REFUTED, HOLDS, planted("ch14_bug_hunt_loop", {}, outcome="fails")),
    ("triton_for_gb10", UNTESTED, HOLDS, planted("ch14_bug_hunt_matrix", {"target": "sm_121a"}, outcome="builds")),
    ("listing_runs", ONLY_IF, HOLDS, planted("ch14_descriptors_rules", {}, device="right")),
    ("fewer_reads", REFUTED, HOLDS, planted("ch07_resample_ladder", {"name": "lane0_search"}, ms=1.0)),
    ("coalescing", ONLY_IF, REFUTED, planted("ch07_resample_ladder", {"name": "vectors"}, ms=0.3)),
    ("persistent", REFUTED, HOLDS, planted("ch07_resample_ladder", {"name": "persistent"}, ratio=0.95)),
    ("phase_one", REFUTED, HOLDS, planted("ch07_resample_ncu", {"kernel": "lane0_search"}, dram_percent=36.0)),
    ("tma_required", REFUTED, HOLDS, planted("ch07_resample_ncu", {"kernel": "vectors"}, dram_percent=50.0)),
    ("memory_bound", ONLY_IF, HOLDS, planted("ch07_resample_ncu", {"kernel": "lane0_search"}, dram_percent=60.0)),
    ("decision_rule", HOLDS, REFUTED, planted("ch07_resample_ladder", {"name": "bulk_rows"}, ratio=0.99)),
    ("the_pass", HOLDS, REFUTED, planted("ch14_bug_hunt_loop", {"stage": "TritonGPUAssignLatencies"}, stage="ptxas")),
    ("blackwell_only", HOLDS, REFUTED,
     planted("ch14_bug_hunt_matrix", {"target": "sm_90a"}, stage="TritonGPUAssignLatencies")),
    ("one_stage", HOLDS, REFUTED, planted("ch14_bug_hunt_loop", {"num_stages": 1}, outcome="fails")),
    ("descriptors_needed", REFUTED, HOLDS, planted("ch14_bug_hunt_loop", {"LOADS": "pointers"}, outcome="builds")),
    ("sixteen_warps", REFUTED, HOLDS, planted("ch14_bug_hunt_loop", {"num_warps": 16}, tcgen05=8)),
    ("cost_of_caution", HOLDS, REFUTED, planted("ch14_gemm_claim", {"name": "best"}, factor=1.2)),
])
def test_a_verdict_is_of_the_rows(name, before, after, evidence):
    assert CLAIMS[name].rule(judge.Evidence()).verdict == before
    assert CLAIMS[name].rule(evidence).verdict == after


def test_the_marks_must_be_there():
    for text in ("", trial.BEGIN, f"{trial.END}\n{trial.BEGIN}", f"{trial.BEGIN}\n{trial.END}\n{trial.END}"):
        with pytest.raises(ValueError, match="README.md must hold the lines"):
            trial.rewrite_table(text)
    assert trial.rewrite_table(f"a\n{trial.BEGIN}\nold\n{trial.END}\nb") == f"a\n{trial.make_readme_part()}\nb"


def test_command_line(monkeypatch, tmp_path, capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(each.claim.text in said and each.finding.describe() in said for each in EVERY)
    readme, notebook = tmp_path / "README.md", tmp_path / "01_claims.ipynb"
    monkeypatch.setattr(trial, "README", readme)
    monkeypatch.setattr(trial, "NOTEBOOK", notebook)
    readme.write_text("no marks")
    assert main(["--write"]) == 2 and "README.md must hold" in capsys.readouterr().err
    assert readme.read_text() == "no marks"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, after = text.partition(trial.BEGIN)[0], text.partition(trial.END)[2]
    stale = re.sub(r"\d(\.\d\d) ×", r"9\1 ×", before)
    assert stale != before
    readme.write_text(stale + trial.BEGIN + trial.END + after, encoding="utf-8")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(6 * 7)")]), notebook)
    assert main(["--write"]) == 0 and readme.read_text(encoding="utf-8") == text
    assert nbformat.read(notebook, 4).cells[0].outputs[0].text == "42\n"
