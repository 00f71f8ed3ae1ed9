"""Every record in results/: registered by an experiment, made by today's code, and well formed."""

import importlib
import json
import pathlib
import pkgutil

import pytest

import ch07
import ch10
import ch14
from tilelab import bench, results

ROOT = pathlib.Path(bench.__file__).parents[1]
RECORDS = [path for path in sorted((ROOT / "results").glob("*/*.json")) if path.stem != "tests"]
# Records that hold something else than rows that are "ok", and why.
REFUSALS = {
    "ch10_gemm_sweep": "a sweep rejects what does not fit",
    "ch14_attention_sweep": "a sweep rejects what does not fit",
    "ch14_gemm_sweep": "a sweep rejects what does not fit",
    "ch14_gemm_claim": "the claim's configurations do not all fit",
    "ch14_blockscaled_emulated": "Triton up to 3.7 does not compile dot_scaled of NVFP4 for Hopper",
    "ch14_bug_hunt_loop": "a hunt for builds that fail",
    "ch14_bug_hunt_matrix": "a hunt for builds that fail",
    "ch14_bug_hunt_warp_specialize": "a hunt for builds that fail",
}
# Records that are older than their code, each with what changed since. Recording one anew means deleting its line here.
OLDER = {
    "ch14_compiled_cells": "functions of the module and its worker were renamed and shortened",
    "ch14_compiled_choices": "functions of the module and its worker were renamed and shortened",
    "ch14_compiled_ncu": "the profiler's helper moved to tilelab.profiler",
    "ch14_mx_formats_speed": "functions and parameters were renamed; the machine code is the same",
    "ch14_mx_formats_sweep": "functions and parameters were renamed; the machine code is the same",
    "sweep_gpus": "the sweep's engine was rewritten",
    "sweep_race": "the sweep's engine was rewritten; only a race on one GPU compares it fairly with triton.autotune",
}
# Records of faults that were planted on purpose: rows may be "wrong" there, or have a `result` instead of a status.
PLANTED = ("ch07_bulk_broken", "ch10_gemm_broken", "ch10_tile_broken", "sweep_faults")


@pytest.fixture(scope="module")
def experiments():
    """Import every module of every topic, so that results.EXPERIMENTS is complete, and return it."""
    for chapter in (ch07, ch10, ch14):
        for module in pkgutil.walk_packages(chapter.__path__, f"{chapter.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    return results.EXPERIMENTS


@pytest.fixture(params=RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def record(request):
    return json.loads(request.param.read_text(encoding="utf-8"))


def test_there_are_records():
    assert len(RECORDS) > 70


def test_a_record_is_made_by_todays_code_of_its_experiment(record, experiments):
    reason = results.stale_reason(record, experiments[record["experiment"]].source())
    assert bool(reason) == (record["experiment"] in OLDER), reason or "recorded anew: delete its line in OLDER"


def test_a_record_states_its_origin(record):
    assert set(results.KEYS) <= set(record) and record["recorded"].endswith("Z") and len(record["source"]) == 16
    known = ("python", "torch", "triton", "cuda", "driver") if record["device"]["capability"] else ("python",)
    assert all(record["versions"][name] for name in known)


def test_the_rows_of_a_record_are_well_formed(record):
    name, rows = record["experiment"], record["rows"]
    assert rows
    if name in PLANTED:
        assert all(row.get("status", "ok") in ("ok", "rejected", "failed", "wrong") for row in rows)
    else:
        assert {row["status"] for row in rows} <= ({"ok", "rejected", "failed"} if name in REFUSALS else {"ok"})
    for row in rows:
        assert row.get("status", "ok") == "ok" or row.get("reason") or row.get("message"), row
        if row.get("ratio") and not name.startswith("ch14_mx_formats"):  # there it compares bytes per second
            assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ms"])
