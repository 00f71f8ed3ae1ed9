"""Inputs, ladders and checks for the kernels of `notebooks/18_ch14_moe.ipynb`, the reader's among them.

A `prepare` of a cell takes the tensors that `make_case`, `make_fp8`, `make_swiglu` or `make_masked` returns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import moe
from ch14.moe.lesson import workloads
from ch14.moe.lesson.workloads import make_sorted
from tilelab.cells import lesson
from tilelab.cells.launch_memory import LaunchMemory
from tilelab.measure import check as checks
from tilelab.measure import peers
from tilelab.records import results
from tilelab.runtime import device

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TILE, SMS = 128, 132  # The notebook's first kernels compute tiles of 128 × 128. An H200 has 132 SMs.
TIMED = ([128] * 64, 4096, 2048)  # rows of each expert, N, K
TIMED_RAGGED = (workloads.route(workloads.Model(64, 8, 0, 0), 1024, "random"), 4096, 2048)  # as many rows
TIMED_MASKED = ([1] * 128, 64, 1536, 2048)  # rows of each expert, capacity, N, K
CASES = {
    "cpu": [([70, 0, 133, 1], 136, 72), ([0, 0, 20, 0], 40, 64), ([128, 128], 128, 64)],
    "cuda": [([70, 0, 133, 1], 144, 80), ([0, 0, 20, 0], 48, 64), ([200] * 32, 512, 512)],
}
FP8_CASES = {
    "cpu": [([70, 0, 133, 1], 136, 256), ([0, 64, 0], 256, 128)],
    "cuda": [([70, 0, 133, 1], 144, 256), ([0, 64, 0], 256, 128), ([200] * 32, 512, 512)],
}
SWIGLU_CASES = {
    "cpu": [([70, 0, 133, 1], 512, 256), ([0, 64, 0], 256, 128)],
    "cuda": [([70, 0, 133, 1], 512, 256), ([0, 64, 0], 256, 128), ([200] * 32, 1024, 512)],
}
MASKED_CASES = {
    "cpu": [([3, 0, 70, 64], 70, 136, 72), ([0, 0], 5, 40, 64)],
    "cuda": [([3, 0, 70, 64], 70, 144, 80), ([0, 0], 5, 48, 64), ([5] * 64, 128, 512, 512)],
}
SMALL, SMALL_MASKED = ([128] * 4, 256, 256), ([8] * 4, 64, 256, 256)  # where only the types count

STEPS = {
    "ladder": (
        "one_expert:prepare_loop",
        "one_expert:prepare_graph",
        "one_launch:prepare_one_launch",
        "persistent:prepare_persistent",
        "whole_tiles:prepare_whole_tiles",
    ),
    "ragged_ladder": ("persistent:prepare_persistent", "whole_tiles:prepare_whole_tiles"),
    "fp8_ladder": ("scaled:prepare_scaled",),
    "swiglu_ladder": ("scaled:prepare_separate", "swiglu:prepare_swiglu"),
    "masked_ladder": ("masked:prepare_masked",),
}
for _name, _steps in STEPS.items():
    lesson.register(f"ch14_moe_{_name}", "18_ch14_moe", *_steps)


def _make_ladder(
    name: str, peer: str, prepare_peer, make, check_version, timed, small, flops=None, nbytes=None
):
    def make_inputs():
        return make(timed, "cuda") if device.current().capability else make(small, "cpu")

    return lesson.Ladder(
        f"ch14_moe_{name}", peer, prepare_peer, make_inputs, check_version, flops=flops, nbytes=nbytes
    )


FLOPS = 2 * sum(TIMED[0]) * TIMED[1] * TIMED[2]


# ---- in bf16


def make_case(case: tuple[Sequence[int], int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return a (M, K) and weight (experts, N, K) in bf16, offsets (experts,) and out (M, N)."""
    return make_sorted(*case, False, where)[:4]


def multiply(a, weight, offsets) -> torch.Tensor:
    """Return the grouped product in float64."""
    return moe.spec(a, weight.mT, offsets)


def check_version(prepare: Callable) -> str:
    """Run a grouped product with ragged and empty groups; return "" or what is wrong."""
    return lesson.check_launch(prepare, CASES, make_case, multiply)


def make_ladder(ragged: bool = False) -> lesson.Ladder:
    """Return the ladder of the versions in bf16, beside torch's grouped product; the experts have equal shares of rows.

    With `ragged`, they have as many rows together, and each token chooses its experts at random.
    """

    def prepare_torch(a, weight, offsets, out):
        return lambda: torch._grouped_mm(a, weight.mT, offs=offsets)

    name, timed = ("ragged_ladder", TIMED_RAGGED) if ragged else ("ladder", TIMED)
    return _make_ladder(
        *(name, "torch._grouped_mm", prepare_torch, make_case, check_version, timed, SMALL), flops=FLOPS
    )


def tabulate_waves(layers: dict[str, tuple[Sequence[int], int]], sms: int = SMS) -> results.Table:
    """Return a table of layers {name: (rows of each group, N)}: tiles, and the share of SMs that have work.

    A loop of launches ends a wave after each group, one launch only once.
    """
    rows = []
    for name, (sizes, n) in layers.items():
        tiles = [math.ceil(size / TILE) * math.ceil(n / TILE) for size in sizes if size]
        in_loop = sum(math.ceil(each / sms) for each in tiles)
        together = math.ceil(sum(tiles) / sms)
        useful = sum(sizes) * n / TILE**2
        rows.append(
            {
                "layer": name,
                "experts with tokens": len(tiles),
                "tiles": sum(tiles),
                "waves, loop": in_loop,
                "waves, one launch": together,
                "SMs at work, loop": f"{sum(tiles) / in_loop / sms:.0%}",
                "SMs at work, one launch": f"{sum(tiles) / together / sms:.0%}",
                "rows of tiles in use": f"{useful / sum(tiles):.0%}",
            }
        )
    return results.table(rows, f"tiles of {TILE} × {TILE}, {sms} SMs")


# ---- in fp8


def make_fp8(case: tuple[Sequence[int], int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return a, its scales, weight, its scales, offsets, both operands in bf16, and out (M, N) in bf16.

    a (M, K) and weight (experts, N, K) are float8_e4m3fn with a scale per 1 × 128 and per 128 × 128 elements. The
    scales of a lie column by column.
    """
    sizes, n, k = case
    a, weight, offsets, out, *scales = make_sorted(sizes, n, k, True, where)
    wide = [moe._dequantise(*each).to(BF16) for each in ((a, scales[0], 1), (weight, scales[1], moe.BLOCK))]
    return a, scales[0], weight, scales[1], offsets, *wide, out


def multiply_fp8(a, a_scale, weight, b_scale, offsets, *_) -> torch.Tensor:
    """Return the grouped product of the operands of `make_fp8` in float64."""
    return moe.spec(a, weight.mT, offsets, a_scale, b_scale.mT)


def make_fp8_ladder() -> lesson.Ladder:
    """Return the ladder of the version with block scales, beside torch's grouped product of the same in bf16."""

    def prepare_torch(a, a_scale, weight, b_scale, offsets, wide_a, wide_weight, out):
        return lambda: torch._grouped_mm(wide_a, wide_weight.mT, offs=offsets)

    def check_scaled(prepare):
        return lesson.check_launch(prepare, FP8_CASES, make_fp8, multiply_fp8)

    return _make_ladder(
        *("fp8_ladder", "torch._grouped_mm in bf16", prepare_torch, make_fp8, check_scaled, TIMED, SMALL),
        flops=FLOPS,
    )


def make_swiglu(case: tuple[Sequence[int], int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return what `make_fp8` does, with N = 2 I, but out (M, I) in float8_e4m3fn with its scales (M, I / 128).

    The products are near 1. The scales of out lie column by column, as in a.
    """
    *tensors, out = make_fp8(case, where)
    tensors[3] /= math.sqrt(case[2])
    tensors[6] /= math.sqrt(case[2])
    rows, wide = out.shape
    scales = peers.align_columns(torch.empty(rows, wide // 256, device=where))
    return *tensors, torch.empty(rows, wide // 2, dtype=FP8, device=where), scales


def apply_swiglu(both: torch.Tensor, out: torch.Tensor, out_scale: torch.Tensor) -> None:
    """Write silu(gate) * value of `both` (M, 2 I) to `out` (M, I), quantised with a scale for each 128 columns."""
    gate, value = both.float().chunk(2, -1)
    result = (F.silu(gate) * value).unflatten(-1, (-1, moe.BLOCK))
    scale = result.abs().amax(-1).clamp_min(1e-30) / 448
    out.copy_((result / scale[..., None]).flatten(-2))
    out_scale.copy_(scale)


def _quantise_exactly(*tensors) -> tuple[torch.Tensor, torch.Tensor]:
    gate, value = multiply_fp8(*tensors).chunk(2, -1)
    result = (F.silu(gate) * value).unflatten(-1, (-1, moe.BLOCK))
    scale = result.abs().amax(-1).clamp_min(1e-30) / 448
    return (result / scale[..., None]).flatten(-2), scale


def make_swiglu_ladder() -> lesson.Ladder:
    """Return the ladder of SwiGLU and the quantiser, beside torch's in bf16, which quantises nothing."""

    def prepare_torch(a, a_scale, weight, b_scale, offsets, wide_a, wide_weight, out, out_scale):
        def run():
            gate, value = torch._grouped_mm(wide_a, wide_weight.mT, offs=offsets).chunk(2, -1)
            return F.silu(gate) * value

        return run

    def check_quantised(prepare):
        # A number that lies between two of e4m3 may be rounded to either.
        return lesson.check_launch(
            prepare, SWIGLU_CASES, make_swiglu, _quantise_exactly, checks.TOLERANCE[FP8], outputs=2
        )

    peer = "torch._grouped_mm and SwiGLU in bf16"
    return _make_ladder(
        *("swiglu_ladder", peer, prepare_torch, make_swiglu, check_quantised, TIMED, SMALL), flops=FLOPS
    )


# ---- masked


def make_masked(case: tuple[Sequence[int], int, int, int], where: str = "") -> tuple[torch.Tensor, ...]:
    """Return a (experts, capacity, K), weight (experts, N, K), counts (experts,) and out (experts, capacity, N)."""
    return workloads.make_masked(*case, False, where or ("cuda" if device.current().capability else "cpu"))[
        :4
    ]


def find_masked_fault(a, weight, counts, out) -> str:
    """Return "" or which expert's rows of `out` are wrong; the other rows may hold anything."""
    for expert, count in enumerate(counts.tolist()):
        wanted = a[expert, :count].double() @ weight[expert].double().T
        if count and not checks.relative_error(out[expert, :count], wanted) < checks.TOLERANCE[BF16]:
            return f"rows of expert {expert} are wrong"
    return ""


def check_masked(prepare: Callable) -> str:
    """Run a masked product; return "" or what is wrong, and that is also a row that is stored without a token."""
    where = "cuda" if device.current().has_tma else "cpu"
    for case in MASKED_CASES[where]:
        memory = LaunchMemory(make_masked(case, where), keep=False)
        fault = lesson.run_launch(memory, lambda *tensors: prepare(*tensors)()) or memory.find_damage()
        *_, counts, out = memory.tensors
        fault = fault or find_masked_fault(*memory.given, out)
        stored = next(
            (e for e, count in enumerate(counts.tolist()) if not out[e, count:].isnan().all()), None
        )
        if not fault and stored is not None:
            fault = f"rows of expert {stored} that hold no token were stored"
        if fault:
            return f"{case}: {fault}"
    return ""


def make_masked_ladder() -> lesson.Ladder:
    """Return the ladder of the masked layout with one token per expert, beside torch.bmm of all rows."""

    def prepare_bmm(a, weight, counts, out):
        return lambda: torch.bmm(a, weight.mT, out=out)

    sizes, _, n, k = TIMED_MASKED
    return _make_ladder(
        *("masked_ladder", "torch.bmm of all rows", prepare_bmm, make_masked, check_masked),
        *(TIMED_MASKED, SMALL_MASKED),
        nbytes=2 * len(sizes) * n * k,
    )


def capture(launch: Callable) -> Callable[[], object]:
    """Return the replay of a CUDA graph that holds what `launch` launches; without a GPU, `launch`."""
    if not device.current().capability:
        return launch
    launch()  # it compiles and loads the kernel, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


# ---- the reader's functions


def check_block_m(block_m: Callable[[int], int]) -> None:
    """Raise AssertionError unless `block_m(rows)` returns the better of 64 and 128 rows per tile."""
    for rows in range(1, 1025):
        chosen = block_m(rows)
        assert chosen in (64, 128), f"it must return 64 or 128; with rows = {rows} it returns {chosen!r}"
        time = {64: 0.6 * math.ceil(rows / 64), 128: math.ceil(rows / 128)}
        better = min(time, key=time.get)
        assert time[chosen] <= time[better] + 1e-9, (
            f"with rows = {rows}, tiles of {chosen} take {time[chosen]:.1f} and tiles of {better} take "
            f"{time[better]:.1f}"
        )


GRADIENT_CASES = {  # rows of each expert, rows of no expert, N, K
    "cpu": [([128, 64], 3, 64, 64), ([70, 0, 133, 1], 3, 72, 40), ([3, 2], 0, 40, 72)],
    "cuda": [([128, 64], 3, 64, 64), ([70, 0, 133, 1], 3, 200, 136), ([3, 2], 0, 40, 72)],
}


def make_gradient(case: tuple[Sequence[int], int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return a (rows, K) and g (rows, N), whose rows of no expert are NaN, offsets, and out (experts, N, K)."""
    sizes, spare, n, k = case
    a, g = (torch.randn(sum(sizes) + spare, each, device=where).to(BF16) for each in (k, n))
    a[sum(sizes) :], g[sum(sizes) :] = float("nan"), float("nan")
    offsets = torch.tensor(sizes, device=where).cumsum(0).int()
    return a, g, offsets, torch.empty(len(sizes), n, k, dtype=BF16, device=where)


def multiply_rows(a, g, offsets) -> torch.Tensor:
    """Return the gradient of each expert's weights, (experts, N, K) in float64."""
    bounds = [0, *offsets.tolist()]
    parts = [slice(begin, end) for begin, end in zip(bounds, bounds[1:])]
    return torch.stack([g[part].double().T @ a[part].double() for part in parts])


def check_gradient(kernel) -> None:
    """Raise AssertionError unless `kernel(a, g, out, offsets, rows, N, K, BLOCK)` computes the weights' gradient."""
    lesson.require_written(kernel)

    def prepare(a, g, offsets, out):
        groups, n, k = out.shape
        grid = (groups, triton.cdiv(n, 64), triton.cdiv(k, 64))
        return lambda: kernel[grid](a, g, out, offsets, len(a), n, k, BLOCK=64, num_warps=4, num_stages=2)

    lesson.require_launch(prepare, GRADIENT_CASES, make_gradient, multiply_rows)


def find_uneven(programs: int, block: int, sizes: Sequence[int], writers: torch.Tensor) -> str:
    """Return what is wrong with which program computed which tile of `sizes`, or ""."""
    counts, rows = [0] * programs, writers.split([size for size in sizes if size])
    for number in (tile for group in rows for part in group.split(block) for tile in part.split(block, 1)):
        found = number.unique().tolist()
        if len(found) > 1 or found[0] < 0:
            return "a tile must be stored by one program"
        counts[found[0]] += 1
    if max(counts) - min(counts) > 1:
        return f"of {programs} programs, one computes {max(counts)} tiles and another {min(counts)}"
    return ""


def check_grouped(kernel) -> None:
    """Raise AssertionError unless `kernel(a_desc, b_desc, out, offsets, groups, N, K, BLOCK_…)` is right.

    It runs with several numbers of programs, and is compiled for Hopper.
    """
    lesson.require_written(kernel)
    block, sizes = 64, {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}

    def prepare(programs, a, weight, offsets, out):
        a_desc = TensorDescriptor.from_tensor(a, [block, block])
        b_desc = TensorDescriptor.from_tensor(weight, [1, block, block])
        (groups, n, k), options = weight.shape, dict(num_warps=4, num_stages=2)
        return lambda: kernel[(programs,)](a_desc, b_desc, out, offsets, groups, n, k, **sizes, **options)

    for programs, (where, cases) in ((p, each) for p in (1, 3, 40) for each in CASES.items()):
        if where != ("cuda" if device.current().has_tma else "cpu"):
            continue
        for case in cases:
            judge = functools.partial(find_uneven, programs, block, case[0])
            lesson.require_launch(
                *(functools.partial(prepare, programs), {where: [case]}, make_case, multiply),
                judge_writers=judge,
            )
    report = lesson.compile_launch(functools.partial(prepare, 132), make_case(SMALL, "cpu"), "sm_90a")
    assert report.launchable, report.reason
    assert report.counts["wgmma"], "it must multiply by wgmma: tl.dot of tiles in bf16"


CHECKS = {"Exercise 1": check_block_m, "Exercise 2": check_gradient, "Exercise 3": check_grouped}
check = checks.make_checker(CHECKS)
