import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from ch14.descriptors import tile_copy
from ch14.gemm import kernels as gemm_kernels
from ch14.gemm.configs import GemmConfig, parse
from ch14.gemm.configs import configs as gemm_configs
from ch14.gemm.configs import job as gemm_job
from tilelab import build, build_worker, cubin, device, worker_pool

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
    jobs = [gemm_job(CONFIG, target) for target in device.TARGETS[1:]]
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
            assert 32 <= report.registers <= 255 and report.spills <= 16
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
    eight, sixteen = (build.build_one(gemm_job(GemmConfig(128, 128, 64, warps, 3), "sm_100a"))
                      for warps in (8, 16))
    assert eight.counts["tcgen05_mma"] and not sixteen.counts["tcgen05_mma"] and sixteen.counts["mma_sync"]


def test_rejection_gives_the_numbers():
    report = build.build_one(gemm_job(GemmConfig(128, 128, 128, 8, 4), "sm_90a"))
    assert (report.status, report.launchable) == ("rejected", False)
    assert report.reason == "it needs 262,176 B of shared memory per block; sm_90a has 232,448 B."
    assert report.row()["smem"] == 262176


def test_ptxas_refusal_is_one_line():
    report = build.build_one(gemm_job(GemmConfig(256, 256, 128, 16, 5), "sm_90a"))
    assert report.status == "failed" and report.registers is None
    assert report.reason.startswith("ptxas: Insufficient registers (128)") and "\n" not in report.reason


def test_a_real_failing_pass_is_named():
    """A flattened loop whose body branches after an inner loop."""
    report = build.build_one(build.Job("tilelab.faults_kernels:double_kernel", {"x": "*fp32", "y": "*fp32", "n": "i32"},
                                       {"BLOCK": 64, "FAULT": "failing compiler pass"}, "sm_90a"))
    assert report.status == "failed" and "\n" not in report.reason
    assert report.reason.startswith("the compiler pass TritonGPUFuseNestedLoops failed")


def test_failing_pass_is_named():
    said = "x.mlir:3:1: error: operand does not dominate this use\nPipeline failed while executing [`SomePass` on"
    assert build_worker._describe_error(RuntimeError("PassManager::run failed"), said) == \
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
    ({"kernel": "tilelab.nowhere:kernel"}, "tilelab.nowhere:kernel cannot be imported"),
    ({"kernel": "json:dumps"}, "json:dumps is no @triton.jit function"),
    ({"aligned": ("M",)}, "M: given but not taken"),
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


def test_every_job_is_reported_once(tmp_path):
    dies = kernel_file(tmp_path, "import os\nos.abort()")
    jobs = [*(copy_job(name=f"good {stages}", num_stages=stages) for stages in range(1, 5)),
            copy_job(name="dies", kernel=dies), copy_job(name="nowhere", kernel="tilelab.nowhere:kernel"),
            copy_job(name="cannot be sent", constants={"BLOCK_M": 64, "BLOCK_N": object()})]
    reports = list(build.build(jobs))
    assert sorted(report.job.name for report in reports) == sorted(job.name for job in jobs)
    assert {report.job.name for report in reports if report.launchable} == {f"good {i}" for i in range(1, 5)}
    assert all(report.reason for report in reports if not report.launchable)


def test_what_a_kernel_file_prints_is_not_taken_for_an_answer(tmp_path):
    path = pathlib.Path(kernel_file(tmp_path, """
        print('{"reason": "printed"}')
        from tilelab.doctor_copy import copy_tma_kernel as kernel
        """))
    assert build.build_one(copy_job(kernel=str(path))).launchable


def test_kernel_file_may_hold_a_dataclass():
    """Dataclasses with postponed annotations look their module up in sys.modules."""
    report = build.build_one(copy_job(kernel=f"{tile_copy.__file__}:copy_tma_kernel"))
    assert report.launchable, report.reason


def test_two_builds_at_once_share_the_workers():
    found = []
    threads = [threading.Thread(target=lambda: found.extend(build.build([copy_job(), copy_job()]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [report.status for report in found] == ["ok"] * 4


def test_a_build_inside_the_loop_over_another():
    found = []

    def nested():
        for report in build.build([copy_job(), copy_job(target="sm_100a")]):
            found.append((report.status, build.build_one(copy_job(target="sm_120a")).status))

    thread = threading.Thread(target=nested, daemon=True)
    thread.start()
    thread.join(60)
    assert found == [("ok", "ok")] * 2


def test_workers_outlive_a_build(tmp_path):
    kernel = kernel_file(tmp_path, """
        import os
        raise RuntimeError(f"process {os.getpid()}")
        """)
    seen = {next(build.build([copy_job(kernel=kernel)], workers=workers)).reason for workers in (1, 2, 1)}
    assert len(seen) == 1 and re.search(r"process \d+", seen.pop())


def test_reports_come_as_they_finish(tmp_path):
    slow = copy_job(kernel=kernel_file(tmp_path, "import time\ntime.sleep(3)"), name="slow")
    assert [report.job.name for report in build.build([slow, copy_job(name="quick")], workers=2)] == ["quick", "slow"]


def test_the_interpreter_in_this_process_does_not_reach_the_compiler(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert build.build_one(gemm_job(CONFIG, "sm_90a")).launchable


def test_importing_is_light():
    code = "import sys, tilelab.build; sys.exit('triton' in sys.modules or 'torch' in sys.modules)"
    root = pathlib.Path(build.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60).returncode == 0


def test_cold_cache_is_used_and_sixty_builds_take_less_than_a_minute(tmp_path):
    from ch14.gemm.sweep import grid

    begun = time.perf_counter()
    reports = list(build.build([gemm_job(config, "sm_90a") for config in grid()[:60]], cache=tmp_path))
    assert time.perf_counter() - begun < 60
    assert len(reports) == 60 and any(os.scandir(tmp_path))


def test_a_cache_serves_only_its_own_build(tmp_path):
    build.build_one(copy_job(), cache=tmp_path)
    before = set(tmp_path.rglob("*"))
    build.build_one(copy_job(num_stages=7))
    assert before and set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("pattern, damage", [
    ("*.cubin", pathlib.Path.unlink), ("*.cubin", lambda path: path.write_bytes(path.read_bytes()[:4000])),
    ("*.ptx", lambda path: path.write_text(path.read_text()[:3000])), ("*.ptx", lambda path: path.write_bytes(b"")),
    ("*kernel.json", lambda path: path.write_text("{"))])
def test_damaged_cache_is_compiled_again(tmp_path, pattern, damage):
    whole = build.build_one(copy_job(), cache=tmp_path)
    for path in list(tmp_path.rglob(pattern)):
        damage(path)
    again = build.build_one(copy_job(), cache=tmp_path)
    assert again.launchable, again.reason
    assert (again.ptx, again.registers) == (whole.ptx, whole.registers) and whole.registers


@pytest.mark.parametrize("target", device.TARGETS)
def test_resources_agree_with_cuobjdump(target):
    config = GemmConfig(128, 256, 64, 4, 2) if target == "sm_120a" else CONFIG  # too few warps: it spills
    report = build.build_one(copy_job(target=target) if target == "sm_80" else gemm_job(config, target))
    try:
        text = cubin.cuobjdump("-res-usage", report.cubin)
    except RuntimeError as error:  # a cuobjdump may be older than the target; the figures are there all the same
        assert target in ("sm_103a", "sm_121a") and re.match(r"the cuobjdump of Triton \S+ cannot read", str(error))
        assert report.registers
        return
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert (report.registers, report.spills, report.smem_static) == tuple(map(int, found.groups()))
    assert target != "sm_120a" or report.spills > 100


def test_sass_counts():
    report = build.build_one(gemm_job(CONFIG, "sm_90a"))
    counts = build.sass_counts(report.cubin)
    assert counts["HGMMA"] and counts["UTMALDG"] and counts["UTMASTG"] and counts["SYNCS"] and not counts["UTCHMMA"]
    assert counts["HGMMA"] == len(re.findall(r"\bHGMMA\b", report.sass))
    with pytest.raises(RuntimeError, match="the cuobjdump of Triton .* cannot read this cubin: "):
        build.sass(b"no cubin")


def test_row_is_json_and_repr_is_short():
    report = build.build_one(copy_job(name="copy"))
    row = json.loads(json.dumps(report.row()))
    assert row["name"] == "copy" and row["tma_load"] == 1 and row["setmaxnreg"] == 0 and row["threads"] == 128
    assert len(repr(report)) < 1500


def test_job_for_a_kernel_object():
    from ch14.descriptors.tile_copy import copy_tma_kernel

    job = build.job_for(copy_tma_kernel, COPY["signature"], COPY["constants"], "sm_90a", num_warps=8)
    assert job.kernel == "ch14.descriptors.tile_copy:copy_tma_kernel" and build.build_one(job).threads == 256

    def local():
        pass

    with pytest.raises(ValueError, match="cannot import .*local.*: define it at the top level of a module"):
        build.job_for(local, {}, {}, "sm_90a")


@pytest.mark.parametrize("dtype, b_k_major", [("bf16", True), ("bf16", False), ("fp16", False), ("fp8", True)])
def test_no_wgmma_is_serialized(dtype, b_k_major):
    """ptxas only remarks on it, Triton drops the remark, and it costs a third of the speed."""
    configs = gemm_configs("course", dtype, "sm_90a").values()
    reports = list(build.build([gemm_job(config, "sm_90a", dtype, b_k_major) for config in configs]))
    assert len(reports) == len(configs) == 8
    for report in reports:
        assert report.counts["wgmma"] and build.ptxas_remarks(report.ptx, "sm_90a") == [], report.job.name


def test_serialized_wgmma_is_remarked_on(tmp_path):
    """The course's kernel with its two accumulators in a flattened loop: what the test above must be able to see."""
    source = pathlib.Path(gemm_kernels.__file__).read_text()
    flattened = source.replace("flatten=EXTRA_N == 0", "flatten=True").replace("from __future__ import annotations", "")
    assert "flatten=True" in flattened
    path = tmp_path / "flattened.py"
    path.write_text(flattened)
    job = gemm_job(parse("128,192,64,4,5"), "sm_90a")
    report = build.build_one(dataclasses.replace(job, kernel=f"{path}:gemm_persistent_kernel"))
    assert report.launchable, report.reason
    remark, = build.ptxas_remarks(report.ptx, "sm_90a")
    assert "wgmma.mma_async instructions are serialized" in remark


def test_no_remarks_is_not_what_a_refused_ptx_gives():
    with pytest.raises(RuntimeError):
        build.ptxas_remarks("no PTX", "sm_90a")


def test_an_edited_kernel_file_is_compiled_as_it_is_now(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path = tmp_path / "edited.py"
    for value in (1001, 1002, 1003):  # same size, same second: all that a bytecode cache looks at
        path.write_text("import triton\nimport triton.language as tl\nG = tl.constexpr(%d)\n"
                        "@triton.jit\ndef kernel(p):\n    tl.store(p, G)\n" % value)
        assert str(value) in build.build_one(build.Job(f"{path}:kernel", {"p": "*i32"}, {}, "sm_90a")).ptx


TWO_KERNELS = """
#include "ptx.cuh"
extern "C" __global__ void small(float* out) { out[threadIdx.x] = 1; }
extern "C" __global__ void big(const float* in, float* out) {
    __shared__ float tile[1024];
    extern __shared__ float more[];
    float held[64];
    for (int i = 0; i < 64; i++) held[i] = in[i * threadIdx.x];
    tile[threadIdx.x] = held[int(in[0])];
    cp_async_16(shared_address(more), in);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = tile[1023 - threadIdx.x] + more[5];
}
"""


@pytest.fixture
def cu_job(tmp_path, monkeypatch):
    """cu_job("big", target, ...) is the Job of a kernel in a file of TWO_KERNELS, or of `text`."""
    monkeypatch.setenv("TILES_CUBINS", str(tmp_path / "cubins"))

    def job(name, target="sm_90a", text=TWO_KERNELS, signature=None, constants=None, **changes):
        (tmp_path / "two.cu").write_text(text)
        return build.Job(f"{tmp_path}/two.cu:{name}", signature or {}, constants or {}, target, **changes)

    return job


@pytest.mark.parametrize("target", device.TARGETS)
def test_cu_figures_are_of_that_kernel(cu_job, target):
    big, small = (build.build_one(cu_job(name, target, num_warps=8)) for name in ("big", "small"))
    for report, name in ((big, "big"), (small, "small")):
        assert report.launchable and (report.threads, report.smem, report.ptx) == (256, 0, "")
        if not report.counts:
            assert target in ("sm_103a", "sm_121a") and report.registers  # Triton 3.6's cuobjdump cannot read them
            continue
        text = cubin.cuobjdump("-res-usage", report.cubin)
        found = re.search(rf"Function {name}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
        assert (report.registers, report.spills, report.smem_static) == tuple(map(int, found.groups()))
        assert report.sass.count("Function : ") == 1 and f"Function : {name}\n" in report.sass
        assert json.loads(json.dumps(report.row()))["STG"] == report.counts["STG"] == 1
    assert big.spills == 256 and small.spills == 0 and big.smem_static - small.smem_static == 4096
    if big.counts:
        assert big.counts["LDGSTS"] == 1 and big.counts["LDG"] >= 64 and big.counts["UBLKCP"] == 0
        assert small.counts["LDGSTS"] == small.counts["LDG"] == 0


def test_cu_copy_engine_is_counted():
    kernel = str(pathlib.Path(build.__file__).with_name("doctor_copy.cu")) + ":bulk_copy"
    report = build.build_one(build.Job(os.path.relpath(kernel), {}, {"CHUNK_BYTES": 16384}, "sm_90a", num_warps=1))
    assert report.launchable, report.reason
    assert report.counts["UBLKCP"] == 2 and report.counts["SYNCS"] and not report.counts["LDG"]
    assert report.counts == dict.fromkeys(cubin.OPCODES, 0) | build.sass_counts(report.cubin)


def test_cu_shared_memory_and_threads_decide(cu_job):
    reports = {target: build.build_one(cu_job("big", target, smem_bytes=98304)) for target in ("sm_90a", "sm_121a")}
    assert reports["sm_90a"].launchable and reports["sm_90a"].smem == 98304
    assert reports["sm_90a"].programs_per_sm == 2  # 98,304 + 4,096 + 1,024 B of 233,472
    assert build.build_one(cu_job("small", smem_bytes=76000)).programs_per_sm == 3
    assert build.build_one(cu_job("big", smem_bytes=76000)).programs_per_sm == 2  # its static 4,096 B are too many
    assert build.build_one(cu_job("big", "sm_80", smem_bytes=79000)).programs_per_sm == 1
    refused = reports["sm_121a"]
    assert refused.status == "rejected"
    assert refused.reason == "it needs 102,400 B of shared memory per block; sm_121a has 101,376 B."
    reason = build.build_one(cu_job("small", num_warps=33)).reason
    assert reason == "it has 1,056 threads per block; sm_90a allows 1,024."


def test_cu_constants_reach_the_compiler(cu_job):
    text = """
        static_assert(ON == 1 && OFF == 0 && N == 7 && sizeof(ELEMENT) == 2, "");
        extern "C" __global__ void kernel(ELEMENT* out) { out[0] = N; }
    """
    constants = {"ON": True, "OFF": False, "N": 7, "ELEMENT": "unsigned short"}
    report = build.build_one(cu_job("kernel", text=text, constants=constants))
    assert report.launchable, report.reason


@pytest.mark.parametrize("changes, reason", [
    ({"name": "nope"}, "two.cu defines no kernel nope; it defines big, small."),
    ({"name": "f", "text": "__global__ void f() {}"},
     'two.cu defines no kernel f; it defines _Z1fv (extern "C" leaves a name as it is written).'),
    ({"name": "f", "text": "static_assert(true);"}, "two.cu defines no kernel f; it defines none."),
    ({"name": "f", "text": "\nconst int x = lost;\nconst int y = lost;"},
     'two.cu(2): error: identifier "lost" is undefined.'),
    ({"name": "f", "text": '#include "none.cuh"'},
     'two.cu(1): catastrophic error: cannot open source file "none.cuh".'),
    ({"name": "f", "target": "sm_80", "text": """extern "C" __global__ void f() { asm("fence.proxy.async;"); }"""},
     "two.cu does not compile for sm_80: ptxas: ")])
def test_bad_cu_job_is_one_sentence(cu_job, changes, reason):
    report = build.build_one(cu_job(**changes))
    assert report.status == "failed" and reason in report.reason and "\n" not in report.reason
    assert report.row()["registers"] is None


def test_cu_that_nvrtc_cannot_target(cu_job, monkeypatch):
    from tilelab import cuda

    def too_old(*args):
        raise cuda.CompileError("two.cu does not compile for sm_121a:\nnvrtc: error: invalid value for "
                                "--gpu-architecture (-arch)\nmore")

    monkeypatch.setattr(cuda, "compile_file", too_old)
    answer = build_worker._compile_cu(dataclasses.asdict(cu_job("small", "sm_121a")))
    assert answer == {"reason": "two.cu does not compile for sm_121a: nvrtc: error: invalid value for "
                                "--gpu-architecture (-arch)"}


def test_cu_whose_sass_cannot_be_read(cu_job, monkeypatch):
    def too_old(*args):
        raise RuntimeError("the cuobjdump of Triton 3.6 cannot read this cubin")

    monkeypatch.setattr(cubin, "cuobjdump", too_old)
    answer = build_worker._compile_cu(dataclasses.asdict(cu_job("small")))
    assert answer["counts"] == {} and answer["registers"]
    assert build._make_report(cu_job("small"), answer).launchable


def test_cu_needs_neither_triton_nor_torch(cu_job):
    code = ("import sys, json; from tilelab import build_worker; "
            "answer = build_worker._compile_cu(json.loads(sys.argv[1])); "
            "sys.exit('registers' not in answer or 'triton' in sys.modules or 'torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, json.dumps(dataclasses.asdict(cu_job("small")))],
                          cwd=pathlib.Path(build.__file__).parents[1], check=False, timeout=60)
    assert done.returncode == 0


def test_cu_cache_folder_is_the_callers(cu_job, tmp_path):
    build.build_one(cu_job("small"))
    assert len([path for path in (tmp_path / "cubins").iterdir() if path.suffix != ".listing"]) == 1
    build.build_one(cu_job("small"), cache=tmp_path / "own")
    assert len([path for path in (tmp_path / "own").iterdir() if path.suffix != ".listing"]) == 1
    assert build.build_one(cu_job("small")).seconds < 0.02  # recalled


def test_a_listing_is_made_once_and_kept_whole(cu_job, tmp_path, monkeypatch):
    report = build.build_one(cu_job("small"))
    wanted = build.sass(report.cubin)
    kept = [path for path in (tmp_path / "cubins").iterdir() if path.suffix == ".listing"]
    assert kept
    with monkeypatch.context() as patch:
        patch.setattr(cubin.subprocess, "run", None)  # nothing is run again
        assert build.sass(report.cubin) == wanted
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1])
    assert build.sass(report.cubin) == wanted


def test_cu_and_triton_jobs_mix(cu_job):
    reports = list(build.build([cu_job("big"), copy_job(), cu_job("small"), cu_job("nope")]))
    assert sorted(report.status for report in reports) == ["failed", "ok", "ok", "ok"]


def test_what_the_compiler_says_after_a_long_log_has_no_hole_before_it(tmp_path):
    """A worker's log is cut to nothing between jobs; where the next is written is the worker's to set."""
    with worker_pool.lease_worker("tilelab.build_worker", "the compiler", TRITON_INTERPRET="0") as worker:
        worker.stop()
    for name, code in (("long", "os.write(2, b'x' * 300_000)\nraise ValueError('long')"),
                       ("dies", "os.write(2, b'LLVM ERROR: at last')\nos.abort()")):
        path = tmp_path / f"{name}.py"
        path.write_text(f"import os\n{code}\n")
        reason = build.build_one(copy_job(kernel=f"{path}:kernel")).reason
    assert reason == "the compiler died (SIGABRT): LLVM ERROR: at last."
