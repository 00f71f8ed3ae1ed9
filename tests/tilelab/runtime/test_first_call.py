"""config="tune" measures the first configurations of a ranking, keeps the fastest, and never during a capture."""

import dataclasses

import pytest
import torch

from tilelab.runtime import device, first_call, plans, tuned


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 0


RANKED = [Config(block) for block in range(1, 21)]
US = {config: 10.0 for config in RANKED} | {RANKED[3]: 8.0, RANKED[5]: 1.0, RANKED[15]: 0.5}


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a", 132))
    monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(first_call, "_copies", lambda tensors: [tensors])
    monkeypatch.setattr(first_call, "_measure", lambda launches: [US[launch()] for (launch,) in launches])


def choose():
    def compile_one(config):
        if config == RANKED[5]:
            raise RuntimeError("ptxas refuses it")

    return first_call.choose(
        "gemm", (64, 128, 256), "bf16", RANKED, compile_one, lambda config, *_: lambda: config, (), "1"
    )


def find(source="1"):
    return tuned.find_exact("gemm", Config, 64, 128, 256, "bf16", lambda config: True, lambda: source)


def test_the_fastest_that_compiles_among_the_first_dozen_is_kept():
    assert choose() == (RANKED[3], "tuned among 11 at the first call")
    assert find() == (RANKED[3], "tuned") and find("2")[1] == "tuned, for another version of the kernel"


def test_nothing_is_measured_during_a_capture(monkeypatch):
    monkeypatch.setattr(plans, "is_capturing", lambda: True)
    assert choose() == (RANKED[0], "not tuned, because a CUDA graph is being captured") and find() is None
    made = []
    planner = plans.Planner(lambda x, out, config: made.append(config) or "a plan", ("x",))
    for config in ("tune", "tune", "best", "best"):
        planner.find((torch.zeros(1),), None, config)
    assert made == ["tune", "tune", "best"], "a later call may tune"
    plans._planners.remove(planner)


def test_without_memory_for_copies_nothing_is_kept(monkeypatch):
    def refuse(tensors):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(first_call, "_copies", refuse)
    assert choose() == (RANKED[0], "not tuned, because there is no memory for copies of the operands")
    assert find() is None


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path / "file")
    assert choose()[0] == RANKED[3] and find() is None
