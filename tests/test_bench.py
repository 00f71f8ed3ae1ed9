import pytest
import torch

from tilelab import bench, device

pytestmark = pytest.mark.filterwarnings("error")


def mm(a, b, c):
    return lambda: torch.mm(a, b, out=c)


def square(n):
    return lambda: [torch.randn(n, n, device="cuda").half() for _ in range(3)]


@pytest.mark.skipif(device.current().capability is not None, reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(device.Unsupported, match="timing needs a GPU; here is no GPU .*: read results/ instead"):
        bench.compare({"a": mm}, square(64), "a")


def test_unknown_peer():
    with pytest.raises(ValueError, match="the peer must be one of a; here it is 'b'"):
        bench.compare({"a": mm}, square(64), "b")


def test_floor_is_the_higher_of_two():
    roof = bench.Ceilings(copy_gbps=4000, bf16_tflops=800)
    assert bench.floor_ms(roof, flops=800e9) == pytest.approx(1)
    assert bench.floor_ms(roof, flops=1, nbytes=8e9) == pytest.approx(2)


def test_row_of_a_timing():
    row = bench.Timing("ours", 0.5, "theirs", 1.0, tflops=3.0).row()
    assert (row["ratio"], row["status"], row["tflops"]) == (2, "ok", 3) and "gbps" not in row
    assert bench.Timing("ours", None, "theirs", 1.0, reason="no").row()["status"] == "failed"


@pytest.mark.gpu
@pytest.mark.parametrize("n", [512, 4096])  # in a graph, and not
def test_a_kernel_against_itself_is_one(n):
    timing = bench.compare({"cuBLAS": mm, "again": mm}, square(n), "cuBLAS", flops=2 * n**3)["again"]
    assert 0.93 < timing.ratio < 1.07 and timing.tflops > 1


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_one_call_takes_microseconds():
    a, b, c = square(64)()
    assert 1 < bench.call_us(mm(a, b, c)) < 1000
