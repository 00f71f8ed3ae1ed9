"""The variants that decide claims are right, and differ in what their rows say."""

import csv
import io

import pytest
from cases import cases

from claims.audits import resample as audit
from tilelab import emulator
from tilelab.measure import profiler
from tilelab.runtime import device

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


@pytest.fixture(scope="module")
def candidates():
    return audit.make_candidates(3)


def test_every_candidate_is_right(candidates):
    for name, (_, prepare) in candidates.items():
        if not audit._is_shuffled(name):
            assert audit.exercises.find_fault(prepare, "cpu") == "", name


@cases(
    "constants, change",
    ({"SEARCHES": "EVERY_THREAD"}, ("times[middle] <= target", "times[middle] < target - 1")),
    ({"SEARCHES": "LANE_0"}, ("at.w = __shfl_sync(0xffffffff, at.w, 0);", "at.w = at.w;")),
    ({"ORDER": "EVERY_FOURTH"}, ("feature % 32 * 4 + feature / 32", "feature % 32 * 4")),
    ({"ORDER": "A_ROW_PER_LANE"}, ("? i / count :", "? i / CHUNK :")),
)
def test_a_wrong_variant_fails(constants, change, monkeypatch, tmp_path):
    text = audit.SOURCE.read_text()
    assert change[0] in text
    (tmp_path / "audit.cu").write_text(text.replace(*change))
    monkeypatch.setattr(audit, "SOURCE", tmp_path / "audit.cu")
    assert audit.exercises.find_fault(audit.exercises.by_chunk(audit.find_variant(**constants)), "cpu")


def test_rows_say_what_varies(candidates):
    fields = [tuple(row.values()) for name, (row, _) in candidates.items() if " search" in name]
    assert len(fields) == len(set(fields)) == 6 + 5
    instructions = {
        where: audit.find_variant(SEARCHES="LANE_0", **extra).counts()
        for where, extra in ((audit.SHARED, {}), (audit.GLOBAL, {"TIMES": 0}))
    }
    assert instructions[audit.SHARED]["LDS"] and "LDS" not in instructions[audit.GLOBAL]


def make_csv(count: int, without: str = "") -> str:
    """Return what ncu prints for as many launches, with 1, 2, 3, ... for the counters."""
    names = ["ID", "Kernel Name", *(metric for key, metric in audit.METRICS.items() if key != without)]
    text = io.StringIO()
    counted = ["search_variant(const float *)", *map(str, range(1, len(names) - 1))]
    rows = [names, [""] * len(names), *([str(number), *counted] for number in range(count))]
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    return f"==PROF== Connected\n{text.getvalue()}==PROF== Disconnected\n"


def test_counters_get_the_names_of_the_launches(candidates, monkeypatch):
    asked = []
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(device, "current", lambda: HOPPER)
    monkeypatch.setattr(
        profiler,
        "run_ncu",
        lambda options, command: asked.append((options, command)) or make_csv(len(candidates)),
    )
    rows = audit.count_reads().rows
    assert [row["name"] for row in rows] == list(candidates)
    assert rows[0]["dram_percent"] == 1 and rows[0]["load_sectors"] == 7
    assert rows[0]["searches"] == audit.LANE_0
    ((options, command),) = asked
    assert "off" in options and ",".join(audit.METRICS.values()) in options
    assert command[-1] == "claims.audits.resample"


@cases(
    "text, message",
    (make_csv(3), "ncu saw 3 launches of 15"),
    ("", "ncu saw 0 launches"),
    (make_csv(15, "load_sectors"), "lacks a counter"),
)
def test_counters_that_do_not_fit_are_refused(monkeypatch, text, message):
    monkeypatch.setattr(profiler, "run_ncu", lambda options, command: text)
    with pytest.raises(profiler.ProfilerUnavailable, match=message):
        profiler.profile_launches(["command"], [str(i) for i in range(15)], audit.METRICS)
