"""Tensor maps: what the copy engine is told of a tensor, and where it puts each byte of a box in shared memory.

Source: CUDA driver API, "Tensor Map Object Management"; PTX ISA, "Tensors" (tiled mode, swizzling modes).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SWIZZLES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}  # bytes of a row that are shuffled
PROMOTIONS = ("none", "64B", "128B", "256B")
FILLS = ("zero", "nan")
# torch's dtype: cuda.core's name of it.
DTYPES = {torch.uint8: "UINT8", torch.int16: "UINT16", torch.int32: "INT32", torch.int64: "INT64",
          torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT32", torch.float64: "FLOAT64"}


def swizzle_offset(offset: int, swizzle: str = "none") -> int:
    """Where the byte `offset` of a box, counted row by row, lies in shared memory that is aligned to 1,024 bytes.

    Swizzling exchanges units of 16 bytes: their number within 32, 64 or 128 bytes is XORed with bits of the number of
    the 128-byte line. Works on integers and on numpy or torch arrays of them.
    """
    span = SWIZZLES[swizzle]
    if not span:
        return offset
    bits = span // 16 - 1
    # The pattern repeats every 256, 512 or 1,024 bytes: the bits above those of the unit, from bit 7 on.
    return offset ^ (((offset >> 7) & bits) << 4)


def check_describable(shape: Sequence[int], strides: Sequence[int], itemsize: int, address: int, box: Sequence[int], *,
          swizzle: str = "none", l2_promotion: str = "none", fill: str = "zero", floating: bool = True) -> None:
    """ValueError with a sentence for what a tiled tensor map cannot describe. `strides` and `box` in elements, the
    innermost last; needs no GPU."""
    if not isinstance(swizzle, str) or swizzle not in SWIZZLES:
        raise ValueError(f"swizzle is one of {', '.join(SWIZZLES)}; here it is {swizzle!r}.")
    if l2_promotion not in PROMOTIONS:
        raise ValueError(f"l2_promotion is one of {', '.join(PROMOTIONS)}; here it is {l2_promotion!r}.")
    if fill not in FILLS:
        raise ValueError(f"fill is zero or nan; here it is {fill!r}.")
    if fill == "nan" and not floating:
        raise ValueError("only floating point tensors can be filled with nan outside; this one holds integers.")
    if not 1 <= len(shape) <= 5:
        raise ValueError(f"a tensor map has 1 to 5 dimensions; this tensor has {len(shape)}.")
    if len(box) != len(shape):
        raise ValueError(f"a box has as many extents as the tensor, {len(shape)}; here it is {tuple(box)}.")
    if any(type(extent) is not int or not 1 <= extent <= 256 for extent in box):
        raise ValueError(f"each extent of a box is 1 to 256 elements; here the box is {tuple(box)}.")
    if any(not 1 <= extent <= 1 << 32 for extent in shape):
        raise ValueError(f"each extent of the tensor is 1 to 2^32; here they are {tuple(shape)}.")
    if address % 16:
        raise ValueError(f"a tensor map starts at a multiple of 16 bytes; this tensor starts {address % 16} past one: "
                         "copy it first.")
    if strides[-1] != 1 and shape[-1] > 1:
        raise ValueError(f"the last dimension must be contiguous (stride 1); the strides are {tuple(strides)}.")
    for extent, stride in zip(shape[:-1], strides):
        if extent > 1 and (stride * itemsize % 16 or stride < 1 or stride * itemsize >= 1 << 40):
            raise ValueError(f"outer strides are positive multiples of 16 bytes ({max(1, 16 // itemsize)} elements) "
                             f"below 2^40; here one is {stride * itemsize:,} bytes: make it contiguous, or pad its "
                             "rows.")
    inner = box[-1] * itemsize
    if inner % 16:
        raise ValueError(f"the innermost extent of a box takes a multiple of 16 bytes; {box[-1]} elements take "
                         f"{inner}.")
    if SWIZZLES[swizzle] and inner > SWIZZLES[swizzle]:
        raise ValueError(f"with a swizzle of {swizzle} the innermost extent of a box is at most that; {box[-1]} "
                         f"elements take {inner} bytes.")


def make_tensor_map(tensor: torch.Tensor, box: Sequence[int], *, swizzle: str = "none", l2_promotion: str = "128B",
               fill: str = "zero"):
    """A tiled tensor map (cuda.core.TensorMapDescriptor, 128 bytes) of a CUDA tensor, to be passed to a launch by
    value.

    `box` is in elements, innermost last, as the tensor's shape. What a box covers outside of the tensor is loaded as
    zero or nan (`fill`) and never stored. The map holds the address: keep the tensor. Raises ValueError as `check` does
    and for a dtype that has no tensor map, and tilelab.device.Unsupported without a GPU.
    """
    from cuda.core import _tensor_map as core  # its enums have no public name yet
    from cuda.core.utils import StridedMemoryView

    from tilelab import cuda, device

    if tensor.dtype not in DTYPES:
        raise ValueError(f"a tensor map holds {', '.join(str(dtype)[6:] for dtype in DTYPES)}; this tensor holds "
                         f"{str(tensor.dtype)[6:]}.")
    check_describable(tensor.shape, tensor.stride(), tensor.element_size(), tensor.data_ptr(), box, swizzle=swizzle,
          l2_promotion=l2_promotion, fill=fill, floating=tensor.is_floating_point())
    cuda.current_device()
    device.require("has_tma", "a tensor map", "compile the kernel and read its SASS")
    # A stride that is never taken may be anything in torch; the driver wants a multiple of 16 bytes.
    strides, whole = [1], -(-tensor.shape[-1] * tensor.element_size() // 16) * 16 // tensor.element_size()
    for extent, stride in list(zip(tensor.shape, tensor.stride()))[-2::-1]:
        strides.insert(0, stride if extent > 1 else whole)
        whole = max(whole, strides[0] * extent)
    plain = tensor.detach().as_strided(tensor.shape, strides)
    view = StridedMemoryView.from_any_interface(plain, stream_ptr=-1)
    return view.as_tensor_map(
        tuple(box), data_type=core.TensorMapDataType[DTYPES[tensor.dtype]],
        swizzle=core.TensorMapSwizzle["NONE" if swizzle == "none" else f"SWIZZLE_{swizzle}"],
        l2_promotion=core.TensorMapL2Promotion["NONE" if l2_promotion == "none" else f"L2_{l2_promotion}"],
        oob_fill=core.TensorMapOOBFill["NONE" if fill == "zero" else "NAN_REQUEST_ZERO_FMA"])
