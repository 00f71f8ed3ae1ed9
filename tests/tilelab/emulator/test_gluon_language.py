"""The language of the Gluon emulator: grids, pointers, types, copies, tensor memory, and what it refuses by name."""

import inspect
import types
from importlib.metadata import version

import pytest
import torch
from cases import cases

import ch14  # noqa: F401  selects Triton's interpreter where there is no GPU
from tilelab.cells import lesson
from tilelab.emulator import gluon as gluon_emulator

KERNELS = """
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout, allocate_tensor_memory, get_tmem_reg_layout, tcgen05_commit, tcgen05_mma)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait)
from triton.language.core import _aggregate as aggregate

LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLANE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def number_programs(out, X: gl.constexpr):
    i = gl.program_id(0) + gl.num_programs(0) * (gl.program_id(1) + gl.num_programs(1) * gl.program_id(2))
    gl.store(out + i, i * 10 + gl.num_programs(2))


@gluon.jit
def softmax(x, out, stride, n):
    rows = gl.arange(0, 16, gl.SliceLayout(1, PLANE))[:, None]
    columns = gl.arange(0, 32, gl.SliceLayout(0, PLANE))[None, :]
    s = gl.load(x + rows * stride + columns, mask=columns < n, other=-float("inf"), cache_modifier=".ca")
    e = gl.exp(s - gl.max(s, axis=1)[:, None])
    gl.store(out + rows * stride + columns, e / gl.sum(e, axis=1)[:, None], mask=columns < n)


@gluon.jit
def divide(x, out):
    i = gl.arange(0, 8, LINE)
    v = gl.load(x + i)
    gl.store(out + i, v // 3)
    gl.store(out + 8 + i, v % 3)
    gl.store(out + 16 + i, v * 1000000000)
    first = gl.load(x)
    gl.store(out + 24, first // 3)
    gl.store(out + 25, first % 3)
    gl.store(out + 26, (v.to(gl.uint32, bitcast=True) >> 28).to(gl.int32).sum(0))


@gluon.jit
def sum_two(a, b):
    return a + b


@gluon.jit
def rearrange(x, out):
    i = gl.arange(0, 8, LINE)
    v = gl.load(x + i)
    gl.store(out + i, gl.gather(v, 7 - i, 0))
    gl.store(out + 8 + i, gl.associative_scan(v, 0, sum_two))
    gl.store(out + 16 + i, gl.histogram(v, 8, layout=LINE))
    gl.store(out + 24 + i, gl.umulhi(v.to(gl.uint32) + 0xFFFFFFF0, v.to(gl.uint32) + 2).to(gl.int32))


@gluon.jit
def count_values(x, counts):
    v = gl.load(x + gl.program_id(0) * 64 + gl.arange(0, 64, LINE))
    gl.atomic_add(counts + v, 1, mask=v < 8, sem="relaxed")
    gl.atomic_max(counts + 8, gl.max(v, 0))


@gluon.jit
def copy_async(x, out, COMMIT: gl.constexpr, WAIT: gl.constexpr):
    i = gl.arange(0, 128, LINE)
    tile = gl.allocate_shared_memory(x.dtype.element_ty, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    async_copy.async_copy_global_to_shared(tile, x + i, mask=i < 100)
    if COMMIT:
        async_copy.commit_group()
    if WAIT:
        async_copy.wait_group(0)
    gl.store(out + i, tile.load(LINE))


@gluon.jit
def swap_halves(x, out):
    rows = gl.arange(0, 16, gl.SliceLayout(1, PLANE))[:, None]
    columns = gl.arange(0, 32, gl.SliceLayout(0, PLANE))[None, :]
    tile = gl.allocate_shared_memory(gl.float32, [16, 32], gl.PaddedSharedLayout.with_identity_for(
        [[32, 4]], [16, 32], [1, 0]), gl.load(x + rows * 32 + columns))
    left = tile.slice(0, 16, dim=1)
    right = tile.slice(16, 16, dim=1)
    saved = left.load(PLANE)
    left.store(right.load(PLANE))
    right.store(saved)
    gl.store(out + rows * 32 + columns, tile.load(PLANE))


@gluon.constexpr_function
def halve(n):
    return n // 2


@aggregate
class Line:
    slope: gl.constexpr
    start: gl.tensor

    @gluon.constexpr_function
    def __init__(self, slope, start):
        self.slope = gl.constexpr(slope)
        self.start = start

    @gluon.jit
    def create(start):
        return Line(halve(8), gl.to_tensor(start))

    @gluon.jit
    def at(self, i):
        return self.start + i * self.slope


@gluon.jit
def describe(out, N: gl.constexpr):
    gl.static_assert(halve(N) == N.value // 2)
    gl.store(out, Line.create(5).at(3))
    gl.store(out + 1, gl.num_warps() * 10 + gl.num_ctas())
    gl.store(out + 2, out.dtype.element_ty.primitive_bitwidth)


@gluon.jit
def multiply(a, b, c, ON_BLACKWELL: gl.constexpr, WAITS: gl.constexpr):
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(done, count=1)
    a_tile = gl.allocate_shared_memory(a.dtype, a.type.block_type.shape, a.layout)
    b_tile = gl.allocate_shared_memory(b.dtype, b.block_type.shape, b.layout)
    mbarrier.expect(ready, a.block_type.nbytes + b.block_type.nbytes)
    tma.async_copy_global_to_shared(a, [0, 0], ready, a_tile)
    tma.async_copy_global_to_shared(b, [0, 0], ready, b_tile)
    mbarrier.wait(ready, 0)
    if ON_BLACKWELL:
        layout: gl.constexpr = TensorMemoryLayout([64, 32], col_stride=1)
        acc = allocate_tensor_memory(gl.float32, [64, 32], layout)
        tcgen05_mma(a_tile, b_tile, acc, use_acc=False)
        tcgen05_mma(a_tile, b_tile, acc)
        tcgen05_commit(done)
        if WAITS:
            mbarrier.wait(done, 0)
        c_block = acc.load(get_tmem_reg_layout(gl.float32, (64, 32), layout, gl.num_warps()))
    else:
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
        c_block = warpgroup_mma(a_tile, b_tile, warpgroup_mma_init(gl.zeros([64, 32], gl.float32, mma)), is_async=True)
        c_block = warpgroup_mma(a_tile, b_tile, c_block, is_async=True)
        if WAITS:
            c_block = warpgroup_mma_wait(0, [c_block])
    c_tile = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    c_tile.store(c_block)
    fence_async_shared()
    tma.async_copy_shared_to_global(c, [0, 0], c_tile)
    tma.store_wait(0)


@gluon.jit
def move_rows(source, target, rows, width):
    offsets = gl.load(rows + gl.arange(0, 8, LINE))
    tile = gl.allocate_shared_memory(source.dtype, [8, 16], source.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 8 * source.block_type.nbytes)
    blackwell.tma.async_gather(source, offsets, width, barrier=bar, result=tile)
    mbarrier.wait(bar, 0)
    blackwell.tma.async_scatter(target, offsets, 0, tile)
    tma.store_wait(0)


@gluon.jit
def skip(x, out, n):
    tile = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.expect(bars.index(0), x.block_type.nbytes, pred=n == 1)
    tma.async_copy_global_to_shared(x, [0, 0], bars.index(0), tile, pred=n == 1)
    mbarrier.arrive(bars.index(0), count=1, pred=n > 1)
    mbarrier.wait(bars.index(0), 0)
    mbarrier.wait(bars.index(2), 1, pred=n > 1)
    mbarrier.arrive(bars.index(n - 2), pred=n > 1)
    tma.async_copy_shared_to_global(out, [0, 0], tile)
    tma.store_wait(0)


@triton.autotune([triton.Config({"N": 32}), triton.Config({"N": 64})], key=[])
@triton.heuristics({"M": lambda given: given["N"] * 2})
@gluon.jit
def tuned(out, N: gl.constexpr, M: gl.constexpr):
    gl.store(out + gl.arange(0, N, LINE), M)


@gluon.jit
def body(p):
    i = gl.arange(0, 32, LINE)
    BODY
"""


@pytest.fixture(scope="module")
def kernels():
    gluon_emulator.enable()
    return lesson.define(KERNELS)


class Descriptor:
    """What the emulator reads of a host descriptor."""

    def __init__(self, base, block_shape):
        self.base, self.block_shape, self.layout = base, block_shape, None


def test_a_grid_has_three_dimensions_and_may_be_a_function(kernels):
    for seed in gluon_emulator.SEEDS:
        out = torch.zeros(24, dtype=torch.int32)
        with gluon_emulator.with_seed(seed):
            kernels["number_programs"][lambda given: (given["X"], 3, 4)](out, X=2)
        assert out.tolist() == [10 * i + 4 for i in range(24)]


def test_pointers_with_masks_and_reductions(kernels):
    x = torch.randn(16, 20)
    out = torch.zeros(16, 20)
    kernels["softmax"][(1,)](x, out, 20, 20)
    torch.testing.assert_close(out, x.softmax(1))


def test_integers_divide_and_wrap_as_on_the_gpu(kernels):
    x = torch.tensor([-7, -1, 0, 1, 7, 5, -5, 100], dtype=torch.int32)
    out = torch.zeros(27, dtype=torch.int32)
    kernels["divide"][(1,)](x, out)
    assert torch.equal(out[:8], x.div(3, rounding_mode="trunc")) and torch.equal(out[8:16], x.fmod(3))
    assert torch.equal(out[16:24], x * 1000000000)
    assert out[24:].tolist() == [-2, -1, 45]


def test_elements_are_gathered_summed_up_and_counted(kernels):
    x = torch.tensor([3, 0, 7, 3, 1, 1, 5, 3], dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int32)
    kernels["rearrange"][(1,)](x, out)
    high = [(each + 0xFFFFFFF0) * (each + 2) >> 32 for each in x.tolist()]
    expected = [*x.flip(0).tolist(), *x.cumsum(0).tolist(), *x.bincount(minlength=8).tolist(), *high]
    assert out.tolist() == expected


def test_atomics_count_every_element(kernels):
    x = torch.randint(0, 10, (128,), dtype=torch.int32)
    counts = torch.zeros(9, dtype=torch.int32)
    kernels["count_values"][(2,)](x, counts)
    assert counts.tolist() == [*x.bincount(minlength=8)[:8].tolist(), int(x.max())]


def test_cp_async_needs_commit_and_wait(kernels):
    x, out = torch.randn(128), torch.ones(128)
    kernels["copy_async"][(1,)](x, out, True, True)
    assert torch.equal(out[:100], x[:100]) and not out[100:].any()
    for commit, wait in ((False, True), (True, False)):
        with pytest.raises(gluon_emulator.GluonError, match="before cp.async has landed"):
            kernels["copy_async"][(1,)](x, out, commit, wait)


def test_views_of_shared_memory(kernels):
    x, out = torch.randn(16, 32), torch.zeros(16, 32)
    kernels["swap_halves"][(1,)](x, out)
    assert torch.equal(out, x.roll(16, 1))


def test_aggregates_constexprs_and_the_launch_are_known(kernels):
    out = torch.zeros(3, dtype=torch.int32)
    kernels["describe"][(1,)](out, N=8, num_warps=8)
    assert out.tolist() == [17, 81, 32]


@pytest.mark.parametrize("on_blackwell", [False, True])
def test_products_are_right_and_need_a_wait(kernels, on_blackwell):
    a, b, c = torch.randn(64, 64).half(), torch.randn(64, 32).half(), torch.zeros(64, 32)
    given = [Descriptor(each, list(each.shape)) for each in (a, b, c)]
    for seed in gluon_emulator.SEEDS:
        with gluon_emulator.with_seed(seed):
            gluon_emulator.run(kernels["multiply"], 1, *given, on_blackwell, True)
            torch.testing.assert_close(c, 2 * (a.float() @ b.float()), atol=1e-3, rtol=1e-3)
            says = "nobody has waited|before warpgroup_mma_wait"
            with pytest.raises(gluon_emulator.GluonError, match=says):
                gluon_emulator.run(kernels["multiply"], 1, *given, on_blackwell, False)


def test_gather_and_scatter_of_rows(kernels):
    x = torch.randn(32, 32)
    out = torch.zeros(32, 32)
    rows = torch.tensor([9, 3, 31, 0, 7, 99, 2, 1], dtype=torch.int32)
    gluon_emulator.run(kernels["move_rows"], 1, Descriptor(x, [1, 16]), Descriptor(out, [1, 16]), rows, 16)
    expected = torch.zeros(32, 32)
    inside = rows[rows < 32].long()
    expected[inside, :16] = x[inside, 16:]
    assert torch.equal(out, expected)
    with pytest.raises(gluon_emulator.GluonError, match="multiple of 16 bytes"):
        gluon_emulator.run(kernels["move_rows"], 1, Descriptor(x, [1, 16]), Descriptor(out, [1, 16]), rows, 2)


def test_a_predicate_that_is_false_skips(kernels):
    x, out = torch.randn(4, 8), torch.zeros(4, 8)
    gluon_emulator.run(kernels["skip"], 1, Descriptor(x, [4, 8]), Descriptor(out, [4, 8]), 1)
    assert torch.equal(x, out)


def test_a_tuned_kernel_runs_its_first_configuration(kernels):
    out = torch.zeros(64, dtype=torch.int32)
    kernels["tuned"][(1,)](out)
    assert out.tolist() == [64] * 32 + [0] * 32


@cases(
    "body, said",
    ("gl.load(p + i, padding_option='zero')", "does not know padding_option='zero' of gl.load"),
    ("gl.load(p + i, colour=3)", r"gl.load got an unexpected keyword argument 'colour'"),
    ("gl.fp4_to_fp(i, gl.float16, 0)", "does not know triton.*fp4_to_fp"),
    ("hopper.cluster.arrive()", "does not know triton.*cluster.arrive"),
    ("fence_async_shared(cluster=True)", "does not know cluster=True of fence_async_shared"),
    ("i.to(gl.float16, fp_downcast_rounding='rtz')", "does not know fp_downcast_rounding='rtz'"),
    ("gl.store(p + i + 1, 1.0)", "gl.store at element 32 of a tensor whose memory holds 32"),
    ("gl.store(p + i, gl.zeros([32], gl.float32, gl.BlockedLayout([2], [32], [4], [0])))", "layouts meet"),
    ("gl.device_assert(i < 5, 'too large')", "device_assert fails in program .0, 0, 0.: too large"),
    ("gl.static_assert(1 == 2, 'never')", "static_assert fails: never"),
    ("while gl.load(p) == 0: pass", "the program does not end"),
    ("mbarrier.init(gl.allocate_shared_memory(gl.int64, [2, 1], None), 1)", "take .index"),
    ("gl.program_id(3)", "axis 3 of the grid"),
)
def test_what_the_emulator_lacks_is_named(body, said, monkeypatch):
    if "cluster.arrive" in body and version("triton") < "3.7":
        pytest.skip("Triton 3.6 has no hopper.cluster")
    monkeypatch.setattr("tilelab.emulator.gluon.program._LONGEST_LOOP", 500)
    gluon_emulator.enable()
    kernel = lesson.define(KERNELS.replace("BODY", body))["body"]
    with pytest.raises(gluon_emulator.GluonError, match=said):
        kernel[(1,)](torch.zeros(32))


@cases("option, said", ({"num_ctas": 2}, "num_ctas=2"), ({"warps": 2}, "no option 'warps'"))
def test_an_option_of_the_launch_is_named(kernels, option, said):
    with pytest.raises(gluon_emulator.GluonError, match=said):
        kernels["number_programs"][(1,)](torch.zeros(1, dtype=torch.int32), X=1, **option)


def test_every_stand_in_takes_the_parameters_of_triton():
    from tilelab.emulator.gluon import translate

    hidden = {"_semantic", "_generator", "_builder"}
    for module, table in translate.TABLES.items():
        for name, stand_in in table.items():
            real = getattr(module, name, None)
            if not isinstance(stand_in, types.FunctionType) or real is None or inspect.isclass(real):
                continue
            real = inspect.signature(getattr(real, "fn", real)).parameters
            own = inspect.signature(stand_in).parameters
            kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            lacks = {each for each in real if each not in hidden and real[each].kind not in kinds} - set(own)
            assert not lacks, f"{module.__name__}.{name} lacks {lacks}"
