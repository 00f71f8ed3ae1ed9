"""How kernels are timed against themselves: which timings are paired, and what is said of the pairs."""

import json
import subprocess
import types

import pytest

from claims.audits import itself as audit
from tilelab.measure import bench
from tilelab.records import margins
from tilelab.runtime import device

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


def take(ratio, again=1.0, spread=0.01):
    return audit.Sample(ratio, again, spread, 10.0)


def test_timings_are_paired_as_each_way_says():
    processes = [[take(1.0, 1.01), take(1.1, 1.12)], [take(2.0, 2.02), take(2.2, 2.24)]]

    def pair(way):
        return [(old, new) for old, new, spreads in audit.pair_samples(processes, way) if spreads == 0.02]

    assert pair(margins.INTERLEAVED) == [(1.0, 1.01), (1.1, 1.12), (2.0, 2.02), (2.2, 2.24)]
    assert pair(margins.AFTER) == [(1.0, 1.1), (2.0, 2.2)]
    assert pair(margins.FRESH) == [(1.0, 2.0), (1.1, 2.2)]


def test_a_distribution_is_compared_with_the_spreads():
    found = audit.summarise([(2.0, 2.02, 0.08), (1.0, 0.9, 0.04), (1.0, 1.03, 0.04)])
    assert found["pairs"] == 3 and found["median"] == pytest.approx(0.03)
    assert found["shift"] == pytest.approx(0.01)
    assert found["largest"] == pytest.approx(0.1) and 0.09 < found["percentile_95"] < 0.1
    assert found["spread"] == pytest.approx(0.02) and found["beyond"] == pytest.approx(0.06)
    assert found["within"] == pytest.approx(2 / 3)


def test_processes_wait_for_their_turn_and_every_kind_gets_its_rows(monkeypatch):
    subjects = audit.make_subjects()
    assert {subject.kind for subject in subjects} == set(margins.KINDS)
    asked, sample = [], audit.asdict(take(1.0, 1.01))

    def start(command, **options):
        def communicate(line, timeout):
            asked.append(line)
            return json.dumps([[sample] * len(subjects)] * audit.PASSES), ""

        nothing = types.SimpleNamespace(returncode=0, communicate=communicate, wait=lambda: 0)
        return types.SimpleNamespace(**vars(nothing), kill=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(device, "current", lambda: HOPPER)
    rows = audit.time_against_themselves().rows
    assert len(asked) == audit.PROCESSES
    summaries = [row for row in rows if row["way"] in margins.WAYS]
    assert len(summaries) == 15 and len(rows) == 15 + len(subjects)
    assert summaries[0]["kind"] == margins.PRODUCT and summaries[0]["largest"] == pytest.approx(0.01)


def test_a_kernel_that_fails_is_named(monkeypatch):
    failed = types.SimpleNamespace(reason="out of memory")
    monkeypatch.setattr(bench, "compare", lambda *_, **__: {audit.FIRST: failed, audit.AGAIN: failed})
    with pytest.raises(RuntimeError, match="ch10.wgmma_gemm at .* was not timed: out of memory"):
        audit.time_beside_itself(audit.make_subjects()[0])
