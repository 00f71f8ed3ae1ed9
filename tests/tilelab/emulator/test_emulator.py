"""The emulator runs right kernels to the right result, and finds each fault that a learner may make."""

import importlib

import pytest
import torch
from cases import cases

from ch10 import tile_pipeline, wgmma_gemm
from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.runtime import cuda, tensor_map

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


@cases(
    "line, instead, reason",
    ("i / 2 % 2", "0", "a bulk_store reads shared address 128, where a load may still be landing"),
    (
        "tx(shared_address(&full[i % 2]), BYTES)",
        "tx(shared_address(&full[i % 2]), 2 * BYTES)",
        "block 0, thread 0 waits for ever for parity 0 of the mbarrier at shared address 0. Its phase 0 .parity 0. "
        "has 1 of 1 arrivals and still lacks 256 bytes",
    ),
    ("    fence_mbarrier_init();", "", "fence_mbarrier_init is missing"),
    ("    bulk_wait_read<0>();\n}", "}", "ended while the copy engine had not yet read its shared memory"),
    ("bulk_commit();", "", "overwrites shared address .* which a bulk_store may still read"),
    (", BYTES, shared_address(&full", ", BYTES - 8, shared_address(&full", "moves whole units of 16 bytes"),
    ("x + u64(first + i) * BYTES", "x + u64(first + i + 8) * BYTES", "leaves the tensors"),
    ("&full[stage]), 1)", "&full[stage]), 2)", "lacks 1 of 2 arrivals$"),
)
def test_a_broken_rule_is_named(line, instead, reason):
    with pytest.raises(emulator.EmulationError, match=reason):
        run_ring((line, instead))


@pytest.mark.parametrize("seed", emulator.SEEDS)
def test_a_buffer_that_is_overwritten_too_early_is_named(seed):
    with pytest.raises(emulator.EmulationError, match="overwrites .* which a bulk_store may still read"):
        run_ring(("bulk_wait_read<0>(); load", "load"), seed)


def test_each_writer_needs_the_proxy_fence_before_the_barrier():
    def run(source):
        x = torch.randn(5 * 64)
        out = torch.full_like(x, float("nan"))
        cuda_magic.find_kernels(source)["twice"][5, 64, 256](x, out)
        return torch.equal(out, 2 * x)

    assert run(DOUBLE)
    behind = DOUBLE.replace(
        "    fence_proxy_async();\n    __syncthreads();", "    __syncthreads();\n    FENCE"
    )
    for fence in ("", "fence_proxy_async();", "if (threadIdx.x == 0) fence_proxy_async();"):
        with pytest.raises(emulator.EmulationError, match="each writer fences, and the barrier follows"):
            run(behind.replace("FENCE", fence))


def test_a_source_that_does_not_compile_names_the_line_of_the_cell():
    with pytest.raises(cuda.CompileError, match=r"cell\(18\): error"):
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
        expected = [
            [len(positive), positive[0] + 1, 31 - positive[-1], 2 * bool((rows[warp] > 1).any()) + 1]
        ] * 32
        assert votes.view(2, 32, 4)[warp].tolist() == expected


@cases(
    "body, reason",
    ("if (threadIdx.x % 32 == 0) out[0] = __shfl_sync(~0u, x[0], 0);", None),  # the other lanes have ended
    (
        "if (threadIdx.x % 2) __syncthreads(); else __shfl_sync(~0u, x[0], 0); __syncthreads();",
        "waits for ever in __shfl_sync",
    ),
    ("if (threadIdx.x % 2) __shfl_sync(~0u, x[0], 0); else __ballot_sync(~0u, 1);", "in __ballot_sync.. and"),
    ("__shfl_sync(1u, x[0], 0);", "lane 1 calls __shfl_sync.. with mask 0x1, which does not name it"),
    ("if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, x[0], 20);", "reads from lane 20"),
)
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
        with pytest.raises(emulator.EmulationError, match="block 0, thread 3: reads at address 0x"):
            run_warps(source)
    assert run_warps(WARP)[1].isfinite().all()


def test_a_value_of_another_lane_needs_a_sync():
    source = """extern "C" __global__ void warp(const float* x, float* out, int* votes) {
        __shared__ float values[64];
        values[threadIdx.x] = x[threadIdx.x];
        __syncwarp();
        out[threadIdx.x] = values[threadIdx.x ^ 1];
    }"""
    x, out, _ = run_warps(source)
    assert torch.equal(out, x.view(-1, 2).flip(1).flatten())
    says = "no __syncwarp.. or other barrier lies between: a data race"
    with pytest.raises(emulator.EmulationError, match=says):
        run_warps(source.replace("__syncwarp();", ""))


# ---- tensor maps

BOX = """#include "tma.cuh"
extern "C" __global__ void move(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap out,
                                unsigned char* bytes, int column, int row, int size) {
    extern __shared__ __align__(1024) unsigned char tile[];
    __shared__ __align__(8) u64 full;
    const u32 barrier = shared_address(&full);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, size);
        tma_load_2d(shared_address(tile), x, column, row, barrier);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < SPAN; i += 64) bytes[i] = tile[i];
    if (threadIdx.x == 0) {
        tma_store_2d(out, shared_address(tile), column, row);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
"""


def move_box(x, out, row, column, box, swizzle="none", fill="zero", change=("", ""), smem_bytes=None, seed=0):
    assert change[0] in BOX
    span = box[0] * max(box[1] * x.element_size(), tensor_map.SWIZZLES[swizzle])
    kernel = cuda_magic.find_kernels(BOX.replace(*change), [f"-DSPAN={span}"])["move"]
    found = torch.zeros(span, dtype=torch.uint8)
    maps = [cuda_magic.make_tensor_map(tensor, box, swizzle=swizzle, fill=fill) for tensor in (x, out)]
    with emulator.with_seed(seed):
        kernel[1, 64, smem_bytes or span](*maps, found, column, row, box[0] * box[1] * x.element_size())
    return found


@cases(
    "dtype, box, swizzle, row, column",
    (torch.float32, (8, 32), "128B", 0, 0),
    (torch.float32, (16, 16), "64B", -3, 60),
    (torch.uint8, (8, 32), "32B", 35, 0),
    (torch.bfloat16, (64, 8), "none", -60, -8),
    (torch.float32, (8, 16), "128B", 33, -4),
    (torch.int64, (4, 6), "none", 1, 2),
)
def test_a_box_lies_as_the_swizzle_says_and_comes_back(dtype, box, swizzle, row, column):
    x = (torch.rand(37, 64) * 100).to(dtype)
    out = torch.zeros_like(x)
    found = move_box(x, out, row, column, box, swizzle)
    inside = torch.zeros(box, dtype=dtype)
    rows, columns = (
        range(max(0, -first), min(extent, size - first))
        for first, extent, size in zip((row, column), box, x.shape)
    )
    here = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
    there = (slice(rows.start + row, rows.stop + row), slice(columns.start + column, columns.stop + column))
    inside[here] = x[there]
    row_bytes = box[1] * x.element_size()
    pitch = max(row_bytes, tensor_map.SWIZZLES[swizzle])
    places = (torch.arange(box[0])[:, None] * pitch + torch.arange(row_bytes)).flatten()
    assert torch.equal(found[tensor_map.swizzle_offset(places, swizzle)], inside.view(torch.uint8).flatten())
    expected = torch.zeros_like(x)
    expected[there] = x[there]
    assert torch.equal(out, expected)


def test_what_lies_outside_is_filled_and_is_left_out_in_whole_units():
    x, out = torch.rand(8, 32), torch.full((8, 32), 7.0)
    found = move_box(x[:, :31], out[:, :31], 0, 16, (8, 32), "none", "nan").view(torch.float32).view(8, 32)
    assert torch.equal(found[:, :15], x[:, 16:31]) and found[:, 15:].isnan().all()
    # the unit of columns 28 to 31
    assert torch.equal(out[:, 16:31], x[:, 16:31]) and out[:, 31].isnan().all()
    assert (out[:, :16] == 7).all()


@cases(
    "change, column, reason",
    (("", ""), 1, "tma_load_2d starts at x = 1, within a unit of 16 bytes: .* an illegal instruction"),
    (("shared_address(tile), x", "shared_address(tile) + 64, x"), 0, "must lie at a multiple of 128 bytes"),
    (("shared_address(tile), x", "shared_address(tile) + 128, x"), 0, "leaves shared memory"),
    (("barrier, size)", "barrier, size / 2)"), 0, "1 of 1 arrivals, and 512 bytes came that were not"),
    (("barrier, size)", "barrier, 2 * size)"), 0, "still lacks 1024 bytes"),
    (("fence_mbarrier_init();", ""), 0, "fence_mbarrier_init is missing"),
    (("bulk_commit();", ""), 0, "a store was not committed with bulk_commit"),
    (
        (
            "tma_load_2d(shared_address(tile), x, column, row",
            "tma_load_3d(shared_address(tile), x, column, row, 0",
        ),
        0,
        "tma_load_3d is given a tensor map of 2 dimensions",
    ),
)
def test_a_broken_rule_of_tensor_maps_is_named(change, column, reason):
    x = torch.rand(8, 32)
    with pytest.raises(emulator.EmulationError, match=reason):
        move_box(x, torch.zeros_like(x), 0, column, (8, 32), change=change, smem_bytes=1024)


def test_maps_are_checked_as_on_a_gpu_and_tensors_are_no_maps():
    with pytest.raises(ValueError, match="1 to 256 elements"):
        cuda_magic.make_tensor_map(torch.zeros(8, 512), (8, 512))
    x = torch.zeros(8, 32)
    with pytest.raises(ValueError, match=r"x of move is a tensor map; pass make_tensor_map\(tensor, box\)"):
        cuda_magic.find_kernels(BOX, ["-DSPAN=1024"])["move"][1, 64, 1024](x, x, x, 0, 0, 1024)


DIMENSIONS = """#include "tma_1d.cuh"
extern "C" __global__ void turn(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y,
                                const __grid_constant__ TensorMap sum) {
    __shared__ __align__(128) float tile[2][256];
    __shared__ __align__(8) u64 full;
    const u32 barrier = shared_address(&full);
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    for (int batch = 0; batch < 3; ++batch) {
        mbarrier_arrive_expect_tx(barrier, 2048);
        tma_load_3d(shared_address(tile[0]), x, 4 * (batch % 2), -1, batch, barrier);
        tma_load_1d(shared_address(tile[1]), y, 256 * batch, barrier);
        mbarrier_wait(barrier, batch % 2);
        tma_reduce_add_2d(sum, shared_address(tile[0]), 0, 0);
        tma_store_1d(y, shared_address(tile[1]), 768 - 256 * batch);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
"""


@pytest.mark.parametrize("seed", emulator.SEEDS)
def test_maps_of_one_and_three_dimensions_and_sums(seed):
    x, y, total = torch.randn(3, 10, 20), torch.randn(1024), torch.zeros(16, 16)
    expected, before = torch.zeros(16, 16), y.clone()
    for batch in range(3):
        first = 4 * (batch % 2)
        expected[1:11] += x[batch, :, first : first + 16]
    maps = [
        cuda_magic.make_tensor_map(x, (1, 16, 16)),
        cuda_magic.make_tensor_map(y, (256,)),
        cuda_magic.make_tensor_map(total, (16, 16)),
    ]
    with emulator.with_seed(seed):
        cuda_magic.find_kernels(DIMENSIONS)["turn"][1, 1](*maps)
    torch.testing.assert_close(total, expected)
    assert torch.equal(y[512:], torch.cat([before[256:512], before[:256]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_sums_of_each_dtype(dtype):
    source = BOX.replace("tma_store_2d", "tma_reduce_add_2d")
    x, out = (torch.randn(2, 8, 16) * 100).to(dtype)
    expected = (x.double() + out.double()).to(dtype)
    kernel = cuda_magic.find_kernels(source, ["-DSPAN=1"])["move"]
    maps = [cuda_magic.make_tensor_map(tensor, (8, 16)) for tensor in (x, out)]
    kernel[1, 64, x.nbytes](*maps, torch.zeros(1, dtype=torch.uint8), 0, 0, x.nbytes)
    assert torch.equal(out, expected)


# ---- clusters and products: the kernels of chapter 10

TILES = importlib.import_module("ch10.tile_pipeline.configs").configs
GEMMS = importlib.import_module("ch10.wgmma_gemm.configs").STEPS


def find_kernel(module, config, constants, change=("", "")):
    source = module.SOURCE.read_text()
    assert change[0] in source
    name = getattr(config, "kernel", None) or config.op
    options = [f"-D{macro}={value}" for macro, value in constants.items()]
    return cuda_magic.find_kernels(source.replace(*change), options)[name]


def add_shared(cluster, change=("", ""), seed=0):
    config = next(each for each in TILES("add_shared").values() if each.cluster == cluster)
    x, y = torch.randn(5, 22, 300), torch.randn(22, 300)
    out = torch.zeros_like(x)
    kernel = find_kernel(tile_pipeline, config, config.constants(4), change)
    box, (across, down) = config.box(4), config.tiles(x.shape)
    maps = [
        cuda_magic.make_tensor_map(tensor, size)
        for tensor, size in ((x, (1, *box)), (y, (config.rows // cluster, config.columns)), (out, (1, *box)))
    ]
    kernel.prepare(
        config.blocks(x.shape), config.block_threads, (*maps, across, down), config.smem_bytes(4), cluster
    )(seed)
    return torch.equal(out, x + y)


@pytest.mark.parametrize("seed", emulator.SEEDS)
def test_blocks_of_a_cluster_share_a_box(seed):
    assert add_shared(4, seed=seed)


@cases(
    "change, reason",
    (("cluster_wait();  // the barriers of all", "// "), "has initialised no mbarrier at shared address 0"),
    (("(1 << CLUSTER) - 1", "(2 << CLUSTER) - 1"), "names block 2 of a cluster of 2"),
    (("(1 << CLUSTER) - 1", "1 << rank"), "waits for ever for parity 0 of the mbarrier"),
)
def test_a_broken_rule_of_clusters_is_named(change, reason):
    with pytest.raises(emulator.EmulationError, match=reason):
        for seed in emulator.SEEDS:
            add_shared(2, change, seed)


def multiply(step, change=("", ""), seed=0, shape=(200, 264, 584)):
    """Return how many elements of a product are wrong."""
    config, (m, n, k) = step, shape
    a, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    out = torch.full((m, n), float("nan")).bfloat16()
    maps = [
        cuda_magic.make_tensor_map(tensor, box, swizzle=swizzle)
        for tensor, box, swizzle in (
            (a, (config.block_m, 64), "128B"),
            (weight, (config.block_n // config.cluster, 64), "128B"),
            (out, (64, config.box), f"{2 * config.box}B"),
        )
    ]
    kernel = find_kernel(wgmma_gemm, config, config.constants(), change)
    given = (*maps, out, m, n, k, n, wgmma_gemm.NOTHING)
    kernel.prepare(config.grid(m, n, 4), config.threads, given, config.smem_bytes, config.cluster)(seed)
    return int((~torch.isclose(out.float(), a.float() @ weight.float().T, rtol=0.02, atol=0.5)).sum())


ONE_GROUP = next(step for step in GEMMS.values() if step.kernel == "one_group" and step.num_stages > 1)
TWO_CONSUMERS = next(step for step in GEMMS.values() if step.consumers == 2 and step.epilogue_subtile > 1)
IN_CLUSTER = next(step for step in GEMMS.values() if step.cluster == 2)


@pytest.mark.parametrize("seed", emulator.SEEDS)
@cases("step", ONE_GROUP, TWO_CONSUMERS, IN_CLUSTER, ids=["one_group", "two_consumers", "cluster"])
def test_products_are_right_at_any_speed_of_the_tensor_core(step, seed):
    assert multiply(step, seed=seed) == 0


WAIT = """        wgmma_wait<1>();
        const u32 multiplied = state.read_clock();
        if (step > first) {
            release<MULTICAST>(barriers.empty + 8 * previous_stage);
"""
EARLY = WAIT.replace("wgmma_wait<1>();", "").replace("if (step > first)", "").replace("previous_", "state.")


@cases(
    "step, change, reason",
    (TWO_CONSUMERS, (WAIT, EARLY), "overwrites .* which a wgmma may still read"),
    (TWO_CONSUMERS, ("        wgmma_wait<1>();\n", ""), "overwrites .* which a wgmma may still read"),
    (TWO_CONSUMERS, ("        fence_proxy_async();", ""), "without fence_proxy_async"),
    (
        TWO_CONSUMERS,
        ("        if (leader) bulk_wait_read<BUFFERS - 1>();", ""),
        "stmatrix .* tma_store_2d may still read",
    ),
    (TWO_CONSUMERS, ("accumulate || k > 0", "true"), None),
    (TWO_CONSUMERS, ("within = k % 4 * 32", "within = k % 4 * 64"), "in row 1 of a swizzle"),
    (ONE_GROUP, ("        wgmma_wait<LAG>();", ""), "overwrites .* which a wgmma may still read"),
)
def test_a_product_that_reads_too_early_or_too_late_is_named_or_wrong(step, change, reason):
    for seed in (0, 2):
        if reason is None:
            assert multiply(step, change, seed)
        else:
            with pytest.raises(emulator.EmulationError, match=reason):
                multiply(step, change, seed)


@cases(
    "step, change, reason",
    (TWO_CONSUMERS, ("    wgmma_fence();\n", ""), "wgmma_fence.. is missing"),
    (TWO_CONSUMERS, ("    wgmma_commit();\n", ""), "overwrites .* which a wgmma may still read"),
    (
        TWO_CONSUMERS,
        ("    wgmma_wait<0>();\n    release", "    release"),
        "ends before wgmma_wait has waited",
    ),
    (
        TWO_CONSUMERS,
        ("state.phase ^ 1)", "state.phase)"),
        "thread 0 waits for ever for parity 0 of the mbarrier.*; .*block 0, thread 128 waits for ever for parity 0",
    ),
    (TWO_CONSUMERS, ("4 * CONSUMERS * ctas", "8 * CONSUMERS * ctas"), "lacks 8 of 16 arrivals"),
    (
        TWO_CONSUMERS,
        ("named_barrier_sync(barrier, 128)", "named_barrier_sync(barrier, 256)"),
        "waits for ever in named_barrier_sync.. at barrier 1, where 128 of 256 threads have arrived",
    ),
    (IN_CLUSTER, ("    if (MULTICAST) cluster_arrive(), cluster_wait();\n}", "}"), "has ended already"),
)
def test_a_broken_rule_of_products_is_named(step, change, reason):
    with pytest.raises(emulator.EmulationError, match=reason):
        for seed in (0, 2):
            multiply(step, change, seed)


def test_sums_are_no_numbers_until_the_wait():
    source = """#include "wgmma.cuh"
    extern "C" __global__ void look(float* early, float* late) {
        __shared__ __align__(1024) unsigned char tile[16384];
        for (int i = threadIdx.x; i < 16384; i += 128) tile[i] = i % 2 ? 0x3f : 0x80;  // 1.0
        fence_proxy_async();
        __syncthreads();
        float d[32];
        const u64 a = wgmma_descriptor(shared_address(tile)), b = wgmma_descriptor(shared_address(tile) + 8192);
        wgmma_fence();
        wgmma_m64k16<64>(d, a, b, 0);
        wgmma_m64k16<64>(d, a + 2, b + 2, 1);
        wgmma_commit();
        early[threadIdx.x] = d[threadIdx.x % 32];
        wgmma_wait<0>();
        late[threadIdx.x] = d[threadIdx.x % 32];
    }"""
    for seed in emulator.SEEDS:
        early, late = torch.zeros(128), torch.zeros(128)
        with emulator.with_seed(seed):
            cuda_magic.find_kernels(source)["look"][1, 128](early, late)
        assert early.isnan().all() and (late == 32).all()


@cases(
    "source, reason",
    (
        "#include <cuda/semaphore>\n__device__ void f() {}\n",
        "kernel includes <cuda/semaphore> in line 2, which the emulator lacks",
    ),
    (
        '__device__ void f() { asm volatile("tcgen05.alloc 1;"); }\n',
        "line 2: the emulator does not know the instruction `tcgen05.alloc`",
    ),
)
def test_what_it_does_not_know_is_said(source, reason):
    source += 'extern "C" __global__ void kernel(float* x) { f(); }'
    kernel = cuda_magic.find_kernels(source)["kernel"]
    with pytest.raises(emulator.NotEmulated, match=reason):
        kernel[1, 1](torch.zeros(1))


@cases(
    "body, reason",
    ("for (volatile int i = 0; i >= 0; i = (i + 1) % 9) x[0] += i;", "run for 0.2 s without waiting: a loop"),
    ("x[0] = 7 / int(x[1]);", "thread 0: divides an integer by zero"),
    ("volatile char big[1 << 20]; big[threadIdx.x] = 0; x[0] = big[0];", "needs more than 128 KiB"),
)
def test_a_crash_of_the_kernel_is_named(body, reason, monkeypatch):
    monkeypatch.setattr(emulator, "LONGEST_RUN_S", 0.2)
    kernel = cuda_magic.find_kernels(f'extern "C" __global__ void crash(float* x) {{ {body} }}')["crash"]
    with pytest.raises(emulator.EmulationError, match=reason):
        kernel[1, 32](torch.zeros(2))


IN_STEP = 'extern "C" __global__ void k(float* y) {{ {} }}'


def run_in_step(body, threads=32):
    y = torch.arange(64.0) + 1
    cuda_magic.find_kernels(IN_STEP.format(body))["k"][1, threads](y)
    return y.tolist()


def test_lanes_that_write_the_same_run_in_step():
    for seed in (0, 1, 3):
        with emulator.with_seed(seed):
            assert run_in_step("y[0] = y[0] * 3; y[1] = y[1] - 5;")[:3] == [3, -3, 3]
            with pytest.raises(emulator.EmulationError, match="no __syncwarp.* lies between: a data race"):
                run_in_step("y[0] += y[threadIdx.x + 1];")
            with pytest.raises(emulator.EmulationError, match="no barrier lies between: a data race"):
                run_in_step("y[0] = y[0] * 3; y[1] = y[1] - 5;", threads=64)
