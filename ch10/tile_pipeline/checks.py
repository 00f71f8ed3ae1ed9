"""What the launchers of `ch10.tile_pipeline` and `ch10.tile_pipeline.box_dump` take: everything else is a sentence here."""

from __future__ import annotations

import torch

from ch10.tile_pipeline.configs import TileConfig
from tilelab import device, tensor_map

DIMENSIONS = {"copy": "R, C", "stencil": "R, C", "transpose": "R, C", "add_shared": "B, R, C", "accumulate": "B, R, C"}
LARGEST = (1 << 31) - (1 << 15)  # of an extent: coordinates have 32 bits, and the last CTA's may lie past the end
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by size: their maps keep all bits


def check_tensor(name: str, tensor, dimensions: str) -> torch.Tensor:
    """The tensor; ValueError for what is none, or not of these dimensions, "R, C", or no plain numbers in memory."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor; it is a {type(tensor).__name__}.")
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)[6:]
        raise ValueError(f"{name} must be dense and of plain numbers; it is {kind}.")
    if tensor.ndim != len(dimensions.split(", ")):
        raise ValueError(f"{name} has the shape ({dimensions}); here it is {tuple(tensor.shape)}.")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} is a view that conjugates or negates what memory holds: resolve it first.")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which this kernel does not give: detach it.")
    if max(tensor.shape) > LARGEST:
        raise ValueError(f"{name}'s extents are at most {LARGEST:,}; here they are {tuple(tensor.shape)}.")
    return tensor


def check_layout(name: str, tensor, box, swizzle: str = "none", l2_promotion: str = "128B", fill: str = "zero"):
    """ValueError for what no tensor map describes, or whose rows lie in each other."""
    try:
        tensor_map.check_describable(tensor.shape, tensor.stride(), tensor.element_size(), tensor.data_ptr(), box, swizzle=swizzle,
                         l2_promotion=l2_promotion, fill=fill, floating=tensor.is_floating_point())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    size = tensor.shape[-1]
    for stride, extent in sorted(zip(tensor.stride()[:-1], tensor.shape)):
        if extent > 1 and stride < size:
            raise ValueError(f"the rows of {name} lie in each other: {tuple(tensor.shape)} with strides "
                             f"{tensor.stride()}.")
        size += (extent - 1) * stride


def _memory(tensor) -> tuple[int, int]:
    """The addresses of its first byte, and of the one after its last."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def result_shape(op: str, x) -> tuple[int, ...]:
    """Of out."""
    return {"transpose": tuple(x.shape[::-1]), "accumulate": tuple(x.shape[1:])}.get(op, tuple(x.shape))


def check(config: TileConfig, x, y, out, fill: str, **weights: float) -> None:
    """ValueError with a sentence for what the kernel cannot take."""
    op = config.op
    check_tensor("x", x, DIMENSIONS[op])
    shape, given = result_shape(op, x), {"x": x, "out": out}
    check_tensor("out", out, ", ".join({"transpose": "C, R", "accumulate": "R, C"}.get(op, DIMENSIONS[op]).split(", ")))
    if op == "add_shared":
        given["y"] = check_tensor("y", y, "R, C")
    elif y is not None:
        raise ValueError(f"only add_shared takes y; here {op} is given one.")
    wanted = {"x": tuple(x.shape), "y": tuple(x.shape[1:]), "out": shape}
    for name, tensor in given.items():
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (wanted[name], x.dtype, x.device):
            raise ValueError(f"{name} must be {wanted[name]} of {str(x.dtype)[6:]} on {x.device}, as x is "
                             f"{tuple(x.shape)}; it is {tuple(tensor.shape)} of {str(tensor.dtype)[6:]} on "
                             f"{tensor.device}.")
    if op == "copy" and x.element_size() not in BITS:
        raise ValueError(f"copy takes elements of 1, 2, 4 or 8 bytes; those of {str(x.dtype)[6:]} have "
                         f"{x.element_size()}.")
    if op == "transpose" and x.element_size() != 4:
        raise ValueError(f"transpose takes elements of 4 bytes; those of {str(x.dtype)[6:]} have {x.element_size()}.")
    if op not in ("copy", "transpose") and x.dtype != torch.float32:
        raise ValueError(f"{op} takes float32; here it is {str(x.dtype)[6:]}.")
    if fill not in tensor_map.FILLS:
        raise ValueError(f"fill is zero or nan; here it is {fill!r}.")
    if fill != "zero" and op != "stencil":
        raise ValueError(f"only the stencil reads what lies outside; here {op} is to fill it with {fill}.")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or abs(weight) > 3.4e38:
            raise ValueError(f"{name} is a number within float32; here it is {weight!r}.")
    if not all(tensor.numel() for tensor in given.values()):
        return
    blocks = config.blocks(x.shape)
    if blocks >= 1 << 31:
        raise ValueError(f"there are fewer than 2^31 blocks; here are {blocks:,}: take larger tiles.")
    for name, tensor in given.items():
        rows, columns = config.box(x.element_size())
        box = (1,) * (tensor.ndim - 2) + ((rows, columns) if name != "y" else (rows // config.cluster, columns))
        check_layout(name, tensor, box, config.swizzle, config.l2_promotion)
    begin, end = _memory(out)
    for name in given.keys() - {"out"}:  # tiles are stored while others are still read
        low, high = _memory(given[name])
        if begin < high and low < end:
            raise ValueError(f"out lies in the memory that {name} spans: give it memory of its own.")


def check_gpu(x, job: str) -> None:
    """ValueError for a tensor that is not on the current GPU; tilelab.device.Unsupported, which names `job`, for a GPU
    without TMA."""
    device.require("has_tma", "a copy by tensor map", f"compile it with {job} and read its SASS")
    if not x.is_cuda:
        raise ValueError(f"x must be on the GPU; it is on {x.device}.")
    if x.device.index != torch.cuda.current_device():  # a map does not say where its address is
        raise ValueError(f"x lies on {x.device}, and the launch is for cuda:{torch.cuda.current_device()}: make the "
                         "tensors' GPU the current one, with torch.cuda.device.")
