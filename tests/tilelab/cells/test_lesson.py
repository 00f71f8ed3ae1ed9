"""A ladder of kernel versions: live on a GPU, recorded without one, and honest about both."""

import pytest
import torch

from tilelab import emulator
from tilelab.cells import cuda_magic, lesson
from tilelab.records import results
from tilelab.runtime import device, provenance

ADD = """extern "C" __global__ void add_one(const float* x, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + 1;
}
"""
pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
KERNEL = cuda_magic.find_kernels(ADD)["add_one"]


def check(prepare):
    def run(where):
        x = torch.randn(100, device=where)
        out = torch.zeros_like(x)
        prepare(x, out)()
        return "" if torch.equal(out, x + 1) else "the sums are wrong"

    return lesson.run_everywhere(run)


def make_ladder(inputs=1 << 20):
    def make_inputs():
        x = torch.randn(inputs, device="cuda")
        return [x, torch.empty_like(x)]

    def prepare_torch(x, out):
        return lambda: torch.add(x, 1, out=out)

    return lesson.Ladder("test_ladder", "torch add", prepare_torch, make_inputs, check, nbytes=8 * inputs)


def prepare_with(kernel):
    return lambda x, out: kernel.prepare(-(-x.numel() // 32), 32, (x, out, x.numel()))


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """A record of two versions, made by today's text of the first and another text of the second, without a GPU."""
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setattr(device, "current", lambda: device.Device())
    rows = [
        {"version": name, "code": code, "status": "ok", "ms": 1.0, "gbps": 4000.0, "ratio": 0.98, "gain": 1.5}
        for name, code in (("add_one", lesson.code_hash(KERNEL)), ("add_two", "another"))
    ]
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a")
    results.save(results.make_record("test_ladder", rows, "0" * 16, here))


def test_without_a_gpu_figures_are_recorded_and_the_check_runs_in_the_emulator(recorded):
    ladder = make_ladder()
    table = ladder.step(KERNEL, prepare_with(KERNEL))
    assert "recorded on NVIDIA H200" in table.caption
    assert table.frame.iloc[0].to_dict() == {
        "version": "add_one",
        "ms": "1",
        "GB/s": "4000",
        "× torch add": "0.98",
        "× version before": "1.5",
        "check": "ok in the emulator",
    }
    table = ladder.step(KERNEL, prepare_with(KERNEL), "add_two")
    assert table.frame["check"].iloc[1] == "ok in the emulator; figures of another text of the cell"
    wrong = cuda_magic.find_kernels(ADD.replace("+ 1;", "+ 2;"))["add_one"]
    table = ladder.step(wrong, prepare_with(wrong))
    assert table.frame["check"].iloc[2].startswith("the sums are wrong (in the emulator)")
    assert "add_three is not recorded" in ladder.step(KERNEL, prepare_with(KERNEL), "add_three").caption


def test_an_unwritten_kernel_is_found():
    empty = cuda_magic.find_kernels('extern "C" __global__ void a(int n) {\n    // your kernel\n}\n')["a"]
    with pytest.raises(NotImplementedError):
        lesson.require_written(empty)
    lesson.require_written(KERNEL)


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_checked_and_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setenv("TILES_RECORD", "1")
    ladder = make_ladder()
    ladder.step(KERNEL, prepare_with(KERNEL))
    table = ladder.step(KERNEL, prepare_with(KERNEL), "again")
    assert list(table.frame["check"]) == ["ok", "ok"] and table.caption.endswith(provenance.utc_now()[:10])
    assert results.load("test_ladder")["source"] == lesson.ladder_hash([row["code"] for row in ladder.rows])
    wrong = cuda_magic.find_kernels(ADD.replace("+ 1;", "+ 2;"))["add_one"]
    assert (
        ladder.step(wrong, prepare_with(wrong)).frame["check"].iloc[2].startswith("wrong: the sums are wrong")
    )
