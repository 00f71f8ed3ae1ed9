"""The errors of the field note's published kernel, one at a time, as torch on the CPU: something for a test to find.

They are of indexing, so they need no GPU to be seen. Source: the note's "Persistent Thread Block Architecture" and
"Coalesced Memory Access Pattern", for blocks of 1,024 threads, a warp a target.
"""

from __future__ import annotations

import torch

from ch07 import resample

WARPS, THREADS = 32, 1024
FLAWS = ("features strided by the block", "one time array for all batches", "the last batches dropped")


def right(features, source_times, target_times, out):
    """out = the interpolation."""
    out.copy_(resample.spec(features, source_times, target_times))


def features_strided(features, source_times, target_times, out):
    """A warp owns a target, and its threads take features threadIdx.x, threadIdx.x + blockDim.x, …: those of the block,
    not of the warp."""
    whole = resample.spec(features, source_times, target_times).to(out.dtype).flatten(0, 1)
    rows, depth = out.view(whole.shape), features.shape[2]
    for flat in range(len(whole)):
        warp = flat % WARPS
        for first in range(32 * warp, depth, THREADS):
            rows[flat, first:first + 32] = whole[flat, first:first + 32]


def one_time_array(features, source_times, target_times, out):
    """A block loads the times of its first target's batch, and searches them for targets of the next batch too."""
    targets = target_times.shape[1]
    for first in range(0, target_times.numel(), WARPS):
        for flat in range(first, min(first + WARPS, target_times.numel())):
            batch, target = divmod(flat, targets)
            times = source_times[first // targets, None]
            time = target_times[batch, None, target, None]
            out[batch, target] = resample.spec(features[batch, None], times, time)[0, 0]


def last_batches_dropped(features, source_times, target_times, out):
    """The grid is made for whole iterations of WARPS targets; the rest is never visited."""
    whole = resample.spec(features, source_times, target_times).to(out.dtype).flatten(0, 1)
    visited = len(whole) // WARPS * WARPS
    out.view(whole.shape)[:visited] = whole[:visited]


def published() -> dict:
    """The flawed versions by name; each takes (features, source_times, target_times, out) and writes out."""
    return dict(zip(FLAWS, (features_strided, one_time_array, last_batches_dropped)))


def written(kernel, batches: int, sources: int, targets: int, depth: int) -> float:
    """The share of the outputs that `kernel` writes at all."""
    out = torch.full((batches, targets, depth), float("nan"))
    kernel(torch.randn(batches, sources, depth), torch.rand(batches, sources).sort(1).values,
           torch.rand(batches, targets), out)
    return float(torch.isfinite(out).float().mean())
