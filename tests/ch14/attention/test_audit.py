"""FlashAttention-4 beside the course's kernel: its layout, its check, and its row where it is missing."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from ch14.attention import audit, experiments
from tilelab import device, results

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")
CASE = (2, 4, 4, 70, 70, 64)


def pretend_flash_attn(q, k, v, causal=False):
    """Take and return (B, S, H, D), as FlashAttention-4 does, and sums of the softmax beside."""
    assert q.shape == (2, 70, 4, 64) and all(tensor.is_contiguous() for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=causal)
    return out.transpose(1, 2).contiguous(), torch.zeros(2, 4, 70)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A stand-in for the package, found through TILES_PEERS."""
    package, module = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    module.flash_attn_func, package.cute = pretend_flash_attn, module
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setenv("TILES_PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.skipif(device.current().has_tma, reason="the shapes are for a CPU")
def test_its_result_is_checked_in_its_own_layout(installed, causal):
    function = audit.import_flash_attention_4()
    assert str(installed) in sys.path
    row = audit.verify(audit.prepare_flash_attention_4(function, causal), (*CASE, causal))
    assert row["status"] == "ok", row["reason"]
    other = audit.verify(audit.prepare_flash_attention_4(function, not causal), (*CASE, causal))
    assert other["status"] == "wrong" and "is above" in other["reason"]
    refuses = audit.verify(lambda *given: lambda: pretend_flash_attn(q=None), (*CASE, causal))
    assert refuses["status"] == "failed" and "TypeError" in refuses["reason"]


def test_without_it_there_is_a_reason(monkeypatch):
    monkeypatch.delenv("TILES_PEERS", raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    found, why = audit.find_candidates((*CASE, False))
    assert list(found) == ["course"] and "TILES_PEERS" in why and why.endswith(".")


@pytest.mark.parametrize("is_installed", [True, False])
def test_rows_of_every_case(monkeypatch, is_installed):
    """The rows, with stand-ins for the GPU's part: the check, the timing and the compiler."""
    def time(candidates, case, **timing):
        return [{"name": name, "ms": 2.0, "peer": "cuDNN", "peer_ms": 1.0, "ratio": 0.5, "status": "ok"}
                for name in ("cuDNN", *candidates)]

    monkeypatch.setattr(device, "current", lambda: HOPPER)
    monkeypatch.setattr(audit, "verify", lambda candidate, case: {"status": "ok", "reason": "", "error": 1e-3})
    monkeypatch.setattr(experiments, "compare_with_cudnn", time)
    monkeypatch.setattr(audit.build, "compile_ahead", lambda jobs: None)
    if is_installed:
        monkeypatch.setattr(audit, "import_flash_attention_4", lambda: pretend_flash_attn)
    else:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    rows = audit.compare_with_peers().rows
    of_peer = [row for row in rows if row["name"] == audit.FLASH_4]
    assert len(of_peer) == len(audit.CASES) + 1 and len(rows) == 3 * len(of_peer) + 2
    assert {row["status"] for row in of_peer} == {"ok" if is_installed else "failed"}
    assert all(row.get("ratio") or row["reason"] for row in of_peer)
    assert [row["name"] for row in rows[-2:]] == ["flash", "eager"] and rows[-1]["shape"] == list(experiments.LONG)
    assert "ch14_attention_peers" in results.EXPERIMENTS
