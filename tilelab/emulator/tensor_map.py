"""Tensor maps of CPU tensors, as the emulator's copy engine reads them (struct Map in engine.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tilelab.runtime.tensor_map import DTYPES, SWIZZLES, check_describable

MARK = 0x70614D54


class EmulatedTensorMap(ctypes.Structure):
    """The 128 bytes that a kernel takes by value. It keeps its tensor alive."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("strides", ctypes.c_uint64 * 5),
        ("shape", ctypes.c_uint32 * 5),
        ("box", ctypes.c_uint16 * 5),
        ("dimensions", ctypes.c_uint8),
        ("itemsize", ctypes.c_uint8),
        ("swizzle", ctypes.c_uint8),
        ("fill_is_nan", ctypes.c_uint8),
        ("type", ctypes.c_char * 2),
        ("mark", ctypes.c_uint32),
        ("unused", ctypes.c_uint8 * 32),
    ]
    is_cpu = True

    def __init__(self, tensor: torch.Tensor, box: Sequence[int], swizzle: str, fill: str):
        itemsize, storage = tensor.element_size(), tensor.untyped_storage()
        kind = b"b" if tensor.dtype == torch.bfloat16 else b"f"
        if not tensor.is_floating_point():
            kind = b"is" if tensor.dtype.is_signed else b"iu"
        super().__init__(
            tensor.data_ptr(),
            storage.data_ptr() + storage.nbytes(),
            dimensions=tensor.ndim,
            itemsize=itemsize,
            swizzle=SWIZZLES[swizzle],
            fill_is_nan=fill == "nan",
            type=kind,
            mark=MARK,
        )
        for index in range(tensor.ndim):  # the innermost dimension comes first
            dimension = tensor.ndim - 1 - index
            self.strides[index] = tensor.stride(dimension) * itemsize
            self.shape[index] = tensor.shape[dimension]
            self.box[index] = box[dimension]
        self.tensor = tensor


assert ctypes.sizeof(EmulatedTensorMap) == 128


def make_tensor_map(
    tensor: torch.Tensor,
    box: Sequence[int],
    *,
    swizzle: str = "none",
    l2_promotion: str = "128B",
    fill: str = "zero",
) -> EmulatedTensorMap:
    """Return a tensor map of a CPU tensor. Arguments and errors are those of `runtime.tensor_map.make_tensor_map`."""
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"a tensor map holds {', '.join(str(dtype)[6:] for dtype in DTYPES)}; the tensor is "
            f"{str(tensor.dtype)[6:]}."
        )
    check_describable(
        tensor.shape,
        tensor.stride(),
        tensor.element_size(),
        tensor.data_ptr(),
        box,
        swizzle=swizzle,
        l2_promotion=l2_promotion,
        fill=fill,
        floating=tensor.is_floating_point(),
    )
    return EmulatedTensorMap(tensor.detach(), box, swizzle, fill)
