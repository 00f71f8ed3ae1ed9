"""Make tensor maps (CUtensorMap), and compute the address at which a swizzled box holds each byte in shared memory.

A tensor map tells the Tensor Memory Accelerator the shape of a tensor, the shape of a box, and the swizzle. Sources:
CUDA driver API, "Tensor Map Object Management", and PTX ISA, "Tensors" (tiled mode, swizzling modes).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

# A swizzle's name, and the bytes within which units of 16 bytes change places.
SWIZZLES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
PROMOTIONS = ("none", "64B", "128B", "256B")
FILLS = ("zero", "nan")
# {torch's dtype: the driver's name for the dtype}
DTYPES = {
    torch.uint8: "UINT8",
    torch.int16: "UINT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
}


def swizzle_offset(offset: int, swizzle: str = "none") -> int:
    """Return the address in shared memory of byte `offset` of a box, where `offset` counts row by row.

    Both count from the start of the box, which must be aligned to 1,024 bytes. The swizzle exchanges units of 16
    bytes within 32, 64 or 128 bytes: it XORs bits 4 to 6 of the offset with bits 7 to 9.

        offset   ... | 9 8 7 | 6 5 4 | 3 2 1 0      128B uses three bits, 64B the lower two, 32B the lowest one
                         |       ^ byte within its unit of 16
                         +--XOR--+

    `offset` may also be a numpy or torch array of integers.
    """
    width = SWIZZLES[swizzle]
    if not width:
        return offset
    mask = width // 16 - 1
    return offset ^ (((offset >> 7) & mask) << 4)


def check_describable(
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    address: int,
    box: Sequence[int],
    *,
    swizzle: str = "none",
    l2_promotion: str = "none",
    fill: str = "zero",
    floating: bool = True,
) -> None:
    """Raise ValueError with one sentence for a tensor or box that a tiled tensor map cannot describe.

    The driver itself answers every such case with CUDA_ERROR_INVALID_VALUE. `strides` and `box` are in elements, the
    innermost last; `itemsize` and `address` are in bytes. Needs no GPU.
    """
    for name, value, allowed in (
        ("swizzle", swizzle, tuple(SWIZZLES)),
        ("l2_promotion", l2_promotion, PROMOTIONS),
        ("fill", fill, FILLS),
    ):
        if value not in allowed:
            raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(allowed)}.")
    if not 1 <= len(shape) <= 5:
        raise ValueError(f"a tensor map has 1 to 5 dimensions; this tensor has {len(shape)}.")
    if len(box) != len(shape):
        raise ValueError(f"box must have {len(shape)} extents, as many as the tensor; it is {tuple(box)}.")
    inner_bytes = box[-1] * itemsize
    outer_bytes = [stride * itemsize for extent, stride in zip(shape[:-1], strides) if extent > 1]
    wrong_bytes = next((size for size in outer_bytes if size % 16 or not 0 < size < 1 << 40), None)
    rules = (
        (fill == "zero" or floating, "fill must be zero for a tensor of integers; it is nan."),
        (
            all(type(extent) is int and 1 <= extent <= 256 for extent in box),
            f"each extent of a box must be 1 to 256 elements; the box is {tuple(box)}.",
        ),
        (
            all(1 <= extent <= 1 << 32 for extent in shape),
            f"each extent of the tensor must be 1 to 2^32; the shape is {tuple(shape)}.",
        ),
        (
            address % 16 == 0,
            f"a tensor map starts at a multiple of 16 bytes; the tensor starts {address % 16} past one: copy it first.",
        ),
        (
            strides[-1] == 1 or shape[-1] == 1,
            f"the last dimension must be contiguous (stride 1); the strides are {tuple(strides)}.",
        ),
        (
            wrong_bytes is None,
            f"outer strides are positive multiples of 16 bytes ({max(1, 16 // itemsize)} elements) below 2^40; one is "
            f"{wrong_bytes or 0:,} bytes: make it contiguous, or pad its rows.",
        ),
        (
            inner_bytes % 16 == 0,
            f"the innermost extent of a box takes a multiple of 16 bytes; {box[-1]} elements take {inner_bytes}.",
        ),
        (
            inner_bytes <= (SWIZZLES[swizzle] or inner_bytes),
            f"with the swizzle {swizzle} the innermost extent of a box takes at most as many bytes; it takes "
            f"{inner_bytes}.",
        ),
    )
    for holds, sentence in rules:
        if not holds:
            raise ValueError(sentence)


class TensorMap:
    """A tensor map in memory of the host, a kernel's argument. The driver copies its 128 bytes at each launch.

    The map holds the address of a tensor and does not keep the tensor alive.
    """

    NBYTES = 128

    def __init__(self, encoded):
        from cuda.bindings import driver

        self._memory = ctypes.create_string_buffer(2 * self.NBYTES)
        # CUDA 13 aligns maps to 128
        self.pointer = -(-ctypes.addressof(self._memory) // self.NBYTES) * self.NBYTES
        ctypes.memmove(self.pointer, encoded.getPtr(), self.NBYTES)
        self._map, self._replace_address = driver.CUtensorMap(self.pointer), driver.cuTensorMapReplaceAddress

    def move(self, address: int) -> None:
        """Let the map describe a tensor of the same shape and strides at another address, a multiple of 16 bytes."""
        (status,) = self._replace_address(self._map, address)
        if status:
            raise RuntimeError(f"the driver refused to move a tensor map to {address:#x}: {status.name}.")


def make_tensor_map(
    tensor: torch.Tensor,
    box: Sequence[int],
    *,
    swizzle: str = "none",
    l2_promotion: str = "128B",
    fill: str = "zero",
) -> TensorMap:
    """Return a tiled tensor map of a CUDA tensor, a kernel's argument.

    `box` is in elements, innermost last like the tensor's shape. Elements of a box outside of the tensor are loaded as
    `fill` and never stored. The map holds the tensor's address, so keep the tensor alive. Raises ValueError as
    `check_describable` does and for a dtype not in DTYPES, and Unsupported without a GPU that has TMA.
    """
    from cuda.bindings import driver

    from tilelab.runtime import cuda, device

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
    cuda.current_device()
    device.require("has_tma", "a tensor map", "compile the kernel and read its SASS")
    if not tensor.is_cuda:
        raise ValueError(f"a tensor map describes GPU memory; the tensor is on {tensor.device}: move it.")
    # Torch allows any stride for an extent of 1; the driver demands a multiple of 16 bytes for it too.
    # Strides are in bytes, the innermost first.
    strides, whole = ([], -(-tensor.shape[-1] * tensor.element_size() // 16) * 16)
    for extent, stride in list(zip(tensor.shape, tensor.stride()))[-2::-1]:
        strides.append(stride * tensor.element_size() if extent > 1 else whole)
        whole = max(whole, strides[-1] * extent)

    def choose(enum: str, value: str):
        return getattr(getattr(driver, f"CUtensorMap{enum}"), f"CU_TENSOR_MAP_{value}")

    status, encoded = driver.cuTensorMapEncodeTiled(
        choose("DataType", f"DATA_TYPE_{DTYPES[tensor.dtype]}"),
        tensor.ndim,
        tensor.data_ptr(),
        [driver.cuuint64_t(extent) for extent in tensor.shape[::-1]],
        # One dimension has no stride, but the driver refuses a null pointer.
        [driver.cuuint64_t(size) for size in strides or [whole]],
        [driver.cuuint32_t(extent) for extent in box[::-1]],
        [driver.cuuint32_t(1)] * tensor.ndim,
        choose("Interleave", "INTERLEAVE_NONE"),
        choose("Swizzle", "SWIZZLE_NONE" if swizzle == "none" else f"SWIZZLE_{swizzle}"),
        choose(
            "L2promotion",
            "L2_PROMOTION_NONE" if l2_promotion == "none" else f"L2_PROMOTION_L2_{l2_promotion}",
        ),
        choose("FloatOOBfill", "FLOAT_OOB_FILL_" + ("NONE" if fill == "zero" else "NAN_REQUEST_ZERO_FMA")),
    )
    if status:
        raise RuntimeError(f"the driver refused a tensor map of {tuple(tensor.shape)}: {status.name}.")
    return TensorMap(encoded)
