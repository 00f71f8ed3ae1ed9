"""What a kernel asks of the engines: mbarriers, TMA, cp.async, wgmma and tcgen05, each with its rules.

An engine acts some time after it was asked. A tile stays in use until a role has waited for the engine: a read or an
overwrite before that is a fault, even where this run happened to have the data in time.

A kernel in Gluon needs no fence between `mbarrier.init` and TMA. Triton's compiler puts a barrier of the CTA there and
no fence, and `fence.mbarrier_init` is for mbarriers that other CTAs of a cluster use.
"""

from __future__ import annotations

import collections
import linecache
import sys
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tilelab.emulator.gluon.memory import Tile, Use, listed, multiply
from tilelab.emulator.gluon.program import GluonError, program, refuse
from tilelab.emulator.gluon.values import (
    GLUON,
    Shape,
    Value,
    _address,
    _require_inside,
    as_value,
    sizes,
    unwrap,
)

# ---- mbarriers


class _Barrier:
    """An mbarrier: `pending` arrivals and `bytes` of the current phase, and what a wait finds completed."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.current, self.completed = [], []  # uses of tiles that end with this phase, and with earlier ones

    def change(self, arrivals: int, nbytes: int, uses: Any = ()) -> None:
        self.pending -= arrivals
        self.bytes += nbytes
        self.current += uses
        if self.pending < 0:
            raise GluonError(f"an mbarrier with {self.count} arrivals per phase got one too many")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.completed += self.current
            self.current = []


def _place(mbarrier: Any) -> tuple[dict, int]:
    if not isinstance(mbarrier, Tile) or mbarrier.dtype.name != "int64":
        raise GluonError("an mbarrier is a tile of one gl.int64 in shared memory")
    if mbarrier.outside:
        raise GluonError(mbarrier.outside)
    if mbarrier.numel != 1:
        raise GluonError(
            f"an array of mbarriers of shape {mbarrier.shape} stands where one is needed: take .index(i)"
        )
    return mbarrier.allocation.barriers, mbarrier.begin


def _barrier(mbarrier: Any) -> _Barrier:
    barriers, place = _place(mbarrier)
    if place not in barriers:
        raise GluonError("an mbarrier is used before mbarrier.init")
    return barriers[place]


def init(mbarrier, count):
    barriers, place = _place(mbarrier)
    if place in barriers:
        raise GluonError("mbarrier.init over an mbarrier in use: mbarrier.invalidate comes first")
    if not 1 <= int(unwrap(count)) < 2**20:
        raise GluonError(f"mbarrier.init with count {int(unwrap(count))}; it is 1 to {2**20 - 1:,}")
    barriers[place] = _Barrier(int(unwrap(count)))


def invalidate(mbarrier):
    _barrier(mbarrier)
    barriers, place = _place(mbarrier)
    del barriers[place]


def expect(mbarrier, bytes_per_cta=None, pred=True, *, bytes=None):
    if not unwrap(pred):
        return
    nbytes = int(unwrap(bytes if bytes_per_cta is None else bytes_per_cta))
    _barrier(mbarrier).change(1, nbytes)
    program().progress()
    program().maybe_pause()


def arrive(mbarrier, *, count=1, pred=True):
    if not unwrap(pred):
        return
    _barrier(mbarrier).change(int(unwrap(count)), 0)
    owner = program()
    owner.progress()
    for write in owner.written:
        if write.role is owner.role and write.arrived is None:
            write.arrived = owner.clock
    owner.maybe_pause()


def wait(mbarrier, phase, pred=True, deps=()):
    if not unwrap(pred):
        return
    barrier, owner, parity = _barrier(mbarrier), program(), int(unwrap(phase)) % 2
    frame = sys._getframe(1)
    file, number = frame.f_code.co_filename, frame.f_lineno

    def describe() -> str:
        line = linecache.getline(file, number).strip()
        lacks = f"phase {barrier.phase} lacks {barrier.pending} arrivals, {barrier.bytes} bytes"
        return f"in `{line}` for parity {parity} ({lacks})"

    owner.pause(lambda: barrier.phase % 2 != parity, describe)
    for use in barrier.completed:
        use.release()
    barrier.completed.clear()
    owner.clock += 1
    owner.role.waited = owner.clock


# ---- TMA


class Descriptor:
    """A tensor descriptor: the tensor in global memory and the box that TMA moves."""

    def __init__(self, tensor: torch.Tensor, block_shape: Any, layout: Any, padding: str = "zero"):
        self.tensor, self.layout, self.padding = tensor, layout, padding
        if tensor.dtype not in GLUON:
            refuse(f"a descriptor of {tensor.dtype}")
        if getattr(layout, "fp4_padded", False):
            refuse("fp4_padded=True of NVMMASharedLayout")
        self.dtype, self.block_shape = GLUON[tensor.dtype], Shape(block_shape)
        self.shape = tuple(Value(size, gl.int32) for size in tensor.shape)
        self.strides = tuple(Value(step, gl.int64) for step in tensor.stride())
        self.block_type = _BlockType(self.dtype, self.block_shape)
        self.type = _DescriptorType(self.block_type, layout)
        self.nbytes_per_cta = self.block_type.nbytes

    def _find(self, origin: Any, shape: Any) -> tuple:
        """Return the slices of the tensor and of the tile that the box at `origin` shares with the tensor."""
        if len(origin) != self.tensor.ndim:
            raise GluonError(f"{len(origin)} coordinates for a tensor of {self.tensor.ndim} dimensions")
        of_tensor, of_tile = [], []
        for o, box, size in zip(origin, shape, self.tensor.shape):
            begin, end = max(0, o), max(0, min(o + box, size))
            empty = begin >= end
            of_tensor.append(slice(0, 0) if empty else slice(begin, end))
            of_tile.append(slice(0, 0) if empty else slice(begin - o, end - o))
        return tuple(of_tensor), tuple(of_tile)

    def read(self, origin: Any, shape: Any) -> torch.Tensor:
        of_tensor, of_tile = self._find(origin, shape)
        inside = self.tensor[of_tensor]
        if list(inside.shape) == list(shape):
            return inside.clone()
        fill = float("nan") if self.padding == "nan" and self.tensor.is_floating_point() else 0
        box = torch.full(tuple(shape), fill, dtype=self.tensor.dtype)
        box[of_tile] = inside
        return box

    def write(self, origin: Any, box: torch.Tensor) -> None:
        of_tensor, of_tile = self._find(origin, box.shape)
        self.tensor[of_tensor] = box[of_tile]


class _BlockType:
    def __init__(self, element_ty: Any, shape: Shape):
        self.element_ty = self.scalar = element_ty
        self.shape, self.numel = shape, torch.Size(shape).numel()
        self.nbytes = self.numel * element_ty.primitive_bitwidth // 8

    def __eq__(self, other):
        return (self.element_ty, self.shape) == (other.element_ty, other.shape)


class _DescriptorType:
    def __init__(self, block_type: _BlockType, layout: Any):
        self.block_type, self.layout, self.nbytes_per_cta = block_type, layout, block_type.nbytes


def make_tensor_descriptor(base, shape, strides, block_shape, layout, padding_option="zero"):
    shape, strides = sizes(shape), sizes(strides)
    if base.is_block or strides[-1] != 1:
        raise GluonError("tma.make_tensor_descriptor takes one pointer and a last stride of 1")
    flat = base.memory.flat
    if base.data + sum((size - 1) * step for size, step in zip(shape, strides)) >= flat.numel():
        raise GluonError(f"a descriptor of shape {shape} and strides {strides} goes past its tensor")
    tensor = flat.as_strided(shape, strides, flat.storage_offset() + base.data)
    return Descriptor(tensor, sizes(block_shape), unwrap(layout), unwrap(padding_option))


def _is_off(pred: Any, multicast: Any, name: str) -> bool:
    if unwrap(multicast):
        refuse(f"multicast=True of {name}")
    return not unwrap(pred)


def _start_load(read: Any, barrier: Any, tile: Tile) -> None:
    counted, owner = _barrier(barrier), program()
    tile.require_free("TMA overwrites a tile that another load still lands in", "landing", "cp.async")
    tile.require_free("TMA overwrites a tile that is still being read", "reading")
    value, use = read(), Use(tile, "landing")
    tile.poison()

    def land() -> None:
        tile.data.copy_(value)
        counted.change(0, -value.nbytes, [use])

    owner.enqueue(collections.deque(), land)
    owner.written[:] = [each for each in owner.written if not each.tile.overlaps(tile)]
    owner.maybe_pause()


def async_copy_global_to_shared(tensor_desc, coord, barrier, result, pred=True, multicast=False):
    if _is_off(pred, multicast, "tma.async_copy_global_to_shared"):
        return
    if result.shape != tensor_desc.block_shape or result.dtype != tensor_desc.dtype:
        raise GluonError(
            f"a load of {tensor_desc.block_shape} of {tensor_desc.dtype} into a tile of {result.shape} of "
            f"{result.dtype}"
        )
    origin = sizes(coord)
    _start_load(lambda: tensor_desc.read(origin, tensor_desc.block_shape), barrier, result)


def _rows(name: str, tensor_desc: Any, x_offsets: Any, y_offset: Any, tile: Tile) -> tuple[list[int], int]:
    rows, column = x_offsets.data.tolist(), int(unwrap(y_offset))
    width = tensor_desc.block_shape[-1]
    if (
        len(tensor_desc.block_shape) != 2
        or tensor_desc.block_shape[0] != 1
        or tile.shape != [len(rows), width]
    ):
        raise GluonError(
            f"{name} of {len(rows)} rows with a descriptor of boxes {tensor_desc.block_shape} and a tile of "
            f"{tile.shape}; the box is one row, and the tile holds all rows"
        )
    if column * tensor_desc.dtype.primitive_bitwidth // 8 % 16:
        raise GluonError(
            f"{name} at column {column} of {tensor_desc.dtype}; the offset is a multiple of 16 bytes"
        )
    return rows, column


def async_gather(tensor_desc, x_offsets, y_offset, barrier, result, pred=True, multicast=False):
    if _is_off(pred, multicast, "tma.async_gather"):
        return
    rows, column = _rows("tma.async_gather", tensor_desc, x_offsets, y_offset, result)
    box = tensor_desc.block_shape
    _start_load(lambda: torch.cat([tensor_desc.read([row, column], box) for row in rows]), barrier, result)


def _start_store(write: Any, tile: Tile) -> None:
    tile.require_landed("TMA stores")
    tile.require_fenced("TMA stores")
    program().role.stores.append((write, Use(tile, "reading")))
    program().maybe_pause()


def async_copy_shared_to_global(tensor_desc, coord, src):
    box, width = tensor_desc.block_shape, getattr(tensor_desc.layout, "swizzle_byte_width", 0)
    # A swizzled box is sent in pieces of the swizzle's width, so a tile of fewer pieces may be stored too.
    is_part = width and src.shape[:-1] == box[:-1] and src.shape[-1] <= box[-1]
    is_part = is_part and not src.shape[-1] * src.data.element_size() % width
    if src.dtype != tensor_desc.dtype or not (src.shape == box or is_part):
        raise GluonError(
            f"a store of a tile of {src.shape} of {src.dtype} to boxes of {box} of {tensor_desc.dtype}"
        )
    origin = sizes(coord)
    tensor_desc._find(origin, src.shape)
    _start_store(lambda: tensor_desc.write(origin, src.data), src)


def async_scatter(tensor_desc, x_offsets, y_offset, src):
    rows, column = _rows("tma.async_scatter", tensor_desc, x_offsets, y_offset, src)
    if column < 0 or min(rows) < 0:
        raise GluonError(f"tma.async_scatter to row {min(rows)}, column {column}; offsets are not negative")

    def write() -> None:
        for row, data in zip(rows, src.data):
            tensor_desc.write([row, column], data[None])

    _start_store(write, src)


def store_wait(pendings=0):
    stores = program().role.stores
    while len(stores) > int(unwrap(pendings)):
        write, use = stores.pop(0)
        write()
        use.release()
        program().progress()


def fence_async_shared(cluster=False):
    """Pass to the engines what this role wrote, and what others wrote and announced before this role's last wait."""
    if unwrap(cluster):
        refuse("cluster=True of fence_async_shared")
    owner = program()
    owner.written[:] = [
        each for each in owner.written
        if each.role is not owner.role and not (each.arrived and each.arrived < owner.role.waited)
    ]  # fmt: skip


def gdc_wait():
    """Do nothing: no kernel runs before this one. The same stands in for `gdc_launch_dependents`."""


# ---- cp.async


def async_copy_from_pointers(smem, pointer, mask=None, cache_modifier="", eviction_policy="", volatile=False):
    flat, offsets, mask, _, _ = _address("async_copy.async_copy_global_to_shared", pointer, mask)
    if smem.shape != list(offsets.shape) or smem.dtype != pointer.dtype.element_ty:
        raise GluonError(
            f"cp.async of {list(offsets.shape)} elements of {pointer.dtype.element_ty} to a tile of {smem.shape} of "
            f"{smem.dtype}"
        )
    smem.require_free("cp.async overwrites a tile that another copy still lands in", "landing", "cp.async")
    smem.require_free("cp.async overwrites a tile that is still being read", "reading")
    _require_inside("cp.async", flat, offsets, mask)
    data = torch.zeros(offsets.shape, dtype=flat.dtype)  # masked elements become zero
    chosen = slice(None) if mask is None else mask
    data[chosen] = flat[offsets[chosen]]
    use = Use(smem, "cp.async")
    smem.poison()
    program().role.copies.append((smem, data, use))


def commit_group():
    role = program().role
    role.groups.append(role.copies)
    role.copies = []


def wait_group(num_outstanding=0):
    groups = program().role.groups
    while len(groups) > int(unwrap(num_outstanding)):
        for tile, data, use in groups.pop(0):
            tile.data.copy_(data)
            use.release()
            tile.write_by_threads()


# ---- wgmma


class Pending:
    """The result of an asynchronous product, which nobody may read before `warpgroup_mma_wait`."""

    def __init__(self, a: Any, b: Any, c: Any, layout: Any):
        self.a, self.b, self.c, self.layout, self.result, self.uses = a, b, c, layout, None, []
        for tile in (a, b):
            if isinstance(tile, Tile):
                tile.require_landed("a product reads")
                tile.require_fenced("a product reads")
                self.uses.append(Use(tile, "reading"))

    def finish(self) -> Value:
        a, b = (each.data if isinstance(each, Tile) else as_value(each).data for each in (self.a, self.b))
        c = self.c.result if isinstance(self.c, Pending) else self.c
        data = multiply(a, b, None if c is None else c.data)
        self.result = Value(data, gl.float32 if data.is_floating_point() else gl.int32, self.layout)
        for use in self.uses:
            use.release()
        return self.result

    def _read(self, *_, **__):
        raise GluonError("the result of an asynchronous product is read before warpgroup_mma_wait")

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __getitem__ = to = _read
    settle = __neg__ = reshape = permute = split = sum = max = min = cast = _read


def warpgroup_mma_init(value):
    return as_value(value)


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    if not isinstance(b, Tile):
        raise GluonError("the second operand of warpgroup_mma is a tile in shared memory")
    use_acc = bool(unwrap(use_acc))
    if isinstance(acc, Pending):
        acc = acc if acc.result is None else acc.result
    a = a if isinstance(a, Tile) else as_value(a)
    _require_matching("warpgroup_mma", a, b, acc if isinstance(acc, Value) else None)
    product = Pending(a, b, acc if use_acc else None, acc.layout)
    products = program().role.products
    products.append(product)
    if not unwrap(is_async):
        warpgroup_mma_wait(0, (product,))
        return product.result
    program().maybe_pause()
    return product


def _require_matching(name: str, a: Any, b: Any, acc: Any) -> None:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise GluonError(f"{name} of {a.shape} of {a.dtype} by {b.shape} of {b.dtype}")
    if acc is not None and acc.shape != [a.shape[0], b.shape[1]]:
        raise GluonError(f"{name} of {a.shape} by {b.shape} into an accumulator of {acc.shape}")


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    owner = program()
    products = owner.role.products
    if products:
        owner.maybe_pause()  # the last moment for another role to overwrite an operand
    while len(products) > int(unwrap(num_outstanding)):
        products.pop(0).finish()
        owner.progress()
    results = [
        each.result if isinstance(each, Pending) and each.result is not None else each
        for each in listed(deps)
    ]
    return results[0] if len(results) == 1 else tuple(results) if results else None


def mma_v2(a, b, acc, input_precision=None):
    return _multiply_now("mma_v2", a, b, acc)


def dot_fma(a, b, acc):
    return _multiply_now("gl.dot_fma", a, b, acc)


def _multiply_now(name: str, a: Any, b: Any, acc: Any) -> Value:
    a, b, acc = (as_value(each) for each in (a, b, acc))
    _require_matching(name, a, b, acc)
    return Value(multiply(a.data, b.data, acc.data).to(acc.data.dtype), acc.dtype, acc.layout)


# ---- tcgen05


def _issue(uses: list[Use], run: Any) -> None:
    owner = program()
    owner.role.unobserved += uses
    owner.enqueue(owner.role.tensor_core, run)


def _require_tensor_memory(name: str, acc: Any, *tiles: Any) -> None:
    if not isinstance(acc, Tile) or not acc.is_tensor_memory:
        raise GluonError(f"{name} writes tensor memory")
    for tile in tiles:
        if not isinstance(tile, Tile):
            raise GluonError(f"the operands of {name} are tiles in shared or tensor memory")
        tile.require_ordered(f"{name} reads")
        tile.require_fenced(f"{name} reads")


def tcgen05_mma(a, b, acc, *, use_acc=True, pred=True, multicast=False, mbarriers=None, mbarrier_preds=None):
    if _is_off(pred, multicast, "tcgen05_mma"):
        return
    _require_tensor_memory("tcgen05_mma", acc, a, b)
    _require_matching("tcgen05_mma", a, b, acc)
    use_acc = bool(unwrap(use_acc))

    def run() -> None:
        acc.data.copy_(multiply(a.data, b.data, acc.data if use_acc else None))

    _start_on_tensor_core("tcgen05_mma", [a, b], acc, run)
    preds = listed(mbarrier_preds) or [True] * len(listed(mbarriers))
    for barrier, on in zip(listed(mbarriers), preds, strict=True):
        tcgen05_commit(barrier, on)
    program().maybe_pause()


def _start_on_tensor_core(name: str, sources: list[Tile], acc: Tile, run: Any) -> None:
    role = program().role
    for use in acc.allocation.uses:
        if use.tile.overlaps(acc) and use not in role.unobserved:
            raise GluonError(f"{name} writes tensor memory that another role's product still uses")
    _issue([*(Use(tile, "reading") for tile in sources), Use(acc, "product")], run)


def tcgen05_copy(src, dst):
    _require_tensor_memory("tcgen05_copy", dst, src)
    if src.shape != dst.shape or src.dtype != dst.dtype or not hasattr(dst.layout, "block"):
        refuse(f"tcgen05_copy of {src.shape} of {src.dtype} to {dst.shape} of {dst.dtype} with {dst.layout}")
    _start_on_tensor_core("tcgen05_copy", [src], dst, lambda: dst.data.copy_(src.data))


def tcgen05_commit(barrier, pred=True, descs=()):
    if not unwrap(pred):
        return
    if listed(descs):
        refuse("descs of tcgen05_commit")
    counted, role = _barrier(barrier), program().role
    uses = list(role.unobserved)
    program().enqueue(role.tensor_core, lambda: counted.change(1, 0, uses))
    program().maybe_pause()


# ---- roles


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    owner, parent = program(), program().role
    functions_and_args, warps = listed(functions_and_args), sizes(worker_num_warps)
    if len(owner.roles) > 1:
        raise GluonError("gl.warp_specialize runs once per program, and not in one of its roles")
    if len(warps) != len(functions_and_args) - 1:
        raise GluonError(
            f"gl.warp_specialize of {len(functions_and_args)} functions names the warps of {len(warps)} workers"
        )
    owner.clock += 1
    for write in owner.written:
        write.arrived = owner.clock
    owner.clock += 1
    roles = [
        owner.add_role(lambda call=call, given=given: call(*listed(given)), f"role {number}", count)
        for number, ((call, given), count) in enumerate(zip(functions_and_args, [parent.num_warps, *warps]))
    ]
    for role in roles:
        role.waited = owner.clock
    owner.pause(lambda: all(role.ended for role in roles))
    owner.roles[:] = [parent]
    owner.clock += 1
    for write in owner.written:
        write.arrived = write.arrived or owner.clock
    owner.clock += 1
    parent.waited = owner.clock
    return roles[0].result


def barrier(*, cluster=False):
    program().maybe_pause()
