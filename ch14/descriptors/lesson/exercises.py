"""Inputs and checks for the kernels that a reader writes in `notebooks/07_ch14_descriptors.ipynb`.

All matrices are bfloat16. A launch is a function without arguments, made by `prepare(*inputs, out)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ch14.descriptors import spec
from ch14.descriptors.lesson.experiments import LARGE, SHAPES
from tilelab.cells import lesson
from tilelab.measure.check import make_checker
from tilelab.runtime import device

NOTEBOOK = "07_ch14_descriptors"
# Shapes to check: rows that end within a tile, a single row, and more than one tile in both directions.
CASES = {"cpu": [(1, 8), (5, 40), (7, 2056)], "cuda": [(1, 8), (37, 200), (257, 1032), (300, 4104)]}

lesson.register(
    "ch14_descriptors_copies",
    NOTEBOOK,
    "copy_pointers:prepare_pointers",
    "copy_host:prepare_host",
    "copy_device:prepare_device",
    "copy_device_loop:prepare_device_loop",
    "copy_tiles:prepare_host_loop",
)
lesson.register(
    "ch14_descriptors_sums",
    NOTEBOOK,
    "add_tiles:prepare_add",
    "add_tiles:prepare_add(tiles_per_program=4, num_stages=2)",
)
lesson.register(
    "ch14_descriptors_gathers",
    NOTEBOOK,
    "gather_pointers:prepare_gather_pointers",
    "gather_rows:prepare_gather_rows",
)


def _random(shape: tuple[int, int], where: str | None) -> torch.Tensor:
    """Return a random matrix; without `where` one on the GPU, or one that only a compiler looks at."""
    if where is None and not device.current().capability:
        return torch.empty(shape, dtype=torch.bfloat16)
    return torch.randn(shape, device=where or "cuda").bfloat16()


def make_copy(shape=LARGE, where: str | None = None) -> list[torch.Tensor]:
    """Return a random matrix x and out."""
    x = _random(shape, where)
    return [x, torch.empty_like(x)]


def make_sum(shape=LARGE, where: str | None = None) -> list[torch.Tensor]:
    """Return random matrices x and y, and out."""
    return [_random(shape, where), *make_copy(shape, where)]


def make_gather(shape=SHAPES["gather"][0], where: str | None = None) -> list[torch.Tensor]:
    """Return a random matrix x, a permutation of its rows as int32, and out.

    A small matrix gets a cycle through its rows, which is never its own inverse: a scatter would give another result.
    """
    x, out = make_copy(shape, where)
    rows = torch.randperm(shape[0]) if shape[0] > 100 else torch.arange(shape[0]).roll(1)
    return [x, rows.int().to(x.device), out]


def check_copy(prepare: Callable) -> str:
    """Run a copy on small matrices; return "" or what is wrong. `prepare(x, out)` returns the launch."""
    return lesson.check_launch(prepare, CASES, make_copy, lambda x: x, tolerance=0)


def check_sum(prepare: Callable) -> str:
    """Run a sum on small matrices; return "" or what is wrong. `prepare(x, y, out)` returns the launch."""
    return lesson.check_launch(prepare, CASES, make_sum, lambda x, y: spec("add", x, y))


def check_gather(prepare: Callable) -> str:
    """Run a gather on small matrices; return "" or what is wrong. `prepare(x, index, out)` returns the launch."""
    return lesson.check_launch(prepare, CASES, make_gather, lambda x, index: x[index.long()], tolerance=0)


def check_boxes(boxes: Callable, copy_host, prepare: Callable) -> None:
    """Raise AssertionError unless `boxes(block_m, block_n)` is the number of loads in the PTX of each block.

    `prepare(x, out, block)` launches `copy_host` with one warp: several warps would share the boxes.
    """
    for block in ((1, 512), (4, 1024), (8, 256), (64, 64), (512, 64), (2, 64), (512, 128)):
        report = lesson.compile_launch(
            lambda x, out, block=block: prepare(x, out, block), make_copy((8, 64), "cpu")
        )
        predicted, found = boxes(*block), report.counts["tma_load"]
        assert predicted == found, (
            f"a block of {block[0]} × {block[1]} takes {found} load"
            f"{'s' * (found > 1)}; boxes returns {predicted}"
        )


def check_padded_copy(kernel, prepare: Callable) -> None:
    """Raise AssertionError unless the copy is right where x and out are parts of wider matrices, of unlike widths."""

    def make_padded(shape, where):
        (x, _), (_, out) = (make_copy((shape[0], shape[1] + more), where) for more in (8, 40))
        return [x[:, : shape[1]], out[:, : shape[1]]]

    cases = {"cpu": [(3, 40), (9, 136)], "cuda": [(3, 40), (37, 200)]}
    lesson.require_launch(prepare, cases, make_padded, lambda x: x, tolerance=0)


def check_row_max(kernel, prepare: Callable) -> None:
    """Raise AssertionError unless out[i] is the largest element of row i, also where all are negative."""

    def make(shape, where):
        """Return rows below zero, each larger than the one before, and between them rows whose largest element is 0."""
        x = -torch.rand(shape, device=where) - torch.arange(shape[0], 0, -1, device=where)[:, None]
        x[1::3, shape[1] // 2], x[2::3, -1] = 0, 7
        return [x, torch.empty(shape[0], device=where)]

    cases = {"cpu": [(3, 12), (7, 100), (4, 32), (1, 4)], "cuda": [(3, 12), (64, 100), (4, 32)]}
    lesson.require_launch(prepare, cases, make, lambda x: x.amax(1), tolerance=0)
    counts = lesson.compile_launch(prepare, make((8, 100), "cpu")).counts
    assert counts["tma_load"], "the rows must come by the descriptor"


def check_scatter(kernel, prepare: Callable) -> None:
    """Raise AssertionError unless row i of x has become row index[i] of out."""
    lesson.require_written(kernel)
    cases = {"cpu": [(19, 64), (5, 200)], "cuda": [(19, 64), (300, 1000)]}

    def scatter(x, index):
        return torch.empty_like(x).index_copy_(0, index.long(), x)

    lesson.require_launch(prepare, cases, make_gather, scatter, tolerance=0)


def check_transpose(kernel, prepare: Callable) -> None:
    """Raise AssertionError unless out is x.T and the kernel loads and stores whole tiles by TMA."""
    lesson.require_written(kernel)

    def make(shape, where):
        x, _ = make_copy(shape, where)
        return [x, torch.empty(shape[::-1], dtype=x.dtype, device=where)]

    cases = {"cpu": [(64, 72), (40, 200)], "cuda": [(64, 72), (1000, 520)]}
    lesson.require_launch(prepare, cases, make, lambda x: x.T, tolerance=0)
    counts = lesson.compile_launch(prepare, make((64, 64), "cpu")).counts
    assert counts["tma_load"] and counts["tma_store"], "the kernel must load and store by descriptors"


CHECKS = {
    "Exercise 1": check_boxes,
    "Exercise 2": check_padded_copy,
    "Exercise 3": check_row_max,
    "Exercise 4": check_scatter,
    "Exercise 5": check_transpose,
}
check = make_checker(CHECKS)
