"""Building for any target: instructions, resources, limits and reasons; and, marked `fault`, compilers that crash."""

import dataclasses
import json
import os
import pathlib
import re
import textwrap
import threading

import pytest
from cases import cases
from planted import rarely
from pythons import run_python

from ch14.descriptors.lesson import tile_copy
from ch14.gemm import kernels as gemm_kernels
from ch14.gemm.configs import GemmConfig, parse
from ch14.gemm.configs import configs as gemm_configs
from ch14.gemm.configs import job as gemm_job
from tilelab.course import notebook
from tilelab.runtime import build, build_worker, cubin

CONFIG = GemmConfig(128, 128, 64, 8, 3)
COPY = {
    "kernel": "tilelab.course.doctor_copy:copy_tma_kernel",
    "constants": {"BLOCK_M": 64, "BLOCK_N": 64},
    "signature": dict.fromkeys(("source", "destination"), "tensordesc<bf16[64, 64]>"),
}
FAMILY = {"sm_90a": "wgmma", "sm_100a": "tcgen05_mma", "sm_120a": "mma_sync"}
POINTER_KERNEL = """
    import triton
    import triton.language as tl
    @triton.jit
    def kernel(a, b, c, N: tl.constexpr):
        i = tl.arange(0, N)
        at = i[:, None] * N + i[None, :]
        tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))
    """


def copy_job(**changes):
    return build.Job(**{**COPY, "target": "sm_90a", **changes})


def kernel_file(folder, text):
    path = folder / "written_kernel.py"
    path.write_text(textwrap.dedent(text))
    return f"{path}:kernel"


def build_all(jobs):
    """Return the reports of {name: job} by name."""
    return {
        report.job.name: report
        for report in build.build([dataclasses.replace(job, name=name) for name, job in jobs.items()])
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports of one build each, all made in one call."""
    fp16 = {"a": "*fp16", "b": "*fp16", "c": "*fp32"}
    fuse = {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BLOCK": 64, "FAULT": "failing compiler pass"}
    pointers = kernel_file(tmp_path_factory.mktemp("kernels"), POINTER_KERNEL)
    return build_all(
        {
            **{target: gemm_job(CONFIG, target) for target in FAMILY},
            "sm_80": build.Job(pointers, fp16, {"N": 64}, "sm_80"),
            "copy": copy_job(),
            "sm_103a": copy_job(target="sm_103a"),
            "sm_121a": copy_job(target="sm_121a"),
            "sixteen warps": gemm_job(GemmConfig(128, 128, 64, 16, 3), "sm_100a"),
            "spills": gemm_job(GemmConfig(128, 256, 64, 4, 2), "sm_120a"),
            "too much shared memory": gemm_job(GemmConfig(128, 128, 128, 8, 4), "sm_90a"),
            "too many registers": gemm_job(GemmConfig(256, 256, 128, 16, 5), "sm_90a"),
            "failing pass": build.Job("tilelab.sweeps.faults_kernels:double_kernel", *fuse, "sm_90a"),
            "file with a dataclass": copy_job(kernel=f"{tile_copy.__file__}:copy_tma_kernel"),
        }
    )


@pytest.mark.compile
@pytest.mark.parametrize("target", FAMILY)
def test_each_target_gets_its_instructions(reports, target):
    report = reports[target]
    assert report.launchable, report.reason
    assert [name for name in FAMILY.values() if report.counts[name]] == [FAMILY[target]]
    assert report.counts["tma_load"] and report.counts["tma_store"] and report.counts["tensormap_replace"]
    assert report.threads == 256 and 32 <= report.registers <= 255 and report.spills <= 16


@pytest.mark.compile
def test_what_a_target_or_a_number_of_warps_has_not(reports):
    old = reports["sm_80"]
    assert old.launchable and old.counts["mma_sync"] and not old.counts["tma_load"]
    sixteen = reports["sixteen warps"].counts  # which lose the fifth tensor core
    assert sixteen["mma_sync"] and not sixteen["tcgen05_mma"]


@pytest.mark.compile
def test_what_cannot_be_launched_has_one_sentence(reports):
    report = reports["too much shared memory"]
    assert (report.status, report.launchable, report.row()["smem"]) == ("rejected", False, 262176)
    assert report.reason == "it needs 262,176 B of shared memory per block; sm_90a has 232,448 B."
    for name, reason in (
        ("too many registers", "ptxas: Insufficient registers (128)"),
        ("failing pass", "the compiler pass TritonGPUFuseNestedLoops failed"),
    ):
        report = reports[name]
        assert report.status == "failed" and report.registers is None
        assert report.reason.startswith(reason) and "\n" not in report.reason


def test_failing_pass_is_named():
    said = "x.mlir:3:1: error: operand does not dominate this use\nPipeline failed while executing [`SomePass` on"
    found = build_worker._describe_error(RuntimeError("PassManager::run failed"), said)
    assert found == "the compiler pass SomePass failed: operand does not dominate this use"


@pytest.mark.compile
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_100a", "spills", "sm_103a", "sm_121a"])
def test_resources_agree_with_cuobjdump(reports, name):
    report = reports[name]
    try:
        text = cubin.cuobjdump("-res-usage", report.cubin)
    except (
        RuntimeError
    ) as error:  # a cuobjdump may be older than the target; the figures are there all the same
        assert name in ("sm_103a", "sm_121a")
        assert re.match(r"the cuobjdump of Triton \S+ cannot read", str(error))
        assert report.registers
        return
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert (report.registers, report.spills, report.smem_static) == tuple(map(int, found.groups()))
    assert name != "spills" or report.spills > 100  # too few warps


@pytest.mark.compile
def test_sass_counts(reports):
    report = reports["sm_90a"]
    counts = build.sass_counts(report.cubin)
    assert counts["HGMMA"] and counts["UTMALDG"] and counts["UTMASTG"] and counts["SYNCS"]
    assert not counts["UTCHMMA"]
    assert counts["HGMMA"] == len(re.findall(r"\bHGMMA\b", report.sass))
    with pytest.raises(RuntimeError, match="the cuobjdump of Triton .* cannot read this cubin: "):
        build.sass(b"no cubin")


@pytest.mark.compile
def test_row_is_json_and_repr_is_short(reports):
    row = json.loads(json.dumps(reports["copy"].row()))
    assert row["name"] == "copy" and row["tma_load"] == 1 and row["setmaxnreg"] == 0 and row["threads"] == 128
    assert len(repr(reports["copy"])) < 1500


@pytest.mark.compile
def test_kernel_file_may_hold_a_dataclass(reports):
    """Dataclasses with postponed annotations look their module up in sys.modules."""
    assert reports["file with a dataclass"].launchable, reports["file with a dataclass"].reason


@pytest.mark.compile
@pytest.mark.fault
def test_a_crash_is_a_row_and_the_next_build_works(tmp_path):
    for crash, expected, timeout_s in (
        (r"os.write(2, b'LLVM ERROR: no such thing\n'); os.abort()", "LLVM ERROR: no such thing", 120),
        ("time.sleep(300)", "the compiler gave no answer within 2 s.", 2),
        ("raise RuntimeError('first line')", "RuntimeError: first line", 120),
    ):
        kernel = kernel_file(tmp_path, f"import os, time\n{crash}\n")
        report = build.build_one(copy_job(kernel=kernel), timeout_s)
        assert report.status == "failed" and expected in report.reason and report.reason.endswith(".")
    assert build.build_one(copy_job()).launchable


@pytest.mark.compile
def test_bad_job_is_a_failed_row():
    expected = {
        "nothing": {"kernel": "tilelab.course.doctor_copy:nothing"},
        "tilelab.nowhere:kernel cannot be imported": {"kernel": "tilelab.nowhere:kernel"},
        "json:dumps is no @triton.jit function": {"kernel": "json:dumps"},
        "M: given but not taken": {"aligned": ("M",)},
        "BLOCK_K: given but not taken": {"constants": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}},
    }
    for reason, changes in expected.items():
        report = build.build_one(copy_job(**changes))
        assert report.status == "failed" and reason in report.reason


def test_unknown_target_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="unknown target 'sm_42'"):
        build.build([copy_job(target="sm_42")])


@pytest.mark.compile
def test_stopping_early_leaves_the_workers_usable():
    jobs = [copy_job(num_stages=stages) for stages in range(1, 4)]
    some = build.build(jobs)
    next(some)
    some.close()
    assert sorted(report.job.num_stages for report in build.build(jobs)) == [1, 2, 3]
    assert list(build.build([])) == []


@pytest.mark.compile
@pytest.mark.fault
def test_every_job_is_reported_once(tmp_path):
    dies = kernel_file(tmp_path, "import os\nos.abort()")
    jobs = [
        *(copy_job(name=f"good {stages}", num_stages=stages) for stages in range(1, 4)),
        copy_job(name="dies", kernel=dies),
        copy_job(name="nowhere", kernel="tilelab.nowhere:kernel"),
        copy_job(name="cannot be sent", constants={"BLOCK_M": 64, "BLOCK_N": object()}),
    ]
    reports = list(build.build(jobs))
    assert sorted(report.job.name for report in reports) == sorted(job.name for job in jobs)
    assert {report.job.name for report in reports if report.launchable} == {f"good {i}" for i in range(1, 4)}
    assert all(report.reason for report in reports if not report.launchable)


@pytest.mark.compile
def test_what_a_kernel_file_prints_is_not_taken_for_an_answer(tmp_path):
    kernel = kernel_file(
        tmp_path,
        """
        print('{"reason": "printed"}')
        from tilelab.course.doctor_copy import copy_tma_kernel as kernel
        """,
    )
    assert build.build_one(copy_job(kernel=kernel)).launchable


@pytest.mark.compile
def test_two_builds_at_once_share_the_workers_and_one_may_be_nested():
    found = []

    def build_nested():
        for report in build.build([copy_job(), copy_job()]):
            found.append((report.status, build.build_one(copy_job()).status))

    threads = [threading.Thread(target=build_nested, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [("ok", "ok")] * 4


@pytest.mark.compile
def test_workers_outlive_a_build(tmp_path):
    kernel = kernel_file(
        tmp_path,
        """
        import os
        raise RuntimeError(f"process {os.getpid()}")
        """,
    )
    seen = {next(build.build([copy_job(kernel=kernel)], workers=workers)).reason for workers in (1, 2, 1)}
    assert len(seen) == 1 and re.search(r"process \d+", seen.pop())


@pytest.mark.compile
def test_reports_come_as_they_finish(tmp_path):
    wait = f"import os, time\nwhile not os.path.exists('{tmp_path}/go'):\n    time.sleep(0.01)\n"
    slow = copy_job(kernel=kernel_file(tmp_path, wait), name="slow")
    reports = build.build([slow, copy_job(name="quick")], workers=2)
    assert next(reports).job.name == "quick"
    (tmp_path / "go").touch()
    assert next(reports).job.name == "slow"


def test_importing_is_light():
    code = "import sys, tilelab.runtime.build; sys.exit('triton' in sys.modules or 'torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0


@pytest.mark.compile
def test_a_cache_serves_only_its_own_build_and_heals(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # it does not reach the compiler
    whole = build.build_one(copy_job(), cache=tmp_path)
    files = set(tmp_path.rglob("*"))
    build.build_one(copy_job(num_stages=7))
    assert files and set(tmp_path.rglob("*")) == files and whole.registers
    for pattern, damage in (
        ("*.cubin", pathlib.Path.unlink),
        ("*.cubin", lambda path: path.write_bytes(path.read_bytes()[:4000])),
        ("*.ptx", lambda path: path.write_text(path.read_text()[:3000])),
        ("*.ptx", lambda path: path.write_bytes(b"")),
        ("*kernel.json", lambda path: path.write_text("{")),
    ):
        for path in list(tmp_path.rglob(pattern)):
            kept = path.read_bytes()
            damage(path)
            again = build.build_one(copy_job(), cache=tmp_path)
            assert again.launchable, again.reason
            assert (again.ptx, again.registers) == (whole.ptx, whole.registers)
            path.write_bytes(kept)


def test_job_for_a_kernel_object():
    job = build.job_for(
        tile_copy.copy_tma_kernel, COPY["signature"], COPY["constants"], "sm_90a", num_warps=8
    )
    assert (job.kernel, job.num_warps) == ("ch14.descriptors.lesson.tile_copy:copy_tma_kernel", 8)

    def local():
        pass

    with pytest.raises(ValueError, match="cannot import .*local.*: define it at the top level of a module"):
        build.job_for(local, {}, {}, "sm_90a")


@pytest.mark.compile
@cases(
    "dtype, k_major, place", ("bf16", True, 0), rarely("bf16", True, 3), ("bf16", False, 0), ("fp8", True, 0)
)
def test_no_wgmma_is_serialized(dtype, k_major, place):
    """The widest tiles: ptxas only remarks on it, Triton drops the remark, and it costs a third of the speed."""
    config = list(gemm_configs("course", dtype, "sm_90a").values())[place]
    report = build.build_one(gemm_job(config, "sm_90a", dtype, k_major))
    assert report.counts["wgmma"] and build.ptxas_remarks(report.ptx, "sm_90a") == []


@pytest.mark.compile
def test_serialized_wgmma_is_remarked_on(tmp_path):
    """The course's kernel with its two accumulators in a flattened loop: what the test above must be able to see."""
    source = pathlib.Path(gemm_kernels.__file__).read_text()
    flattened = source.replace("flatten=EXTRA_N == 0", "flatten=True").replace(
        "from __future__ import annotations", ""
    )
    assert "flatten=True" in flattened
    path = tmp_path / "flattened.py"
    path.write_text(flattened)
    job = gemm_job(parse("128,192,64,4,5"), "sm_90a")
    report = build.build_one(dataclasses.replace(job, kernel=f"{path}:gemm_persistent_kernel"))
    assert report.launchable, report.reason
    (remark,) = build.ptxas_remarks(report.ptx, "sm_90a")
    assert "wgmma.mma_async instructions are serialized" in remark


@pytest.mark.compile
def test_no_remarks_is_not_what_a_refused_ptx_gives():
    with pytest.raises(RuntimeError):
        build.ptxas_remarks("no PTX", "sm_90a")


@pytest.mark.compile
def test_an_edited_kernel_file_is_compiled_as_it_is_now(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path = tmp_path / "edited.py"
    for value in (1001, 1002):  # same size, same second: all that a bytecode cache looks at
        path.write_text(
            "import triton\nimport triton.language as tl\nG = tl.constexpr(%d)\n"
            "@triton.jit\ndef kernel(p):\n    tl.store(p, G)\n" % value
        )
        assert str(value) in build.build_one(build.Job(f"{path}:kernel", {"p": "*i32"}, {}, "sm_90a")).ptx


# ---- CUDA C++


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


@pytest.fixture(scope="module")
def cu_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cu")


@pytest.fixture
def cu_job(cu_folder, monkeypatch):
    """cu_job("big", target, ...) is the Job of a kernel in a file of TWO_KERNELS, or of `text`."""
    monkeypatch.setenv("TILES_CUBINS", str(cu_folder / "cubins"))

    def job(name, target="sm_90a", text=TWO_KERNELS, constants=None, **changes):
        (cu_folder / "two.cu").write_text(text)
        return build.Job(f"{cu_folder}/two.cu:{name}", {}, constants or {}, target, **changes)

    return job


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_121a"])
def test_cu_figures_are_of_that_kernel(cu_job, target):
    big, small = (build.build_one(cu_job(name, target, num_warps=8)) for name in ("big", "small"))
    for report, name in ((big, "big"), (small, "small")):
        assert report.launchable and (report.threads, report.smem, report.ptx) == (256, 0, "")
        if not report.counts:
            assert target == "sm_121a" and report.registers  # Triton 3.6's cuobjdump cannot read it
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


@pytest.mark.compile
def test_cu_copy_engine_is_counted():
    kernel = str(pathlib.Path(notebook.__file__).with_name("doctor_copy.cu")) + ":bulk_copy"
    report = build.build_one(
        build.Job(os.path.relpath(kernel), {}, {"CHUNK_BYTES": 16384}, "sm_90a", num_warps=1)
    )
    assert report.launchable, report.reason
    assert report.counts["UBLKCP"] == 2 and report.counts["SYNCS"] and not report.counts["LDG"]
    assert report.counts == dict.fromkeys(cubin.OPCODES, 0) | build.sass_counts(report.cubin)


@pytest.mark.compile
def test_cu_shared_memory_and_threads_decide(cu_job):
    found = build_all(
        {
            "fits": cu_job("big", smem_bytes=98304),
            "too small a target": cu_job("big", "sm_121a", smem_bytes=98304),
            "three": cu_job("small", smem_bytes=76000),
            "two": cu_job("big", smem_bytes=76000),
            "one": cu_job("big", "sm_80", smem_bytes=79000),
            "too many threads": cu_job("small", num_warps=33),
        }
    )
    assert found["fits"].launchable and found["fits"].smem == 98304
    assert found["fits"].programs_per_sm == 2  # 98,304 + 4,096 + 1,024 B of 233,472
    assert found["three"].programs_per_sm == 3
    assert found["two"].programs_per_sm == 2  # its static 4,096 B are too many
    assert found["one"].programs_per_sm == 1
    refused = found["too small a target"]
    assert refused.status == "rejected"
    assert refused.reason == "it needs 102,400 B of shared memory per block; sm_121a has 101,376 B."
    assert found["too many threads"].reason == "it has 1,056 threads per block; sm_90a allows 1,024."


@pytest.mark.compile
def test_cu_constants_reach_the_compiler(cu_job):
    text = """
        static_assert(ON == 1 && OFF == 0 && N == 7 && sizeof(ELEMENT) == 2, "");
        extern "C" __global__ void kernel(ELEMENT* out) { out[0] = N; }
    """
    constants = {"ON": True, "OFF": False, "N": 7, "ELEMENT": "unsigned short"}
    report = build.build_one(cu_job("kernel", text=text, constants=constants))
    assert report.launchable, report.reason


@pytest.mark.compile
@cases(
    "changes, reason",
    ({"name": "nope"}, "two.cu defines no kernel nope; it defines big, small."),
    (
        {"name": "f", "text": "__global__ void f() {}"},
        'two.cu defines no kernel f; it defines _Z1fv (extern "C" leaves a name as it is written).',
    ),
    ({"name": "f", "text": "static_assert(true);"}, "two.cu defines no kernel f; it defines none."),
    ({"name": "f", "text": "\nconst int x = lost;\nconst int y = lost;"}, 'identifier "lost" is undefined.'),
    (
        {"name": "f", "text": '#include "none.cuh"'},
        'two.cu(1): catastrophic error: cannot open source file "none.cuh".',
    ),
    (
        {
            "name": "f",
            "target": "sm_80",
            "text": """extern "C" __global__ void f() { asm("fence.proxy.async;"); }""",
        },
        "two.cu does not compile for sm_80: ptxas: ",
    ),
)
def test_bad_cu_job_is_one_sentence(cu_job, changes, reason):
    report = build.build_one(cu_job(**changes))
    assert report.status == "failed" and reason in report.reason and "\n" not in report.reason
    assert report.row()["registers"] is None


def test_cu_that_nvrtc_cannot_target(cu_job, monkeypatch):
    from tilelab.runtime import cuda

    def too_old(*args):
        raise cuda.CompileError(
            "two.cu does not compile for sm_121a:\nnvrtc: error: invalid value for "
            "--gpu-architecture (-arch)\nmore"
        )

    monkeypatch.setattr(cuda, "compile_file", too_old)
    answer = build_worker._compile_cu(dataclasses.asdict(cu_job("small", "sm_121a")))
    assert answer == {
        "reason": "two.cu does not compile for sm_121a: nvrtc: error: invalid value for "
        "--gpu-architecture (-arch)"
    }


@pytest.mark.compile
def test_cu_whose_sass_cannot_be_read(cu_job, monkeypatch):
    def too_old(*args):
        raise RuntimeError("the cuobjdump of Triton 3.6 cannot read this cubin")

    monkeypatch.setattr(cubin, "cuobjdump", too_old)
    report = build.build_one(cu_job("small"))
    assert report.launchable and report.registers and report.counts == {}


@pytest.mark.compile
def test_a_kernel_is_built_without_torch_until_its_package_is_asked():
    code = (
        "import sys; from tilelab.runtime import build_worker; sys.modules['torch'] = None; "
        "assert build_worker._load_kernel('ch14.gemm.kernels:gemm_plain_kernel', {}).arg_names; "
        "from ch14.gemm import spec"
    )
    done = run_python("-c", code, TRITON_INTERPRET="0")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: import of torch halted; None in sys.modules"


@pytest.mark.compile
def test_cu_needs_neither_triton_nor_torch(cu_job):
    code = (
        "import sys, json; from tilelab.runtime import build_worker; "
        "answer = build_worker._compile_cu(json.loads(sys.argv[1])); "
        "sys.exit('registers' not in answer or 'triton' in sys.modules or 'torch' in sys.modules)"
    )
    assert run_python("-c", code, json.dumps(dataclasses.asdict(cu_job("small")))).returncode == 0


@pytest.mark.compile
def test_cubins_and_listings_are_kept_in_the_callers_folder(cu_job, cu_folder, monkeypatch):
    def kept(folder, is_listing):
        return [path for path in (cu_folder / folder).iterdir() if (path.suffix == ".listing") == is_listing]

    report = build.build_one(cu_job("small"), cache=cu_folder / "own")
    assert len(kept("own", False)) == 1
    monkeypatch.setenv("TILES_CUBINS", str(cu_folder / "own"))
    wanted = build.sass(report.cubin)
    assert kept("own", True)
    with monkeypatch.context() as patch:
        patch.setattr(cubin.subprocess, "run", None)  # nothing is run again
        assert build.sass(report.cubin) == wanted
    for path in kept("own", True):
        path.write_bytes(path.read_bytes()[:-1])
    assert build.sass(report.cubin) == wanted


@pytest.mark.compile
def test_cu_and_triton_jobs_mix(cu_job):
    reports = list(build.build([cu_job("big"), copy_job(), cu_job("small"), cu_job("nope")]))
    assert sorted(report.status for report in reports) == ["failed", "ok", "ok", "ok"]
    found = [report.status for report in build.disassemble([cu_job("big"), cu_job("nope")])]
    assert found == ["ok", "failed"]
