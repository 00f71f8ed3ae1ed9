"""Inputs, ladders and checks for the kernels of `notebooks/08_ch14_gemm.ipynb`, the reader's among them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import gemm
from ch14.gemm.lesson import experiments
from tilelab.cells import lesson
from tilelab.measure.check import make_checker
from tilelab.runtime import device

TILE, STEP = (
    128,
    64,
)  # of every kernel in the notebook: 128 × 128 elements of C, and 64 elements of K per step
PROGRAMS = 3  # of a persistent kernel that is checked: fewer than tiles
CASES = {
    "cpu": [(300, 264, 136), (1, 136, 72)],  # (M, N, K): in the interpreter, then on a GPU
    "cuda": [(300, 264, 136), (2048, 6144, 512)],
}

# 80 tiles of C, 400 steps each: the last product of an MLP in Qwen 3 32B, 256 tokens.
FEW_TILES = (256, 5120, 25600)

STEPS = (
    "gemm_pointers:prepare_pointers",
    "gemm_descriptors:prepare_descriptors",
    "gemm_pointers:prepare_pointers(num_stages=3)",
    "gemm_descriptors:prepare_descriptors(num_stages=3)",
    "gemm_grouped:prepare_grouped",
    "gemm_subtiled:prepare_subtiled",
    "gemm_persistent:prepare_persistent",
    "gemm_persistent:prepare_persistent(num_stages=3)",
    "gemm_persistent:prepare_persistent(num_stages=3, epilogue_subtile=4, programs_per_sm=2)",
    "gemm_early:prepare_early",
)
lesson.register("ch14_gemm_ladder", "08_ch14_gemm", *STEPS)
lesson.register("ch14_gemm_stages", "08_ch14_gemm", *STEPS[:2], sweep=True)
lesson.register(
    "ch14_gemm_few_tiles", "08_ch14_gemm", "gemm_subtiled:prepare_subtiled", "gemm_split:prepare_split"
)
lesson.register("ch14_gemm_splits", "08_ch14_gemm", "gemm_split:prepare_split", sweep=True)
for _size in (2048, 4096, 8192):
    lesson.register(
        f"ch14_gemm_ablation_{_size}",
        "08_ch14_gemm",
        "gemm_once:prepare_once",
        "gemm_early:prepare_early",
        "gemm_persistent:prepare_persistent",
        sweep=True,
    )


def make_inputs(shape: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """Return a (M, K), b = weight.T and out in bf16; small ones without a GPU, where only their types count."""
    return experiments.make_inputs(*(shape if device.current().capability else (256,) * 3))[:3]


def make_case(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return a (M, K), b = weight.T (K, N) and out (M, N) in bf16."""
    m, n, k = case
    a, weight = (torch.randn(rows, k, device=where).bfloat16() for rows in (m, n))
    return a, weight.T, torch.empty(m, n, dtype=torch.bfloat16, device=where)


def make_cancelling(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return operands as `make_case` does, whose halves of K cancel but for eight columns, so that rounding shows."""
    a, b, out = make_case(case, where)
    half = case[2] // 2
    a[:, half:], b[half:-8] = -a[:, :half], b[: half - 8]
    return a, b, out


def check_version(prepare: Callable) -> str:
    """Run a GEMM on ragged shapes; return "" or what is wrong.

    On a GPU the sizes are multiples of 16, as those that are timed, so that Triton compiles a version once for both.
    """
    cases = CASES | {"cuda": [(304, 272, 144), (2048, 6144, 512)]}
    return lesson.check_launch(prepare, cases, make_case, gemm.spec)


def make_ladder(
    size: int | tuple[int, int, int] = 8192, experiment: str = "ch14_gemm_ladder"
) -> lesson.Ladder:
    """Return the ladder of the notebook's versions at `size` cubed or at (M, N, K), beside torch.mm."""
    shape = m, n, k = (size,) * 3 if isinstance(size, int) else size

    def prepare_mm(a, b, out):
        return lambda: torch.mm(a, b, out=out)

    return lesson.Ladder(
        experiment,
        "torch.mm",
        prepare_mm,
        functools.partial(make_inputs, shape),
        check_version,
        flops=2 * m * n * k,
        repeats=False,
    )


# ---- the reader's kernels


def prepare_with(kernel, describe: Callable) -> Callable:
    """Return a `prepare` that launches a program per tile of C with what `describe(a, b, out)` returns."""
    blocks = dict(BLOCK_M=TILE, BLOCK_N=TILE, BLOCK_K=STEP, num_warps=4, num_stages=3)

    def prepare(a, b, out):
        given, tiles = describe(a, b, out), triton.cdiv(len(a), TILE) * triton.cdiv(b.shape[1], TILE)
        return lambda: kernel[(tiles,)](*given, **blocks)

    return prepare


def by_pointers(a, b, out) -> tuple:
    """Return the arguments of a kernel like gemm_pointers."""
    return a, b, out, len(a), *b.T.shape, a.stride(0), b.stride(1), out.stride(0)


def describe(*tiles: tuple[torch.Tensor, list[int]]) -> tuple:
    return tuple(TensorDescriptor.from_tensor(*tile) for tile in tiles)


def by_transposed_descriptors(a, b, out) -> tuple:
    """Return the arguments of a kernel that takes A.T (K, M): descriptors of it, of B.T and of C, then N and K."""
    return *describe((a.T, [STEP, TILE]), (b.T, [TILE, STEP]), (out, [TILE, TILE])), *b.T.shape


def make_transposed(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return the operands of `make_case` with A stored by columns; M is rounded up to whole 16 bytes."""
    m, n, k = case
    a, b, out = make_case((-(-m // 8) * 8, n, k), where)
    return a.T.contiguous().T, b, out


def check_masks(kernel) -> None:
    """Raise AssertionError unless a kernel with the arguments of gemm_pointers is right at ragged sizes."""
    lesson.require_launch(prepare_with(kernel, by_pointers), CASES, make_case, gemm.spec)


def check_loop(kernel) -> None:
    """Raise AssertionError unless a kernel computes the product by TMA from A.T, B.T and C."""
    lesson.require_written(kernel)
    prepare = prepare_with(kernel, by_transposed_descriptors)
    lesson.require_launch(prepare, CASES, make_transposed, gemm.spec)
    report = lesson.compile_launch(prepare, make_transposed((256, 256, 256), "cpu"), "sm_90a")
    assert report.counts["tma_load"] and report.counts["wgmma"], "it must load by TMA and multiply by wgmma"


@triton.jit
def _list_tiles(out_ptr, tiles_m, tiles_n, GROUP: tl.constexpr, PICK: tl.constexpr):
    tile_m, tile_n = PICK(tl.program_id(0), tiles_m, tiles_n, GROUP)
    tl.store(out_ptr + 2 * tl.program_id(0), tile_m)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, tile_n)


def check_raster(pick) -> None:
    """Raise AssertionError unless `pick(tile, tiles_m, tiles_n, GROUP_N)` is a raster of groups of columns.

    GROUP_N columns of tiles sweep the rows together; the last group may be narrower.
    """
    lesson.require_written(pick)
    where = "cuda" if device.current().has_tma else "cpu"
    for tiles_m, tiles_n, group in ((4, 6, 2), (5, 7, 3), (3, 2, 4), (6, 5, 1)):
        out = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32, device=where)
        _list_tiles[(tiles_m * tiles_n,)](out, tiles_m, tiles_n, GROUP=group, PICK=pick)
        found = [tuple(pair) for pair in out.tolist()]
        name = f"{tiles_m} × {tiles_n} tiles, GROUP_N = {group}"
        missing = set((m, n) for m in range(tiles_m) for n in range(tiles_n)) - set(found)
        assert not missing, f"{name}: nobody computes tile {min(missing)}"
        width = min(group, tiles_n)
        first = set(found[: width * tiles_m])
        assert all(n < width for _, n in first), (
            f"{name}: the first group must stay in columns 0 to {width - 1}"
        )
        assert {m for m, _ in found[:width]} == {0}, f"{name}: the first {width} programs must share row 0"


def check_whole(kernel, prepare: Callable) -> None:
    """Raise AssertionError unless `prepare(a, b, out, programs)` launches a persistent GEMM by descriptors.

    Each tile of 128 × 128 must be computed by one program alone, and the programs must share the tiles evenly.
    """
    lesson.require_written(kernel)

    def find_uneven(programs: int, writers: torch.Tensor) -> str:
        """Return "" or what is wrong with which of `programs` programs wrote which element."""
        owners = []
        for number, tile in enumerate(tile for rows in writers.split(TILE) for tile in rows.split(TILE, 1)):
            if not bool((tile == tile[0, 0]).all()) or int(tile[0, 0]) == -2:
                return f"several programs compute tile {number}, in row-major order"
            owners.append(int(tile[0, 0]))
        counts = sorted(owners.count(program) for program in range(programs))
        if max(owners) >= programs or counts[-1] > counts[0] + 1:
            shares = ", ".join(
                str(owners.count(program)) for program in range(max(max(owners) + 1, programs))
            )
            return f"{programs} programs must share {len(owners)} tiles evenly, but they have {shares}"
        return ""

    for programs, cases in ((PROGRAMS, CASES), (1, dict.fromkeys(CASES, [(129, 136, 64)])), (7, CASES)):
        lesson.require_launch(
            functools.partial(prepare, programs=programs),
            cases,
            make_case,
            gemm.spec,
            judge_writers=functools.partial(find_uneven, programs),
        )
    long = dict.fromkeys(CASES, [(129, 136, 2048)])
    if fault := lesson.check_launch(
        functools.partial(prepare, programs=PROGRAMS), long, make_cancelling, gemm.spec
    ):
        raise AssertionError(f"where large sums cancel, {fault}")
    report = lesson.compile_launch(
        functools.partial(prepare, programs=PROGRAMS), make_case((256, 256, 256), "cpu"), "sm_90a"
    )
    assert report.launchable, report.reason
    assert report.counts["tma_load"] and report.counts["tma_store"], "it must load and store by descriptors"
    assert report.counts["wgmma"], "it must multiply by wgmma: use tl.dot"
    assert report.smem >= 3 * 2 * (TILE + TILE) * STEP, "keep at least three stages"
    if device.current().has_tma:  # only the interpreter knows which program wrote an element
        lesson.check_interpreted(check_whole, kernel, prepare)


def check_fit(prepare: Callable, options: dict) -> None:
    """Raise AssertionError unless two programs of three stages or more fit on an SM, with as few parts as possible."""
    if not options:
        raise NotImplementedError

    def compile_with(**changed):
        launch = functools.partial(prepare, **options | changed)
        return lesson.compile_launch(launch, make_inputs((256, 256, 256)), "sm_90a")

    report, parts = compile_with(), options.get("epilogue_subtile", 1)
    assert report.launchable, report.reason
    assert options.get("num_stages", 0) >= 3, "keep at least three stages"
    assert report.programs_per_sm == 2, f"{report.programs_per_sm} program per SM: {report.smem:,} B each"
    if parts > 1:
        assert compile_with(epilogue_subtile=parts // 2).programs_per_sm != 2, "fewer parts fit too"
    fault = check_version(functools.partial(prepare, **options))
    assert not fault, fault


CHECKS = {
    "Exercise 1": check_fit,
    "Exercise 2": check_masks,
    "Exercise 3": check_loop,
    "Exercise 4": check_raster,
    "Exercise 5": check_whole,
}
check = make_checker(CHECKS)
