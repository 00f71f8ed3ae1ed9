import json
import re
import signal
import subprocess
import sys
import tempfile
import time

import filelock
import nbformat
import pytest
from waiting import is_alive, wait_for

from tilelab.course import notebook, record, suite
from tilelab.records import results
from tilelab.runtime import device, files, provenance

new_code, new_text = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell


@pytest.fixture
def notebooks(monkeypatch, tmp_path):
    """A repository whose notebooks/ and results/ are empty, on a GPU as far as `record` can tell."""
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a")
    monkeypatch.setattr(device, "current", lambda: here)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(device, "memory_in_use_gib", dict)  # by the tests that run beside these
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # locks of this test's own: others run beside it
    (tmp_path / "notebooks").mkdir()
    return tmp_path / "notebooks"


def write(path, *sources):
    nbformat.write(nbformat.v4.new_notebook(cells=[new_text("# Title"), *map(new_code, sources)]), path)
    return path


@pytest.mark.notebook
def test_recorded_in_place(notebooks, monkeypatch, capsys):
    monkeypatch.setattr(notebook, "SLOW_S", 0.4)
    path = write(
        notebooks / "00_start.ipynb",
        "import os, time\nos.environ['TILES_RECORD']",
        "",
        "print(os.getcwd())\ntime.sleep(0.6)",
    )
    assert record.main([]) == 0
    assert re.search(r" s, recorded; slowest cells .*\[2\] \d+ s", capsys.readouterr().out)
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    assert [cell.get("execution_count") for cell in kept.cells] == [None, 1, None, 2]
    assert kept.cells[1].outputs[0].data["text/plain"] == "'1'"
    assert kept.cells[3].outputs[0].text.strip() == str(notebooks)
    assert kept.metadata == notebook.METADATA and "execution" not in kept.cells[3].metadata
    first = path.read_bytes()
    assert record.main(["--notebooks", "00_start"]) == 0 and path.read_bytes() == first


@pytest.mark.fault
def test_a_failure_leaves_the_notebook(notebooks, capsys):
    bad = write(notebooks / "a.ipynb", "1 / 0")
    dead = write(notebooks / "b.ipynb", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    good = write(notebooks / "c.ipynb", "1")
    before = bad.read_bytes(), dead.read_bytes()
    assert record.main([]) == 1
    said = capsys.readouterr().out
    assert "failed, left as it was: ZeroDivisionError: division by zero\n" in said
    assert "1 / 0" in said and "\x1b" not in said
    assert "b: " in said and "failed, left as it was\nKernel died\n" in said
    assert (bad.read_bytes(), dead.read_bytes()) == before and '"text/plain"' in good.read_text()


def test_tidy_drops_what_a_saved_notebook_cannot_show():
    text = {"text/plain": "IntSlider(value=0)"}
    shown = nbformat.v4.new_output("display_data", {**text, notebook.WIDGET: {"model_id": "1"}})
    cell = new_code(
        "x", outputs=[shown], execution_count=7, metadata={"execution": {"a": "1"}, "tags": ["keep"]}
    )
    made = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    notebook.tidy(made)
    assert cell.outputs[0].data == text and cell.metadata == {"tags": ["keep"]} and cell.execution_count == 1
    assert made.metadata == notebook.METADATA


MEETS = """
import os, pathlib, time
pathlib.Path(os.environ["CUDA_VISIBLE_DEVICES"]).write_text("here")
while not all(pathlib.Path(gpu).exists() for gpu in ("GPU-a", "GPU-b")):
    time.sleep(0.01)
print(os.environ["CUDA_VISIBLE_DEVICES"])"""


@pytest.mark.notebook
def test_every_gpu_takes_the_next_notebook(notebooks, monkeypatch, capsys):
    monkeypatch.setattr(device, "same_model_uuids", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(notebook, "CELL_TIMEOUT_S", 60)
    paths = [write(notebooks / name, MEETS) for name in ("ch07.ipynb", "ch10.ipynb", "ch14.ipynb")]
    alone = [
        write(notebooks / f"{stem}.ipynb", "import os\nprint(os.environ.get('CUDA_VISIBLE_DEVICES'))")
        for stem in record.ALONE
    ]
    assert record.main(["--side-by-side"]) == 0
    shown = [nbformat.read(path, 4).cells[1].outputs[0].text.strip() for path in paths]
    assert set(shown) == {"GPU-a", "GPU-b"}
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said[3:5]] == list(record.ALONE)
    assert said[5].startswith("5 of 5 recorded in ")
    assert all(nbformat.read(path, 4).cells[1].outputs[0].text == "None\n" for path in alone)


def refused(arguments, capsys):
    """The one line with which a recording is refused, with status 2."""
    with pytest.raises(SystemExit) as stopped:
        record.main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    return said.removeprefix("python -m tilelab.course.record: ")


def test_refusals(notebooks, monkeypatch, capsys):
    assert refused(["--notebooks", "ch99"], capsys) == "unknown notebook ch99; choose from none.\n"
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))
    assert refused([], capsys) == "recording needs a GPU; this machine has no GPU (torch is a CPU build).\n"


@pytest.fixture
def experiments(monkeypatch, notebooks):
    """Three experiments: one that measures, one that fails, and one that only loads its record."""

    def measure(rows, live=True):
        return lambda: results.Record(results.make_record("speed", rows, "0" * 16), live=live)

    experiments = {"speed": measure([{"name": "best", "ratio": 1.0, "status": "ok"}])}
    experiments |= {"broken": lambda: 1 / 0, "lesson": measure([], live=False)}
    monkeypatch.setattr(results, "EXPERIMENTS", experiments)
    monkeypatch.setattr(provenance, "versions", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(record.headlines, "EXPERIMENTS", ("speed",))


def test_experiments_without_their_notebooks(experiments, tmp_path, capsys):
    assert record.main(["--experiments", "--to", str(tmp_path / "to")]) == 0
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["speed.json"]
    found = results.read(tmp_path / "to" / "speed.json")["rows"]
    assert found == [{"name": "best", "ratio": 1.0, "status": "ok"}]
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"speed: \d+\.\d s, recorded", said[0])
    assert said[1] == f"1 of 1 recorded in {tmp_path}/to"


def test_an_experiment_that_fails_does_not_stop_the_others(experiments, tmp_path, capsys):
    assert record.main(["--experiments", "broken", "lesson", "speed"]) == 1
    broken, lesson, speed, end = capsys.readouterr().out.splitlines()
    assert broken.endswith("failed, left as it was: ZeroDivisionError: division by zero")
    assert lesson.endswith("only its notebook measures it, or this machine cannot") and speed.endswith(
        "recorded"
    )
    assert end == f"1 of 3 recorded in {tmp_path}/results/nvidia-h200"
    assert results.load("speed")["versions"] == {"torch": "2.13.0"}


def test_another_version_of_torch_replaces_no_record(experiments, monkeypatch):
    assert record.main(["--experiments"]) == 0
    monkeypatch.setattr(provenance, "versions", lambda: {"torch": "2.14.0"})
    assert record.main(["--experiments"]) == 0
    own = results.results_folder() / "nvidia-h200"
    assert results.read(own / "speed.json")["versions"]["torch"] == "2.13.0"
    assert results.read(own / "torch-2.14" / "speed.json")["versions"]["torch"] == "2.14.0"
    monkeypatch.setattr(suite, "run", lambda **_: {"passed": 1, "failed": 0, "skipped": 0, "seconds": 1.0})
    assert record.main(["--notebooks", "--tests"]) == 0
    assert not (own / "tests.json").exists() and (own / "torch-2.14" / "tests.json").exists()


def test_experiments_that_are_refused(experiments, capsys):
    found = refused(["--experiments", "fast"], capsys)
    assert found == "unknown experiment fast; each file in results/ is named after one.\n"
    assert refused(["--to", "x"], capsys) == "--to is for the records of --experiments.\n"
    assert refused(["--experiments", "--tests"], capsys).startswith(
        "--experiments runs neither notebooks nor tests: "
    )


@pytest.mark.parametrize("gpus", [[""], ["GPU-a", "GPU-b"]])
def test_an_interrupt_begins_no_other_experiment(experiments, monkeypatch, tmp_path, capsys, gpus):
    begun = []

    def measure_next(left, gpu, *_):
        for name in left:
            begun.append(name)
            if name == "first":
                raise KeyboardInterrupt
            time.sleep(0.2)

    monkeypatch.setattr(record, "_measure_next", measure_next)
    names = ["first", *map(str, range(50))]
    assert record._record_experiments(names, tmp_path, gpus) == 130
    assert len(begun) < 4 and capsys.readouterr().out.startswith("interrupted; left as before: first, 0")


def test_one_recording_of_everything(experiments, monkeypatch, capsys):
    """Old code comes first; what a notebook recorded and what needs no GPU is not measured again."""
    monkeypatch.setattr(record, "import_experiments", lambda: None)
    measured, here = [], device.current()
    monkeypatch.setattr(suite, "run", lambda **_: {"passed": 1, "failed": 0, "skipped": 0, "seconds": 1.0})
    monkeypatch.setattr(provenance, "utc_now", lambda: "2026-01-02T00:00:00Z")
    monkeypatch.setattr(results, "EXPERIMENTS", {})
    for name, when, source, on in (
        ("older", "2026-01-01T00:00:00Z", "now", here),
        ("stale", "2026-01-01T00:00:00Z", "then", here),
        ("build", "2026-01-01T00:00:00Z", "now", results.NO_GPU),
        ("by_its_notebook", "2026-01-02T00:00:01Z", "now", here),
    ):
        old = results.make_record(name, [], source, on)
        results.save({**old, "recorded": when})

        def run(name=name):
            measured.append(name)
            return results.Record(results.make_record(name, [], "now"), live=True)

        results.register(name, run, lambda: "now")
    assert record.main(["--all"]) == 0
    assert measured == ["stale", "older"]
    assert "2 of 2 recorded in " in capsys.readouterr().out
    monkeypatch.setattr(record.headlines, "EXPERIMENTS", ("older",))
    monkeypatch.setattr(provenance, "versions", lambda: {"torch": "2.14.0"})
    assert "holds records of another torch" in refused(["--all"], capsys)


def test_every_headline_can_be_measured():
    assert tuple(record._check_experiments([])) == record.headlines.EXPERIMENTS


def test_one_recording_at_a_time(notebooks, capsys):
    path = write(notebooks / "a.ipynb", "1")
    before = path.read_bytes()
    results.results_folder().mkdir()
    with filelock.FileLock(results.results_folder() / ".recording"):
        assert refused([], capsys).startswith("another recording is running") and path.read_bytes() == before
    assert record.main(["--notebooks"]) == 0, "nothing is locked"


def test_one_recording_on_a_gpu(notebooks, monkeypatch, capsys):
    path = write(notebooks / "a.ipynb", "1")
    before = path.read_bytes()
    monkeypatch.setattr(device, "same_model_uuids", lambda: ["GPU-test"])
    lock = device.user_lock_path("GPU-test.recording")
    with filelock.FileLock(lock):  # of another clone
        assert refused([], capsys).startswith("another recording is running")
    monkeypatch.setattr(
        device, "memory_in_use_gib", lambda: {"GPU-other": (139, 140), "GPU-test": (126.4, 140)}
    )
    assert refused([], capsys) == (
        "other processes hold 126 of the 140 GiB of GPU-test, and recording allows 35: end "
        "them, or choose another GPU with CUDA_VISIBLE_DEVICES.\n"
    )
    assert path.read_bytes() == before
    monkeypatch.setattr(device, "memory_in_use_gib", lambda: {"GPU-other": (139, 140), "GPU-test": (1, 140)})
    assert record.main(["--notebooks"]) == 0, "the GPU is free"
    lock.unlink()


def test_nowhere_to_write_is_said_before_measuring(notebooks, monkeypatch, tmp_path, capsys):
    path = write(notebooks / "a.ipynb", "1")
    before = path.read_bytes()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path / "file"))
    expected = f"{tmp_path}/file/nvidia-h200 cannot be written (Not a directory): nothing was recorded.\n"
    assert refused([], capsys) == expected
    assert path.read_bytes() == before


@pytest.mark.notebook
def test_a_relative_folder_is_one_for_all(notebooks, monkeypatch):
    monkeypatch.chdir(notebooks.parent)
    monkeypatch.setenv("TILES_RESULTS", "kept")
    write(notebooks / "a.ipynb", "from tilelab.records import results\nprint(results.results_folder())")
    assert record.main([]) == 0
    found = nbformat.read(notebooks / "a.ipynb", 4).cells[1].outputs[0].text.strip()
    assert found == str(notebooks.parent / "kept")


@pytest.mark.notebook
def test_a_widget_that_holds_outputs_can_be_recorded(notebooks):
    write(
        notebooks / "a.ipynb",
        "import ipywidgets\nheld = ipywidgets.Output()\nwith held:\n    print('inside')\nheld",
    )
    assert record.main([]) == 0
    kept = nbformat.read(notebooks / "a.ipynb", 4)
    assert "widgets" not in kept.metadata and notebook.WIDGET not in json.dumps(kept)


INTERRUPTED = """
import pathlib, signal, sys, tempfile
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and hands that down
from tilelab.runtime import device
from tilelab.course import record
here = device.Device("NVIDIA H200", (9, 0), "sm_90a")
device.current = lambda: here
record.ROOT = pathlib.Path(sys.argv[1])
tempfile.tempdir = sys.argv[1]  # locks of its own: the recording that these tests may be part of holds the GPU's
device.memory_in_use_gib = dict
sys.exit(record.main([]))
"""


@pytest.mark.fault
@pytest.mark.parametrize("how, status", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_recording_that_is_ended(notebooks, tmp_path, how, status):
    save = (
        "import dataclasses, os, pathlib, time\n"
        "from tilelab.records import results\nfrom tilelab.runtime import device\n"
        "on = dataclasses.asdict(device.Device('NVIDIA H200', (9, 0), 'sm_90a'))\n"
        "row = {'experiment': 'x', 'device': on, 'versions': {}, 'recorded': '', 'source': '', 'rows': []}\n"
        "results.save(row)\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    paths = [write(notebooks / name, save) for name in ("a.ipynb", "b.ipynb")]
    before = [path.read_bytes() for path in paths]
    options = {"env": notebook.child_env(), "text": True, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen([sys.executable, "-c", INTERRUPTED, tmp_path], stdout=subprocess.PIPE, **options)
    pid = notebooks / "pid"
    wait_for(lambda: run.poll() is not None or pid.exists() and pid.read_text(), 300)
    assert run.returncode is None, "the recording did not begin"
    run.send_signal(how)
    said = run.communicate(timeout=300)[0]
    assert run.returncode == status and (how == signal.SIGKILL or said == "interrupted; left as before: a\n")
    assert [path.read_bytes() for path in paths] == before and results.load("x")["rows"] == []
    kernel = int(pid.read_text())
    wait_for(lambda: not is_alive(kernel))  # it ends with whom it works for
    assert record.main(["--notebooks"]) == 0, "nothing is locked"


@pytest.mark.fault
def test_tests_that_end_without_a_report(notebooks, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "find_gpus", lambda: {})
    (tmp_path / "conftest.py").write_text("import os\nos._exit(9)\n")
    kept = results.results_folder() / "nvidia-h200" / "tests.json"
    before = json.dumps({"versions": provenance.versions()})
    files.write_atomically(kept, before)
    assert record.main(["--notebooks", "--tests"]) == 1
    found = capsys.readouterr().out
    assert found == "tests: failed, tests.json left as it was: pytest ended with status 9 and no report.\n"
    assert kept.read_text() == before
