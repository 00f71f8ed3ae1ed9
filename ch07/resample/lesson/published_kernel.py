"""The indexing errors of the field note's published kernel, one at a time, in torch on the CPU.

A test of a kernel should find each error. No GPU is needed. Source: the note's "Persistent Thread Block Architecture"
and "Coalesced Memory Access Pattern", for blocks of 1,024 threads with one target per warp.
"""

import torch

from ch07 import resample

WARPS = 32  # of a block


def correct_kernel(features, source_times, target_times, out):
    """Write the interpolation to `out`, as all kernels here should."""
    out.copy_(resample.spec(features, source_times, target_times))


def stride_features(features, source_times, target_times, out):
    """Let a warp step through the features of its target by the 1,024 threads of the block, not by its own 32."""
    whole = resample.spec(features, source_times, target_times).to(out.dtype)
    warp = torch.arange(target_times.numel()).view(*target_times.shape, 1) % WARPS
    visited = torch.arange(features.shape[2]) // 32 % WARPS == warp
    out.copy_(torch.where(visited, whole, out))


def share_time_array(features, source_times, target_times, out):
    """Search one batch's times for all targets of a block, also where the block reaches into the next batch."""
    batches, targets = target_times.shape
    target = torch.arange(batches * targets)
    loaded = target // WARPS * WARPS // targets  # the batch whose times the block has loaded
    rows = resample.spec(features[target // targets], source_times[loaded], target_times.reshape(-1, 1))
    out.copy_(rows.view(out.shape))


def drop_last_targets(features, source_times, target_times, out):
    """Visit whole rounds of WARPS targets only; nothing visits the targets that are left."""
    whole = resample.spec(features, source_times, target_times).to(out.dtype).flatten(0, 1)
    visited = len(whole) // WARPS * WARPS
    out.view(whole.shape)[:visited] = whole[:visited]


FLAWED_KERNELS = {
    "features strided by the block": stride_features,
    "one time array for all batches": share_time_array,
    "the last targets dropped": drop_last_targets,
}


def written_share(kernel, batches: int, sources: int, targets: int, depth: int) -> float:
    """Return the share of the outputs that `kernel` writes at all."""
    out = torch.full((batches, targets, depth), float("nan"))
    kernel(
        torch.randn(batches, sources, depth),
        torch.rand(batches, sources).sort(1).values,
        torch.rand(batches, targets),
        out,
    )
    return float(torch.isfinite(out).float().mean())
