"""The kernel files of the seven languages, their budget, and their mistakes. None of the packages is needed."""

import pytest

from ch14.languages import TITLES, configs
from ch14.languages.lesson import cells, exercises, experiments, figures, mistakes, worker
from tilelab import ROOT
from tilelab.cells import lesson
from tilelab.runtime import cubin

CELLS = lesson.notebook_texts(ROOT / "notebooks" / "19_ch14_languages.ipynb")


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


def test_a_worker_answers_errors_and_death():
    language = experiments.Language("triton")
    try:
        assert "AttributeError" in language.ask("nothing", 120)["reason"]
        language.process.kill()
        assert language.ask("describe")["status"] == "failed"
    finally:
        language.close()
