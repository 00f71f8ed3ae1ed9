"""The counters of Nsight Compute, read from a stand-in for ncu."""

import stat

import pytest
from cases import cases
from sentences import refused

from tilelab.measure import profiler
from tilelab.records import results

METRICS = {"percent": "dram__throughput.avg.pct", "instructions": "smsp__inst_executed.sum"}
CSV = """==PROF== Connected to process 1
"ID","Kernel Name","Block Size","dram__throughput.avg.pct","smsp__inst_executed.sum"
"","","","%","inst"
"0","vectors(const bf16 *, const float *, int)","(256, 1, 1)",{values}
==PROF== Disconnected from process 1
"""
COUNTED = CSV.format(values='"88.5","1,234,567"')


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Put an ncu on the PATH that prints a text and ends with a status; it keeps its arguments in the returned file."""

    def install(text, status=0):
        (tmp_path / "said").write_text(text)
        path = tmp_path / "ncu"
        path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/asked\ncat {tmp_path}/said\nexit {status}\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "asked"

    return install


def profile():
    return profiler.profile_kernels(["python", "-m", "ch07.resample"], ["vectors", "bulk_rows"], METRICS)


def test_counters_of_a_launch_are_read(ncu):
    asked = ncu(COUNTED)
    assert profile() == [{"kernel": "vectors", "percent": 88.5, "instructions": 1234567.0}]
    words = asked.read_text().splitlines()
    assert "regex:^(vectors|bulk_rows)$" in words and ",".join(METRICS.values()) in words
    assert words[-3:] == ["python", "-m", "ch07.resample"]


def test_a_report_is_kept_and_read(ncu, tmp_path):
    """ncu prints no table while it writes a report, so the table is read from the report."""
    asked = ncu(COUNTED)
    rows = profiler.profile_kernels(
        ["python", "-m", "ch07.resample"], ["vectors"], METRICS, str(tmp_path / "a.ncu-rep")
    )
    assert [row["percent"] for row in rows] == [88.5]
    assert asked.read_text().splitlines()[-2:] == ["--import", str(tmp_path / "a.ncu-rep")]


@cases(
    "text, status, message",
    ("==ERROR== ERR_NVGPUCTRPERM - The user may not\n", 1, "this user may not read the GPU's counters"),
    ("", 0, "ncu saw no launch of vectors, bulk_rows"),
    ("", 1, r"ncu gave no counters \(it printed nothing\)"),
    (
        "==PROF== Connected\n==ERROR== The application returned an error code (2).\n\n",
        2,
        r"ncu gave no counters \(==ERROR== The application returned an error code \(2\)\.\)",
    ),
    ('"ID","Kernel Name"\n"",""\n', 0, "ncu saw no launch of vectors"),
    (COUNTED, 9, "ncu gave no counters"),
    (CSV.format(values='"n/a","n/a"'), 0, "lacks a counter"),
    ('"ID","Kernel Name"\n"",""\n"0","vectors"\n', 0, "lacks a counter"),
)
def test_no_counters_is_one_sentence(ncu, text, status, message):
    ncu(text, status)
    with refused(message, profiler.ProfilerUnavailable):
        profile()


def test_without_ncu_it_is_said(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda tool: None)
    says = r"^ncu is not on the PATH: install Nsight Compute.*\.$"
    with pytest.raises(profiler.ProfilerUnavailable, match=says):
        profile()


def test_an_experiment_shows_its_record_where_nothing_can_be_profiled(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "EXPERIMENTS", {})
    monkeypatch.setattr(profiler, "can_profile", lambda: True)
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    results.save(results.make_record("made_up", [{"status": "ok", "percent": 5.0}], "source", results.NO_GPU))

    def refuse():
        raise profiler.ProfilerUnavailable("nobody may.")

    record = profiler.experiment("made_up", lambda: "source")(refuse)()
    assert not record.live and record.rows[0]["percent"] == 5.0 and "nobody may." in capsys.readouterr().out
    assert profiler.experiment("made_up", lambda: "source")(lambda: [{"status": "ok"}])().live
