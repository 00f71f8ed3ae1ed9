import os
import textwrap
import threading

import pytest

from ch14 import gemm_configs
from ch14.gemm_configs import GemmConfig
from tilelab import build, device

CONFIG = GemmConfig(128, 128, 64, 8, 3)
COPY = {"kernel": "tilelab.doctor_copy:copy_tma_kernel", "constants": {"BLOCK_M": 64, "BLOCK_N": 64},
        "signature": dict.fromkeys(("source", "destination"), "tensordesc<bf16[64, 64]>")}


def copy_job(**changes):
    return build.Job(**{**COPY, "target": "sm_90a", **changes})


def kernel_file(folder, text):
    path = folder / "written_kernel.py"
    path.write_text(textwrap.dedent(text))
    return f"{path}:kernel"


def test_each_target_gets_its_instructions():
    jobs = [gemm_configs.job(CONFIG, target) for target in device.TARGETS[1:]]
    reports = {report.job.target: report for report in build.build(jobs)}
    family = {"sm_90a": "wgmma", "sm_100a": "tcgen05_mma", "sm_103a": "tcgen05_mma", "sm_120a": "mma_sync",
              "sm_121a": "mma_sync"}
    for target, report in reports.items():
        assert report.launchable, report.reason
        found = {name for name in ("wgmma", "tcgen05_mma", "mma_sync") if report.counts[name]}
        assert found == {family[target]}
        assert report.counts["tma_load"] and report.counts["tma_store"] and report.counts["tensormap_replace"]
        assert report.threads == 256
        if report.registers is not None:  # the cuobjdump in Triton 3.6 cannot read sm_103a and sm_121a
            assert 32 <= report.registers <= 255 and report.spills == 0
    assert len(reports) == 5


def test_pointer_kernel_for_sm_80(tmp_path):
    kernel = kernel_file(tmp_path, """
        import triton
        import triton.language as tl
        @triton.jit
        def kernel(a, b, c, N: tl.constexpr):
            i = tl.arange(0, N)
            at = i[:, None] * N + i[None, :]
            tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))
        """)
    report = build.build_one(build.Job(kernel, {"a": "*fp16", "b": "*fp16", "c": "*fp32"}, {"N": 64}, "sm_80"))
    assert report.launchable and report.counts["mma_sync"] and not report.counts["tma_load"]


def test_sixteen_warps_lose_the_fifth_tensor_core():
    eight, sixteen = (build.build_one(gemm_configs.job(GemmConfig(128, 128, 64, warps, 3), "sm_100a"))
                      for warps in (8, 16))
    assert eight.counts["tcgen05_mma"] and not sixteen.counts["tcgen05_mma"] and sixteen.counts["mma_sync"]


def test_rejection_gives_the_numbers():
    report = build.build_one(gemm_configs.job(GemmConfig(128, 128, 128, 8, 4), "sm_90a"))
    assert (report.status, report.launchable) == ("rejected", False)
    assert report.reason == "it needs 262,176 B of shared memory a block; sm_90a has 232,448 B."
    assert report.row()["smem"] == 262176


def test_ptxas_refusal_is_one_line():
    report = build.build_one(gemm_configs.job(GemmConfig(256, 256, 128, 16, 5), "sm_90a"))
    assert report.status == "failed" and report.registers is None
    assert report.reason.startswith("ptxas: Insufficient registers (128)") and "\n" not in report.reason


def test_failing_pass_is_named():
    said = "x.mlir:3:1: error: operand does not dominate this use\nPipeline failed while executing [`SomePass` on"
    assert build._why(RuntimeError("PassManager::run failed"), said) == \
        "the compiler pass SomePass failed: operand does not dominate this use"


@pytest.mark.parametrize("crash, expected", [
    ("os.abort()", "died (SIGABRT)"),
    ("os.kill(os.getpid(), 11)", "died (SIGSEGV)"),
    ("sys.exit(3)", "died (exit status 3)"),
    ("sys.stderr.write('LLVM ERROR: no such thing\\n'); sys.stderr.flush(); os.abort()", "LLVM ERROR: no such thing"),
    ("time.sleep(60)", "no answer within 3 s"),
    ("raise RuntimeError('first line')", "RuntimeError: first line"),
])
def test_crash_is_a_row_and_the_next_build_works(tmp_path, crash, expected):
    job = copy_job(kernel=kernel_file(tmp_path, f"import os, sys, time\n{crash}\n"))
    report = build.build_one(job, timeout_s=3)
    assert report.status == "failed" and expected in report.reason and report.reason.endswith(".")
    assert build.build_one(copy_job()).launchable


@pytest.mark.parametrize("changes, expected", [
    ({"kernel": "tilelab.doctor_copy:nothing"}, "nothing"),
    ({"kernel": "tilelab.nowhere:kernel"}, "nowhere"),
    ({"constants": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}}, "BLOCK_K: given but not taken"),
])
def test_bad_job_is_a_failed_row(changes, expected):
    report = build.build_one(copy_job(**changes))
    assert report.status == "failed" and expected in report.reason


def test_unknown_target_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="unknown target 'sm_42'"):
        build.build([copy_job(target="sm_42")])


def test_stopping_early_leaves_the_workers_usable():
    jobs = [copy_job(num_stages=stages) for stages in range(1, 5)]
    some = build.build(jobs)
    next(some)
    some.close()
    assert sorted(report.job.num_stages for report in build.build(jobs)) == [1, 2, 3, 4]
    assert list(build.build([])) == []


def test_two_builds_at_once_take_turns():
    found = []
    threads = [threading.Thread(target=lambda: found.extend(build.build([copy_job(), copy_job()]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [report.status for report in found] == ["ok"] * 4


def test_the_interpreter_in_this_process_does_not_reach_the_compiler(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert build.build_one(gemm_configs.job(CONFIG, "sm_90a")).launchable


def test_cold_cache_is_used_and_sixty_builds_take_less_than_a_minute(tmp_path):
    from ch14.gemm_trials import grid

    jobs = [gemm_configs.job(config, "sm_90a") for config in grid()[:60]]
    reports = list(build.build(jobs, cache=tmp_path))
    assert len(reports) == 60 and any(os.scandir(tmp_path))
    assert sum(report.seconds for report in reports) < 120  # two workers


@pytest.mark.parametrize("b_k_major", [True, False])
def test_no_wgmma_is_serialized(b_k_major):
    """ptxas only remarks on it, Triton drops the remark, and it costs a third of the speed."""
    configs = gemm_configs.configs("course", target="sm_90a")
    for report in build.build([gemm_configs.job(config, "sm_90a", b_k_major=b_k_major) for config in configs]):
        assert report.counts["wgmma"] and build.ptxas_remarks(report.ptx, "sm_90a") == [], report.job.name
