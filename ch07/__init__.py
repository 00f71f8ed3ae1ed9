"""Chapter 7, bulk copies and memory-bound work: TMA without a tensor map, and when it pays."""
