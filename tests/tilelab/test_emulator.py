"""The emulator runs right kernels to the right result, and finds each fault that a learner may make."""

import pytest
import torch

from tilelab import cuda, cuda_magic, emulator

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]

RING = """#include "ptx.cuh"
extern "C" __global__ void ring(const unsigned char* x, unsigned char* out, int tiles) {
    __shared__ __align__(128) unsigned char buffer[2][BYTES];
    __shared__ __align__(8) u64 full[2];
    if (threadIdx.x != 0) return;
    for (int stage = 0; stage < 2; ++stage) mbarrier_init(shared_address(&full[stage]), 1);
    fence_mbarrier_init();
    const int first = blockIdx.x * 8, count = min(8, tiles - first);
    auto load = [&](int i) {
        mbarrier_arrive_expect_tx(shared_address(&full[i % 2]), BYTES);
        bulk_load(shared_address(buffer[i % 2]), x + u64(first + i) * BYTES, BYTES, shared_address(&full[i % 2]));
    };
    for (int i = 0; i < min(2, count); ++i) load(i);
    for (int i = 0; i < count; ++i) {
        mbarrier_wait(shared_address(&full[i % 2]), i / 2 % 2);
        bulk_store(out + u64(first + i) * BYTES, shared_address(buffer[i % 2]), BYTES);
        bulk_commit();
        if (i + 2 < count) { bulk_wait_read<0>(); load(i + 2); }
    }
    bulk_wait_read<0>();
}
"""
DOUBLE = """#include "ptx.cuh"
extern "C" __global__ void twice(const float* x, float* out) {
    extern __shared__ __align__(128) float tile[];
    __shared__ __align__(8) u64 full;
    const u32 barrier = shared_address(&full);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 256);
        bulk_load(shared_address(tile), x + blockIdx.x * 64, 256, barrier);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    tile[threadIdx.x] *= 2;
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) { bulk_store(out + blockIdx.x * 64, shared_address(tile), 256); bulk_commit(); }
    if (threadIdx.x == 0) bulk_wait_read<0>();
}
"""


def run_ring(change=("", ""), seed=0, out_bytes=21 * 256):
    assert change[0] in RING
    kernel = cuda_magic.find_kernels(RING.replace(*change), ["-DBYTES=256"])["ring"]
    x = torch.randint(0, 255, (21 * 256,), dtype=torch.uint8)
    out = ~x[:out_bytes]
    with emulator.with_seed(seed):
        kernel[3, 32](x, out, 21)
    return int((x != out).sum())


@pytest.mark.parametrize("seed", emulator.SEEDS)
def test_a_right_kernel_is_right_at_any_speed_of_the_engine(seed):
    assert run_ring(seed=seed) == 0


@pytest.mark.parametrize("line, instead, reason", [
    ("i / 2 % 2", "0", "waits for ever for parity 0|more arrivals in a phase than the 1"),
    ("tx(shared_address(&full[i % 2]), BYTES)", "tx(shared_address(&full[i % 2]), 2 * BYTES)",
     "block 0, thread 0 waits for ever for parity 0 of the mbarrier at shared address 0. Its phase 0 .parity 0. still "
     "lacks 0 of 1 arrivals and 256 bytes"),
    ("    fence_mbarrier_init();", "", "fence_mbarrier_init is missing"),
    ("    bulk_wait_read<0>();\n}", "}", "ended while the copy engine had not yet read its shared memory"),
    ("bulk_commit();", "", "ended while the copy engine had not yet read"),
    (", BYTES, shared_address(&full", ", BYTES - 8, shared_address(&full", "moves whole units of 16 bytes"),
    ("x + u64(first + i) * BYTES", "x + u64(first + i + 8) * BYTES", "leaves the tensors"),
    ("&full[stage]), 1)", "&full[stage]), 2)", "lacks 1 of 2 arrivals and 0 bytes")])
def test_a_broken_rule_is_named(line, instead, reason):
    with pytest.raises(emulator.EmulationError, match=reason):
        run_ring((line, instead))


def test_a_buffer_that_is_overwritten_too_early_gives_wrong_bytes():
    assert any(run_ring(("bulk_wait_read<0>(); load", "load"), seed) for seed in emulator.SEEDS)


@pytest.mark.parametrize("fence, right", [("fence_proxy_async();", True), ("", False)])
def test_threads_and_the_proxy_fence(fence, right):
    kernel = cuda_magic.find_kernels(DOUBLE.replace("fence_proxy_async();", fence))["twice"]
    x = torch.randn(5 * 64)
    out = torch.full_like(x, float("nan"))
    kernel[5, 64, 256](x, out)
    assert torch.equal(out, 2 * x) == right


def test_a_source_that_does_not_compile_names_the_line_of_the_cell():
    with pytest.raises(cuda.CompileError, match="cell:18:"):
        run_ring(("bulk_commit();", "bulk_comit();"))


WARP = """extern "C" __global__ void warp(const float* x, float* out, int* votes) {
    const int lane = threadIdx.x % 32;
    float sum = x[threadIdx.x];
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    const unsigned positive = __ballot_sync(~0u, x[threadIdx.x] > 0);
    out[threadIdx.x] = __shfl_sync(~0u, x[threadIdx.x], 5) + __shfl_up_sync(~0u, x[threadIdx.x], 1)
                       + __shfl_down_sync(~0u, x[threadIdx.x], 3) + __shfl_sync(~0u, sum, lane, 8);
    votes[4 * threadIdx.x] = __popc(positive);
    votes[4 * threadIdx.x + 1] = __ffs(positive);
    votes[4 * threadIdx.x + 2] = __clz(positive);
    votes[4 * threadIdx.x + 3] = 2 * __any_sync(~0u, x[threadIdx.x] > 1) + __all_sync(~0u, x[threadIdx.x] > -9);
}
"""


def run_warps(source, threads=64, seed=0, name="warp"):
    kernel = cuda_magic.find_kernels(source)[name]
    x, out, votes = torch.randn(threads), torch.full((threads,), float("nan")), torch.full((threads, 4), -1)
    votes = votes.to(torch.int32)
    with emulator.with_seed(seed):
        kernel[1, threads](x, out, votes)
    return x, out, votes


@pytest.mark.parametrize("seed", emulator.SEEDS)
def test_lanes_exchange_values(seed):
    x, out, votes = run_warps(WARP, seed=seed)
    rows = x.view(2, 32)
    lanes = torch.arange(32)
    up, down = rows[:, (lanes - 1).clamp(min=0)], rows[:, torch.where(lanes + 3 < 32, lanes + 3, lanes)]
    torch.testing.assert_close(out.view(2, 32), rows[:, 5:6] + up + down + rows.sum(1, keepdim=True))
    for warp in range(2):
        positive = [lane for lane in range(32) if rows[warp, lane] > 0]
        assert votes.view(2, 32, 4)[warp].tolist() == [[len(positive), positive[0] + 1, 31 - positive[-1],
                                                        2 * bool((rows[warp] > 1).any()) + 1]] * 32


@pytest.mark.parametrize("body, reason", [
    ("if (threadIdx.x % 32 == 0) out[0] = __shfl_sync(~0u, x[0], 0);", None),  # the other lanes have ended
    ("if (threadIdx.x % 2) __syncthreads(); else __shfl_sync(~0u, x[0], 0); __syncthreads();",
     "waits for ever in __shfl_sync.. for the other lanes of mask 0xffffffff"),
    ("if (threadIdx.x % 2) __shfl_sync(~0u, x[0], 0); else __ballot_sync(~0u, 1);",
     "lanes of one warp meet in __ballot_sync.. and in __shfl_sync.."),
    ("__shfl_sync(1u, x[0], 0);", "lane 1 calls __shfl_sync.. with mask 0x1, which does not name it"),
    ("if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, x[0], 20);", "reads from lane 20")])
def test_lanes_that_do_not_meet_are_named(body, reason):
    source = f'extern "C" __global__ void warp(const float* x, float* out, int* votes) {{ {body} }}'
    if reason is None:
        x, out, _ = run_warps(source, 32)
        assert out[0] == x[0]
    else:
        with pytest.raises(emulator.EmulationError, match=reason):
            run_warps(source)


def test_an_access_to_memory_that_does_not_exist_ends_the_run_and_not_the_process():
    source = """extern "C" __global__ void warp(const float* x, float* out, int* votes) {
        out[threadIdx.x] = x[threadIdx.x + (1ll << 44) * (threadIdx.x == 3)];
    }"""
    for _ in range(3):
        with pytest.raises(emulator.EmulationError, match="block 0, thread 3: reads or writes at address 0x"):
            run_warps(source)
    assert run_warps(WARP)[1].isfinite().all()


def test_a_value_of_another_lane_needs_a_sync():
    """A lane runs until it waits, so what it reads too early is not there yet."""
    source = """extern "C" __global__ void warp(const float* x, float* out, int* votes) {
        __shared__ float values[64];
        values[threadIdx.x] = x[threadIdx.x];
        __syncwarp();
        out[threadIdx.x] = values[threadIdx.x ^ 1];
    }"""
    x, out, _ = run_warps(source)
    assert torch.equal(out, x.view(-1, 2).flip(1).flatten())
    x, out, _ = run_warps(source.replace("__syncwarp();", ""))
    assert not torch.equal(out, x.view(-1, 2).flip(1).flatten())
