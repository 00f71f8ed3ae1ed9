"""Time parts of the fp8 kernel alone: its loads, its products, its additions and its epilogue.

Each part is the kernel with the other parts cut out of a copy of its source. The results of such a kernel mean nothing,
so they are not checked. No part waits for what another, missing part would bring: where the loads are cut out, so are
the waits for them.
"""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

from ch14 import fp8_gemm
from ch14.fp8_gemm.lesson.experiments import FP8_SOURCES, experiment, measure, prepare_course, prepare_torch
from tilelab.measure.patch import patched_source
from tilelab.records import results
from tilelab.runtime import provenance

SHAPES = ((4096, 4096, 7168), (8192, 8192, 1024))  # a long K, and a short one
_NO_LOADS = ("if (threadIdx.x == 0) {\n            for (int id", "if (false) {\n            for (int id", 1)
_NO_WAITS = (
    ("mbarrier_wait(memory.full + 8 * state.stage, state.phase);", "", 1),
    ("release(memory, used_stage, lane);", "", 1),
)
_NO_PRODUCTS = ("multiply(sum, a + consumer * ROWS * BLOCK_K, a + A_BYTES);", "", 1)
_ADDITION = "acc[i] += sum[i] * (i / 2 % 2 ? lower_factor : upper_factor);"
_NO_SUMS = (_ADDITION, "acc[i] = 0;", 1)
# Without any use of the sums the compiler drops the products.
_ONE_ADDITION = (_ADDITION, "if (i == 0) acc[i] += sum[i];", 1)
_NO_EPILOGUE = ("else if (row < M) epilogue(", "else if (row < 0) epilogue(", 1)
_NO_STEPS = ("blocks_left = work.last - step;", "blocks_left = 0;", 1)

PARTS = {
    "loads alone": (_NO_PRODUCTS, _NO_SUMS, _NO_EPILOGUE),
    "products alone": (_NO_LOADS, *_NO_WAITS, _ONE_ADDITION, _NO_EPILOGUE),
    "products and additions": (_NO_LOADS, *_NO_WAITS, _NO_EPILOGUE),
    "loads and products": (_ONE_ADDITION, _NO_EPILOGUE),
    "epilogue alone": (_NO_LOADS, _NO_STEPS),
}


@contextlib.contextmanager
def cut_to(name: str):
    """Let the operator compile only a part of the kernel, one of PARTS, as long as the context lasts."""
    with (
        patched_source(fp8_gemm.SOURCE, *PARTS[name]) as source,
        mock.patch.object(fp8_gemm, "SOURCE", source),
    ):
        yield


def prepare_part(name: str):
    """Return a candidate that launches a part of the kernel, one of PARTS, on `verification.fp8_operands`."""

    def prepare(*operands):
        with cut_to(name):
            return prepare_course()(*operands)

    return prepare


@experiment(
    "ch14_blockscaled_isolated", functools.partial(provenance.source_hash, *FP8_SOURCES, prepare_part)
)
def measure_isolated():
    """Measure the kernel and each of PARTS beside torch's product, at SHAPES."""
    candidates = {"torch": prepare_torch, "whole kernel": prepare_course()} | {
        name: prepare_part(name) for name in PARTS
    }
    return [row for shape in SHAPES for row in measure(candidates, shape, rounds=10, warm_s=0.15)]


def tabulate(record: results.Record) -> results.Table:
    """Return a table of the times of `measure_isolated`, each also as a share of the whole kernel's."""
    rows = []
    for shape in dict.fromkeys(tuple(row["shape"]) for row in record.rows):
        here = [row for row in record.rows if tuple(row["shape"]) == shape]
        whole = next(row for row in here if row["name"] == "whole kernel")["ms"]
        rows += [row | {"of the whole kernel": row["ms"] / whole} for row in here if row.get("ms")]
    columns = ["shape", "name", "ms", "of the whole kernel", "peer_ms", "spread"]
    return results.table(rows, record.label(), [each for each in columns if any(each in row for row in rows)])
