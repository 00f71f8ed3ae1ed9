"""The kernel files of the seven languages, their budget, and their mistakes. None of the packages is needed."""

import pytest

from ch14.languages import TITLES, configs
from ch14.languages.lesson import cells, exercises, experiments, figures, mistakes, worker
from tilelab import ROOT
from tilelab.cells import lesson
from tilelab.records import results
from tilelab.runtime import cubin, device

CELLS = lesson.notebook_texts(ROOT / "notebooks" / "19_ch14_languages.ipynb")
ANSWERS = {
    cell.split()[1]: cell.partition("\n")[2]
    for cell in lesson.notebook_texts(ROOT / "notebooks" / "solutions" / "19_ch14_languages.ipynb")
    if cell.startswith("%%language")
}


@pytest.mark.parametrize("name", TITLES)
def test_every_language_has_one_short_kernel_and_24_different_configurations(name):
    text = worker.find_source(name).read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 60
    assert len({str(config) for config in configs.CONFIGS[name]}) == 24
    assert figures.count_words(name) > 5 and figures.count_lines(name)[0] <= 60


@pytest.mark.parametrize("name", TITLES)
def test_the_notebook_holds_the_recorded_kernel(name):
    (text,) = (cell.partition("\n")[2] for cell in CELLS if cell.startswith(f"%%language {name}\n"))
    assert cells.is_recorded(name, text)


@pytest.mark.parametrize("name", TITLES)
def test_every_mistake_can_be_planted(name):
    text = worker.find_source(name).read_text()
    for mistake in mistakes.MISTAKES:
        planted, config = mistakes.plant(mistake, name, text)
        assert (planted, config) != (text, configs.CONFIGS[name][0])
        assert (planted == text) == (mistake == "too much shared memory")


@pytest.mark.compile
def test_the_cuda_kernel_multiplies_by_wgmma_from_tma_without_spills():
    from ch14.languages.kernels import cuda_host

    code = cuda_host.compile_kernel(worker.find_source("cuda"), "sm_90a", **configs.CONFIGS["cuda"][0])
    counts = cubin.sass_counts(code)
    assert counts["UTMALDG"] == 2 and counts["UTMASTG"] and counts["HGMMA"]
    assert not cubin.read_resources(code)["spills"]


@pytest.mark.compile
def test_the_triton_kernel_multiplies_by_wgmma_from_tma():
    prepare = lesson.define(worker.find_source("triton").read_text())["prepare"]
    inputs = exercises.make_case((256, 256, 256), "cpu")
    config = configs.CONFIGS["triton"][0]
    report = lesson.compile_launch(lambda a, b, bias, out: prepare(a, b, out, **config), inputs, "sm_90a")
    assert report.counts["tma_load"] and report.counts["wgmma"] and not report.spills


@pytest.mark.compile
@pytest.mark.parametrize("name", ["cute", "cutile", "helion", "tilelang"])
def test_an_installed_language_compiles_an_answer_without_a_gpu(name):
    if not worker.is_installed(name):
        pytest.skip(f"{TITLES[name]} is not installed; make languages installs it")
    with experiments.start_text(name, ANSWERS[name]) as language:
        found = language.ask("compile", 240, config=configs.CONFIGS[name][1], epilogue=True)
    assert found["status"] == "ok", found["reason"]
    assert found["counts"]["HGMMA"] and not found["spills"]


def test_gluon_s_answer_is_judged_in_the_emulator(monkeypatch, capsys):
    assert set(ANSWERS) == set(TITLES)
    monkeypatch.setattr(device, "current", lambda: device.Device("none"))
    for before, after in (("", ""), ("columns = n +", "columns = m +"), ("gl.exp(-acc)", "gl.exp(acc)")):
        assert before in ANSWERS["gluon"]
        exercises.check(
            "Exercise 2", "gluon", ANSWERS["gluon"].replace(before, after) if before else ANSWERS["gluon"]
        )
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Exercise 2: solved." and all("elements are wrong" in line for line in said[1:]), said


def test_what_a_missing_language_would_compile_is_not_judged(monkeypatch, capsys):
    monkeypatch.setattr(device, "current", lambda: device.Device("none"))
    monkeypatch.setattr(worker, "is_installed", lambda name: False)
    for name in ("cute", "cutile", "helion", "tilelang"):
        exercises.check("Exercise 2", name, ANSWERS[name])
    assert capsys.readouterr().out.count("not checked (") == 4
    assert exercises.choose_config("cutile")["num_worker_warps"] == 8  # with four, the tile spills


def test_a_worker_answers_errors_and_death():
    language = experiments.Language("triton")
    try:
        assert "AttributeError" in language.ask("nothing", 120)["reason"]
        language.process.kill()
        assert language.ask("describe")["status"] == "failed"
    finally:
        language.close()


def test_a_language_that_was_missing_leaves_its_figures_out():
    row = {"kind": "language", "name": "Triton", "language": "triton", "status": "failed"}
    row["build_s"] = [4.0, 1.0]
    record = results.Record(results.make_record("ch14_languages_speed", [row], "0" * 16), live=True)
    effort = figures.tabulate_effort(record).rows
    assert len(effort) == len(TITLES) and "2.50" in effort[list(TITLES).index("triton")]
    exercises.show_listings(record)


def test_a_kernel_that_fails_only_where_it_is_timed_has_a_reason(monkeypatch):
    class Language:
        def __init__(self, *_):
            pass

        def ask(self, do, *_, **__):
            return {"status": "failed" if do == "hold" else "ok", "reason": "", "versions": {}}

        def close(self):
            pass

    monkeypatch.setattr(experiments, "Language", Language)
    found = cells.try_kernel("triton", "", {})
    cells.end_spares()
    assert found["status"] == "failed" and "4096" in found["reason"]


def test_a_cell_without_record_or_with_a_wrong_line_is_one_sentence(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="it got 'triton --chek'"):
        cells.run_cell("triton --chek", "")
    with pytest.raises(ValueError, match="unknown language ''"):
        cells.run_cell("", "")
    assert not cells.is_recorded("triton", "def (")
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setattr(device, "current", lambda: device.Device("none"))
    with pytest.raises(FileNotFoundError, match="no record of ch14_languages_speed"):
        cells.show_kernel("triton", "")
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a"))
    missing = {"status": "failed", "reason": "ModuleNotFoundError: no triton"}
    monkeypatch.setattr(cells, "try_kernel", lambda name, text, config: missing)
    text = worker.find_source("triton").read_text()
    assert cells.show_kernel("triton", text).endswith("and it cannot run: ModuleNotFoundError: no triton.")
