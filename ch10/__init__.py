"""Chapter 10, tensor maps and pipelines: tiles of two dimensions, and a GEMM on Hopper's tensor cores."""
