"""Chapter 7, bulk copies and memory-bound work: TMA without a tensor map, and when it pays."""

from tilelab.runtime.caches import replace_unwritable_caches

replace_unwritable_caches()  # torch.compile is a peer of the resampling
