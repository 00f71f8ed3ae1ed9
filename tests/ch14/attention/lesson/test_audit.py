"""FlashAttention-4 beside the course's kernel: its layout, its check, and its row where it is missing."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from ch14.attention.lesson import audit, experiments
from tilelab.measure import bench, peers
from tilelab.records import results
from tilelab.runtime import device

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")
CASE = (2, 4, 2, 70, 70, 64)
FLASH_4 = peers.FlashAttention4.NAME


def pretend_flash_attn(q, k, v, causal=False):
    """Take and return (B, S, H, D), as FlashAttention-4 does, and sums of the softmax beside."""
    assert q.shape == (2, 70, 4, 64) and k.shape == v.shape == (2, 70, 2, 64)
    assert all(tensor.is_contiguous() for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), torch.zeros(2, 4, 70)


@pytest.fixture
def flash_4():
    return peers.FlashAttention4(
        FLASH_4, "4.0", library=types.SimpleNamespace(flash_attn_func=pretend_flash_attn)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.skipif(device.current().has_tma, reason="the shapes are for a CPU")
def test_its_result_is_checked_in_its_own_layout(flash_4, causal):
    row = audit.verify(flash_4.prepare_attention(causal), (*CASE, causal), "math")
    assert row["status"] == "ok", row["reason"]
    other = audit.verify(flash_4.prepare_attention(not causal), (*CASE, causal), "math")
    assert other["status"] == "wrong" and "is above" in other["reason"]
    refuses = audit.verify(lambda *given: lambda: pretend_flash_attn(q=None), (*CASE, causal), "math")
    assert refuses["status"] == "failed" and "TypeError" in refuses["reason"]


@pytest.fixture
def stand_ins(monkeypatch):
    """A Hopper GPU on which every check passes, cuDNN takes 2 ms, the course 1 ms and FlashAttention-4 0.9 ms."""
    times = {"cuDNN": 2.0, "course": 1.0, FLASH_4: 0.9, "flash": 4.0, "eager": 16.0}

    def compare(candidates, make_inputs, peer, **timing):
        ratios = {name: () if name == peer else (times[peer] / times[name],) * 4 for name in candidates}
        return {
            name: bench.Timing(name, times[name], peer, times[peer], ratios=ratios[name]) for name in ratios
        }

    monkeypatch.setattr(device, "current", lambda: HOPPER)
    monkeypatch.setattr(audit, "verify", lambda *given: {"status": "ok", "reason": "", "error": 1e-3})
    monkeypatch.setattr(experiments, "choose_peer", lambda case: "cuDNN")
    monkeypatch.setattr(bench, "compare", compare)
    monkeypatch.setattr(experiments.build, "compile_ahead", lambda jobs: None)


def test_rows_of_every_case(stand_ins, monkeypatch, flash_4):
    monkeypatch.setattr(peers, "find", lambda name: flash_4)
    rows = audit.compare_with_peers().rows
    cases = len(audit.CASES) + 1
    found = [row["name"] for row in rows]
    assert found == ["cuDNN", FLASH_4, "course", "course"] * cases + ["flash", "eager"]
    assert all(
        row["status"] == "ok" and row["ratio"] == pytest.approx(row["peer_ms"] / row["ms"]) for row in rows
    )
    against = {
        row["peer"]: (row["ratio"], row["spread"], row["peer_version"])
        for row in rows
        if row["name"] == "course"
    }
    assert against["cuDNN"][0] == 2 and against[FLASH_4] == (pytest.approx(0.9), 0, "4.0")
    assert {tuple(row["shape"]) for row in rows[-2:]} == {experiments.LONG}
    assert "ch14_attention_peers" in results.EXPERIMENTS


def test_without_it_its_rows_say_why(stand_ins, monkeypatch):
    monkeypatch.delenv("TILES_PEERS", raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    rows = audit.compare_with_peers().rows
    missing = [row for row in rows if row["status"] != "ok"]
    assert len(missing) == len(audit.CASES) + 1 and {row["peer"] for row in missing} == {FLASH_4}
    assert all("TILES_PEERS" in row["reason"] and "ratio" not in row for row in missing)


def test_a_result_that_is_wrong_is_not_timed(stand_ins, monkeypatch, flash_4):
    monkeypatch.setattr(audit, "verify", lambda candidate, case, peer: next(verdicts))
    verdicts = iter([{"status": "ok", "reason": ""}, {"status": "wrong", "reason": "error 1 is above 0"}])
    *_, row = audit.compare_case((*CASE, False), flash_4)
    assert row["status"] == "failed" and row["reason"] == f"{FLASH_4}: error 1 is above 0."
    assert row["peer"] == FLASH_4
    verdicts = iter([{"status": "wrong", "reason": "error 1 is above 0"}, {"status": "ok", "reason": ""}])
    rows = audit.compare_case((*CASE, False), flash_4)
    found = [(row["name"], row["status"]) for row in rows]
    assert found == [("cuDNN", "ok"), (FLASH_4, "ok"), ("course", "wrong"), ("course", "wrong")]
