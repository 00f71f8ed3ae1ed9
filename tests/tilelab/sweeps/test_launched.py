"""A row of a sweep fails where the space launched another binary than it built."""

import dataclasses
from types import SimpleNamespace

import pytest
from triton.runtime.jit import JITFunction

from tilelab.runtime import build
from tilelab.sweeps import launched
from tilelab.sweeps.space import Space
from tilelab.sweeps.sweep import config_keys


def softmax_kernel():
    pass


@dataclasses.dataclass(frozen=True)
class SoftmaxSpace(Space):
    """A softmax over numbers of warps. `passed` are the fields that its job passes on."""

    passed: tuple = ()
    kernel: object = softmax_kernel

    @classmethod
    def source(cls):
        return "1"

    def job(self, config):
        options = {"num_warps": config} if "num_warps" in self.passed else {}
        return build.Job("anywhere:softmax_kernel", {}, {}, "sm_90a", **options)

    def measure(self, config):
        JITFunction.run(SimpleNamespace(fn=self.kernel), num_warps=config, num_stages=3)
        return {"status": "ok", "reason": "", "ms": 1.0}


@pytest.fixture(autouse=True)
def launch(monkeypatch):
    monkeypatch.setattr(
        JITFunction, "run", lambda self, **options: SimpleNamespace(metadata=SimpleNamespace(**options))
    )


def test_what_a_sweep_builds_is_what_it_times():
    right, forgot = SoftmaxSpace((1,), passed=("num_warps",)), SoftmaxSpace((1,))
    assert [right.measure(warps)["status"] for warps in (4, 8)] == ["ok", "ok"]
    assert forgot.measure(4)["status"] == "ok"  # the default, by luck
    row = forgot.measure(8)
    assert row["status"] == "failed" and "num_warps=8 and it built 4" in row["reason"]


def test_roles_that_the_compiler_adds_do_not_count(monkeypatch):
    compiled = SimpleNamespace(metadata=SimpleNamespace(num_warps=12, num_stages=3))
    monkeypatch.setattr(JITFunction, "run", lambda self, **options: compiled)
    assert SoftmaxSpace((1,)).measure(4)["status"] == "ok"  # launched with 4 warps; two roles bring 4 each


def test_other_kernels_and_other_launches_of_the_kernel_do_not_count():
    assert SoftmaxSpace((1,), kernel=print).measure(8)["status"] == "ok"
    job = SoftmaxSpace((1,)).job(4)
    seen = [("softmax_kernel", {"num_warps": warps, "num_stages": 3}) for warps in (8, 4)]
    assert launched.find_difference(job, seen) == ""  # the peer may be another configuration
    assert launched.find_difference(job, []) == ""
    found = "num_stages=5"
    assert found in launched.find_difference(job, [("softmax_kernel", {"num_warps": 4, "num_stages": 5})])


def test_the_finalists_are_timed_again_by_default():
    space = SoftmaxSpace((1,), passed=("num_warps",))
    assert [row["ms"] for row in space.measure_finalists([4, 8])] == [1.0, 1.0]
    assert SoftmaxSpace((1,)).measure_finalists([8]) == [{}]


def test_the_names_of_rows_are_unique():
    @dataclasses.dataclass(frozen=True)
    class Config:
        num_warps: int

        def __str__(self):
            return "softmax"

    assert len(config_keys([Config(4), Config(4)], SoftmaxSpace((1,)))) == 1
    with pytest.raises(ValueError, match="two configurations have the name 'softmax'"):
        config_keys([Config(4), Config(8)], SoftmaxSpace((1,)))
