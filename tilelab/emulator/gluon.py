"""Run Gluon kernels for Hopper on CPU tensors, one program after the other, and name the rule that a kernel breaks.

Triton has no interpreter for Gluon. Here the Python text of a kernel runs as it stands, with stand-ins for
`triton.experimental.gluon.language` and its Hopper module. The roles of `gl.warp_specialize` take turns at random. TMA
lands its bytes late, in any order. An asynchronous product reads its operands as late as `warpgroup_mma_wait` allows,
so that a tile which is overwritten early gives a wrong result. Layouts, registers and `warp`-level races inside a role
are not modelled: a role is one thread.

After `enable()`, a launch `kernel[grid](…)` on descriptors of CPU tensors runs here; one on CUDA tensors is unchanged.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import linecache
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

SEEDS = (0, 1, 2)  # of the turns and of TMA; `with_seed` sets one

_seed = contextvars.ContextVar("seed", default=0)
_NOTHING_MOVES = 20_000  # turns after which a program is given up


class GluonError(RuntimeError):
    """A kernel broke a rule of the hardware; the message names it."""


@contextlib.contextmanager
def with_seed(seed: int) -> Iterator[None]:
    """Let the roles take other turns, and TMA land in another order."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


_replaced = contextvars.ContextVar("replaced", default=None)


@contextlib.contextmanager
def replacing(**functions: Callable) -> Iterator[None]:
    """Let kernels call these functions instead of those of the same names."""
    token = _replaced.set(functions)
    try:
        yield
    finally:
        _replaced.reset(token)


# ---- shared memory


class Tile:
    """A tile, or an array of tiles, in shared memory: `index`, `reshape` and `permute` give views."""

    def __init__(self, data: torch.Tensor, state: dict | None = None, children: list | None = None):
        self.data, self.state = (
            data,
            state if state is not None else {"landing": 0, "reading": 0, "written_by": None},
        )
        self.children = children if children is not None else [None] * data.shape[0]
        self.shape, self.dtype = list(data.shape), data.dtype

    def index(self, index: int) -> Tile:
        if not 0 <= int(index) < len(self.children):
            raise GluonError(f"index {int(index)} of {len(self.children)} tiles in shared memory")
        if self.children[index] is None:
            self.children[index] = Tile(self.data[index])
        return self.children[index]

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.data.view(*shape), self.state, [])

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.data.permute(*order), self.state, [])

    def load(self, layout: Any = None) -> torch.Tensor:
        _require_landed(self, "a thread reads")
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        if self.state["landing"] or self.state["reading"]:
            raise GluonError("threads write a tile that TMA or the tensor core still uses")
        self.data.copy_(_value(value))
        self.state["written_by"] = _program().role


class Barrier:
    """An mbarrier: `pending` arrivals and `bytes` of the current phase."""

    def __init__(self):
        self.count = None

    def begin(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.fenced = False

    def require_begun(self) -> None:
        if self.count is None:
            raise GluonError("an mbarrier is used before mbarrier.init")

    def change(self, arrivals: int, nbytes: int) -> None:
        self.require_begun()
        self.pending -= arrivals
        self.bytes += nbytes
        if self.pending < 0:
            raise GluonError(f"an mbarrier with {self.count} arrivals per phase got one too many")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Barriers:
    def __init__(self, count: int):
        self.barriers, self.shape = [Barrier() for _ in range(count)], [count, 1]

    def index(self, index: int) -> Barrier:
        if not 0 <= int(index) < len(self.barriers):
            raise GluonError(f"index {int(index)} of {len(self.barriers)} mbarriers")
        return self.barriers[index]


def _require_landed(tile: Tile, who: str) -> None:
    if tile.state["landing"]:
        raise GluonError(f"{who} a tile before TMA has landed it")


# ---- one program and its roles


class _Role:
    def __init__(self, call: Callable[[], None], name: str):
        self.call, self.name, self.turn = call, name, threading.Semaphore(0)
        self.is_ready, self.waits_for, self.ended = (lambda: True), "", False
        self.products, self.stores = [], []  # asynchronous ones that nobody has waited for


class _Program:
    def __init__(self, number: int, grid: int):
        self.number, self.grid = number, grid
        self.random = random.Random(f"{_seed.get()} {number}")
        self.roles, self.copies, self.barriers, self.allocated, self.error = [], [], [], [], None
        self.role, self.yielded = None, threading.Semaphore(0)

    def add_role(self, call, name: str) -> _Role:
        role = _Role(call, name)
        self.roles.append(role)
        threading.Thread(target=self._run_role, args=(role,), daemon=True).start()
        return role

    def _run_role(self, role) -> None:
        _here.program = self
        role.turn.acquire()
        try:
            if not self.error:
                role.call()
                if role.products:
                    raise GluonError("a role ends before it has waited for its products")
                if role.stores:
                    raise GluonError("a role ends before tma.store_wait: TMA may not have read the tile yet")
        except _Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        role.ended = True
        self.yielded.release()

    def pause(self, is_ready: Callable[[], bool] = lambda: True, waits_for: str = "") -> None:
        """Let others run until `is_ready()`."""
        role = self.role
        role.is_ready, role.waits_for = is_ready, waits_for
        self.yielded.release()
        role.turn.acquire()
        if self.error:
            raise _Stopped

    def run(self, call) -> None:
        self.add_role(call, "the program")
        for _ in range(_NOTHING_MOVES):
            alive = [role for role in self.roles if not role.ended]
            if not alive or self.error:
                break
            ready = [role for role in alive if role.is_ready()]
            if self.copies and (not ready or self.random.random() < 0.3):
                self.land(self.random.randrange(len(self.copies)))
            elif ready:
                self.role = self.random.choice(ready)
                self.role.turn.release()
                self.yielded.acquire()
            else:
                waits = "; ".join(f"{role.name} waits {role.waits_for}" for role in alive if role.waits_for)
                self.error = GluonError(f"nothing moves any more: {waits}")
        else:
            self.error = self.error or GluonError(f"the program does not end within {_NOTHING_MOVES:,} turns")
        while any(not role.ended for role in self.roles):
            self.role = next(role for role in self.roles if not role.ended)
            self.role.turn.release()
            self.yielded.acquire()
        if not self.error and self.copies:
            self.error = GluonError("the program ends while a load is under way")
        if self.error:
            raise self.error

    def tiles(self) -> list[Tile]:
        return list(
            itertools.chain.from_iterable([tile, *filter(None, tile.children)] for tile in self.allocated)
        )

    def land(self, index: int) -> None:
        tile, value, barrier = self.copies.pop(index)
        tile.data.copy_(value)
        tile.state["landing"] -= 1
        barrier.change(0, -value.nbytes)


class _Stopped(BaseException):
    pass


_here = threading.local()


def _program() -> _Program:
    return _here.program


def _maybe_pause() -> None:
    if _program().random.random() < 0.5:
        _program().pause()


# ---- TMA, barriers, products


class _Descriptor:
    def __init__(self, host):
        self.tensor, self.layout, self.dtype = host.base, host.layout, host.base.dtype
        self.shape, self.block_shape = list(host.shape), list(host.block_shape)
        size = torch.Size(self.block_shape).numel() * host.base.element_size()
        self.block_type = types.SimpleNamespace(shape=self.block_shape, nbytes=size)

    def _find(self, origin):
        """Return the slices of the tensor and of the tile that the box at `origin` shares with the tensor."""
        if len(origin) != len(self.shape):
            raise GluonError(f"{len(origin)} coordinates for a tensor of {len(self.shape)} dimensions")
        inside = [
            (max(0, int(o)), min(int(o) + box, size))
            for o, box, size in zip(origin, self.block_shape, self.shape)
        ]
        empty = any(begin >= end for begin, end in inside)
        of_tensor = [slice(0, 0) if empty else slice(*each) for each in inside]
        of_tile = [
            slice(0, 0) if empty else slice(begin - int(o), end - int(o))
            for (begin, end), o in zip(inside, origin)
        ]
        return tuple(of_tensor), tuple(of_tile)

    def read(self, origin) -> torch.Tensor:
        box = torch.zeros(self.block_shape, dtype=self.dtype)
        of_tensor, of_tile = self._find(origin)
        box[of_tile] = self.tensor[of_tensor]
        return box

    def write(self, origin, box) -> None:
        of_tensor, of_tile = self._find(origin)
        self.tensor[of_tensor] = box[of_tile]


def _init(barrier, count) -> None:
    barrier.begin(int(count))
    _program().barriers.append(barrier)


def _expect(barrier, nbytes=None, bytes_per_cta=None, pred=True) -> None:
    barrier.change(1, int(nbytes if bytes_per_cta is None else bytes_per_cta))
    _maybe_pause()


def _arrive(barrier, *, count=1, pred=True) -> None:
    barrier.change(int(count), 0)
    _maybe_pause()


def _wait(barrier, phase, pred=True, deps=()) -> None:
    barrier.require_begun()
    frame = sys._getframe(1)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    _program().pause(
        lambda: barrier.phase % 2 != int(phase) % 2,
        f"in `{line}` for parity {int(phase) % 2} (phase {barrier.phase} lacks {barrier.pending} "
        f"arrivals, {barrier.bytes} bytes)",
    )


def _load(desc, origin, barrier, tile, pred=True) -> None:
    barrier.require_begun()
    if not barrier.fenced:
        raise GluonError(
            "TMA uses an mbarrier that no fence_async_shared follows: it may not see the mbarrier.init"
        )
    if tile.shape != desc.block_shape:
        raise GluonError(f"a load of {desc.block_shape} into a tile of {tile.shape}")
    if tile.state["landing"] or tile.state["reading"]:
        raise GluonError(
            "TMA overwrites a tile that "
            + ("another load still lands in" if tile.state["landing"] else "is still being read")
        )
    tile.data.fill_(float("nan"))
    tile.state["landing"] += 1
    _program().copies.append((tile, desc.read(origin), barrier))
    _maybe_pause()


def _store(desc, origin, tile) -> None:
    _require_landed(tile, "TMA stores")
    if tile.state["written_by"]:
        raise GluonError("TMA stores a tile that threads have written, without fence_async_shared in between")
    tile.state["reading"] += 1
    _program().role.stores.append((desc, [int(each) for each in origin], tile))
    _maybe_pause()


def _store_wait(pendings=0) -> None:
    stores = _program().role.stores
    while len(stores) > pendings:
        desc, origin, tile = stores.pop(0)
        desc.write(origin, tile.data)
        tile.state["reading"] -= 1


def _fence(*_, **__) -> None:
    program = _program()
    for barrier in program.barriers:
        barrier.fenced = True
    for tile in program.tiles():
        if tile.state["written_by"] is program.role:
            tile.state["written_by"] = None


class Pending:
    """The result of an asynchronous product, which nobody may read before `warpgroup_mma_wait`."""

    def __init__(self, a, b, c):
        self.a, self.b, self.c, self.result = a, b, c, None
        self.tiles = [operand for operand in (a, b) if isinstance(operand, Tile)]
        for tile in self.tiles:
            _require_landed(tile, "a product reads")
            tile.state["reading"] += 1
            if tile.state["written_by"]:
                raise GluonError(
                    "a product reads a tile that threads have written, without fence_async_shared"
                )

    def finish(self) -> torch.Tensor:
        a, b = (
            operand.data if isinstance(operand, Tile) else _value(operand) for operand in (self.a, self.b)
        )
        product = a.float() @ b.float()
        self.result = product if self.c is None else product + self.c
        for tile in self.tiles:
            tile.state["reading"] -= 1
        return self.result

    def _read(self, *_, **__):
        raise GluonError("the result of an asynchronous product is read before warpgroup_mma_wait")

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __getitem__ = to = _read

    @classmethod
    def __torch_function__(cls, *_, **__):
        cls._read(None)


def _value(value):
    if isinstance(value, Pending):
        value._read()
    return value


def _multiply(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    if not isinstance(b, Tile):
        raise GluonError("the second operand of warpgroup_mma is a tile in shared memory")
    product = Pending(a, b, _value(acc) if use_acc else None)
    if not is_async:
        _multiply_wait(0)
        return product.finish()
    _program().role.products.append(product)
    _maybe_pause()
    return product


def _multiply_wait(num_outstanding=0, deps=()):
    products = _program().role.products
    if products:
        _maybe_pause()  # the last moment for another role to overwrite an operand
    while len(products) > num_outstanding:
        products.pop(0).finish()
    results = [
        each.result if isinstance(each, Pending) and each.result is not None else each for each in deps
    ]
    return results[0] if len(results) == 1 else tuple(results) if results else None


# ---- the stand-ins for gluon.language


def _allocate(dtype, shape, layout, value=None):
    if dtype == "int64":
        return Barriers(shape[0])
    tile = Tile(torch.full([int(size) for size in shape], float("nan"), dtype=dtype))
    _program().allocated.append(tile)
    return tile


def _specialise(partitions, worker_num_warps, worker_num_regs=None):
    program = _program()
    roles = [
        program.add_role(lambda call=call, arguments=arguments: call(*arguments), f"role {number}")
        for number, (call, arguments) in enumerate(partitions)
    ]
    program.pause(lambda: all(role.ended for role in roles))


def _choose(function, on_numbers):
    def call(a, b):
        a, b = _value(a), _value(b)
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return function(*(torch.as_tensor(each, dtype=torch.float32) for each in (a, b)))
        return on_numbers(a, b)

    return call


def _where(condition, a, b):
    if not isinstance(condition, torch.Tensor):
        return a if condition else b
    return torch.where(condition, _value(a), _value(b))


def _stand_ins() -> dict[int, object]:
    """Return {id of a module or function of Triton: its stand-in}."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

    def no_op(*_, **__):
        _maybe_pause()

    here = types.SimpleNamespace
    barrier = here(
        init=_init,
        expect=_expect,
        arrive=_arrive,
        wait=_wait,
        MBarrierLayout=lambda *_, **__: None,
        invalidate=lambda barrier: None,
    )
    tma = here(async_copy_global_to_shared=_load, async_copy_shared_to_global=_store, store_wait=_store_wait)
    language = here(
        program_id=lambda axis: _program().number,
        num_programs=lambda axis: _program().grid,
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, _unwrap(value), dtype=dtype),
        arange=lambda begin, end, layout=None: torch.arange(begin, end),
        where=_where,
        maximum=_choose(torch.maximum, max),
        minimum=_choose(torch.minimum, min),
        cdiv=lambda a, b: -(-a // b),
        max=lambda x, axis: _value(x).amax(axis),
        sum=lambda x, axis: _value(x).sum(axis),
        exp2=lambda x: torch.exp2(_value(x)),
        convert_layout=lambda x, layout, **_: _value(x),
        allocate_shared_memory=_allocate,
        warp_specialize=_specialise,
        static_range=range,
        barrier=no_op,
        thread_barrier=no_op,
        to_tensor=_unwrap,
        constexpr=_unwrap,
        static_assert=lambda *_: None,
        float32=torch.float32,
        float16=torch.float16,
        bfloat16=torch.bfloat16,
        int64="int64",
        **{
            name: getattr(gl, name)
            for name in (
                "NVMMADistributedLayout",
                "NVMMASharedLayout",
                "DotOperandLayout",
                "SliceLayout",
                "BlockedLayout",
            )
        },
    )
    found = {
        id(gl): language,
        id(hopper.mbarrier): barrier,
        id(hopper.tma): tma,
        id(hopper.warpgroup_mma): _multiply,
        id(hopper.warpgroup_mma_wait): _multiply_wait,
        id(hopper.fence_async_shared): _fence,
    }
    return found | {
        id(getattr(gl, name)): no_op for name in ("barrier", "thread_barrier") if hasattr(gl, name)
    }


def _unwrap(value):
    return getattr(value, "value", value)


def _emulated(kernel, stand_ins: dict, known: dict, replaced: dict) -> Callable:
    """Return the Python function of a Gluon function, whose globals are replaced by stand-ins."""
    if id(kernel) not in known:
        function = kernel.fn
        names = {"__builtins__": function.__globals__.get("__builtins__")}
        known[id(kernel)] = types.FunctionType(
            function.__code__, names, function.__name__, function.__defaults__
        )
        for name in function.__code__.co_names:
            if name in function.__globals__:
                value = replaced.get(name, function.__globals__[name])
                names[name] = stand_ins.get(id(value)) or (
                    _make_plain_class(value, stand_ins, known, replaced)
                    if hasattr(value, "__triton_aggregate__")
                    else _emulated(value, stand_ins, known, replaced)
                    if hasattr(value, "fn")
                    else _unwrap(value)
                    if type(value).__name__ == "constexpr"
                    else value
                )
    return known[id(kernel)]


def _make_plain_class(aggregate, stand_ins: dict, known: dict, replaced: dict) -> type:
    """Return an aggregate as a plain class, whose fields may be tiles and barriers of the emulator."""
    if id(aggregate) not in known:
        made = known[id(aggregate)] = type(aggregate.__name__, (), {})
        for method in aggregate.hash_attrs:
            setattr(made, method.fn.__name__, _emulated(method, stand_ins, known, replaced))
    return known[id(aggregate)]


def enable() -> None:
    """Let launches of Gluon kernels on CPU tensors run in the emulator, in this process."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    if hasattr(launch, "emulates"):
        return

    def run_or_launch(kernel, *arguments, grid, warmup, **options):
        tensors = [each.base for each in arguments if hasattr(each, "block_shape")]
        if warmup or not kernel.is_gluon() or not tensors or tensors[0].is_cuda:
            return launch(kernel, *arguments, grid=grid, warmup=warmup, **options)
        return run(kernel, grid, *arguments, **options)

    run_or_launch.emulates = True
    JITFunction.run = run_or_launch


def is_enabled() -> bool:
    """Return whether `enable` was called in this process."""
    from triton.runtime.jit import JITFunction

    return hasattr(JITFunction.run, "emulates")


def run(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Run every program of `kernel[grid](*arguments, **constants)` on CPU tensors. GluonError names a broken rule."""
    constants = {
        name: value for name, value in constants.items() if name in kernel.arg_names
    }  # not num_warps, …
    function = _emulated(kernel, _stand_ins(), {}, _replaced.get() or {})
    arguments = [_Descriptor(each) if hasattr(each, "block_shape") else each for each in arguments]
    count = grid if isinstance(grid, int) else torch.Size(grid).numel()
    for number in range(count):
        program = _Program(number, count)
        program.run(lambda: function(*arguments, **constants))
