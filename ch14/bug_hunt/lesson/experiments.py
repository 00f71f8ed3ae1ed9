"""The builds behind the notebook `10_ch14_bug_hunt`, recorded once for the Tritons that a reader does not have.

They need no GPU. Their records lie in results/no-gpu, and `python -m ch14.bug_hunt --matrix` makes them again.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from unittest import mock

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.bug_hunt import HUNTS, Builds, environments, grid, hunts, kernels, outcomes
from tilelab.measure import check
from tilelab.records import results
from tilelab.runtime import device, provenance

VERSIONS = ("3.5.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")  # the version of the note, and later ones
TARGETS = device.TARGETS[1:]


def check_correctness(
    m: int = 100, k: int = 72, n: int = 136, names: Sequence[str] = ("loop", "warp_specialize")
) -> list[dict]:
    """Check that all forms of the loops of `names` compute the same product (m, k) @ (k, n), in float16.

    They run on a GPU with TMA, with one stage, which the compiler accepts in every form; else in Triton's interpreter.
    """
    where = "cuda" if device.current().has_tma else "cpu"
    a, b = (torch.randn(shape, device=where).half() for shape in ((m, k), (k, n)))
    forms = [
        (kernel, loop, loads)
        for kernel, hunt in ((kernels.loop_kernel, "loop"), (kernels.specialized_kernel, "warp_specialize"))
        if hunt in names
        for loop in HUNTS[hunt].axes["LOOP"]
        for loads in HUNTS[hunt].axes["LOADS"]
    ]
    return [
        row
        for kernel, loop, loads in forms
        for row in check.compare(
            functools.partial(_multiply, kernel, loop, loads),
            lambda a, b: a.double() @ b.double(),
            [(f"{loop}, {loads}", (a, b))],
            out=lambda a, b: ((a.shape[0], b.shape[1]), a.dtype),
        )
    ]


def _multiply(kernel, loop: str, loads: str, a, b, out) -> None:
    """Compute out (M, N) = a (M, K) @ b (K, N) with one form of a kernel, in tiles of 64 x 32 x 32."""
    m, n, k = 64, 32, 32
    constants = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "LOADS": loads, "LOOP": loop}
    if kernel is kernels.specialized_kernel:
        constants["WARP_SPECIALIZE"] = not a.is_cuda  # this is what makes the compiler fail
    matrices = (a, b, out)
    if loads == "host":
        tiles = (m, k), (k, n), (m, n)
        matrices = [TensorDescriptor.from_tensor(matrix, list(tile)) for matrix, tile in zip(matrices, tiles)]
    if a.is_cuda:
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )
    blocks = (
        (2,) if loop.startswith("over tiles") else (triton.cdiv(a.shape[0], m), triton.cdiv(b.shape[1], n))
    )
    kernel[blocks](*matrices, a.shape[0], b.shape[1], a.shape[1], **constants, num_warps=4, num_stages=1)


def _matrix_cells() -> list[tuple]:
    """List, for each Triton and target, all loops at the note's threshold, three specialised loops, and three formats
    in two tiles."""
    threshold = {"BLOCK_K": 64, "num_stages": 4, "num_warps": 8}
    cells = [
        ("loop", {"LOOP": loop, "LOADS": loads, **threshold})
        for loads in ("pointers", "device")
        for loop in HUNTS["loop"].axes["LOOP"]
    ]
    cells += [
        ("warp_specialize", {"LOOP": loop, "LOADS": loads, "BLOCK_M": 128, "num_warps": 4})
        for loop, loads in (("over K", "device"), ("over K", "host"), ("over tiles flat", "device"))
    ]
    cells += [
        ("dot_scaled", {"FORMAT": name, "BLOCK_M": m, "num_warps": 4})
        for name in HUNTS["dot_scaled"].axes["FORMAT"]
        for m in (128, 64)
    ]
    return [
        (version, target, hunt, config)
        for version, target, (hunt, config) in itertools.product(VERSIONS, TARGETS, cells)
    ]


def _grid_cells(name: str, versions: Sequence[str], target: str) -> list[tuple]:
    return [(version, target, name, config) for version in versions for config in grid(HUNTS[name])]


# Each returns its cells: (Triton, target, hunt, configuration).
EXPERIMENTS: dict[str, Callable[[], list[tuple]]] = {
    "matrix": _matrix_cells,
    "loop": lambda: _grid_cells("loop", ("3.5.0",), "sm_100a"),
    "warp_specialize": lambda: _grid_cells("warp_specialize", VERSIONS[2:], "sm_90a"),
    # The matrix's loops for GB10 once more, with the installed Triton's ptxas of CUDA 13: that of 3.5.0 is older.
    "ptxas": lambda: [cell for cell in _matrix_cells() if cell[:3] == ("3.5.0", "sm_121a", "loop")],
}


def source() -> str:
    """Return the hash of what is built and of how its outcome is named."""
    jobs = hunts._job, hunts._operands, hunts._loop_job, hunts._specialize_job, hunts._scaled_job
    named = hunts._loop_outcome, hunts._specialize_outcome, hunts._scaled_outcome
    rest = hunts.threads, hunts.operands, outcomes.failure, outcomes.row_of
    return provenance.source_hash(kernels, *jobs, *named, *rest)


def load_record(name: str) -> results.Record:
    """Return the record of an experiment: "matrix", "loop", "warp_specialize" or "ptxas"."""
    return results.load_record(f"ch14_bug_hunt_{name}", source())


for _name in EXPERIMENTS:
    results.register(f"ch14_bug_hunt_{_name}", functools.partial(load_record, _name), source)


def build_now(name: str, version: str) -> list[dict]:
    """Build the cells of an experiment that belong to one available Triton, and return their rows."""
    rows = []
    cells = [cell for cell in EXPERIMENTS[name]() if cell[0] == version]
    newer = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    variables = {"TRITON_PTXAS_PATH": os.fspath(newer)} if name == "ptxas" else {}
    # An empty cache, so that everything is built anew.
    with mock.patch.dict(os.environ, variables), tempfile.TemporaryDirectory() as cache:
        for (target, hunt), group in itertools.groupby(cells, lambda cell: cell[1:3]):
            rows += Builds(HUNTS[hunt], version, target, cache=cache).ask([config for *_, config in group])
    return rows


def row_key(row: dict) -> tuple:
    """Return what identifies a row: hunt, Triton, target and configuration."""
    return tuple(row[name] for name in ("hunt", "triton", "target", *HUNTS[row["hunt"]].axes))


def list_differences(name: str, rows: Sequence[dict]) -> list[str]:
    """Return one sentence for each row that differs from the record in more than `reason`, which is our own wording."""
    recorded, differences = {row_key(row): row for row in load_record(name).rows}, []
    for row in rows:
        before = recorded.get(row_key(row), {})
        changed = [
            field for field in {**before, **row} if before.get(field) != row.get(field) and field != "reason"
        ]
        if changed:
            what = "; ".join(f"{field} was {before.get(field)!r}, is {row.get(field)!r}" for field in changed)
            differences.append(f"{', '.join(map(str, row_key(row)))}: {what if before else 'not recorded'}")
    return differences


def open_builds(hunt: str, version: str, target: str) -> Builds:
    """Return the builds of a hunt: live if this Triton is available, else from the records."""
    rows = None
    if not environments.is_available(version):
        rows = [row for name in EXPERIMENTS if name != "ptxas" for row in load_record(name).rows]
    return Builds(HUNTS[hunt], version, target, rows)
