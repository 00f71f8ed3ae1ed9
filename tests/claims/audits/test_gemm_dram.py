"""The cases whose DRAM bytes are counted, and how the profiler's answer becomes rows."""

import pytest

from ch14.gemm.lesson import experiments
from ch14.gemm.lesson.sweep import GemmSpace
from claims.audits import gemm_dram as audit
from tilelab.measure import profiler
from tilelab.runtime import device

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


def test_cases_are_the_notes_tiles_that_start_and_the_best():
    cases = audit.find_cases("sm_90a", 132)
    assert [n for *_, n in cases] == [n for n in experiments.SQUARES for _ in range(6)]
    assert [which for which, *_ in cases[:6]] == ["conservative"] * 3 + ["proposed"] * 2 + ["best"]


def test_rows_are_named_and_have_rates(monkeypatch):
    cases = audit.find_cases("sm_90a", 132)
    names = ['"ID"', '"Kernel Name"', *(f'"{metric}"' for metric in audit.METRICS.values())]
    line = ",".join(['"0"', '"gemm_plain_kernel"', '"12.5"', '"3,000,000"', '"1,000,000"', '"2000"'])
    monkeypatch.setattr(
        profiler,
        "run_ncu",
        lambda options, command: "\n".join(
            ["==PROF== Connected", ",".join(names), '""', *[line] * len(cases)]
        ),
    )
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(device, "current", lambda: HOPPER)
    monkeypatch.setattr(audit, "compile_cases", lambda cases: None)
    rows = audit.count_bytes().rows
    assert [(row["name"], row["shape"][0]) for row in rows] == [(which, n) for which, _, n in cases]
    assert rows[0]["gbps"] == 2000 and rows[0]["dram_percent"] == 12.5
    assert rows[0]["least_bytes"] == 6 * 2048**2
    assert rows[0]["kernel"] == "64×64×32 · 4 warps · 1 stage · plain"


@pytest.mark.compile
def test_every_case_compiles():
    from tilelab.runtime import build

    jobs = [
        GemmSpace((n, n, n), layout=audit.LAYOUT, compile_for="sm_90a").job(config)
        for _, config, n in audit.find_cases("sm_90a", 132)[:6]
    ]
    assert [report.status for report in build.build(jobs)] == ["ok"] * 6
