"""The public kernels that the course is compared with: how they are found, called, and missed."""

import dataclasses
import itertools
import os
import sys
import types

import pytest
import torch

from tilelab import ROOT
from tilelab.measure import bench, peers
from tilelab.runtime import device

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: HOPPER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("TILES_PEERS", raising=False)


def test_an_unknown_peer_is_refused():
    says = "unknown peer 'cutlass'; choose one of deep_gemm, quack, flash_attention_4."
    with pytest.raises(ValueError, match=says):
        peers.find("cutlass")


@pytest.mark.parametrize("name", peers.KINDS)
def test_without_a_fitting_gpu_there_is_a_reason(monkeypatch, name):
    for here in (device.Device(note="torch is a CPU build"), dataclasses.replace(HOPPER, capability=(7, 5))):
        monkeypatch.setattr(device, "current", lambda here=here: here)
        found = peers.find(name)
        assert found.version is None and here.describe() in found.reason and found.reason.endswith(".")
        assert found.reason.startswith(f"{found.name} runs on GPUs of compute capability ")


@pytest.mark.parametrize("name", peers.KINDS)
def test_a_peer_that_is_not_installed_says_what_to_do(hopper, monkeypatch, name):
    kind = peers.KINDS[name]
    monkeypatch.setitem(sys.modules, kind.MODULE.partition(".")[0], None)
    found = peers.find(name)
    assert (found.name, found.version, found.library) == (kind.NAME, None, None)
    assert found.reason.startswith(f"{kind.NAME} cannot be imported (ModuleNotFoundError: ")
    assert found.reason.endswith("pip install -e .[peers], or name a folder that holds it in TILES_PEERS.")


def test_any_error_of_an_import_is_a_reason(hopper, monkeypatch, tmp_path):
    """A library that is broken or of another torch raises OSError, RuntimeError or AssertionError."""
    for number, error in enumerate(
        ("OSError('undefined symbol: x\\nmore')", "AssertionError", "RuntimeError('no')")
    ):
        folder = tmp_path / str(number) / "deep_gemm"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"raise {error}\n")
        monkeypatch.setenv("TILES_PEERS", str(folder.parent))
        monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])  # before one that is installed
        found = peers.find("deep_gemm")
        assert error.partition("(")[0] in found.reason and "\n" not in found.reason
        sys.path.remove(str(folder.parent))
        sys.modules.pop("deep_gemm", None)


def test_a_folder_of_wheels_is_found_with_its_versions(hopper, monkeypatch, tmp_path):
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "__init__.py").write_text("import beneath\n__version__ = '0'\n")
    (tmp_path / "quack" / "gemm_interface.py").write_text("")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "beneath.py").write_text("")
    (tmp_path / "more.pth").write_text("more\n")
    about = tmp_path / "quack_kernels-0.6.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: quack-kernels\nVersion: 0.6.5\n")
    monkeypatch.setenv("TILES_PEERS", str(tmp_path))
    elsewhere = [place for place in sys.path if not os.path.exists(f"{place}/quack")]
    monkeypatch.setattr(sys, "path", elsewhere)  # without the one that is installed
    try:
        for _ in range(2):
            found = peers.find("quack")
            seen = (found.reason, found.version, found.library.__name__)
            assert seen == ("", "0.6.5", "quack.gemm_interface")
        assert sys.path.count(str(tmp_path)) == 1
    finally:
        for name in ("quack", "quack.gemm_interface", "beneath"):
            sys.modules.pop(name, None)


def make_products(m=6, n=256, k=384):
    a, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    return a, weight.T, torch.empty(m, n).bfloat16()


def test_deep_gemm_gets_a_weight_and_columns_of_scales():
    given = {}

    def fp8_gemm_nt(a, b, d):
        given.update(a=a, b=b, d=d)

    def bf16_gemm_nt(a, b, d):
        assert a.is_contiguous() and b.is_contiguous() and d.is_contiguous()
        d.copy_(a @ b.T)

    library = types.SimpleNamespace(bf16_gemm_nt=bf16_gemm_nt, fp8_gemm_nt=fp8_gemm_nt)
    deep_gemm = peers.DeepGemm("DeepGEMM", library=library)
    a, b, out = make_products()
    assert torch.equal(deep_gemm.prepare_gemm(a, b, out)(), a @ b)
    for m, scale_a in itertools.product((1, 3, 4, 6), (torch.randn, lambda m, k: torch.randn(k, m).T)):
        scale_a, scale_b, weight = scale_a(m, 3), torch.randn(3, 2), torch.zeros(200, 384)
        a, out = torch.zeros(m, 384), torch.empty(m, 200)
        assert deep_gemm.prepare_fp8(a, weight.T, scale_a, scale_b, out)() is out is given["d"]
        assert given["a"][0] is a and given["a"][1].shape == (m, 3) and torch.equal(given["a"][1], scale_a)
        assert given["a"][1].stride() == (1, -(-m // 4) * 4) and given["b"][0].is_contiguous()
        assert given["b"][1].shape == (2, 3) and given["b"][1].is_contiguous()


def test_columns_that_lie_right_are_not_copied():
    scales = torch.randn(3, 8)[:, :6].T
    assert peers.align_columns(scales) is scales
    assert peers.align_columns(scales.contiguous()) is not scales


@dataclasses.dataclass(frozen=True)
class Config:
    ms: float
    device_capacity: int = 9


def test_quack_takes_its_fastest_configuration_once_per_shape(monkeypatch):
    default, fast, broken = Config(2.0), Config(1.0), Config(0.0)
    known = types.ModuleType("quack.gemm_config")
    known.default_config = lambda where: default
    known.get_all_configs = lambda: [Config(0.5, 10), *map(Config, range(2, 12)), fast, broken]
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_config", known)
    by_name = {str(config): config for config in (default, *known.get_all_configs())}
    calls, used = [], []

    def compare(candidates, make_inputs, peer, **timing):
        calls.append(sorted(candidates))
        assert peer == str(default) in candidates
        for prepare in candidates.values():
            prepare(*make_inputs())()
        return {name: bench.Timing(name, by_name[name].ms or None, peer, 2.0) for name in candidates}

    def multiply(a, b, out, config):
        assert b.T.is_contiguous()
        used.append(config)
        out.copy_(a @ b)

    monkeypatch.setattr(bench, "compare", compare)
    library = types.SimpleNamespace(gemm_tuned=types.SimpleNamespace(fn=multiply))
    quack, (a, b, out) = peers.Quack("quack", library=library), make_products()
    launch = quack.prepare_gemm(a, b, out)
    assert [len(names) for names in calls] == [13, 6] and torch.equal(launch(), a @ b) and used[-1] == fast
    quack.prepare_gemm(a, b, out)
    assert len(calls) == 2
    quack.prepare_gemm(*make_products(8))
    assert len(calls) == 4


TIMES = {"course": 2.0, "fast": 1.0, "slow": 4.0, "late": None}
ROUNDS = {"fast": (2.0, 2.1, 1.9, 2.0), "slow": (0.5, 0.4, 0.5, 0.625)}


@pytest.fixture
def timed(monkeypatch):
    def compare(candidates, make_inputs, peer, **timing):
        asked.append([*candidates])
        return {
            name: bench.Timing(name, TIMES[name], peer, TIMES[peer], 7.0, None, reason, ROUNDS.get(name, ()))
            for name in candidates
            for reason in ["" if TIMES[name] else "captured"]
        }

    asked = []
    monkeypatch.setattr(bench, "compare", compare)
    return asked


def find_fault(prepare):
    return {"wrong": "the error 1 is above 0", "refuses": 1 / 0 if prepare() == "refuses" else ""}.get(
        prepare(), ""
    )


def test_each_peer_has_a_row_with_a_ratio_or_a_reason(timed):
    rivals = {
        peers.Peer(name, "1.0"): lambda name=name: name
        for name in ("fast", "wrong", "slow", "late", "refuses")
    }
    rivals[peers.Peer("absent", None, "absent cannot be imported.")] = None
    rows = peers.compare(
        None, rivals, list, find_fault, {"status": "ok", "reason": "", "error": 0.1}, flops=1
    )
    assert timed == [["course", "fast", "slow", "late"]]
    by_peer = {row["peer"]: row for row in rows}
    assert list(by_peer) == [peer.name for peer in rivals] and {row["name"] for row in rows} == {"course"}
    fast, slow = by_peer["fast"], by_peer["slow"]
    assert (fast["ratio"], slow["ratio"]) == (0.5, 2.0) and all(row["error"] == 0.1 for row in rows)
    assert all(row["ratio"] == row["peer_ms"] / row["ms"] and row["tflops"] == 7.0 for row in (fast, slow))
    assert slow["spread"] == pytest.approx(bench.find_spread([2.0, 2.5, 2.0, 1.6]))
    assert fast["peer_version"] == "1.0" and by_peer["absent"]["peer_version"] is None
    assert {name: row["reason"] for name, row in by_peer.items() if row["status"] == "failed"} == {
        "wrong": "the result of wrong is wrong: the error 1 is above 0.",
        "late": "late cannot be timed: captured.",
        "refuses": "refuses fails: ZeroDivisionError: division by zero.",
        "absent": "absent cannot be imported.",
    }
    assert all("ratio" not in row for row in rows if row["status"] == "failed")


def test_a_course_that_is_wrong_and_peers_that_are_missing_are_not_timed(timed):
    wrong = {"status": "wrong", "reason": "the error 1 is above 0", "error": 1.0}
    (row,) = peers.compare(None, {peers.Peer("fast", "1.0"): lambda: "fast"}, list, find_fault, wrong)
    assert row == wrong | {"name": "course", "peer": "fast", "peer_version": "1.0"}
    absent = peers.Peer("absent", reason="absent cannot be imported.")
    (row,) = peers.compare(None, {absent: None}, list, find_fault, {"status": "ok", "reason": ""})
    assert row["status"] == "failed" and row["reason"] == absent.reason and timed == []


def test_a_lost_context_is_raised(timed):
    def lose(prepare):
        raise torch.AcceleratorError("gone")

    with pytest.raises(torch.AcceleratorError):
        peers.compare(None, {peers.Peer("fast"): None}, list, lose, {"status": "ok"})


def test_two_candidates_are_related_over_a_third():
    of_course = bench.Timing("course", 1.0, "cuDNN", 2.0, ratios=(2.0, 2.2))
    of_rival = bench.Timing("other", 0.5, "cuDNN", 2.0, ratios=(4.0, 4.0))
    row = peers.relate(of_course, of_rival, peers.Peer("other"))
    assert row["ratio"] == 0.5 and row["spread"] == pytest.approx(bench.find_spread([0.5, 0.55]))


def test_the_extra_installs_each_of_them():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for kind in peers.KINDS.values():
        for name in ("peers", "peers-torch-2-11"):
            assert any(line.startswith(kind.PACKAGE) for line in extras[name])
