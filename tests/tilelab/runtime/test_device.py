import os
import pathlib
import sys
import tempfile
import types
import warnings

import pytest
import torch
from cases import cases

from tilelab.runtime import device

PREDICATES = ("has_tma", "has_wgmma", "has_tcgen05", "has_native_block_scale")


decided = device.current  # a test may put another function in its place


@pytest.fixture(autouse=True)
def decide_again():
    decided.cache_clear()
    yield
    decided.cache_clear()


@pytest.fixture
def cuda_build(monkeypatch):
    """A torch built for CUDA, with nothing hidden, whatever is installed here."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    return monkeypatch


def fake_gpu(monkeypatch, name="NVIDIA H200", capability=(9, 0)):
    sizes = {"shared_memory_per_block_optin": 232448, "L2_cache_size": 60 << 20, "total_memory": 139 << 30}
    major, minor = capability
    props = types.SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=132, **sizes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props)
    monkeypatch.setattr(device, "driver_version", lambda: "580.95.05")


@cases(
    "target, smem, threads, has",
    ("sm_80", 166912, 2048, ()),
    ("sm_90a", 232448, 2048, ("has_tma", "has_wgmma")),
    ("sm_100a", 232448, 2048, ("has_tma", "has_tcgen05", "has_native_block_scale")),
    ("sm_103a", 232448, 2048, ("has_tma", "has_tcgen05", "has_native_block_scale")),
    ("sm_120a", 101376, 1536, ("has_tma", "has_native_block_scale")),
    ("sm_121a", 101376, 1536, ("has_tma", "has_native_block_scale")),
)
def test_limits(target, smem, threads, has):
    found = device.target_limits(target)
    assert (found.target, found.smem_per_block, found.threads_per_sm) == (target, smem, threads)
    assert found.smem_per_sm == smem + 1024  # the runtime keeps 1 KiB of each block
    assert tuple(name for name in PREDICATES if getattr(found, name)) == has


def test_limits_cover_the_targets():
    assert tuple(device.target_limits(target).target for target in device.TARGETS) == device.TARGETS


def test_unknown_target_says_which_exist():
    with pytest.raises(ValueError, match=r"^sm_90 lacks .* sm_90a\.$"):
        device.target_limits("sm_90")
    with pytest.raises(ValueError, match=r"unknown target 'hopper'.*" + ", ".join(device.TARGETS)):
        device.target_limits("hopper")


def test_known_gpus():
    h200, gb10 = device.KNOWN["H200"], device.KNOWN["GB10"]
    assert (h200.target, h200.sms, h200.smem_per_block, h200.peak_gbps) == ("sm_90a", 132, 232448, 4800)
    assert (gb10.target, gb10.sms, gb10.memory, gb10.peak_gbps) == ("sm_121a", 48, "LPDDR5X", 273)
    for gpu in device.KNOWN.values():
        assert gpu.target in device.TARGETS and gpu.source
        # a rate with sparsity, or a slip of a digit, would leave this range of FLOP per byte
        if gpu.bf16_tflops:
            assert 100 < gpu.bf16_tflops * 1000 / gpu.peak_gbps < 320


@cases(
    "name, entry",
    ("NVIDIA H200", "H200"),
    ("NVIDIA H100 80GB HBM3", "H100 SXM"),
    ("NVIDIA B300 SXM6 AC", "B300"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
    ("NVIDIA H100 PCIe", None),
    ("NVIDIA H200 NVL", None),
    ("NVIDIA H200 MIG 1g.18gb", None),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
)
def test_known_by_driver_name(name, entry):
    assert device.known_gpu(name) is (device.KNOWN[entry] if entry else None)


def test_current_reads_torch(cuda_build):
    fake_gpu(cuda_build)
    here = device.current()
    assert (here.capability, here.target, here.slug) == ((9, 0), "sm_90a", "nvidia-h200")
    assert here.has_tma and here.has_wgmma and not here.has_tcgen05
    assert here.describe().count("\n") == 0 and "132 SMs" in here.describe()
    assert "580.95.05" in here.describe()


def test_current_is_decided_once_and_leaves_the_environment_alone(cuda_build):
    before = dict(os.environ)
    first = device.current()
    fake_gpu(cuda_build)
    assert device.current() is first and dict(os.environ) == before


def test_older_gpu_has_no_architecture_specific_target(cuda_build):
    fake_gpu(cuda_build, "NVIDIA A100-SXM4-80GB", (8, 0))
    assert device.current().target == "sm_80" and not device.current().has_tma


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpu_is_no_gpu(cuda_build, hidden):
    fake_gpu(cuda_build)
    cuda_build.setenv("CUDA_VISIBLE_DEVICES", hidden)
    here = device.current()
    assert here.slug == "no-gpu" and here.target is None and "CUDA_VISIBLE_DEVICES" in here.note
    assert not any(getattr(here, name) for name in PREDICATES)


def test_rocm_is_no_nvidia_gpu(cuda_build):
    fake_gpu(cuda_build)
    cuda_build.setattr(torch.version, "hip", "7.0")
    assert device.current().capability is None and "ROCm" in device.current().note


def test_missing_torch_is_no_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert device.current().capability is None and "torch cannot be imported" in device.current().note


def test_broken_driver_does_not_raise(cuda_build):
    fake_gpu(cuda_build)

    def fail(index):
        raise RuntimeError("CUDA unknown error\nmore lines")

    cuda_build.setattr(torch.cuda, "get_device_properties", fail)
    assert device.current().describe() == "no GPU (the driver does not answer: CUDA unknown error)"


def test_warning_of_torch_becomes_the_note(cuda_build):
    def unavailable():
        warnings.warn("The NVIDIA driver on your system is too old.", stacklevel=2)
        return False

    cuda_build.setattr(torch.cuda, "is_available", unavailable)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device.current().note == "The NVIDIA driver on your system is too old"


@cases(
    "text",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.3.0",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\nGCC version: 11.4.0",
)
def test_driver_version_from_proc(monkeypatch, text):
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path: text)
    assert device.driver_version() == "580.95.05"


def test_driver_version_unknown(monkeypatch, tmp_path):
    def missing(path):
        raise FileNotFoundError

    monkeypatch.setattr(pathlib.Path, "read_text", missing)
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi there
    assert device.driver_version() is None


def test_require(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a"))
    device.require("has_wgmma", "wgmma_gemm", "read its SASS")
    with pytest.raises(device.Unsupported) as error:
        device.require("has_tcgen05", "blockscaled", "compile it for sm_100a.")
    message = str(error.value)
    assert message.startswith("blockscaled needs tcgen05") and "NVIDIA H200" in message
    assert message.endswith(": compile it for sm_100a.") and "\n" not in message


@pytest.mark.gpu
def test_current_on_this_gpu():
    here = device.current()
    assert here.capability == torch.cuda.get_device_capability() and here.name == torch.cuda.get_device_name()
    assert here.sms > 0 and here.memory_bytes > 2**30 and here.l2_bytes > 0
    if here.target in device.TARGETS:
        assert here.smem_per_block == device.target_limits(here.target).smem_per_block
    if published := device.known_gpu(here.name):
        assert published.target == here.target and published.sms in (None, here.sms)


def test_interpret_without_gpu(cuda_build):
    cuda_build.setenv("TRITON_INTERPRET", "0")  # so that what follows is undone, whether it was set or not
    cuda_build.delenv("TRITON_INTERPRET")
    cuda_build.delitem(sys.modules, "triton", raising=False)
    fake_gpu(cuda_build)
    device.interpret_without_gpu()
    assert "TRITON_INTERPRET" not in os.environ
    device.current.cache_clear()
    cuda_build.setattr(torch.cuda, "is_available", lambda: False)
    cuda_build.setitem(sys.modules, "triton", types.ModuleType("triton"))
    with pytest.raises(RuntimeError, match="before the chapter"):
        device.interpret_without_gpu()
    cuda_build.delitem(sys.modules, "triton")
    device.interpret_without_gpu()
    assert os.environ["TRITON_INTERPRET"] == "1"
    cuda_build.setenv("TRITON_INTERPRET", "0")  # who only compiles says so
    device.interpret_without_gpu()
    assert os.environ["TRITON_INTERPRET"] == "0"


def test_a_lock_lies_where_only_this_user_can_open_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = device.user_lock_path("GPU-a.turn")
    assert path == device.user_lock_path("GPU-a.turn") and path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="must be this user's and of mode 0700"):
        device.user_lock_path("GPU-a.turn")
    path.parent.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "tiles-in-flight-12345").mkdir(mode=0o700)  # made by another user
    with pytest.raises(PermissionError):
        device.user_lock_path("GPU-a.turn")


def test_what_processes_hold(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU-a, 129369, 143771'\necho 'GPU-b, [N/A], [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert device.memory_in_use_gib() == {"GPU-a": (129369 / 1024, 143771 / 1024)}
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert device.memory_in_use_gib() == {}


def test_out_of_memory_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 << 30)
    assert device.out_of_memory_reason(ValueError("other")) == ""
    assert device.out_of_memory_reason(torch.OutOfMemoryError("tried to")) == (
        "the GPU has too little free memory; other processes hold 126 of its 140 GiB: end them, or hide the GPU with "
        "CUDA_VISIBLE_DEVICES=-1 to see the recorded rows"
    )
