"""Mend Triton's interpreter (3.6 and 3.7), so that a kernel without a GPU computes what it computes on one.

Triton's own interpreter keeps bfloat16 and the formats of eight bits as integers, with which numpy then computes. Its
conversions round wrongly. It lacks tl.dot_scaled, the functions of libdevice and @triton.autotune without a driver.

`formats` holds numbers and roundings, `builder` the operations, `libdevice` CUDA's library, `reading` the text of
kernels, `reductions` and `launching` the rest.
"""

import triton.language as tl

from tilelab.runtime.interpreter import launching


def mend() -> None:
    """Change the interpreter in this process. Compiled kernels stay as they are."""
    launching.mend()
    # Nothing to do where one launch follows another.
    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda: None
