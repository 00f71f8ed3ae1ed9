"""The builds behind the notebook `ch14_bug_hunt`, recorded once for Tritons that a reader does not have.

No GPU has a part in them: their records lie in results/no-gpu, and `python -m ch14.bug_hunt --matrix` makes them again.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Sequence

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds, environments, hunts, kernels
from tilelab import check, device, results

VERSIONS = ("3.5.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")  # the note's, and what followed
TARGETS = device.TARGETS[1:]


def checked() -> list[dict]:
    """Every form of both loops computes the same product: rows of `check.compare` on ragged shapes, in float16. On the
    GPU where it has TMA, with one stage, which the compiler takes in every form; else in Triton's interpreter."""
    where = "cuda" if device.current().has_tma else "cpu"
    a, b = (torch.randn(shape, device=where).half() for shape in ((100, 72), (72, 136)))
    forms = [(kernel, loop, loads) for kernel, hunt in ((kernels.loop_kernel, "loop"),
                                                        (kernels.specialized_kernel, "warp_specialize"))
             for loop in HUNTS[hunt].axes["LOOP"] for loads in HUNTS[hunt].axes["LOADS"]]
    return [row for kernel, loop, loads in forms
            for row in check.compare(functools.partial(_multiply, kernel, loop, loads),
                                     lambda a, b: a.double() @ b.double(), [(f"{loop}, {loads}", (a, b))],
                                     out=lambda a, b: ((a.shape[0], b.shape[1]), a.dtype))]


def _multiply(kernel, loop: str, loads: str, a, b, out) -> None:
    """out (M, N) = a (M, K) @ b (K, N) by one form of one of the kernels, tiles of 64 x 32 x 32."""
    m, n, k = 64, 32, 32
    constants = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "LOADS": loads, "LOOP": loop}
    if kernel is kernels.specialized_kernel:
        constants["WARP_SPECIALIZE"] = not a.is_cuda  # the compiler may fail of it: that is what the hunt is about
    matrices = (a, b, out)
    if loads == "host":
        tiles = (m, k), (k, n), (m, n)
        matrices = [TensorDescriptor.from_tensor(each, list(tile)) for each, tile in zip(matrices, tiles)]
    if a.is_cuda:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    grid = (2,) if loop.startswith("over tiles") else (triton.cdiv(a.shape[0], m), triton.cdiv(b.shape[1], n))
    kernel[grid](*matrices, a.shape[0], b.shape[1], a.shape[1], **constants, num_warps=4, num_stages=1)


def _matrix():
    """Every form of the loop at the note's threshold, by pointers and by descriptors; three specialised loops; three
    formats in two tiles."""
    threshold = {"BLOCK_K": 64, "num_stages": 4, "num_warps": 8}
    cells = [("loop", {"LOOP": loop, "LOADS": loads, **threshold})
             for loads in ("pointers", "device") for loop in HUNTS["loop"].axes["LOOP"]]
    cells += [("warp_specialize", {"LOOP": loop, "LOADS": loads, "BLOCK_M": 128, "num_warps": 4})
              for loop, loads in (("over K", "device"), ("over K", "host"), ("over tiles flat", "device"))]
    cells += [("dot_scaled", {"FORMAT": name, "BLOCK_M": m, "num_warps": 4})
              for name in HUNTS["dot_scaled"].axes["FORMAT"] for m in (128, 64)]
    return [(version, target, hunt, config)
            for version, target, (hunt, config) in itertools.product(VERSIONS, TARGETS, cells)]


def _grid(name: str, versions: Sequence[str], target: str):
    return [(version, target, name, config) for version in versions for config in bug_hunt.grid(HUNTS[name])]


EXPERIMENTS: dict[str, Callable[[], list]] = {
    "matrix": _matrix,
    "loop": lambda: _grid("loop", ("3.5.1",), "sm_100a"),
    "warp_specialize": lambda: _grid("warp_specialize", VERSIONS[2:], "sm_90a")}


def source() -> str:
    """Hash of what is built, and of how its outcome is told."""
    spaces = hunts
    return results.source_hash(kernels, spaces._job, spaces._operands, spaces._loop_job,
                               spaces._specialize_job, spaces._scaled_job, spaces._loop_outcome,
                               spaces._specialize_outcome, spaces._scaled_outcome, spaces.threads, spaces.operands,
                               bug_hunt.failure, bug_hunt.row_of)


def recorded(name: str) -> results.Record:
    """The record of an experiment ("matrix", "loop", "warp_specialize"), wherever it is read."""
    return results.load_record(f"ch14_bug_hunt_{name}", source())


for _name in EXPERIMENTS:
    results.register(f"ch14_bug_hunt_{_name}", functools.partial(recorded, _name), source)


def built(name: str, version: str) -> list[dict]:
    """The rows of an experiment with one Triton, which must be `bug_hunt_env.known`, built here and now."""
    rows = []
    wanted = [each for each in EXPERIMENTS[name]() if each[0] == version]
    with tempfile.TemporaryDirectory() as cache:  # an empty one: what was built before proves nothing
        for (target, hunt), group in itertools.groupby(wanted, lambda each: each[1:3]):
            rows += Builds(HUNTS[hunt], version, target, cache=cache).ask([config for *_, config in group])
    return rows


def key(row: dict) -> tuple:
    """What a row is about."""
    return tuple(row[name] for name in ("hunt", "triton", "target", *HUNTS[row["hunt"]].axes))


def differences(name: str, rows: Sequence[dict]) -> list[str]:
    """How rows that were built now differ from the record, a sentence each; empty when they do not."""
    before = {key(row): row for row in recorded(name).rows}
    return [f"{', '.join(map(str, key(row)))}: {_difference(before.get(key(row), {}), row)}"
            for row in rows if before.get(key(row)) != row]


def _difference(before: dict, now: dict) -> str:
    changed = [each for each in {**before, **now} if before.get(each) != now.get(each)]
    return "; ".join(f"{each} was {before.get(each)!r}, is {now.get(each)!r}" for each in changed) if before else (
        "not recorded")


def save(name: str, rows: Sequence[dict]) -> None:
    """Write an experiment's record."""
    results.save(results.make_record(f"ch14_bug_hunt_{name}", rows, source(), on=results.NO_GPU))


def builds(hunt: str, version: str, target: str) -> Builds:
    """Builds of a hunt, live where this Triton is at hand, else from the records."""
    if environments.known(version):
        return Builds(HUNTS[hunt], version, target)
    rows = [row for name in EXPERIMENTS for row in recorded(name).rows]
    return Builds(HUNTS[hunt], version, target, rows)
