import pytest
import torch
from pythons import run_python

from tilelab.measure import bench
from tilelab.runtime import device

pytestmark = pytest.mark.filterwarnings("error")


def mm(a, b, c):
    return lambda: torch.mm(a, b, out=c)


def square(n):
    return lambda: [torch.randn(n, n, device="cuda").half() for _ in range(3)]


@pytest.mark.skipif(device.current().capability is not None, reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(device.Unsupported, match="timing needs a GPU; here is no GPU .*: read results/"):
        bench.compare({"a": mm}, square(64), "a")


def test_unknown_peer():
    with pytest.raises(ValueError, match="unknown peer 'b'; choose one of a"):
        bench.compare({"a": mm}, square(64), "b")


def test_floor_is_the_higher_of_two():
    roof = bench.Ceilings(copy_gbps=4000, bf16_tflops=800)
    assert bench.floor_ms(roof, flops=800e9) == pytest.approx(1)
    assert bench.floor_ms(roof, flops=1, nbytes=8e9) == pytest.approx(2)


def test_row_of_a_timing():
    row = bench.Timing("ours", 0.5, "theirs", 1.0, tflops=3.0).row()
    assert (row["ratio"], row["status"], row["tflops"]) == (2, "ok", 3) and "gbps" not in row
    assert bench.Timing("ours", None, "theirs", 1.0, reason="no").row()["status"] == "failed"


@pytest.mark.timing
@pytest.mark.parametrize("n", [512, 4096])  # in a graph, and not
def test_a_kernel_against_itself_is_one(n):
    timing = bench.compare({"cuBLAS": mm, "again": mm}, square(n), "cuBLAS", flops=2 * n**3)["again"]
    assert 0.93 < timing.ratio < 1.07 and timing.tflops > 1


@pytest.mark.timing
def test_twice_the_work_is_half_the_speed():
    def twice(a, b, c):
        return lambda: (torch.mm(a, b, out=c), torch.mm(a, b, out=c))

    assert 0.45 < bench.compare({"once": mm, "twice": twice}, square(1024), "once")["twice"].ratio < 0.6


@pytest.mark.gpu
def test_a_failing_candidate_stops_nobody():
    def broken(a, b, c):
        raise RuntimeError("cannot\nstart")

    timings = bench.compare({"cuBLAS": mm, "broken": broken, "again": mm}, square(512), "cuBLAS")
    assert timings["broken"].reason == "cannot" and timings["broken"].ms is None and timings["again"].ms


@pytest.mark.timing
def test_one_call_takes_microseconds():
    a, b, c = square(64)()
    assert 1 < bench.measure_call_us(mm(a, b, c)) < 1000


@pytest.mark.gpu
@pytest.mark.parametrize("n", [512, 4096])  # in a graph, and not
def test_a_launch_that_fails_stops_nobody(n):
    def broken(a, b, c):
        calls = iter(range(1))
        # the first call is well, the next is inside the burst
        return lambda: next(calls, None) is None and 1 / 0

    timings = bench.compare({"cuBLAS": mm, "broken": broken, "again": mm}, square(n), "cuBLAS")
    assert "division by zero" in timings["broken"].reason and timings["broken"].ms is None
    assert timings["again"].ms


@pytest.mark.gpu
def test_a_candidate_that_waits_for_the_gpu_stops_nobody():
    """A graph cannot capture it. In its own process: what a failed capture leaves behind would fail other tests."""
    code = """
import torch
from tilelab.measure import bench
def mm(a, b, c):
    return lambda: torch.mm(a, b, out=c)
def waits(a, b, c):
    return lambda: torch.mm(a, b, out=c)[0, 0].item()
def inputs():
    return [torch.randn(512, 512, device="cuda").half() for _ in range(3)]
timings = bench.compare({"cuBLAS": mm, "waits": waits, "again": mm}, inputs, "cuBLAS")
assert timings["again"].ms and bool(timings["waits"].ms) != bool(timings["waits"].reason), timings
inputs()
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.timing
@pytest.mark.skipif(device.current().name != "NVIDIA H200", reason="the figure is the H200's")
def test_copy_runs_at_dram_speed():
    elements = 2**28  # 512 MiB of bf16 read and as much written, far above the 60 MB of L2

    def copy(source, destination):
        return lambda: destination.copy_(source)

    timing = bench.compare(
        {"copy": copy},
        lambda: [torch.randn(elements, device="cuda").bfloat16() for _ in range(2)],
        "copy",
        nbytes=4 * elements,
    )["copy"]
    assert 3000 < timing.gbps < 4800  # above the datasheet it would have come from L2
