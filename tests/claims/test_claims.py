"""Claims on trial: links lead somewhere, README and notebook say what the rules say today, and rules judge by rows."""

import json
import os
import pathlib
import re
import shutil
import types

import nbformat
import pytest

from ch10.wgmma_gemm.configs import STEPS
from claims import answers, judge, trial
from claims.__main__ import main
from claims.judge import HOLDS, NO_RECORD, ONLY_IF, REFUTED, UNTESTED
from tilelab import build, results

ROOT = pathlib.Path(__file__).parents[2]
CLAIMS = {claim.name: claim for note in trial.NOTES for claim in note.claims}
build_in_a_worker = build.build


@pytest.fixture(scope="module", autouse=True)
def every():
    """All judgements; the one claim that compiles is judged by a build of its own below."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build", lambda jobs: [types.SimpleNamespace(ptx="the same")] * len(jobs))
        yield trial.judge_all()


@pytest.mark.compile
def test_the_claim_that_compiles(every, monkeypatch):
    monkeypatch.setattr(build, "build", build_in_a_worker)
    assert CLAIMS["copy_stages"].judge() == next(each for each in every if each.claim.name == "copy_stages")


def test_every_note_has_claims_of_its_own(every):
    assert len(every) >= 30 and len(CLAIMS) == len(every) == len({each.claim.text for each in every})
    assert len(trial.NOTES) == 5 and all(len(note.judgements) >= 5 for note in trial.NOTES)


def test_every_claim_is_judged(every):
    for each in every:
        name, found = each.claim.name, each.finding
        assert found.verdict in judge.VERDICTS and bool(found.figure) == (found.verdict != NO_RECORD), name
        assert bool(found.reason) == (found.verdict in (ONLY_IF, UNTESTED, NO_RECORD)), name
        assert each.claim.text.endswith("."), name
        assert not re.search(r"[|\n]", each.claim.text + found.figure + found.reason), name
        assert len(re.findall(r"(?<!\\)\|", each.markdown(""))) == 5, f"{name} needs four columns"


def test_every_claim_leads_to_a_heading(every):
    headings = {}
    for claim in CLAIMS.values():
        if claim.path not in headings:
            cells = json.loads(claim.path.read_text(encoding="utf-8"))["cells"]
            texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
            headings[claim.path] = "\n".join(texts).splitlines()
        assert f"## {claim.heading}" in headings[claim.path], f"{claim.notebook} has no heading {claim.heading!r}"
    for each in every:
        anchor = f"{each.claim.notebook}.ipynb#{each.claim.heading.replace(' ', '-')}"
        assert f"](notebooks/{anchor})" in each.markdown("notebooks/")


def test_the_readme_says_what_the_rules_say():
    text = trial.README.read_text(encoding="utf-8")
    assert trial.rewrite_table(text) == text, "run `python -m claims --write`"
    assert answers.rewrite_figures(text) == text, "run `python -m claims --write`"


def test_every_notebook_that_measures_has_its_answer_from_a_record():
    stems = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {notebook for notebook, *_ in answers.ANSWERS} == stems - {"01_claims"}
    for _, words, figures in answers.ANSWERS:
        assert "#" not in answers.fill_in(words, figures(judge.Evidence())), "and the record is there"


@pytest.fixture
def change(monkeypatch, tmp_path):
    """change(name, function) replaces a record in a copy of results/ by what the function makes of it, or by a text."""
    shutil.copytree(ROOT / "results", tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("TILES_RESULTS", os.fspath(tmp_path))

    def write(name, function):
        path = tmp_path / results.PREFERRED / f"{name}.json"
        changed = function(json.loads((ROOT / "results" / results.PREFERRED / path.name).read_text(encoding="utf-8")))
        path.write_text(changed if isinstance(changed, str) else json.dumps(changed), encoding="utf-8")

    return write


def with_rows(**fields):
    """Return a function that replaces these fields in every row of a record."""
    return lambda record: record | {"rows": [row | fields for row in record["rows"]]}


def test_figures_change_with_the_records_and_words_stay(change):
    text = trial.README.read_text(encoding="utf-8")
    change("ch14_gemm_llm", with_rows(ratio=0.5))
    changed = answers.rewrite_figures(text)
    assert ", 0.50 × on decoder shapes" in changed and changed.count("0.50") == text.count("0.50") + 1
    assert re.sub(r"[\d.]+ × on decoder", "", changed) == re.sub(r"[\d.]+ × on decoder", "", text)


def test_figures_have_the_digits_and_the_sign_that_words_ask_for():
    assert answers.fill_in("# of #.##, +#.# and +#.#", [2.6, 1 / 3, -0.04, -12.34]) == "3 of 0.33, +0.0 and -12.3"
    assert answers.fill_in("#.#", [-0.04]) == "0.0"


# What may be wrong with a record: a function of the record that returns a record or the text of the file.
DAMAGE = {
    "empty": lambda record: "",
    "cut": lambda record: json.dumps(record)[:-20],
    "nothing": lambda record: "null",
    "a list": lambda record: [record],
    "no rows": lambda record: {key: value for key, value in record.items() if key != "rows"},
    "zero rows": lambda record: record | {"rows": []},
    "rows are an object": lambda record: record | {"rows": {"0": {}}},
    "rows are numbers": lambda record: record | {"rows": [1, 2]},
    "empty rows": lambda record: record | {"rows": [{}]},
    "null": with_rows(ratio=None, seconds=None, us=None),
    "text": with_rows(ratio="fast", seconds="fast", us="fast"),
    "a list in a field": with_rows(ratio=[1], seconds=[1], us=[1]),
    "NaN": with_rows(ratio=float("nan"), seconds=float("nan"), us=float("nan")),
    "infinity": with_rows(ratio=float("inf"), seconds=float("inf"), us=float("inf")),
    "device is null": lambda record: record | {"device": None},
    "device is empty": lambda record: record | {"device": {}},
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_record_is_one_sentence(change, kind):
    text = trial.README.read_text(encoding="utf-8")
    for name, claim in (("ch07_resample_ladder", "persistent"), ("sweep_race", ""), ("ch14_descriptors_launch", "")):
        change(name, DAMAGE[kind])
        with pytest.raises(ValueError, match=rf"^the \w+ .* cannot be judged by {name}.* \(\w+: .*\)\.$"):
            CLAIMS[claim].judge() if claim else answers.rewrite_figures(text)
        change(name, lambda record: record)
    assert answers.rewrite_figures(text) == text


def test_an_answer_without_its_words_is_one_sentence():
    text = trial.README.read_text(encoding="utf-8").replace("on decoder shapes", "elsewhere")
    with pytest.raises(ValueError, match=r"^README.md's line about \w+ must hold '.+#.+', with a figure for each #\.$"):
        answers.rewrite_figures(text)


def test_the_notebook_says_what_the_rules_say():
    cells = json.loads(trial.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    shown = ["".join(output["data"].get("text/markdown", "")) for cell in cells for output in cell.get("outputs", ())
             if "data" in output]
    for note in trial.NOTES:
        assert judge.make_table(note.judgements, "") in shown, f"{note.title}: run `python -m claims --write`"


def test_without_records_nothing_is_invented(every, monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", os.fspath(tmp_path))
    for before in every:
        after = before.claim.judge()
        if before.records:
            assert after.finding == judge.Finding(NO_RECORD, "", before.records[0]), before.claim.name
        else:
            assert after.finding == before.finding, before.claim.name


def test_new_records_make_a_new_readme(every, change):
    assert [each.claim.judge().finding for each in every] == [each.finding for each in every]
    change("ch07_resample_ncu", lambda record: record | {"rows": [
        row | {"dram_percent": row["dram_percent"] / 2} for row in record["rows"]]})
    moved = {each.claim.name for each in every if each.claim.judge().finding != each.finding}
    assert moved == {each.claim.name for each in every if "ch07_resample_ncu" in each.records}


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


def test_every_claim_is_printed(every, capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(each.claim.text in said and each.finding.describe() in said for each in every)


@pytest.fixture
def own_files(monkeypatch, tmp_path):
    """A README and a notebook for --write alone; return the path of the README, which is not there yet."""
    monkeypatch.setattr(trial, "README", tmp_path / "README.md")
    monkeypatch.setattr(trial, "NOTEBOOK", tmp_path / "01_claims.ipynb")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(6 * 7)")]), trial.NOTEBOOK)
    return trial.README


def refused(capsys, *arguments):
    """Return the one line with which the command line refuses."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.err.count("\n") == 1 and not said.out
    return said.err.removeprefix("python -m claims: ")


def test_refusals(own_files, change, monkeypatch, capsys):
    assert refused(capsys, "--zz") == "unrecognized arguments: --zz\n"
    assert refused(capsys, "--write").endswith("No such file or directory: '" + os.fspath(own_files) + "'.\n")
    own_files.write_text("no marks")
    assert "README.md must hold" in refused(capsys, "--write") and own_files.read_text() == "no marks"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    own_files.write_text(text, encoding="utf-8")

    def refuse(path, text):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    with monkeypatch.context() as patch:
        patch.setattr(results, "write_atomically", refuse)
        assert "Permission denied" in refused(capsys, "--write")
    change("sweep_race", DAMAGE["cut"])
    assert "sweep_race.json is not JSON" in refused(capsys, "--write")
    assert own_files.read_text(encoding="utf-8") == text


@pytest.mark.notebook
def test_write_makes_the_readme_and_runs_the_notebook(own_files, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, after = text.partition(trial.BEGIN)[0], text.partition(trial.END)[2]
    stale = re.sub(r"\d(\.\d\d) ×", r"9\1 ×", before)
    assert stale != before
    own_files.write_text(stale + trial.BEGIN + trial.END + after, encoding="utf-8")
    assert main(["--write"]) == 0 and own_files.read_text(encoding="utf-8") == text
    assert nbformat.read(trial.NOTEBOOK, 4).cells[0].outputs[0].text == "42\n"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), trial.NOTEBOOK)
    assert refused(capsys, "--write").startswith("An error occurred while executing")
