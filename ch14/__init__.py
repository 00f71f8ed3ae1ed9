"""Chapter 14, compilers: Triton's tensor descriptors, a GEMM, what a compiler makes of them, block-scaled formats."""

import os

from tilelab.runtime.caches import replace_unwritable_caches
from tilelab.runtime.device import interpret_without_gpu

interpret_without_gpu()  # before any module here imports triton
replace_unwritable_caches()
if os.environ.get("TRITON_INTERPRET") == "1":
    from tilelab.runtime import interpreter

    interpreter.mend()
