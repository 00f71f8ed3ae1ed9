"""A copy through tensor descriptors: one TMA load and one TMA store a tile. The field note's copy configurations.

Host descriptors are made once by the launcher; Triton stores each tile from the shared memory that it was loaded into.
Source: Triton's tensor-descriptor API.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilelab import device

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32, torch.int16, torch.int8,
          torch.uint8)


@dataclass(frozen=True)
class CopyConfig:
    """A tile of BLOCK_M x BLOCK_N elements, powers of two, and two options; `num_stages` has no loop to act on."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("block_m", "block_n", "num_warps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two; here it is {value!r}.")

    def __str__(self):
        return f"{self.block_m},{self.block_n},{self.num_warps},{self.num_stages}"


_CURRENT = [(128, 128, 8, 4), (64, 128, 4, 3), (128, 64, 4, 3), (256, 256, 16, 5), (256, 128, 8, 5)]
_PROPOSED = [(256, 256, 16, 5), (256, 128, 8, 5), (128, 256, 8, 5), (128, 128, 8, 4), (64, 128, 4, 3)]
_COURSE = [(32, 128, 4, 1), (64, 64, 4, 1), (8, 1024, 4, 1), (4, 2048, 4, 1)]
SETS = {"conservative": _CURRENT, "proposed": _PROPOSED, "course": _COURSE}


def configs(which: str) -> list[CopyConfig]:
    """The copy configurations of a set: the note's `conservative` (its current five), `proposed`, or the `course`'s."""
    if which not in SETS:
        raise ValueError(f"the sets are {', '.join(SETS)}; here it is {which!r}.")
    return [CopyConfig(*tile) for tile in SETS[which]]


def copy_spec(source):
    """The same bits."""
    return source.clone()


@triton.jit
def copy_tma_kernel(source, destination, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # Columns vary fastest over the programs: neighbours read neighbouring DRAM pages.
    row = tl.program_id(1) * BLOCK_M
    column = tl.program_id(0) * BLOCK_N
    destination.store([row, column], source.load([row, column]))


def _span(matrix) -> tuple[int, int]:
    elements = (matrix.shape[0] - 1) * matrix.stride(0) + matrix.shape[1]
    return matrix.data_ptr(), matrix.data_ptr() + elements * matrix.element_size()


def prepare_copy(source, destination, config: CopyConfig):
    """A function that copies `source` to `destination`, two (M, N) matrices of one dtype whose rows are contiguous.

    Raises ValueError for what a descriptor cannot take (another dtype than DTYPES, a row that is not a multiple of 16
    bytes, an unaligned start), for memory that overlaps and for more than 65,535 rows of tiles;
    tilelab.device.Unsupported without TMA (outside the interpreter).
    """
    for name, matrix in (("source", source), ("destination", destination)):
        if not isinstance(matrix, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor; it is a {type(matrix).__name__}.")
        if matrix.dtype not in DTYPES:
            raise ValueError(f"{name} must be of one of {', '.join(str(d)[6:] for d in DTYPES)}; it is "
                             f"{str(matrix.dtype)[6:]}.")
        if matrix.ndim != 2 or not matrix.numel() or matrix.stride(1) != 1 or matrix.stride(0) < matrix.shape[1]:
            raise ValueError(f"{name} must be a matrix with contiguous rows, not empty; it is {tuple(matrix.shape)} "
                             f"with strides {matrix.stride()}.")
        if matrix.data_ptr() % 16 or matrix.stride(0) * matrix.element_size() % 16 \
                or matrix.shape[1] * matrix.element_size() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes and have rows that are one; a row is "
                             f"{matrix.shape[1] * matrix.element_size()} bytes.")
    if source.shape != destination.shape or source.dtype != destination.dtype or source.device != destination.device:
        raise ValueError(f"source and destination must agree in shape, dtype and device; they are "
                         f"{tuple(source.shape)} {source.dtype} on {source.device} and {tuple(destination.shape)} "
                         f"{destination.dtype} on {destination.device}.")
    (begin, end), (begin_to, end_to) = _span(source), _span(destination)
    if begin < end_to and begin_to < end:  # tiles are stored while others are still read
        raise ValueError("destination lies in the memory that source spans: give it memory of its own.")
    if isinstance(copy_tma_kernel, triton.JITFunction):
        device.require("has_tma", "copy_tma", "use torch's copy_")
    rows, columns = source.shape
    grid = (triton.cdiv(columns, config.block_n), triton.cdiv(rows, config.block_m))
    if grid[1] > 65535:
        raise ValueError(f"the copy takes at most 65,535 rows of tiles; here are {grid[1]}: use a taller tile.")
    tiles = [TensorDescriptor.from_tensor(matrix, [config.block_m, config.block_n]) for matrix in (source, destination)]

    def launch():
        copy_tma_kernel[grid](*tiles, config.block_m, config.block_n, num_warps=config.num_warps,
                              num_stages=config.num_stages)

    return launch


def copy_tma(source, destination, config: CopyConfig | None = None):
    """destination[:] = source; returns destination. Arguments and errors as for `prepare_copy`."""
    prepare_copy(source, destination, config or configs("course")[0])()
    return destination
