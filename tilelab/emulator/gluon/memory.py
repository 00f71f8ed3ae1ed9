"""Tiles in shared memory and in tensor memory: views of one allocation, and which engine still uses which bytes."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from typing import Any

import torch

from tilelab.emulator.gluon.program import GluonError, Role, program, refuse
from tilelab.emulator.gluon.values import (
    Shape,
    Value,
    as_value,
    cast,
    in_memory,
    in_registers,
    sizes,
    to_memory,
    unwrap,
)


class Use:
    """An engine that writes a tile (`landing`) or reads it, until somebody has waited for it."""

    def __init__(self, tile: Tile, kind: str):
        self.tile, self.kind, self.role = tile, kind, program().role
        tile.allocation.uses.append(self)

    def release(self) -> None:
        for uses in (self.tile.allocation.uses, self.role.unobserved):
            if self in uses:
                uses.remove(self)


class Write:
    """A tile that threads have written and that no fence has passed to the asynchronous proxy."""

    def __init__(self, tile: Tile, role: Role, time: int):
        self.tile, self.role, self.time, self.arrived = tile, role, time, None


class Allocation:
    """Bytes, the engines that use them, and the mbarriers in them."""

    def __init__(self, nbytes: int, kind: str):
        self.storage, self.kind = torch.full((nbytes,), 0xFF, dtype=torch.uint8), kind  # NaN for floats
        self.uses, self.barriers = [], {}


class Tile:
    """A tile, or an array of tiles: `index`, `slice`, `reshape`, `permute` and `_reinterpret` give views."""

    def __init__(
        self, allocation: Allocation, data: torch.Tensor, dtype: Any, layout: Any, outside: str = ""
    ):
        self.allocation, self.data, self.dtype, self.layout = allocation, data, dtype, layout
        self.outside, self.shape = outside, Shape(data.shape)
        self.rank, self.numel, size = data.ndim, data.numel(), data.element_size()
        self.begin = data.storage_offset() * size
        self.end = self.begin + size * (1 + sum((n - 1) * step for n, step in zip(data.shape, data.stride())))
        self.nbytes, self.children = self.numel * size, {}

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(
            element_ty=self.dtype, shape=self.shape, layout=self.layout, alloc_shape=self.shape
        )

    def _view(self, data: torch.Tensor) -> Tile:
        return Tile(self.allocation, data, self.dtype, self.layout, self.outside)

    def index(self, index):
        index = int(unwrap(index))
        if index not in self.children:
            inside = 0 <= index < len(self.data)
            self.children[index] = view = self._view(self.data[index if inside else 0])
            if not inside:  # an error where somebody uses it
                what = "mbarriers" if self.dtype.name == "int64" else f"tiles in {self.allocation.kind}"
                view.outside = f"index {index} of {len(self.data)} {what}"
        return self.children[index]

    def slice(self, start, length, dim=None):
        dim = (len(self.shape) - 1 if self.is_tensor_memory else 0) if dim is None else unwrap(dim)
        start, length = int(unwrap(start)), int(unwrap(length))
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise GluonError(f"slice({start}, {length}) of {self.shape[dim]} elements along dimension {dim}")
        return self._view(self.data.narrow(dim, start, length))

    def permute(self, order):
        return self._view(self.data.permute(*sizes(order)))

    def reshape(self, shape):
        if not self.data.is_contiguous() or math.prod(sizes(shape)) != self.numel:
            refuse(f"reshape({sizes(shape)}) of a view of shape {self.shape}")
        return self._view(self.data.view(sizes(shape)))

    def _reinterpret(self, dtype, shape, layout):
        dtype, shape = unwrap(dtype), sizes(shape)
        size = math.prod(shape) * dtype.primitive_bitwidth // 8
        if self.begin + size > self.allocation.storage.numel():
            raise GluonError(
                f"_reinterpret needs {size:,} B and {self.allocation.storage.numel() - self.begin:,} B are left"
            )
        data = self.allocation.storage[self.begin : self.begin + size].view(in_memory(dtype)).view(shape)
        return Tile(self.allocation, data, dtype, unwrap(layout), self.outside)

    def _keep_alive(self):
        pass

    @property
    def is_tensor_memory(self) -> bool:
        return self.allocation.kind == "tensor memory"

    def poison(self) -> None:
        """Fill the tile with what nobody should read."""
        self.data.fill_(float("nan") if self.data.is_floating_point() else torch.iinfo(self.data.dtype).max)

    def overlaps(self, other: Tile) -> bool:
        if self.allocation is not other.allocation or self.begin >= other.end or other.begin >= self.end:
            return False
        if all(each.nbytes == each.end - each.begin for each in (self, other)):
            return True
        marks = torch.zeros_like(self.allocation.storage)
        for tile in (self, other):  # a view with gaps, such as some columns
            size = tile.data.element_size()
            place = (tile.data.shape, [step * size for step in tile.data.stride()], tile.begin)
            marks.as_strided(*place).add_(1)
        return bool((marks > 1).any())

    def require_free(self, message: str, *kinds: str) -> None:
        """Raise `message` if an engine of these kinds still uses the tile."""
        if self.outside:
            raise GluonError(self.outside)
        for use in self.allocation.uses:
            if use.kind in kinds and use.tile.overlaps(self):
                raise GluonError(message.format(use.kind))

    def require_landed(self, who: str) -> None:
        for kind, what in (("landing", "before TMA has landed it"), ("cp.async", "before cp.async has landed it"),
                           ("product", "before tcgen05_mma has ended")):  # fmt: skip
            self.require_free(f"{who} a tile {what}: nobody has waited for it", kind)

    def require_ordered(self, who: str) -> None:
        """Raise if the tensor core may read the tile too early; what its own role issued before comes first."""
        mine = program().role.unobserved
        if any(
            use.kind != "reading" and use not in mine and use.tile.overlaps(self)
            for use in self.allocation.uses
        ):
            self.require_landed(who)

    def require_fenced(self, who: str) -> None:
        for write in program().written:
            if write.tile.overlaps(self):
                raise GluonError(
                    f"{who} a tile that threads have written, without fence_async_shared in between"
                )

    def write_by_threads(self) -> None:
        """Note that threads wrote the tile: an engine sees it after a fence."""
        owner = program()
        owner.progress()
        if not self.is_tensor_memory:
            span = (self.begin, self.end, self.nbytes)
            owner.written[:] = [
                each for each in owner.written
                if each.role is not owner.role or each.tile.allocation is not self.allocation
                or (each.tile.begin, each.tile.end, each.tile.nbytes) != span
            ]  # fmt: skip
            owner.written.append(Write(self, owner.role, owner.clock))

    def load(self, layout=None):
        self.require_landed("a thread reads")
        data = self.data.clone()
        return Value(in_registers(data, self.dtype), self.dtype, unwrap(layout))

    def store(self, value, pred=True):
        if not unwrap(pred):
            return
        self.require_free(
            "threads write a tile that TMA or the tensor core still uses",
            "landing",
            "cp.async",
            "reading",
            "product",
        )
        value = as_value(value)
        if value.shape != self.shape or value.dtype != self.dtype:
            raise GluonError(
                f"a block of shape {value.shape} and type {value.dtype} is stored to a tile of shape {self.shape} "
                f"and type {self.dtype}"
            )
        self.data.copy_(to_memory(value.data, self.dtype))
        self.write_by_threads()

    def gather(self, indices, axis):
        self.require_landed("a thread reads")
        data = self.data.gather(unwrap(axis), indices.data.long())
        return Value(in_registers(data, self.dtype), self.dtype, indices.layout)

    def scatter(self, values, indices, axis):
        self.require_free(
            "threads write a tile that TMA or the tensor core still uses",
            "landing",
            "cp.async",
            "reading",
            "product",
        )
        self.data.scatter_(
            unwrap(axis), indices.data.long(), to_memory(cast(values, self.dtype).data, self.dtype)
        )
        self.write_by_threads()


def allocate(element_ty: Any, shape: Any, layout: Any, value: Any, kind: str) -> Tile:
    dtype, shape = unwrap(element_ty), sizes(shape)
    if dtype.primitive_bitwidth < 8:
        refuse(f"{kind} of type {dtype}")
    allocation = Allocation(math.prod(shape) * dtype.primitive_bitwidth // 8, kind)
    tile = Tile(allocation, allocation.storage.view(in_memory(dtype)).view(shape), dtype, unwrap(layout))
    if value is not None:
        tile.store(value)
    return tile


def allocate_shared_memory(element_ty, shape, layout, value=None):
    return allocate(element_ty, shape, layout, value, "shared memory")


def allocate_tensor_memory(element_ty, shape, layout, value=None):
    shape, columns = sizes(shape), sizes(shape)[-1]
    layout = unwrap(layout)
    if getattr(layout, "two_ctas", False):
        refuse("two_ctas=True of TensorMemoryLayout")
    if len(shape) > 2:
        columns *= math.prod(shape[:-2])
    stride = getattr(layout, "col_stride", 1)
    if getattr(layout, "block", None) and columns * stride * unwrap(
        element_ty
    ).primitive_bitwidth // 32 > 512 * max(1, shape[-2] // 128) * max(1, shape[-2] // 128):
        raise GluonError(f"an allocation of {shape} needs more than the 512 columns of tensor memory")
    return allocate(element_ty, shape, layout, value, "tensor memory")


def multiply(a: Any, b: Any, c: Any) -> torch.Tensor:
    """Return a @ b + c of tensors, with float32 or int32 sums."""
    wide = (lambda each: each.float()) if a.is_floating_point() else (lambda each: each.int())
    if a.dtype == torch.float64:
        wide = torch.Tensor.double
    product = wide(a) @ wide(b)
    return product if c is None else product + c


def listed(values: Any) -> Sequence:
    values = unwrap(values)
    return () if values is None else values if isinstance(values, Sequence) else (values,)
