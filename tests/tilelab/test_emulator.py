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
