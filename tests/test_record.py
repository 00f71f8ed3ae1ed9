import nbformat
import pytest

from tilelab import device, record

new_code, new_text = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell


@pytest.fixture
def notebooks(monkeypatch, tmp_path):
    """A repository whose notebooks/ is empty, on a GPU as far as `record` can tell."""
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a")
    monkeypatch.setattr(device, "current", lambda: here)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    return tmp_path / "notebooks"


def write(path, *sources):
    nbformat.write(nbformat.v4.new_notebook(cells=[new_text("# Title"), *map(new_code, sources)]), path)
    return path


def test_recorded_in_place(notebooks, capsys):
    path = write(notebooks / "00_start.ipynb", "import os\nos.environ['TILES_RECORD']", "", "print(os.getcwd())")
    assert record.main([]) == 0
    assert capsys.readouterr().out.endswith(" s, recorded\n")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, None, 2]
    assert notebook.cells[1].outputs[0].data["text/plain"] == "'1'"
    assert notebook.cells[3].outputs[0].text.strip() == str(notebooks)
    assert notebook.metadata == record.METADATA
    first = path.read_bytes()
    assert record.main(["--notebooks", "00_start"]) == 0 and path.read_bytes() == first


def test_a_failure_leaves_the_notebook(notebooks, capsys):
    bad, good = write(notebooks / "a.ipynb", "1 / 0"), write(notebooks / "b.ipynb", "1")
    before = bad.read_bytes()
    assert record.main([]) == 1
    said = capsys.readouterr().out
    assert "1 / 0" in said and "ZeroDivisionError: division by zero" in said and "\x1b" not in said
    assert bad.read_bytes() == before and '"text/plain"' in good.read_text()


def test_tidy_drops_what_a_saved_notebook_cannot_show():
    text = {"text/plain": "IntSlider(value=0)"}
    shown = nbformat.v4.new_output("display_data", {**text, record.WIDGET: {"model_id": "1"}})
    cell = new_code("x", outputs=[shown], execution_count=7, metadata={"execution": {"a": "1"}, "tags": ["keep"]})
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    record.tidy(notebook)
    assert cell.outputs[0].data == text and cell.metadata == {"tags": ["keep"]} and cell.execution_count == 1
    assert notebook.metadata == record.METADATA


def test_refusals(notebooks, monkeypatch, capsys):
    assert record.main(["--notebooks", "ch99"]) == 2
    assert capsys.readouterr().err == "no notebook ch99: there is none yet.\n"
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))
    assert record.main([]) == 2
    assert capsys.readouterr().err == "Recording needs a GPU; here is no GPU (torch is a CPU build).\n"


def test_summary_of_the_tests(monkeypatch, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.fixture\ndef broken(): 1 / 0\n"
        "def test_a(): pass\ndef test_b(): assert 0\ndef test_c(broken): pass\n"
        "def test_d(): pytest.skip('needs a GPU')\ndef test_e(): pytest.skip('needs a GPU')\n")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    summary = record.run_tests([])
    assert (summary["passed"], summary["failed"], summary["skipped"]) == (1, 2, 2)
    assert summary["skips"] == [("needs a GPU", 2)]
