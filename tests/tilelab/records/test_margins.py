"""The margins: by kind and way from the record of kernels timed against themselves, or the stated defaults."""

import json

import pytest

from claims import judge
from tilelab.records import compare, margins, results


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """measured(rows) writes a record `itself` of the H200 into an empty folder of results."""
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))

    def write(rows):
        device = {"name": "NVIDIA H200", "capability": [9, 0], "target": "sm_90a"}
        record = {"experiment": "itself", "device": device, "versions": {}, "recorded": "", "source": ""}
        (tmp_path / results.PREFERRED).mkdir(exist_ok=True)
        path = tmp_path / results.PREFERRED / "itself.json"
        path.write_text(json.dumps(record | {"rows": rows}))

    return write


ROWS = [
    {
        "kind": kind,
        "way": way,
        "largest": 0.01 * (1 + place + 8 * (kind == margins.QUICK and way == margins.FRESH)),
    }
    for place, kind in enumerate(margins.KINDS)
    for way in margins.WAYS
]


def test_margins_are_of_the_record_or_the_default(measured):
    assert margins.find_margins(results.PREFERRED) is margins.DEFAULTS
    measured([*ROWS, {"kind": margins.COPY, "way": "samples"}])
    found = margins.find_margins(results.PREFERRED, [margins.AFTER])
    assert [round(found[kind], 3) for kind in margins.KINDS] == [0.01, 0.02, 0.03, 0.04, 0.05]
    assert margins.find_margins(results.PREFERRED)[margins.QUICK] == pytest.approx(0.12)
    assert margins.find_margins("nvidia-h20") is margins.DEFAULTS
    assert "product 1.0 %, copy 2.0 %" in margins.describe_margins(found)
    measured(ROWS[1:3])
    with pytest.raises(ValueError, match="the record itself of nvidia-h200 lacks a difference"):
        margins.find_margins(results.PREFERRED)


@pytest.mark.parametrize(
    "kind, row, experiment",
    [
        (margins.PRODUCT, {"ms": 0.2, "spread": 0.01, "tflops": 1.0, "gbps": 1.0}, ""),
        (margins.COPY, {"ms": 0.2, "spread": 0.01, "gbps": 1.0}, ""),
        (margins.GRAPH, {"ms": 0.02, "spread": 0.01, "gbps": 1.0}, ""),
        (margins.GRAPH, {"ms": 0.02, "ratio": 1.0, "tflops": 1.0}, ""),  # the peer
        (margins.QUICK, {"ms": 0.2, "ratio": 0.9, "tflops": 1.0}, ""),
        (margins.QUICK, {"ms": 0.2, "spread": 0.01, "tflops": 1.0}, "ch14_gemm_layers"),
        (margins.HOST, {"us": 12.0, "spread": 0.01}, ""),
    ],
)
def test_a_row_says_of_which_kind_it_is(kind, row, experiment):
    assert margins.classify(row, experiment) == kind


def test_verdicts_and_comparisons_use_the_margin_of_the_kind(measured):
    measured(ROWS)
    evidence = judge.Evidence()
    evidence.load = lambda _: [{"ms": 0.2, "spread": 0.01, "gbps": 1.0, "ratio": 0.9}]
    assert evidence.find_margin() == judge.MARGIN, "nothing was read"
    evidence("ch07_bulk_speed")
    assert evidence.is_better(1.022, 1) and not evidence.is_better(1.02, 1)
    assert evidence.agrees(0.98, gain=1) and not evidence.agrees(0.975, gain=1)
    allowed = compare.list_margins(results.PREFERRED)
    old = {"ratio": 2.0, "ms": 0.02, "spread": 0.01}
    assert compare.allowed_fall(old, old, allowed) == pytest.approx(0.02 + 2 * 0.1), (
        "no less than the default"
    )
    assert compare.allowed_fall(old, {}, allowed) == pytest.approx(0.01 + 2 * 0.12)
