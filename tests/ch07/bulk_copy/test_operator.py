"""The bulk copies: what the compiler makes of them, configurations, the launcher's checks, and results on a GPU."""

import contextlib
import ctypes
import dataclasses
import re
import threading

import pytest
import torch
from cases import cases
from sentences import refused

from ch07 import bulk_copy
from ch07.bulk_copy import OPS, BulkConfig, configs
from ch07.bulk_copy.lesson import experiments, sweep
from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.measure import bench, check
from tilelab.runtime import build, device

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")
# Every configuration of axpy and every kernel is built for Hopper, and one of each kernel for a family after it.
BUILT = [("copy", name, "sm_90a") for name in ("loads", "cp_async", "bulk_ring")]
BUILT += [("axpy", name, "sm_90a") for name in configs("axpy")]
BUILT += [("axpy", "loads", "sm_100a"), ("axpy", "cp_async", "sm_120a")]
BUILT += [("axpy", "bulk_ring", "sm_100a"), ("axpy", "bulk_ring", "sm_120a")]
IN_ORDER = BulkConfig("bulk_in_order", 32, 8192, stages=4, chunks_per_cta=0, ctas_per_sm=2)


@pytest.fixture(scope="module")
def built():
    """Reports by (op, variant, target), and those of rings that lack a line by (op, fault, stages)."""
    jobs = {
        (op, name, target): bulk_copy.job(configs(op)[name], target, experiments.ELEMENT[op])
        for op, name, target in BUILT
    }
    jobs["copy", "bulk_in_order", "sm_90a"] = bulk_copy.job(IN_ORDER, "sm_90a")
    jobs |= {
        ("axpy", element, "sm_90a"): bulk_copy.job(configs("axpy")["bulk_batch"], "sm_90a", element)
        for element in ("bf16", "f16")
    }
    with contextlib.ExitStack() as stack:
        for op, config, fault in experiments.broken_cases():
            path = stack.enter_context(experiments.broken_source(fault))
            jobs[op, fault, config.stages] = bulk_copy.job(config, "sm_90a", experiments.ELEMENT[op], path)
        named = [dataclasses.replace(job, name=" ".join(map(str, key))) for key, job in jobs.items()]
        reports = {report.job.name: report for report in build.build(named)}
    return {key: reports[" ".join(map(str, key))] for key in jobs}


@pytest.mark.compile
def test_every_variant_compiles_and_holds_what_it_teaches(built):
    for op, name, target in BUILT:
        report, config, case = built[op, name, target], configs(op)[name], (op, name, target)
        assert report.launchable and report.spills == 0, (case, report.reason)
        assert report.threads == config.threads, (case, report.reason)
        bulk, counts = config.kernel == "bulk", report.counts
        assert (counts["UBLKCP"] > 0, counts["SYNCS"] > 0) == (bulk, bulk), case
        assert (counts["LDGSTS"] > 0) == (config.kernel == "cp_async"), case
        assert (counts["LDS"] > 0) == (config.kernel == "cp_async" or (bulk and op == "axpy")), case
        # Threads move 16 bytes only where no engine does.
        assert bool(re.search(r"LDG\.E\.128", report.sass)) == (config.kernel == "loads"), case
        assert bool(re.search(r"STG\.E\.128", report.sass)) == (config.kernel in ("loads", "cp_async")), case
        assert bool(re.search(r"LDGSTS\S*\.128", report.sass)) == (config.kernel == "cp_async"), case


@pytest.mark.compile
def test_other_elements_and_the_ring_in_order_compile(built):
    for key in (("axpy", "bf16", "sm_90a"), ("axpy", "f16", "sm_90a"), ("copy", "bulk_in_order", "sm_90a")):
        report = built[key]
        assert report.launchable and not report.spills and report.counts["UBLKCP"], (key, report.reason)


@pytest.mark.compile
def test_a_line_left_out_is_missing_from_the_machine_code(built):
    whole = built["axpy", "nothing", 4]
    broken = {fault: built["axpy", fault, 4] for fault in ("expect_tx", "phase", "proxy_fence", "wait_read")}
    assert all(report.launchable for report in (whole, *broken.values(), built["copy", "wait_read", 1]))
    assert len({report.sass for report in (whole, *broken.values())}) == 5
    assert broken["proxy_fence"].counts["FENCE"] < whole.counts["FENCE"]
    found = {what for what, report in broken.items() if report.counts["FENCE"] != whole.counts["FENCE"]}
    assert found == {"proxy_fence"}
    waits = {what: len(re.findall(r"\bDEPBAR", report.sass)) for what, report in broken.items()}
    assert waits.pop("wait_read") < len(re.findall(r"\bDEPBAR", whole.sass)) == min(waits.values())


@cases(
    "change, message",
    ({"kernel": "tma"}, "unknown kernel 'tma'; choose one of loads, cp_async, bulk, bulk_in_order"),
    ({"threads": 33}, "threads is 33; it must be 32 to 1,024 in steps of 32"),
    ({"threads": 2048}, "threads is 2048"),
    ({"chunk_bytes": 24}, "chunk_bytes is 24; it must be 16 to 524,272 in steps of 16"),
    ({"chunk_bytes": 1 << 20}, "chunk_bytes is 1048576"),
    ({"stages": 0}, "stages is 0; it must be 1 to 1,024"),
    ({"chunks_per_cta": -1}, "chunks_per_cta is -1"),
    ({"ctas_per_sm": 0}, "ctas_per_sm is 0"),
    ({"kernel": "loads", "stages": 2}, "loads has no ring; its stages and chunks_per_cta must be 1"),
    ({"kernel": "loads", "chunks_per_cta": 0}, "loads has no ring"),
    ({"kernel": "bulk_in_order"}, "bulk_in_order is persistent; its chunks_per_cta must be 0"),
)
def test_bad_configuration_is_one_sentence(change, message):
    with refused(message):
        BulkConfig(**{"kernel": "bulk", "threads": 32, "chunk_bytes": 2048, **change})


@cases(
    "config, found",
    (BulkConfig("bulk", 32.0, 2048), "threads .* it is 32.0"),
    (BulkConfig("bulk", 32, 2048, stages=True), "stages .* it is True"),
)
def test_a_configuration_without_whole_numbers_is_one_sentence(config, found):
    for use in (
        lambda: bulk_copy.job(config, "sm_90a"),
        lambda: bulk_copy.prepare(torch.zeros(64), config=config),
    ):
        with pytest.raises(ValueError, match=f"^{found}\\.$"):
            use()


@pytest.mark.compile
@pytest.mark.skipif(not emulator.is_available(), reason="needs g++")
def test_the_ring_in_order_leaves_its_counter_at_zero():
    """A launch with fewer chunks than CTAs, one with several chunks per stage, and both again with the same counter."""
    constants = [f"-D{name}={value}" for name, value in IN_ORDER.constants("u8").items()]
    kernel = cuda_magic.find_kernels(bulk_copy.SOURCE.read_text(), constants)["bulk_in_order"]
    counter = torch.zeros(1, dtype=torch.int32)
    for nbytes in (2 * 8192 + 40, 23 * 8192 + 5) * 2:
        x, out = torch.randint(0, 256, (nbytes,), dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        launch = (x, x, out, ctypes.c_float(1), ctypes.c_uint64(nbytes), counter)
        emulator.prepare(kernel, 3, IN_ORDER.threads, launch, IN_ORDER.smem_bytes(1), 1)()
        assert torch.equal(out, x) and counter.item() == 0


def test_a_configuration_has_a_name_that_can_be_read_back():
    config = BulkConfig("bulk_in_order", 32, 2048, chunks_per_cta=0, ctas_per_sm=2)
    name = "bulk_in_order · 32 threads · 2048 B per chunk · persistent · 2 CTAs per SM"
    assert config.name == str(config) == name
    assert bulk_copy.parse(name) == config


@pytest.mark.parametrize("text", ["", "bulk", "bulk · 32 threads · 4 warps", "loads 256 × 4096 B, 2 stages"])
def test_what_is_no_name_of_a_configuration_is_refused(text):
    with pytest.raises(ValueError, match="name"):
        bulk_copy.parse(text)


def test_a_configuration_knows_its_shared_memory():
    ring = BulkConfig("bulk", 32, 2048, stages=4, chunks_per_cta=8)
    assert (ring.smem_bytes(1), ring.smem_bytes(2)) == (8192, 16384)
    assert BulkConfig("loads", 256, 4096).smem_bytes(2) == 0


def test_a_job_compiles_what_the_configuration_says():
    job = bulk_copy.job(BulkConfig("bulk", 256, 4096, stages=3, chunks_per_cta=6), "sm_100a", "bf16")
    found = job.constants
    assert found == {"ELEMENT": "bf16", "THREADS": 256, "CHUNK_BYTES": 4096, "STAGES": 3, "CHUNKS_PER_CTA": 6}
    assert (job.target, job.num_warps, job.smem_bytes) == ("sm_100a", 8, 3 * 2 * 4096)
    assert job.kernel.endswith("bulk_copy.cu:bulk")
    assert bulk_copy.job(IN_ORDER, "sm_90a").constants["CHUNKS_PER_CTA"] == 0
    assert bulk_copy.job("bulk_ring", "sm_90a").smem_bytes == 4 * 2048


def test_configurations_are_of_copy_or_axpy():
    assert list(configs())[0] == "loads" and list(configs("axpy"))[0] == "bulk_batch"
    with pytest.raises(ValueError, match="unknown op 'scale'; choose copy or axpy"):
        configs("scale")


@pytest.mark.parametrize("op", OPS)
def test_what_is_swept_can_be_told_apart_and_launched(op):
    chosen, space = sweep.grid(op), sweep.BulkSpace((1 << 20,), op, "sm_90a")
    assert len(set(map(str, chosen))) == len(set(chosen)) == len(chosen) > 80
    assert {config.kernel for config in chosen} == {"loads", "cp_async", "bulk"}
    assert [space.reject(config) for config in chosen] == [""] * len(chosen)
    for config in (*chosen, *experiments.front_configs().values()):
        job = dataclasses.replace(space, compile_for="sm_121a").job(config)
        assert job.target == "sm_121a" and job.smem_bytes == config.smem_bytes(1 if op == "copy" else 2)


def test_a_space_rejects_targets_without_tma():
    config = BulkConfig("bulk", 32, 32768, stages=2)
    ampere, hopper = (sweep.BulkSpace((1 << 20,), "axpy", target) for target in ("sm_80", "sm_90a"))
    assert ampere.reject(config) == "sm_80 has no TMA: bulk copies need sm_90a or newer."
    assert hopper.reject(config) == ""
    known = {"name": "bulk", "config": str(config), "kernel": str(config), "shape": [1 << 20]}
    known |= {"dtype": "axpy"}
    assert hopper.label(config) == known


def test_the_panel_s_kernel():
    subject = sweep.BulkSpace
    for op in subject.dtypes:
        for preset in subject.presets.values():
            assert all(axis(config) for axis in subject.axes.values() for config in preset(op))
    for shape in ((6,), (0,), (4, 4)):
        with pytest.raises(ValueError, match="it must be the BYTES of each array, a positive multiple of 4"):
            subject(shape, "copy")


# ---- what the launcher refuses; the checks come before the GPU, so tensors of the CPU will do

ROOM = torch.zeros(256)
INTEGERS = torch.zeros(64, dtype=torch.int32)


@cases(
    "x, y, out, message",
    ([1.0], None, torch.zeros(1), "x must be a torch.Tensor; it is a list"),
    (torch.zeros(1), 2.0, torch.zeros(1), "y must be a torch.Tensor; it is a float"),
    (torch.zeros(8, 4), torch.zeros(4, 8).T, torch.zeros(8, 4), "y must be contiguous"),
    (torch.zeros(64), None, torch.zeros(63), "out must be 64; it is 63"),
    (torch.zeros(64), torch.zeros(60), torch.zeros(64), "y must be 64; it is 60"),
    (ROOM[1:65], None, torch.zeros(64), "equally far past a multiple of 16 bytes; x starts 4 bytes"),
    (torch.zeros(64), ROOM[3:67], torch.zeros(64), "x starts 0 bytes past one, y 12"),
    (ROOM[:64], None, ROOM[32:96], "out lies in the memory of x: give it memory of its own"),
    (torch.zeros(64), ROOM[:64], ROOM[60:124], "out lies in the memory of y: give it memory of its own"),
    (INTEGERS, INTEGERS, INTEGERS.clone(), "x must be float32, bfloat16 or float16; it is int32"),
)
def test_bad_array_is_one_sentence(x, y, out, message):
    with refused(message):
        bulk_copy.prepare(x, y=y, out=out)


@cases(
    "y, config, message",
    (None, None, "unknown configuration None"),
    (torch.zeros(64), "ring", "unknown configuration 'ring'; choose best, bulk_batch, "),
    (torch.zeros(64), IN_ORDER, "bulk_in_order can only copy; leave out y"),
)
def test_bad_configuration_of_a_launch_is_one_sentence(y, config, message):
    with refused(message):
        bulk_copy.prepare(torch.zeros(64), y=y, config=config)


@cases(
    "x, out",
    (torch.zeros(64), torch.zeros(64)),
    (ROOM[:64], ROOM[64:128]),
    (ROOM[1:65], ROOM[129:193]),
    (INTEGERS, INTEGERS.clone()),
    (torch.zeros(0), torch.zeros(0)),
    (torch.zeros(()), torch.zeros(())),
    (ROOM[3:67], None),
)
def test_what_is_right_wants_a_gpu(no_gpu, x, out):
    says = r"a bulk copy needs TMA .* here is no GPU .*: compile it with .*\.$"
    with pytest.raises(device.Unsupported, match=says):
        bulk_copy.prepare(x, out=out)
    with pytest.raises(device.Unsupported):  # the same array may be read twice
        bulk_copy.axpy(2.0, ROOM, ROOM)


def test_tensors_of_the_cpu_are_refused_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: H200)
    with pytest.raises(device.Unsupported, match="a bulk copy needs its tensors on a GPU; they are on cpu"):
        bulk_copy.copy(torch.zeros(64))


def test_spec():
    x, y = torch.randn(100), torch.randn(100)
    same = bulk_copy.spec(x)
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()
    a = torch.tensor(0.1).double()  # the float32, not the double
    assert torch.equal(bulk_copy.spec(x, y, 0.1), a * x.double() + y.double())
    assert not torch.equal(bulk_copy.spec(x, y, 0.1), 0.1 * x.double() + y.double())


@pytest.fixture
def on_cpu(monkeypatch):
    """Let experiments run on the CPU with the kernel that the test installs: a function of x, y, a and out."""

    def install(kernel):
        monkeypatch.setattr(
            bulk_copy,
            "prepare",
            lambda x, *, y=None, a=1.0, out, config, **rest: lambda: kernel(x, y, a, out),
        )

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        experiments,
        "make_random",
        lambda n, dtype: (
            torch.randint(0, 256, (n,), dtype=dtype) if dtype == torch.uint8 else torch.randn(n).to(dtype)
        ),
    )
    monkeypatch.setattr(experiments, "_compile", lambda cases: list(cases))
    return install


def compute(x, y, a, out):
    out.copy_(bulk_copy.spec(x, y, a))


def compute_without_the_last(x, y, a, out):
    out[:-1] = bulk_copy.spec(x, y, a)[:-1]


def overwrite(x, y, a, out):
    compute(x, y, a, out)
    torch.as_strided(out, (1,), (1,), out.storage_offset() + len(out)).view(torch.uint8).bitwise_not_()


@cases("op, dtype", ("copy", torch.uint8), ("axpy", torch.float32), ("axpy", torch.bfloat16))
def test_verify_finds_what_is_wrong(on_cpu, op, dtype):
    reasons = {}
    for kernel in (compute, compute_without_the_last, overwrite):
        on_cpu(kernel)
        row = experiments.verify(op, "best", dtype, 1000, 3)
        reasons[kernel] = row["reason"]
        assert row["status"] == ("wrong" if row["reason"] else "ok")
    assert reasons == {
        compute: "",
        overwrite: "memory outside the output was overwritten",
        compute_without_the_last: "1 bytes differ"
        if op == "copy"
        else "elements are not finite, or were never written",
    }


def test_the_check_covers_every_configuration_and_dtype(on_cpu, monkeypatch):
    monkeypatch.setattr(experiments, "RAGGED", (17,))
    on_cpu(compute)
    rows = experiments.check_correctness.__wrapped__()
    assert len(rows) == 20
    assert all(row["status"] == "ok" and row["cases"] == 3 and row["ulps"] <= 1 for row in rows)
    on_cpu(lambda *given: compute_without_the_last(*given) if len(given[0]) == 17 else None)
    assert all(
        row["status"] == "wrong" and row["reason"] for row in experiments.check_correctness.__wrapped__()
    )


def test_configurations_are_timed_beside_torch_on_the_same_tensors(on_cpu, monkeypatch):
    def compare(candidates, make_inputs, peer, *, nbytes):
        assert peer in candidates and nbytes == 3 << 12
        found = {}
        for name, prepare in candidates.items():
            out, x, y = make_inputs()
            prepare(out, x, y)()
            assert check.ulps(out, bulk_copy.spec(x, y, experiments.A)) <= 1
            found[name] = bench.Timing(name, 2.0, peer, 1.0)
        return found

    on_cpu(compute)
    monkeypatch.setattr(bench, "compare", compare)
    rows = experiments.compare_with_torch("axpy", configs("axpy"), 1 << 12)
    assert [row["name"] for row in rows] == list(configs("axpy")) and {row["ratio"] for row in rows} == {0.5}
    row = sweep.BulkSpace((1 << 12,), "axpy").measure_finalists([configs("axpy")["loads"]])[0]
    assert (row["ms"], row["ratio"], row["shape"]) == (2.0, 0.5, [1 << 12])


def test_rings_that_lack_a_line_run_at_once(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a"))
    cases = experiments.broken_cases()
    met = threading.Barrier(len(cases))

    def meet(code, limit_s):
        number = re.search(r"run_broken_kernel\((\d)\)", code)[1]
        return {"status": "ok", "reason": f"{number}, {met.wait(60)}"}

    monkeypatch.setattr(check, "try_rows", meet)
    rows = experiments.run_broken_kernels.__wrapped__()
    assert [row["name"] for row in rows] == [fault for _, _, fault in cases]
    assert [row["reason"][0] for row in rows] == [str(number) for number in range(len(cases))]
    expected = "axpy, bulk · 256 threads · 4096 B per chunk · 4 stages · persistent · 4 CTAs per SM, without expect_tx"
    assert rows[1]["kernel"] == expected


@pytest.mark.fault
def test_a_ring_runs_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = "from ch07.bulk_copy.lesson import experiments; experiments.run_broken_kernel(0)"
    row = check.try_rows(code, 10)
    # by the build of torch
    assert row["status"] == "failed" and re.search("CUDA|NVIDIA driver", row["reason"])


def test_a_fault_is_a_line_of_the_kernel():
    whole = bulk_copy.SOURCE.read_text()
    for _, _, fault in experiments.broken_cases():
        with experiments.broken_source(fault) as path:
            assert (path.read_text() == whole) == (fault == "nothing")


@pytest.mark.gpu
def test_every_configuration_is_right_on_ragged_sizes_and_offsets():
    rows = experiments.check_correctness.__wrapped__()
    assert len(rows) == 20 and not [row for row in rows if row["status"] != "ok" or row["cases"] < 21]


@pytest.mark.gpu
@cases(
    "config",
    *configs("copy").values(),
    IN_ORDER,
    BulkConfig("bulk", 64, 4096, 3, 0, 2),
    BulkConfig("cp_async", 64, 2048, 3, 0, 2),
    BulkConfig("bulk", 32, 16, 8, 16),
    ids=str,
)
def test_copy_is_equal_bit_for_bit_on_any_offset(config):
    cases = [
        (n, offset, experiments.verify("copy", config, torch.uint8, n, offset))
        for n in (15, 16, 33, 3_000_017)
        for offset in (0, 15)
    ]
    assert not [(n, offset, row["reason"]) for n, offset, row in cases if row["status"] != "ok"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_copy_takes_any_dtype_and_shape(dtype):
    bits = torch.randint(
        0, 2 if dtype == torch.bool else 256, (3, 5, 8 * 11), device="cuda", dtype=torch.uint8
    )
    x = bits.view(dtype)
    out = bulk_copy.copy(x)
    assert out.shape == x.shape and out.dtype == dtype and torch.equal(out.view(torch.uint8), bits)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*configs("copy").values(), IN_ORDER], ids=str)
def test_a_launch_follows_the_stream(config):
    x, late, out = (experiments.make_random(1 << 20, torch.uint8) for _ in range(3))
    launched = bulk_copy.prepare(late, out=out, config=config)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on any other stream would read `late` before it is filled
        late.copy_(x)
        launched()
    stream.synchronize()
    assert torch.equal(out, x)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*configs("copy").values(), IN_ORDER], ids=str)
def test_a_launch_is_replayed_in_a_graph(config):
    x, out = (experiments.make_random((1 << 20) + 5, torch.uint8) for _ in range(2))
    launched = bulk_copy.prepare(x, out=out, config=config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched()
    for _ in range(3):  # the ring in order counts its chunks anew each time
        x.copy_(experiments.make_random(x.numel(), torch.uint8))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, x)


@pytest.mark.gpu
def test_axpy_in_memory_of_its_own_and_given():
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    out = torch.full_like(x, float("nan"))
    assert bulk_copy.axpy(-2.5, x, y, out=out) is out
    assert torch.equal(out, bulk_copy.axpy(-2.5, x, y))
    torch.testing.assert_close(out.double(), bulk_copy.spec(x, y, -2.5), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_nothing_to_copy():
    empty = torch.zeros(0, 7, device="cuda")
    assert bulk_copy.copy(empty).shape == (0, 7) and bulk_copy.axpy(1.0, empty, empty).shape == (0, 7)


@pytest.mark.gpu
def test_too_much_shared_memory_is_unsupported():
    x = torch.zeros(1024, device="cuda")
    with pytest.raises(device.Unsupported, match="take a smaller tile or fewer stages"):
        bulk_copy.copy(x, config=BulkConfig("bulk", 32, 1 << 18, stages=4))
