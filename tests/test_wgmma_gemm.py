import re

import pytest
import torch

from ch10 import wgmma_gemm
from ch10.wgmma_gemm import experiments
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig, candidates
from tilelab import build, device

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")
A, B = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(24, 64, dtype=torch.bfloat16)
EVERY = {**STEPS, **{str(config): config for config in candidates()}}


@pytest.fixture(scope="module")
def built():
    """Reports by name, compiled for sm_90a."""
    jobs = {name: wgmma_gemm.job(config) for name, config in EVERY.items()}
    reports = {report.job.name: report for report in build.build(jobs.values())}
    return {name: reports[job.name] for name, job in jobs.items()}


# ---- what the compiler makes of it


@pytest.mark.parametrize("name", EVERY)
def test_every_configuration_compiles_and_holds_what_it_teaches(built, name):
    report, config = built[name], EVERY[name]
    assert report.launchable and report.spills == 0 and report.threads == config.threads, report.reason
    counts = report.counts
    assert counts["HGMMA"] == 4 * config.depth * config.block_m // config.consumers // 64
    assert counts["UTMALDG"] and counts["SYNCS"] and bool(counts["UTMASTG"]) == (config.kernel != "split")
    assert not re.search(r"\bHMMA|\bLDGSTS", report.sass)


def test_the_products_of_a_step_follow_each_other_without_a_wait(built):
    lines = [line for line in built["wide"].sass.splitlines() if "HGMMA" in line or "WARPGROUP.DEPBAR" in line]
    first = next(index for index, line in enumerate(lines) if "HGMMA" in line)
    assert all("HGMMA" in line for line in lines[first:first + 4]) and "DEPBAR" in lines[first + 4]


def test_registers_are_handed_over(built):
    for name, sass in ((name, built[name].sass) for name in ("roles", "wide")):
        assert "USETMAXREG.DEALLOC" in sass and "USETMAXREG.TRY_ALLOC" in sass, name
    assert "USETMAXREG" not in built["ring"].sass


def test_a_cluster_needs_no_fence_of_the_whole_gpu_at_each_step(built):
    body = built["cluster"].sass
    loop = body[body.index("HGMMA"):body.rindex("HGMMA")]
    assert "MEMBAR" not in loop and "UTMALDG.2D.MULTICAST" in body


@pytest.mark.parametrize("target", ["sm_100a", "sm_120a"])
def test_no_other_target_has_wgmma(target):
    report = build.build_one(wgmma_gemm.job(STEPS["raster"], target))
    assert report.status == "failed"
    assert re.search(rf"not supported on \.target '{target}'|does not compile for {target}", report.reason)


def test_time_stamps_are_written_only_when_asked_for(built):
    assert "CS2R" not in built["tile"].sass
    traced = wgmma_gemm.job(STEPS["tile"])
    traced.constants["TIMELINE"] = 1
    assert "CS2R" in build.build_one(traced).sass


# ---- arguments


def sentence(caught):
    text = str(caught.value)
    return text.endswith(".") and "\n" not in text


@pytest.mark.parametrize("a, b, out, said", [
    ([1.0], B, None, "a must be a torch.Tensor; it is a list."),
    (A.to_sparse(), B, None, "a must be dense; it is sparse_coo."),
    (A[0], B, None, "a must be a matrix with at least one element; its shape is (64,)."),
    (A[:0], B, None, "its shape is (0, 64)"),
    (A.float(), B, None, "a must be bfloat16; it is float32."),
    (A.clone().requires_grad_(), B, None, "gemm has no backward pass and a requires a gradient"),
    (torch._neg_view(A), B, None, "a is a view that negates"),
    (A.expand(16, 64)[:1].expand(16, 64), B, None, "a must be stored row by row; its strides are (0, 1)"),
    (A.T, B, None, "a must be stored row by row; its strides are (1, 64): use contiguous()."),
    (A.flatten()[1:961].view(15, 64), B, None, "a must start at a multiple of 16 bytes"),
    (torch.zeros(4, 68, dtype=torch.bfloat16)[:, :64], B, None, "a multiple of 8 elements"),
    (A, B[:, :32], None, "a (M, K) and b (N, K) differ in K: a is 16 x 64 and b is 24 x 32."),
    (A, torch.zeros(20, 64, dtype=torch.bfloat16), None, "here N is 20 and K is 64: pad them with zeros."),
    (A[:, :60], B[:, :60], None, "here N is 24 and K is 60"),
])
def test_bad_matrices_are_one_sentence(a, b, out, said):
    with pytest.raises(ValueError) as caught:
        wgmma_gemm.prepare(a, b, out)
    assert said in str(caught.value) and sentence(caught)


@pytest.mark.skipif(device.current().has_wgmma, reason="runs there")
def test_without_wgmma_it_says_what_to_do():
    with pytest.raises(device.Unsupported, match=r"needs WGMMA \(compute capability 9.0\); here is .*ch14.gemm.*\.$"):
        wgmma_gemm.gemm(A, B)


def test_matrices_on_the_cpu_are_refused(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: H200)
    with pytest.raises(ValueError, match="a and b must be on the GPU; they are on cpu."):
        wgmma_gemm.gemm(A, B)


@pytest.mark.parametrize("config, said", [
    (7, "config is a WgmmaConfig or its text, best or one of tile, .*; here it is a int."),
    ("fast", "the steps are best, tile, .*; here it is 'fast'."),
    ("split,64,64,4,cluster=8", "a cluster of 8 shares at least as many K steps of 64; K is 64."),
    ("a,b", "a configuration is KERNEL"),
])
def test_a_bad_choice_is_one_sentence(config, said):
    with pytest.raises(ValueError, match=said) as caught:
        wgmma_gemm.chosen(config, 64, 64, 64, 132)
    assert sentence(caught)


def test_a_choice_that_does_not_fit_is_unsupported():
    with pytest.raises(device.Unsupported, match="cannot run: it needs 311,376 B of shared memory"):
        wgmma_gemm.chosen("specialised,128,256,5,consumers=2", 64, 64, 64, 132)


def test_a_choice_is_found():
    assert wgmma_gemm.chosen("raster", 1, 8, 8, 132) is STEPS["raster"] is wgmma_gemm.configs()["raster"]
    assert wgmma_gemm.chosen("best", 4096, 4096, 4096, 132) in candidates()


def test_the_spec():
    a, b = torch.randn(5, 8), torch.randn(16, 8)
    torch.testing.assert_close(wgmma_gemm.spec(a, b), a.double() @ b.double().T)


# ---- on a GPU

HOPPER = pytest.mark.skipif(not device.current().has_wgmma,
                            reason=f"needs a GPU with WGMMA: here is {device.current().describe()}")


@HOPPER
@pytest.mark.parametrize("name", EVERY)
def test_every_configuration_is_right(name):
    for shape in experiments.RAGGED:
        if EVERY[name].kernel == "split" and EVERY[name].cluster > EVERY[name].steps(shape[2]):
            continue
        row = experiments.verify(EVERY[name], *shape)
        assert row["status"] == "ok", (shape, row["reason"])


@HOPPER
@pytest.mark.parametrize("size", [128, 1024])
def test_kernels_that_start_early_wait_for_what_they_read_and_overwrite(size):
    """A chain in which each result is the next one's operand, and buffers are written again while others read."""
    kinds = [STEPS["raster"], WgmmaConfig("split", 64, 128, 2, cluster=2, early=True), STEPS["tile"],
             WgmmaConfig("specialised", 64, 64, 4, persistent=True, early=True)]
    b = torch.nn.init.orthogonal_(torch.empty(size, size)).bfloat16().cuda()
    buffers = [torch.randn(size, size, device="cuda").bfloat16() for _ in range(3)]
    slow = [buffer.clone() for buffer in buffers]
    launches = [wgmma_gemm.prepare(buffers[i % 3], b, buffers[(i + 1) % 3], config=kinds[i % 4]) for i in range(60)]
    for launch in launches:
        launch()
    for i in range(60):
        wgmma_gemm.gemm(slow[i % 3], b, slow[(i + 1) % 3], config=kinds[i % 4])
        torch.cuda.synchronize()
    assert all(map(torch.equal, buffers, slow))


@HOPPER
@pytest.mark.parametrize("name", ["raster", "best"])
def test_a_launch_is_replayed_in_a_graph(name):
    a, b, out = experiments.inputs(300, 264, 520)
    launch = wgmma_gemm.prepare(a, b, out, config=name)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    wanted = out.clone()
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted) and launch.out is out


@HOPPER
def test_out_of_the_operands_and_views_of_a_buffer():
    buffer = torch.randn(64, 192, device="cuda").bfloat16()
    a, b, out = buffer[:, :64], buffer[:, 64:128], buffer[:, 128:]
    with pytest.raises(ValueError, match="out lies in the memory that a spans"):
        wgmma_gemm.gemm(a, b, out)
    wide = torch.full((64, 96), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert wgmma_gemm.gemm(a, b, wide[:, 16:80]).data_ptr() == wide[:, 16:].data_ptr()
    assert not wide[:, 16:80].isnan().any() and wide[:, :16].isnan().all() and wide[:, 80:].isnan().all()
    with pytest.raises(ValueError, match="trace is a contiguous int64 tensor of shape"):
        wgmma_gemm.prepare(a, b, trace=torch.zeros(1, device="cuda"))


@HOPPER
def test_cases_for_the_sanitizer_are_right():
    experiments.sanitizer_cases()
