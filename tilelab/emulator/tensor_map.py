"""A tensor map of a CPU tensor, as the emulator's copy engine reads it (struct Map in engine.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

MARK = 0x70614D54
SWIZZLES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}


class EmulatedTensorMap(ctypes.Structure):
    """The 128 bytes that a kernel takes by value. It keeps its tensor alive."""

    _fields_ = [("address", ctypes.c_uint64), ("end", ctypes.c_uint64), ("strides", ctypes.c_uint64 * 5),
                ("shape", ctypes.c_uint32 * 5), ("box", ctypes.c_uint16 * 5), ("dimensions", ctypes.c_uint8),
                ("itemsize", ctypes.c_uint8), ("swizzle", ctypes.c_uint8), ("fill_is_nan", ctypes.c_uint8),
                ("type", ctypes.c_char * 2), ("mark", ctypes.c_uint32), ("unused", ctypes.c_uint8 * 32)]
    is_cpu = True

    def __init__(self, tensor: torch.Tensor, box: Sequence[int], swizzle: str, fill: str):
        itemsize, storage = tensor.element_size(), tensor.untyped_storage()
        kind = b"b" if tensor.dtype == torch.bfloat16 else b"f" if tensor.is_floating_point() else b"i"
        super().__init__(tensor.data_ptr(), storage.data_ptr() + storage.nbytes(), dimensions=tensor.ndim,
                         itemsize=itemsize, swizzle=SWIZZLES[swizzle], fill_is_nan=fill == "nan", type=kind, mark=MARK)
        for index in range(tensor.ndim):  # the innermost dimension comes first
            dimension = tensor.ndim - 1 - index
            self.strides[index] = tensor.stride(dimension) * itemsize
            self.shape[index] = tensor.shape[dimension]
            self.box[index] = box[dimension]
        self.tensor = tensor


assert ctypes.sizeof(EmulatedTensorMap) == 128
