import ast
import dataclasses
import errno
import importlib
import json
import math
import os
import subprocess
import sys
import types

import numpy
import pytest
import torch
from pythons import run_python

from tilelab import ROOT
from tilelab.course import notebook
from tilelab.records import results
from tilelab.runtime import cuda, device, provenance

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")
ROWS = [
    {"name": "tma", "shape": [64, 64], "ms": 0.123456, "status": "ok"},
    {"name": "plain", "shape": [64, 64], "ms": None, "status": "failed", "reason": "too many registers"},
]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.delenv("TILES_RECORD", raising=False)
    return tmp_path


@pytest.fixture
def on(monkeypatch):
    """Pretend to be on a device."""
    return lambda here: monkeypatch.setattr(device, "current", lambda: here)


def hash_of(tmp_path, text, name="double"):
    """The hash of a function that stands in a file of its own, as `text` has it."""
    path = tmp_path / f"module_{abs(hash(text))}.py"
    path.write_text(text)
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return provenance.source_hash(getattr(module, name))


def test_hash_ignores_comments_layout_and_docstrings(tmp_path):
    plain = hash_of(tmp_path, "def double(x):\n    return f'{2 * x}'\n")
    same = 'def double(x):\n    """Twice."""\n    # why\n\n    return f"{2*x}"  # so\n'
    assert hash_of(tmp_path, same) == plain
    assert hash_of(tmp_path, "def double(x):\n    return f'{3 * x}'\n") != plain
    assert len(plain) == 16 and int(plain, 16) >= 0


def test_hash_ignores_what_a_move_or_a_better_name_changes(tmp_path):
    plain = hash_of(
        tmp_path,
        "from tilelab.runtime import device\n\ndef double(x):\n    if not x:\n        raise "
        "ValueError(f'x is {x}')\n    total = 2 * x\n    return device.TARGETS * total\n",
    )
    moved = (
        "from tilelab.runtime.device import TARGETS\n\ndef double(x):\n    import math\n    if not x:\n        raise "
        "ValueError('x must be at least 1')\n    twice = 2 * x\n    return TARGETS * twice\n"
    )
    assert hash_of(tmp_path, moved) == plain
    for before, after in (
        ("2 * x", "3 * x"),
        ("TARGETS *", "KNOWN *"),
        ("ValueError", "TypeError"),
        ("(x)", "(y)"),
        ("TARGETS * twice", "TARGETS * x"),
    ):
        assert hash_of(tmp_path, moved.replace(before, after)) != plain, after


def test_hash_ignores_packages_types_and_the_layout_of_cuda(tmp_path):
    plain = hash_of(tmp_path, "def double(x, n: 'tl.constexpr'):\n    return run('tilelab.worker', x)\n")
    moved = "def double(x: 'Tensor', n: 'tl.constexpr') -> 'Tensor':\n    return run('tilelab.runtime.worker', x)\n"
    assert hash_of(tmp_path, moved) == plain
    for before, after in (
        ("n: 'tl.constexpr'", "n"),
        (".worker", ".compiler"),
        ("'tilelab.runtime", "'other.runtime"),
    ):
        assert hash_of(tmp_path, moved.replace(before, after)) != plain, after
    dense = "int f(int a){return a*-1+b [ 2 ];}"
    loose = "#include <x.h>\nint f(int a) {\n  // minus\n  return a * -1 + b[2];\n}\n"
    assert cuda.squeeze(dense) == cuda.squeeze(loose) != cuda.squeeze(loose.replace("int a", "inta"))


def test_hash_of_a_module_ignores_its_command_and_the_order_of_its_definitions(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def of_module(text):
        path = tmp_path / f"module_{abs(hash(text))}.py"
        path.write_text(text)
        return provenance.source_hash(importlib.import_module(path.stem))

    plain = of_module('"""Two."""\nA = 1\n\ndef double(x):\n    return 2 * x\n')
    found = of_module(
        'import json\n__all__ = ["A"]\ndef double(x):\n    return 2 * x\n\nA = 1\n'
        'if __name__ == "__main__":\n    print(json)\n'
    )
    assert found == plain
    assert of_module("A = 2\n\ndef double(x):\n    return 2 * x\n") != plain


def test_hash_of_methods_classes_modules_and_cuda(tmp_path):
    assert provenance.source_hash(device.Device) != provenance.source_hash(device)
    assert provenance.source_hash(device.Device.describe) == provenance.source_hash(H200.describe)
    found = provenance.source_hash(json, device)
    assert provenance.source_hash(device, json) == found != provenance.source_hash(json)
    kernel = tmp_path / "copy.cu"
    kernel.write_text("// a copy\nvoid copy(int* x) { x[0] = 1; }\n")
    plain = provenance.source_hash(kernel)
    kernel.write_text("void copy(int* x) {  /* the\nfirst */ x[0] = 1; }\n")
    assert provenance.source_hash(kernel) == plain
    kernel.write_text("void copy(int* x) { x[0] = 2; }\n")
    assert provenance.source_hash(kernel) != plain


def test_a_source_that_has_not_changed_is_parsed_once(tmp_path, monkeypatch):
    """The panel computes hashes at each change of its menus."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "changing_module.py"
    path.write_text("class Twice:\n    factor = 2\n")
    twice = importlib.import_module(path.stem).Twice
    plain = provenance.source_hash(twice, device.Device, H200.describe)
    with monkeypatch.context() as patch:
        patch.setattr(ast, "parse", None)
        assert provenance.source_hash(twice, device.Device, H200.describe) == plain
    path.write_text("class Twice:\n    factor = 20\n")
    assert provenance.source_hash(twice, device.Device, H200.describe) != plain


@pytest.mark.compile
def test_hash_is_the_same_interpreted_or_not():
    from tilelab.course import doctor_copy

    other = "1" if device.current().capability else "0"
    code = "from tilelab.course import doctor_copy; from tilelab.runtime import provenance; "
    code += "print(provenance.source_hash(doctor_copy.copy_tma_kernel))"
    said = run_python("-c", code, TRITON_INTERPRET=other).stdout
    assert said.strip() == provenance.source_hash(doctor_copy.copy_tma_kernel)


def test_hash_is_the_same_under_every_python(tmp_path):
    """The syntax trees of 3.11 and 3.12 differ in f-strings and type parameters."""
    text = (
        "def double(x, width=8):\n    class Inner:\n        pass\n"
        "    return f\"{x!r:{width}} {'a'} {x:>{width}.2f} {{}} 'q'\"\n"
    )
    assert hash_of(tmp_path, text) == "5f11b156da9558f6"
    text = 'async def wait(x):\n    """Wait."""\n    y = x\n    return y\n'
    assert hash_of(tmp_path, text, "wait") == "30907aee7cf8293e"


def test_save_and_load(own_folder, on):
    on(H200)
    record = results.make_record("gemm", ROWS, "1234567890abcdef")
    path = results.save(record)
    assert path == own_folder / "nvidia-h200" / "gemm.json" and os.listdir(path.parent) == ["gemm.json"]
    assert results.load("gemm") == json.loads(json.dumps(record))
    assert list(record) == list(results.KEYS)
    assert record["device"] == dataclasses.asdict(H200) and record["versions"]["driver"] == "580.95.05"
    assert record["recorded"].endswith("Z") and len(record["recorded"]) == 20
    row = '  {"name": "tma", "shape": [64, 64], "ms": 0.123456, "status": "ok"},'
    assert row in path.read_text().splitlines()
    assert results.save(record).read_text() == path.read_text()


def test_save_takes_numpy_and_refuses_nan(own_folder, on):
    on(H200)
    path = results.save(results.make_record("a", [{"ms": numpy.float32(0.5), "n": numpy.int64(3)}], ""))
    assert json.loads(path.read_text())["rows"] == [{"ms": 0.5, "n": 3}]
    for bad in (math.nan, math.inf, numpy.float32("nan")):
        with pytest.raises(ValueError, match="row 1 of a holds NaN or infinity"):
            results.save(results.make_record("a", [{"ms": 1.0}, {"ms": bad}], ""))
    assert json.loads(path.read_text())["rows"] == [{"ms": 0.5, "n": 3}], "the record that was there stays"
    results.save(results.make_record("a", [], ""))
    assert results.load("a")["rows"] == []


WRITER = """
import dataclasses, sys
from tilelab.runtime import device
from tilelab.records import results
on = dataclasses.asdict(device.Device("NVIDIA H200", (9, 0), "sm_90a"))
record = {"experiment": "x", "device": on, "versions": {}, "recorded": "", "source": sys.argv[1],
          "rows": [{"by": sys.argv[1], "text": "x" * 100}] * 2_000}
results.save(record)
print("saved", flush=True)
while True:
    results.save(record)
"""


@pytest.mark.fault
def test_writers_at_once_and_killed(own_folder):
    """Two write one record over and over, one after another is killed: what is read is whole, and of one of them."""
    writers = []
    try:
        for number in range(4):
            options = {"cwd": ROOT, "stdout": subprocess.PIPE, "env": notebook.child_env()}
            writers.append(subprocess.Popen([sys.executable, "-c", WRITER, str(number)], **options))
            writers[-1].stdout.readline()
            for _ in range(5):
                found = results.load("x", "nvidia-h200")
                assert len(found["rows"]) == 2_000
                assert {row["by"] for row in found["rows"]} == {found["source"]}
            if number:
                writers[-2].kill()
                writers[-2].wait()
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert len(results.load("x", "nvidia-h200")["rows"]) == 2_000
    seen = [path.name for path in own_folder.glob("*/*.json")]
    assert seen == ["x.json"], "what a killed one left is no record"


def test_a_disk_that_is_full_loses_nothing(own_folder, on, monkeypatch):
    on(H200)
    path = results.save(results.make_record("gemm", ROWS, "1234567890abcdef"))
    before = path.read_text()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    says = f"{path} cannot be written .No space left on device.; nothing that it held is"
    with pytest.raises(OSError, match=says):
        results.save(results.make_record("gemm", [], ""))
    assert path.read_text() == before and os.listdir(path.parent) == ["gemm.json"]


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a\\b", "*", "a.b", "A", "a b", "a\n", "é", None])
def test_a_name_that_is_no_files(own_folder, on, name):
    on(H200)
    named = {**results.make_record("a", ROWS, ""), "experiment": name}
    for use in (
        lambda: results.make_record(name, ROWS, ""),
        lambda: results.save(named),
        lambda: results.load(name),
        lambda: results.load_record(name, ""),
        lambda: results.live_or_recorded(name, pytest.fail, ""),
    ):
        with pytest.raises(ValueError, match=r"^the name of an experiment holds a to z, 0 to 9 and _; .+\.$"):
            use()
    assert not os.listdir(own_folder)


def test_load_prefers_this_gpu_then_the_h200(on):
    for name in ("NVIDIA A100", "NVIDIA H200", "NVIDIA B200"):
        on(dataclasses.replace(H200, name=name))
        results.save(results.make_record("gemm", [{"on": name}], ""))
    assert results.load("gemm")["rows"] == [{"on": "NVIDIA B200"}]
    assert results.load("gemm", "nvidia-a100")["rows"] == [{"on": "NVIDIA A100"}]
    on(device.Device())
    assert results.load("gemm")["rows"] == [{"on": "NVIDIA H200"}]
    os.remove(results.results_folder() / "nvidia-h200" / "gemm.json")
    assert results.load("gemm")["rows"] == [{"on": "NVIDIA A100"}]
    with pytest.raises(FileNotFoundError, match="gemm on nvidia-h200 in .*: there is nvidia-a100/gemm, nv"):
        results.load("gemm", "nvidia-h200")


def test_load_refuses_what_is_no_record(own_folder):
    with pytest.raises(FileNotFoundError, match="no record of gemm in .*: there is nothing yet"):
        results.load("gemm")
    path = own_folder / "nvidia-h200" / "gemm.json"
    path.parent.mkdir()
    whole = results.make_record("gemm", [], "")
    wrong = [{"rows": {}}, {"rows": [1]}, {"recorded": 5}, {"device": {"name": "x"}}, {"device": None}]
    wrong += [{"source": None}, {"versions": []}, {"experiment": 1}]
    for text in ("", "{", "[]", "5", "{}", *(json.dumps(whole | change) for change in wrong)):
        path.write_text(text)
        with pytest.raises(ValueError, match="nvidia-h200/gemm.json is not (JSON|a record)"):
            results.load("gemm")
    path.write_text(json.dumps(whole))
    assert results.load("gemm")["rows"] == []


def test_too_little_memory_is_said(own_folder, on, monkeypatch):
    def run():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")

    on(H200)
    monkeypatch.setenv("TILES_RECORD", "1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 << 30, 140 << 30))
    says = "^gemm: the GPU has too little free memory; other processes"
    with pytest.raises(device.Unsupported, match=says):
        results.live_or_recorded("gemm", run, "aaaabbbb")
    assert not os.listdir(own_folder)


def test_live_then_recorded(own_folder, on, monkeypatch):
    on(H200)
    live = results.live_or_recorded("gemm", lambda: ROWS, "aaaabbbb")
    assert live.live and live.rows == ROWS and live.label().startswith("measured on NVIDIA H200, 20")
    assert not os.listdir(own_folder)
    monkeypatch.setenv("TILES_RECORD", "1")
    results.live_or_recorded("gemm", lambda: ROWS, "aaaabbbb")
    on(device.Device(note="torch is a CPU build"))
    fresh = results.live_or_recorded("gemm", pytest.fail, "aaaabbbb")
    day = fresh.data["recorded"][:10]
    assert not fresh.live and fresh.rows == ROWS and fresh.label() == f"recorded on NVIDIA H200, {day}"
    old = results.live_or_recorded("gemm", pytest.fail, "ccccdddd")
    assert old.stale == f"recorded {day}, older than its kernel (source aaaa… then, cccc… now)"
    assert old.label() == f"recorded on NVIDIA H200, {day}, older than its kernel"
    found = results.live_or_recorded("other", lambda: ROWS, "", can_run=True).label()
    assert found == "computed here, without a GPU"


def test_an_experiment_is_measured_or_recorded(own_folder, on, monkeypatch):
    sources = iter(("aaaabbbb", "aaaabbbb", "ccccdddd"))

    @results.experiment("speed", lambda: next(sources))
    def speed():
        """How fast."""
        return ROWS

    assert speed.__name__ == "speed" and speed.__doc__ == "How fast." and callable(speed.source)
    on(H200)
    monkeypatch.setenv("TILES_RECORD", "1")
    live = speed()
    assert live.live and live.rows == ROWS and (live.experiment, live.data["source"]) == ("speed", "aaaabbbb")
    on(device.Device())
    kept = speed()
    assert not kept.live and kept.rows == ROWS and kept.stale == ""
    assert "source aaaa… then, cccc… now" in speed().stale  # asked anew at each call


def test_an_experiment_may_need_more_than_tma(on):
    here = []
    counted = results.experiment("counted", lambda: "", can_run=lambda: bool(here))(lambda: ROWS)
    on(H200)
    with pytest.raises(FileNotFoundError, match="no record of counted"):
        counted()
    here.append("a profiler")
    assert counted().live and counted.source() == ""
    on(device.Device())
    assert counted().label() == "computed here, without a GPU"


def test_show(on):
    on(H200)
    rows = [
        {"name": "a", "ms": 0.123456, "tflops": 12345.6, "why": "x" * 80},
        {"name": "b<", "ms": None, "tflops": 2.0},
    ]
    shown = results.Record(results.make_record("gemm", rows, ""), live=True)
    text, markup = repr(shown), shown._repr_html_()
    assert text.splitlines()[0].startswith("gemm: measured on NVIDIA H200, 20")
    assert "0.1235" in text and "12346" in text and "x" * 80 in text and "nan" not in text.lower()
    assert results.table([{"× torch": 0.47614, "±": 0.011279}], "").rows == [["0.476", "0.011"]]
    assert "x" * 80 in markup and "b&lt;" in markup and "gemm: measured on NVIDIA H200" in markup
    assert shown.show(columns=["name", "tflops"]).frame.columns.tolist() == ["name", "tflops"]
    assert repr(results.Record(results.make_record("gemm", [], ""), live=True)).startswith("gemm: measured")


def test_a_table_may_be_folded_as_a_whole():
    shown = dataclasses.replace(results.table([{"n": 1}, {"n": 2}], "two rows"), folded=2)
    before, inside = shown._repr_html_().split("<details>")
    assert "<tr" not in before and inside.count("<tr") == 3 and inside.endswith("</details>")


def test_a_table_is_printed_without_pandas(monkeypatch):
    rows = [
        {"name": "first", "ms": 2, "note": None},
        {"name": "second", "note": [64, 128]},
        {"name": "third", "ms": 0.5},
    ]
    shown = results.table(rows, "three")
    expected = f"three\n{shown.frame.to_string(index=False)}"
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert repr(shown) == repr(results.table(rows, "three")) == expected
    with pytest.raises(KeyError, match="no row has speed"):
        results.table(rows, "", ["speed"])


def test_a_recent_record_is_of_this_machine_and_code(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    assert results.load_recent_record("x", "a") is None, "there is none"
    monkeypatch.setattr(device, "current", lambda: H200)
    record = results.make_record("x", [{"ms": 1}], "a")
    results.save(record)
    assert results.load_recent_record("x", "a").rows == [{"ms": 1}]
    assert not results.load_recent_record("x", "a").live
    assert results.load_recent_record("x", "b") is None
    assert results.load_recent_record("x", "a", within_s=0) is None
    for other in (
        {"recorded": "2020-01-01T00:00:00Z"},
        {"recorded": record["recorded"].rstrip("Z")},  # in no zone
        {"recorded": "today"},
        {"versions": record["versions"] | {"driver": "1"}},
        {"device": record["device"] | {"sms": 1}},
    ):  # under the same name
        results.save(record | other)
        assert results.load_recent_record("x", "a") is None
