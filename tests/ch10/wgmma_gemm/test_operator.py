"""The operator: what it refuses, and on a GPU with WGMMA what it computes."""

import re

import pytest
import torch
from cases import cases
from sentences import refused

from ch10 import wgmma_gemm
from ch10.wgmma_gemm import choice
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig
from ch10.wgmma_gemm.lesson import experiments
from tilelab.runtime import device

A, B = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(24, 64, dtype=torch.bfloat16).T


def test_the_arguments_follow_torch_mm():
    a, b = torch.randn(5, 8), torch.randn(8, 16)
    assert torch.equal(wgmma_gemm.spec(a, b), torch.mm(a.double(), b.double()))


@cases(
    "a, b, out, said",
    ([1.0], B, None, "a must be a torch.Tensor; it is a list."),
    (A.float(), B, None, "a must be bfloat16; it is float32."),
    (A.clone().requires_grad_(), B, None, "wgmma_gemm has no backward pass and a requires a gradient"),
    (torch.zeros(64, 16, dtype=torch.bfloat16).T, B, None, "a must be stored row by row"),
    (A, B.contiguous(), None, "b must have K contiguous, as weight.T has; its strides are (24, 1): use"),
    (A, B[:32], None, "a (M, K) and b (K, N) must agree in K; a is 16 x 64 and b is 32 x 24."),
    (A, torch.zeros(20, 64, dtype=torch.bfloat16).T, None, "N is 20 and K is 64: pad them with zeros."),
    (A[:, :60], B[:60], None, "N is 24 and K is 60"),
    (A, B, torch.zeros(16, 16, dtype=torch.bfloat16), "out must be 16 x 24; it is 16 x 16."),
    (A, B, A.flatten()[:384].view(16, 24), "out lies in the memory of a"),
)
def test_bad_matrices_are_one_sentence(a, b, out, said):
    with refused(re.escape(said)):
        wgmma_gemm.prepare(a, b, out=out)


def test_without_wgmma_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))
    says = r"needs WGMMA \(compute capability 9.0\); here is .*ch14.gemm.*\.$"
    with pytest.raises(device.Unsupported, match=says):
        wgmma_gemm.gemm(A, B)


@cases(
    "config, error, said",
    (WgmmaConfig("split", 64, 64, 4, cluster=8), ValueError, "a cluster of 8 needs as many K steps of"),
    (WgmmaConfig("specialised", 128, 256, 5, consumers=2), device.Unsupported, "cannot run: it needs"),
)
def test_a_configuration_that_does_not_fit_is_refused(config, error, said):
    with pytest.raises(error, match=said):
        wgmma_gemm.resolve_config(config, 64, 64, 64)


def test_a_configuration_is_found_by_name():
    assert wgmma_gemm.resolve_config("raster", 1, 8, 8) is STEPS["raster"] is wgmma_gemm.configs()["raster"]
    assert wgmma_gemm.resolve_config("best", 4096, 4096, 4096) in choice.candidates(4096, 4096, 4096).values()


def hopper(test):
    """Mark a test that needs a GPU with WGMMA."""
    here = device.current()
    return pytest.mark.gpu(
        pytest.mark.skipif(not here.has_wgmma, reason=f"needs a GPU with WGMMA: here is {here.describe()}")(
            test
        )
    )


@hopper
def test_every_configuration_is_right_at_ragged_shapes():
    assert not [row for row in experiments.check_correctness().rows if row["status"] != "ok"]


@hopper
@pytest.mark.parametrize("size", [128, 1024])
def test_kernels_that_start_early_wait_for_what_they_read_and_overwrite(size):
    """A chain in which each result is the next one's operand, and buffers are written again while others read."""
    kinds = [
        STEPS["raster"],
        WgmmaConfig("split", 64, 128, 2, cluster=2, pdl=True),
        STEPS["tile"],
        WgmmaConfig("specialised", 64, 64, 4, persistent=True, pdl=True),
    ]
    b = torch.nn.init.orthogonal_(torch.empty(size, size)).bfloat16().cuda()
    buffers = [torch.randn(size, size, device="cuda").bfloat16() for _ in range(3)]
    slow = [buffer.clone() for buffer in buffers]
    launches = [
        wgmma_gemm.prepare(buffers[i % 3], b.T, out=buffers[(i + 1) % 3], config=kinds[i % 4])
        for i in range(60)
    ]
    for launch in launches:
        launch()
    for i in range(60):
        wgmma_gemm.gemm(slow[i % 3], b.T, out=slow[(i + 1) % 3], config=kinds[i % 4])
        torch.cuda.synchronize()
    assert all(map(torch.equal, buffers, slow))


@hopper
@pytest.mark.parametrize("name", ["raster", "best"])
def test_a_launch_is_replayed_in_a_graph(name):
    a, b, out = experiments.make_inputs(300, 264, 520)
    launch = wgmma_gemm.prepare(a, b, out=out, config=name)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    wanted = out.clone()
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted) and launch.out is out


@hopper
def test_out_of_the_operands_and_views_of_a_buffer():
    buffer = torch.randn(64, 192, device="cuda").bfloat16()
    a, b, out = buffer[:, :64], buffer[:, 64:128].T, buffer[:, 128:]
    with pytest.raises(ValueError, match="out lies in the memory of"):
        wgmma_gemm.gemm(a, b, out=out)
    wide = torch.full((64, 96), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert wgmma_gemm.gemm(a, b, out=wide[:, 16:80]).data_ptr() == wide[:, 16:].data_ptr()
    assert not wide[:, 16:80].isnan().any() and wide[:, :16].isnan().all() and wide[:, 80:].isnan().all()


@hopper
def test_empty_operands_give_an_empty_or_a_zero_result():
    for shape in (0, 16, 64), (16, 0, 64), (16, 16, 0):
        a, b, out = experiments.make_inputs(*shape)
        assert torch.equal(wgmma_gemm.gemm(a, b, out=out.fill_(7)), torch.zeros_like(out)), shape


@hopper
def test_cases_for_the_sanitizer_are_right():
    experiments.sanitizer_cases()
