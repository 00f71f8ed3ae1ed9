"""Chapter 14, compilers: Triton's tensor descriptors, a GEMM, what a compiler makes of them, block-scaled formats."""

from tilelab.device import interpret_without_gpu

interpret_without_gpu()  # before any module here imports triton
