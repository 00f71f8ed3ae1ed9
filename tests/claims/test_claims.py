"""Claims on trial: links lead somewhere, the pages say what the rules say today, and rules judge by rows."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import tomllib

import nbformat
import PIL.Image
import pytest

from claims import answers, builds, judge, lesson, trial
from claims.__main__ import main
from claims.judge import HOLDS, HOLDS_HERE, NO_RECORD, NOT_HERE, ONLY_IF, ONLY_IF_HERE, REFUTED, UNTESTED
from tilelab import ROOT
from tilelab.course import doctor
from tilelab.records import environment, results
from tilelab.runtime import device, files

CLAIMS = {claim.name: claim for note in trial.NOTES for claim in note.claims}
PLANTED = tomllib.loads(pathlib.Path(__file__).with_name("planted.toml").read_text(encoding="utf-8"))[
    "planted"
]
SMEM = "it needs {} B of shared memory per block; {} has 232,448 B."
# What the compilers say; `test_the_compilers_say_so` asks them.
BUILT = {
    "proposed_on_b200": {
        "128×128×128 · 8 warps · 4 stages · plain": SMEM.format("262,192", "sm_100a"),
        "128×128×64 · 8 warps · 3 stages · plain": "",
        "128×256×128 · 16 warps · 4 stages · plain": SMEM.format("294,936", "sm_100a"),
        "256×128×128 · 16 warps · 4 stages · plain": SMEM.format("294,936", "sm_100a"),
        "256×256×128 · 16 warps · 5 stages · plain": SMEM.format("524,320", "sm_100a"),
        "64×64×64 · 4 warps · 2 stages · plain": "",
    },
    "ptxas_error": "Arguments mismatch for instruction 'cp.async.bulk.tensor'",
    "count_copies": {"TMA": 0, "LDGSTS": 1},
    "nvrtc_error": "too few arguments in function call: barrier.wait();",
}
LISTED = {"ptxas_error": "option_a", "count_copies": "option_b", "nvrtc_error": "cuda_listing_runs"}
compilers = {name: getattr(builds, name) for name in BUILT}


@pytest.fixture(scope="module", autouse=True)
def every():
    """All judgements, with the answers of compilers from BUILT."""
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in BUILT.items():
            patch.setattr(builds, name, lambda *_, answer=answer: answer)
        yield trial.judge_all()


@pytest.mark.compile
@pytest.mark.parametrize("name", BUILT)
def test_the_compilers_say_so(name):
    given = CLAIMS[LISTED[name]].given if name in LISTED else {}
    assert compilers[name](*(given[key] for key in ("listing", "target") if given)) == BUILT[name]


def test_every_note_has_claims_of_its_own(every):
    assert len(every) >= 30 and len(CLAIMS) == len(every) == len({each.claim.text for each in every})
    assert len(trial.NOTES) == 5 and all(len(note.judgements) >= 5 for note in trial.NOTES)


def test_every_claim_is_judged(every):
    for each in every:
        name, found = each.claim.name, each.finding
        assert found.verdict in judge.VERDICTS and bool(found.figure) == (found.verdict != NO_RECORD), name
        assert bool(found.reason) == (found.verdict in (ONLY_IF, ONLY_IF_HERE, UNTESTED, NO_RECORD)), name
        assert each.claim.kind in judge.KINDS and each.claim.test and each.claim.judged_on, name
        assert each.claim.quotes, name
        assert each.claim.text.endswith("."), name
        assert not re.search(r"[|\n]", each.claim.text + found.figure + found.reason), name
        assert len(re.findall(r"(?<!\\)\|", each.markdown(""))) == 6, f"{name} needs five columns"
        assert all(len(quote.words) <= 120 for quote in each.claim.quotes), f"{name}: quote a few words"


def test_a_figure_of_another_gpu_is_not_refuted_by_an_h200(every):
    for each in every:
        if each.finding.verdict in (HOLDS, ONLY_IF, REFUTED) and each.claim.kind == judge.MEASURED:
            assert each.claim.about == "", each.claim.name
        if each.finding.verdict in (HOLDS_HERE, ONLY_IF_HERE, NOT_HERE):
            assert each.claim.about and each.claim.kind == judge.MEASURED, each.claim.name


def test_the_policy_names_every_verdict_and_kind():
    assert all(f"**{verdict}" in trial.make_policy() for verdict in judge.VERDICTS)
    assert all(f"| {kind} |" in trial.make_policy() for kind in judge.KINDS)


def test_a_gain_is_a_lower_bound_and_a_state_has_two_ends():
    values = (1.46, 1.48, 2.03, 2.05)
    assert [judge.agrees(value, gain=[1.5, 2]) for value in values] == [False, True, True, True]
    assert [judge.agrees(value, state=[1.5, 2]) for value in values] == [False, True, True, False]
    assert judge.agrees(1.49, gain=1.5) and not judge.agrees(1.46, gain=1.5)
    assert judge.agrees(1.21, gain=1.5, about=True) and not judge.agrees(1.19, gain=1.5, about=True)
    assert judge.is_better(1.03, 1) and not judge.is_better(1.01, 1)


def test_what_no_measurement_can_decide_is_said_with_what_is_known(every):
    fixed = [each for each in every if each.finding.verdict == UNTESTED]
    assert len(fixed) == 24
    for each in fixed:
        assert each.finding.reason and each.finding.figure, each.claim.name


def test_every_claim_leads_to_a_heading(every):
    for each in every:
        notebook, heading = each.claim.shown_in
        cells = json.loads(each.claim.path.read_text(encoding="utf-8"))["cells"]
        lines = "".join(f"\n{''.join(cell['source'])}\n" for cell in cells if cell["cell_type"] == "markdown")
        assert f"\n## {heading}\n" in lines, f"{notebook} has no heading {heading!r}"
        assert f"](notebooks/{notebook}.ipynb#{heading.replace(' ', '-')})" in each.markdown("notebooks/")


def test_every_rule_is_used_with_its_parameters_and_unknown_fields_are_refused():
    assert {claim.rule for claim in CLAIMS.values()} == set(judge.RULES)
    note = {"about": "B200"}
    fields = {"text": "A.", "quotes": [], "test": "b", "shown_in": ["c", "d"], "figure": "{x}"}
    assert judge.Claim.read("leave_open", note, dict(fields)).about == "B200"
    with pytest.raises(TypeError, match="figures"):
        judge.Claim.read("leave_open", note, fields | {"figures": ""})


def test_a_figure_is_filled_with_values_ranges_and_names():
    values = {"x": {"a b": 2}, "several": [3.14, 2.88], "same": (1, 1), "names": ["a", "b"]}
    text = "{x[a b]}, {several:.1f}, {same:d}, {names: and }"
    assert judge.fill_in(text, values) == "2, 2.9 to 3.1, 1, a and b"
    with pytest.raises(KeyError):
        judge.fill_in("{y}", values)


def test_the_pages_say_what_the_rules_say():
    assert trial.LEDGER.read_text(encoding="utf-8") == trial.make_ledger(), "run `python -m claims --write`"
    text = trial.README.read_text(encoding="utf-8")
    assert trial.rewrite_table(text) == text, "run `python -m claims --write`"
    assert answers.rewrite_figures(text) == text, "run `python -m claims --write`"
    page = answers.OPERATORS.read_text(encoding="utf-8")
    assert answers.rewrite_tables(page) == page, "run `python -m claims --write`"


def test_the_readmes_picture_shows_todays_record():
    rows = results.load("ch10_gemm_timeline", results.PREFERRED)["rows"]
    with PIL.Image.open(trial.PICTURE) as picture:
        assert picture.info["Source"] == environment.digest(rows), "run `python -m claims --write`"


def test_every_notebook_that_measures_has_its_answer_from_a_record():
    stems = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert set(answers.ANSWERS) == stems
    for answer in answers.ANSWERS.values():
        figures = answers.find_figures(judge.Evidence(), answer)
        assert "#" not in answers.fill_in(answer["words"], figures), "and the record is there"


@pytest.fixture
def change(monkeypatch, tmp_path):
    """change(name, function) replaces a record in a copy of results/ by what the function makes of it, or by a text."""
    shutil.copytree(ROOT / "results", tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("TILES_RESULTS", os.fspath(tmp_path))

    def write(name, function):
        path = tmp_path / results.PREFERRED / f"{name}.json"
        original = ROOT / "results" / results.PREFERRED / path.name
        changed = function(json.loads(original.read_text(encoding="utf-8")))
        path.write_text(changed if isinstance(changed, str) else json.dumps(changed), encoding="utf-8")

    return write


def with_rows(**fields):
    """Return a function that replaces these fields in every row of a record."""
    return lambda record: record | {"rows": [row | fields for row in record["rows"]]}


def test_figures_change_with_the_records_and_words_stay(change):
    text = trial.README.read_text(encoding="utf-8")
    change("ch14_attention_lesson", with_rows(ratio=0.5))
    changed = answers.rewrite_figures(text)
    assert "lines runs at 0.50 × cuDNN" in changed and changed.count("0.50") == text.count("0.50") + 1
    assert re.sub(r"[\d.]+ × cuDNN", "", changed) == re.sub(r"[\d.]+ × cuDNN", "", text)


def test_peers_change_with_the_records(change):
    page = answers.OPERATORS.read_text(encoding="utf-8")
    change("ch14_blockscaled_peers", with_rows(ratio=0.5))
    shapes = re.findall(r"\| DeepGEMM \S+ \| (\d+) \| 0.50 \| 0.50 \| 0.50 \|", answers.rewrite_tables(page))
    assert shapes == ["18", "12", "12"]
    change("ch14_blockscaled_peers", with_rows(ratio=None))
    with pytest.raises(ValueError, match="the table of peers cannot be judged by"):
        answers.rewrite_tables(page)
    with pytest.raises(ValueError, match="operators.md must hold the lines"):
        answers.rewrite_tables("no marks")


def test_the_costs_of_calls_change_with_the_record(change):
    page = answers.OPERATORS.read_text(encoding="utf-8")
    change("ch14_compiled_host_time", with_rows(us=7.4, peer_us=9.6))
    calls = re.findall(r"^\| `(\S+)`.* \| 7 \| .* \| 10 \|$", answers.rewrite_tables(page), re.MULTILINE)
    assert len(calls) == 14 and calls[0] == "ch14.gemm"
    for fields in ({"us": None}, {"status": "failed"}):
        change("ch14_compiled_host_time", with_rows(**fields))
        with pytest.raises(ValueError, match="the table of calls cannot be judged by"):
            answers.rewrite_tables(page)


def test_figures_have_the_digits_and_the_sign_that_words_ask_for():
    found = answers.fill_in("# of #.##, +#.# and +#.#", [2.6, 1 / 3, -0.04, -12.34])
    assert found == "3 of 0.33, +0.0 and -12.3"
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
    for name, claim in (
        ("ch14_gemm_claim", "closer_to_cublas"),
        ("sweep_race", ""),
        ("ch14_descriptors_copies", ""),
    ):
        change(name, DAMAGE[kind])
        with pytest.raises(ValueError, match=rf"^the \w+ .* cannot be judged by {name}.* \(\w+: .*\)\.$"):
            CLAIMS[claim].judge() if claim else answers.rewrite_figures(text)
        change(name, lambda record: record)
    assert answers.rewrite_figures(text) == text


def test_an_answer_without_its_words_is_one_sentence():
    text = trial.README.read_text(encoding="utf-8").replace("× eager", "times eager")
    says = r"^README.md's line about \w+ must hold '.+#.+', with a figure per #\.$"
    with pytest.raises(ValueError, match=says):
        answers.rewrite_figures(text)


def test_the_notebook_says_what_the_rules_say(every):
    """The notebook quotes ten claims as the notes' files do, with their tests, and folds today's verdicts."""
    cells = json.loads(trial.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    shown = [
        "".join(output["data"].get("text/markdown", ""))
        for cell in cells
        for output in cell.get("outputs", ())
        if "data" in output
    ]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert 8 <= len(lesson.LESSONS) <= 10
    for name in lesson.LESSONS:
        assert lesson.fold_verdict(name).data in shown, f"{name}: run `python -m claims --write`"
        words = CLAIMS[name].quotes[0].words.replace("**", "")
        note = next(note for note in trial.NOTES if CLAIMS[name] in note.claims)
        assert f"“{words}” (*{note.title}*)" in prose and "Verdict: " not in prose
    hold, conditional, _, missing = judge.count_outcomes(every)
    assert f"*Of {len(every)}*: {hold + conditional} hold, and {conditional} of these only with" in prose
    assert f": {missing} claims are not settled, because" in prose
    kinds = [each["kind"] for each in lesson.LESSONS.values()]
    assert len(set(kinds)) == len(kinds), "one claim for each kind of error"


def test_an_answer_is_compared_with_the_verdict(every):
    assert {lesson.answer(name) for name in lesson.LESSONS} == set(lesson.ANSWERS)
    assert lesson.compare({"memory": ""}).startswith("0 of ")
    said = lesson.compare({"memory": " Fails", "one_stage": "fails", "small_k": "only if"})
    assert said.startswith(f"3 of {len(lesson.LESSONS)} claims judged, 2 as the rules judge them")
    assert said.splitlines()[1:] == [f"  {CLAIMS['one_stage'].text} You said 'fails', the rule 'holds'."]


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
    change("ch07_resample_ncu", with_rows(dram_percent=20.0))
    moved = {each.claim.name for each in every if each.claim.judge().finding != each.finding}
    reading = {each.claim.name for each in every if "ch07_resample_ncu" in each.records}
    assert "target" in moved and moved <= reading


def plant(*changes):
    """Return evidence with the changes of a case of planted.toml."""
    evidence = judge.Evidence()
    load = evidence.load

    def is_chosen(row, rows=None, containing=None, **_):
        texts = (containing or {}).items()
        return (rows or {}).items() <= row.items() and all(text in row[name] for name, text in texts)

    def change_rows(experiment):
        rows = load(experiment)
        for change in changes:
            if change["record"] == experiment:
                rows = [row | change["set"] if is_chosen(row, **change) else row for row in rows]
        return rows

    evidence.load = change_rows
    return evidence


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: f"{case['claim']}-{case['after']}")
def test_a_verdict_is_of_the_rows(case):
    claim = CLAIMS[case["claim"]]
    assert claim.apply(judge.Evidence()).verdict == case["before"]
    assert claim.apply(plant(*case["changes"])).verdict == case["after"]


BY_BUILDS = [
    ("option_a", "ptxas_error", "", HOLDS),
    ("option_b", "count_copies", {"TMA": 1, "LDGSTS": 0}, HOLDS),
    ("autotune_fallback", "autotuner_catches", ("CompileTimeAssertionFailure", "PTXASError"), REFUTED),
    ("variables_that_switch", "variables_read", {"TRITON_TMA_ENABLE": ["triton"]}, HOLDS),
]


@pytest.mark.parametrize("name, function, answer, after", BY_BUILDS)
def test_a_verdict_is_of_the_builds(name, function, answer, after, monkeypatch):
    before = CLAIMS[name].apply(judge.Evidence()).verdict
    monkeypatch.setattr(builds, function, lambda *variables: answer)
    assert CLAIMS[name].apply(judge.Evidence()).verdict == after != before


READ = builds, "variables_read", lambda *names: dict.fromkeys(names, ["torch"])


def with_sheet(gpu, **fields):
    """Return what replaces the datasheets by some in which one GPU has other figures."""
    return device, "KNOWN", device.KNOWN | {gpu: dataclasses.replace(device.KNOWN[gpu], **fields)}


# (claim, other parameters of its rule, what else to replace, by what): the facts behind rules without rows. With each
# of these facts the claim would hold.
BY_FACTS = [
    ("memory", {}, with_sheet("GB10", memory="HBM3e", peak_gbps=1500)),
    ("gb10_products", {"fp4_sparse_tflops": 1600}),
    ("flash_attention_3_on_gb10", {"documented": ["H100 / H800 / GB10"]}),
    ("nsys", {"documented": ["kernels", "instructions"]}),
    ("driver", {}, (doctor, "MIN_DRIVER", 550)),
    (
        "cuda_listing_runs",
        {"listing": "auto token = cuda::device::barrier_arrive_tx(barrier, 1, 1024);"},
        (builds, "nvrtc_error", lambda *_: ""),
    ),
    ("variables_without_effect", {}, READ, (builds, "always_compiles", lambda: True)),
    ("transactions", {"lane_bytes": 4}),
    ("tolerance", {"dtype": "float32"}),
]


@pytest.mark.parametrize("name, given, replaced", [(name, given, rest) for name, given, *rest in BY_FACTS])
def test_a_verdict_is_of_the_facts(name, given, replaced, monkeypatch):
    """A rule without rows still compares: with other facts its claim holds."""
    claim = CLAIMS[name]
    assert claim.apply(judge.Evidence()).verdict == REFUTED
    for where, attribute, value in replaced:
        monkeypatch.setattr(where, attribute, value)
    claim = dataclasses.replace(claim, given=claim.given | given)
    assert claim.apply(judge.Evidence()).verdict == HOLDS


def test_every_refuted_claim_could_have_come_out_otherwise(every):
    """For each claim that does not hold there is a test, above or below, in which other evidence lets it hold."""
    tested = {case["claim"] for case in PLANTED}
    tested |= {name for table in (BY_BUILDS, BY_FACTS) for name, *_ in table}
    failing = {each.claim.name for each in every if each.finding.verdict in (REFUTED, NOT_HERE)}
    assert failing <= tested | {"tested_and_working"}, failing - tested


def test_proposed_configurations_that_all_start_would_hold(monkeypatch):
    monkeypatch.setattr(builds, "proposed_on_b200", lambda: dict.fromkeys(BUILT["proposed_on_b200"], ""))
    all_start = {"record": "ch14_gemm_claim", "rows": {"name": "proposed"}, "set": {"status": "ok"}}
    assert CLAIMS["tested_and_working"].apply(judge.Evidence()).verdict == REFUTED, "not on an H200"
    assert CLAIMS["tested_and_working"].apply(plant(all_start)).verdict == HOLDS


def test_the_marks_must_be_there():
    for text in ("", trial.BEGIN, f"{trial.END}\n{trial.BEGIN}", f"{trial.BEGIN}\n{trial.END}\n{trial.END}"):
        with pytest.raises(ValueError, match="README.md must hold the lines"):
            trial.rewrite_table(text)
    found = trial.rewrite_table(f"a\n{trial.BEGIN}\nold\n{trial.END}\nb")
    assert found == f"a\n{trial.make_readme_part()}\nb"


def test_every_claim_is_printed(every, capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(each.claim.text in said and each.finding.describe() in said for each in every)


def make_page(table=""):
    """Return a page with the marks of both tables and `table` in each; the default is today's."""
    return "\n".join(
        f"{answers.BEGIN.format(name)}\n{table or make()}\n\n{answers.END.format(name)}"
        for name, make in answers.TABLES.items()
    )


@pytest.fixture
def own_files(monkeypatch, tmp_path):
    """Pages and a notebook for --write alone; return the path of the README, which is not there yet."""
    monkeypatch.setattr(answers, "OPERATORS", tmp_path / "operators.md")
    answers.OPERATORS.write_text(make_page("old"))
    monkeypatch.setattr(trial, "README", tmp_path / "README.md")
    monkeypatch.setattr(trial, "LEDGER", tmp_path / "CLAIMS.md")
    monkeypatch.setattr(trial, "PICTURE", tmp_path / "timeline.png")
    monkeypatch.setattr(trial, "NOTEBOOK", tmp_path / "claims.ipynb")
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(6 * 7)")]), trial.NOTEBOOK
    )
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
        patch.setattr(files, "write_atomically", refuse)
        assert "Permission denied" in refused(capsys, "--write")
    change("sweep_race", DAMAGE["cut"])
    assert "sweep_race.json is not JSON" in refused(capsys, "--write")
    assert own_files.read_text(encoding="utf-8") == text


@pytest.mark.notebook
def test_write_makes_the_pages_and_runs_the_notebook(own_files, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, after = text.partition(trial.BEGIN)[0], text.partition(trial.END)[2]
    stale = re.sub(r"\d(\.\d\d) ×", r"9\1 ×", before)
    assert stale != before
    own_files.write_text(stale + trial.BEGIN + trial.END + after, encoding="utf-8")
    assert main(["--write"]) == 0 and own_files.read_text(encoding="utf-8") == text
    assert answers.OPERATORS.read_text(encoding="utf-8") == make_page()
    assert trial.LEDGER.read_text(encoding="utf-8") == trial.make_ledger()
    assert nbformat.read(trial.NOTEBOOK, 4).cells[0].outputs[0].text == "42\n"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), trial.NOTEBOOK)
    assert refused(capsys, "--write").startswith("An error occurred while executing")
