"""A ladder of kernel versions: live on a GPU, recorded without one, and honest about both."""

import dataclasses
import types

import pytest
import torch
from cases import cases

from tilelab import emulator
from tilelab.cells import cuda_magic, lesson
from tilelab.records import results
from tilelab.runtime import device, provenance

ADD = """extern "C" __global__ void add_one(const float* x, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + 1;
}
"""
pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
KERNEL = cuda_magic.find_kernels(ADD)["add_one"]


def check(prepare):
    def run(where):
        x = torch.randn(100, device=where)
        out = torch.zeros_like(x)
        prepare(x, out)()
        return "" if torch.equal(out, x + 1) else "the sums are wrong"

    return lesson.run_everywhere(run)


def make_ladder(inputs=1 << 20):
    def make_inputs():
        x = torch.randn(inputs, device="cuda")
        return [x, torch.empty_like(x)]

    def prepare_torch(x, out):
        return lambda: torch.add(x, 1, out=out)

    return lesson.Ladder("test_ladder", "torch add", prepare_torch, make_inputs, check, nbytes=8 * inputs)


def prepare_with(kernel):
    return lambda x, out: kernel.prepare(-(-x.numel() // 32), 32, (x, out, x.numel()))


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """A record of two versions, made by today's text of the first and another text of the second, without a GPU."""
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setattr(device, "current", lambda: device.Device())
    rows = [
        {"version": name, "code": code, "status": "ok", "ms": 1.0, "gbps": 8.389, "ratio": 0.98, "gain": 1.5}
        for name, code in (("add_one", lesson.code_hash(KERNEL)), ("add_two", "another"))
    ]
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a")
    results.save(results.make_record("test_ladder", rows, "0" * 16, here))


def test_without_a_gpu_figures_are_recorded_and_the_check_runs_in_the_emulator(recorded):
    ladder = make_ladder()
    table = ladder.step(KERNEL, prepare_with(KERNEL))
    assert "recorded on NVIDIA H200" in table.caption
    expected = {"version": "add_one", "ms": "1", "GB/s": "8.389", "× torch add": "0.98"}
    expected |= {"check": "ok in the emulator"}
    assert table.frame.iloc[0].to_dict() == expected
    table = ladder.step(KERNEL, prepare_with(KERNEL), "add_two")  # its record is of another text
    found = list(table.frame.iloc[1])
    assert found == ["add_two", "", "", "", "ok in the emulator; this version was not timed"]
    table = make_ladder(2 << 20).step(KERNEL, prepare_with(KERNEL))
    assert list(table.frame.iloc[0])[-1] == "ok in the emulator; recorded at another size"
    assert "add_three is not recorded" in ladder.step(KERNEL, prepare_with(KERNEL), "add_three").caption


@cases(
    "change, check",
    (("+ 1;", "+ 2;"), "wrong: the sums are wrong (in the emulator); this version was not timed"),
    (("+ 1;", "+ 1.0f;"), "ok in the emulator; this version was not timed"),
    (("", "-DWIDTH=2"), "ok in the emulator; this version was not timed"),
)
def test_an_edited_cell_shows_no_figures(recorded, change, check):
    source, options = (ADD, change[1:]) if not change[0] else (ADD.replace(*change), ())
    edited = cuda_magic.find_kernels(source, options)["add_one"]
    table = make_ladder().step(edited, prepare_with(edited))
    assert list(table.frame) == ["version", "check"] and list(table.frame.iloc[0]) == ["add_one", check]


def test_a_gain_over_an_edited_version_is_not_shown(recorded, monkeypatch):
    record = results.load("test_ladder")
    record["rows"][1]["code"] = lesson.code_hash(KERNEL)
    results.save(record)
    edited = cuda_magic.find_kernels(ADD.replace("+ 1;", "+ 1.0f;"))["add_one"]
    for first, gains in ((edited, []), (KERNEL, ["no difference from add_one"])):
        ladder = make_ladder()
        ladder.step(first, prepare_with(first))
        frame = ladder.step(KERNEL, prepare_with(KERNEL), "add_two").frame
        assert frame["ms"].iloc[1] == "1"
        assert [gain for gain in frame.get("gain", []) if gain] == gains


def test_a_gain_is_over_the_origin_or_the_fastest_and_earlier_rows_are_folded(recorded):
    record = results.load("test_ladder")
    ratios = {"first": 0.5, "slow": 0.2, "third": 0.6, "level": 0.61, "again": 0.3}
    record["rows"] = [
        {"version": name, "code": lesson.code_hash(KERNEL), "ms": 1.0, "ratio": ratio, "spread": 0.02}
        for name, ratio in ratios.items()
    ]
    results.save(record)
    ladder, slow = make_ladder(), dataclasses.replace(KERNEL, changed_from="slow")
    for name in ratios:
        table = ladder.step(slow if name == "again" else KERNEL, prepare_with(KERNEL), name)
    gains = ["", "0.40 × first", "1.20 × first", "no difference from third", "1.50 × slow"]
    assert list(table.frame["gain"]) == gains and table.folded == 3
    folded, shown = table._repr_html_().split("</details>")
    assert "third" in folded.partition("<details>")[2] and "again" in shown and "<td>slow" not in shown
    ladder.repeats = False
    assert list(ladder.step(KERNEL, prepare_with(KERNEL), "third").frame["version"]) == ["again", "third"]


def test_a_gain_of_a_cell_with_other_constants_is_over_that_cell(recorded):
    record = results.load("test_ladder")
    record["rows"] = [
        {"version": name, "code": lesson.code_hash(KERNEL), "ms": 1.0, "ratio": ratio, "spread": 0.02}
        for name, ratio in {"first": 0.5, "add_one": 0.4, "wide": 0.6}.items()
    ]
    results.save(record)
    ladder, kernel = make_ladder(), dataclasses.replace(KERNEL, changed_from="first")
    for name in ("first", "", "wide"):
        table = ladder.step(kernel, prepare_with(KERNEL), name)
    assert list(table.frame["gain"]) == ["", "0.80 × first", "1.50 × add_one"]


def test_a_gain_of_a_triton_function_with_other_constants_is_over_its_own_row():
    ladder = make_ladder()
    function, other = (types.SimpleNamespace(__name__=name) for name in ("mine", "other"))
    rows = (
        (function, "mine", 0.4),
        (other, "other", 0.5),
        (function, "mine, 3 stages", 0.6),
        (other, "other, 2", 0.4),
    )
    for kernel, name, ratio in rows:
        ladder._add(kernel, {"version": name, "ratio": ratio})
    assert [row["gain"] for row in ladder.rows[2:]] == ["1.50 × mine", "0.80 × other"]


@pytest.mark.parametrize("edited", [False, True])
def test_a_sweep_of_edited_cells_shows_no_figures(monkeypatch, tmp_path, edited):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setattr(device, "current", lambda: device.Device())
    versions = {(width,): (KERNEL.define(WIDTH=width), prepare_with(KERNEL)) for width in (1, 2)}
    rows = [
        {"width": width, "ms": 1.0, "ratio": 0.98, "code": lesson.code_hash(versions[width,][0])}
        for width in (1, 2)
    ]
    source = lesson.ladder_hash([KERNEL.source_hash(with_constants=False)])
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a")
    results.save(results.make_record("test_sweep", rows, source, here))
    if edited:
        other = cuda_magic.find_kernels(ADD.replace("+ 1;", "+ 1.0f;"))["add_one"]
        versions[2,] = (other.define(WIDTH=2), prepare_with(other))
    record = make_ladder().sweep("test_sweep", versions, ["width"])
    assert [row.get("ms") for row in record.rows] == ([None, None] if edited else [1.0, 1.0])
    assert ("this version was not timed" in record.label()) == edited


def test_an_unwritten_kernel_is_found():
    empty = cuda_magic.find_kernels('extern "C" __global__ void a(int n) {\n    // your kernel\n}\n')["a"]
    with pytest.raises(NotImplementedError):
        lesson.require_written(empty)
    lesson.require_written(KERNEL)


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_checked_and_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setenv("TILES_RECORD", "1")
    ladder = make_ladder()
    ladder.step(KERNEL, prepare_with(KERNEL))
    table = ladder.step(KERNEL, prepare_with(KERNEL), "again")
    assert list(table.frame["check"]) == ["ok", "ok"] and provenance.utc_now()[:10] in table.caption
    assert results.load("test_ladder")["source"] == lesson.ladder_hash([row["code"] for row in ladder.rows])
    wrong = cuda_magic.find_kernels(ADD.replace("+ 1;", "+ 2;"))["add_one"]
    assert (
        ladder.step(wrong, prepare_with(wrong)).frame["check"].iloc[2].startswith("wrong: the sums are wrong")
    )
