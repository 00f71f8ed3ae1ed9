"""The two lists of shapes, and the rows of the experiment that times them."""

import pytest

from ch14.attention.configs import HEAD_DIMS
from ch14.attention.lesson import experiments, held_out
from tilelab.measure import bench, peers
from tilelab.records import results
from tilelab.runtime import device

FLASH_4 = peers.FlashAttention4.NAME


def test_no_held_out_shape_is_one_that_the_choice_was_fitted_to():
    assert not {case[:6] for case in held_out.TUNED} & {case[:6] for case in held_out.HELD_OUT}
    for case in held_out.TUNED + held_out.HELD_OUT:
        batch, heads, kv_heads, queries, keys, d, causal = case
        assert heads % kv_heads == 0 and d in HEAD_DIMS and (queries == keys or not causal)
        assert queries > 64 or 2000 <= keys <= 65536


@pytest.fixture
def stand_ins(monkeypatch):
    """A Hopper GPU on which cuDNN takes 2 ms, the course 1 ms and FlashAttention-4 0.9 ms."""
    times = {"cuDNN": 2.0, "course": 1.0, FLASH_4: 0.9}

    def compare(candidates, make_inputs, peer, **timing):
        return {
            name: bench.Timing(name, times[name], peer, times[peer], ratios=(times[peer] / times[name],) * 4)
            for name in candidates
        }

    class Launch:
        config, chosen = "a configuration", "by the model"

    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a", 132))
    monkeypatch.setattr(experiments, "make_inputs", lambda case: [])
    monkeypatch.setattr(experiments, "prepare_attention", lambda config, causal: lambda: Launch())
    monkeypatch.setattr(
        held_out.audit, "verify", lambda *given: {"status": "ok", "reason": "", "error": 1e-3}
    )
    monkeypatch.setattr(experiments, "choose_peer", lambda case: "cuDNN")
    monkeypatch.setattr(bench, "compare", compare)
    monkeypatch.setattr(experiments.build, "compile_ahead", lambda jobs: None)


def test_rows_name_both_peers_and_the_faster(stand_ins, monkeypatch):
    monkeypatch.setattr(peers, "find", lambda name: peers.FlashAttention4(FLASH_4, "4.0"))
    rows = held_out.measure_held_out().rows
    assert len(rows) == len(held_out.TUNED + held_out.HELD_OUT)
    assert [row["held_out"] for row in rows].count(True) == len(held_out.HELD_OUT)
    for row in rows:
        assert row["peer"] == FLASH_4 and row["us"] == 1000 and row["chosen"] == "by the model"
        assert row["to_cudnn"] == 2 and row["ratio"] == row["to_fa4"] == pytest.approx(0.9)
    assert "ch14_attention_held_out" in results.EXPERIMENTS


def test_without_flash_attention_cudnn_is_the_peer(stand_ins, monkeypatch):
    absent = peers.FlashAttention4(FLASH_4, reason="FlashAttention-4 cannot be imported.")
    row = held_out.measure_case(held_out.HELD_OUT[0], absent)
    assert row["ratio"] == row["to_cudnn"] == 2 and "to_fa4" not in row
