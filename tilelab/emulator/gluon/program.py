"""How the roles of one program take turns, and when its asynchronous engines act.

A role is a Python thread. One role runs at a time; it hands over at each scheduling point. TMA and the tensor core are
queues of actions: every copy of TMA is a queue of its own, and the products of one role end in the order of issue.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SEEDS = (0, 1, 2)  # of the turns and of TMA; `with_seed` sets one

_seed = contextvars.ContextVar("seed", default=0)
_NOTHING_MOVES = 20_000  # turns without any progress after which a program is given up
_LONGEST_LOOP = 50_000  # loads of global memory by a role, without progress
_LONGEST_S = 120.0  # of one program


class GluonError(RuntimeError):
    """A kernel broke a rule of the hardware, or uses what the emulator does not know; the message names it."""


@contextlib.contextmanager
def with_seed(seed: int) -> Iterator[None]:
    """Let the roles take other turns, TMA land in another order, and the programs run in another order."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


def order_programs(count: int) -> list[int]:
    """Return the order in which the seed runs the programs of a grid: forwards, backwards, then at random."""
    order = list(range(count))
    if _seed.get() == 1:
        order.reverse()
    elif _seed.get():
        random.Random(_seed.get()).shuffle(order)
    return order


def _closed_lock() -> threading.Lock:
    """Return a lock that one thread acquires and another releases: it hands over the turn."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Role:
    """One partition of `warp_specialize`, or the whole program."""

    def __init__(self, call: Callable[[], Any], name: str, num_warps: int):
        self.call, self.name, self.num_warps, self.turn = call, name, num_warps, _closed_lock()
        self.is_ready, self.waits_for, self.ended, self.result = (lambda: True), None, False, None
        self.products, self.stores = [], []  # asynchronous ones that nobody has waited for
        self.copies, self.groups = [], []  # cp.async: those not committed yet, and committed groups
        self.tensor_core, self.unobserved = (
            collections.deque(),
            [],
        )  # tcgen05: what runs, and what nobody waited for
        self.waited = 0  # the time at which its last wait returned


class Program:
    """One program of a grid: its roles, its engines and the written tiles that no fence follows."""

    def __init__(self, index: tuple[int, ...], grid: tuple[int, ...], number: int, num_warps: int):
        self.index, self.grid, self.num_warps = index, grid, num_warps
        self.random = random.Random(f"{_seed.get()} {number}")
        self.roles, self.queues, self.written, self.error = [], [], [], None
        self.role, self.yielded, self.clock, self.idle = None, _closed_lock(), 0, 0
        self.steps, self.ends_at = 0, time.monotonic() + _LONGEST_S

    def add_role(self, call: Callable[[], Any], name: str, num_warps: int) -> Role:
        role = Role(call, name, num_warps)
        self.roles.append(role)
        threading.Thread(target=self._run_role, args=(role,), daemon=True).start()
        return role

    def _run_role(self, role: Role) -> None:
        _here.program = self
        role.turn.acquire()
        try:
            if not self.error:
                role.result = role.call()
                if role.products:
                    raise GluonError("a role ends before it has waited for its products")
                if role.stores:
                    raise GluonError("a role ends before tma.store_wait: TMA may not have read the tile yet")
        except Stopped:
            pass
        except BaseException as error:
            self.error = self.error or _explain(error)
        role.ended = True
        self.yielded.release()

    def progress(self) -> None:
        """Note that something happened that another role may wait for."""
        self.clock += 1
        self.idle = 0

    def count_idle(self, most: int) -> None:
        """Give up a loop that never ends."""
        self.idle += 1
        self.steps += 1
        if self.idle > most or (not self.steps % 256 and time.monotonic() > self.ends_at):
            raise GluonError(
                f"the program does not end: {self.idle:,} turns passed without progress (programs run one after "
                "another, so a loop that waits for another program never ends)"
            )

    def count_load(self) -> None:
        self.count_idle(_LONGEST_LOOP)

    def pause(
        self, is_ready: Callable[[], bool] | None = None, waits_for: Callable[[], str] | None = None
    ) -> None:
        """Let others run until `is_ready()`."""
        self.count_idle(_NOTHING_MOVES)
        if len(self.roles) == 1 and not self.queues and (is_ready is None or is_ready()):
            return
        role = self.role
        role.is_ready, role.waits_for = is_ready or (lambda: True), waits_for
        self.yielded.release()
        role.turn.acquire()
        if self.error:
            raise Stopped

    def maybe_pause(self) -> None:
        if self.random.random() < 0.5:
            self.pause()

    def run(self, call: Callable[[], Any]) -> None:
        self.add_role(call, "the program", self.num_warps)
        while not self.error:
            alive = [role for role in self.roles if not role.ended]
            if not alive:
                break
            ready = [role for role in alive if role.is_ready()]
            if self.queues and (not ready or self.random.random() < 0.3):
                self.act()
            elif ready:
                self.role = self.random.choice(ready)
                self.role.turn.release()
                self.yielded.acquire()
            else:
                waits = "; ".join(f"{role.name} waits {role.waits_for()}" for role in alive if role.waits_for)
                self.error = GluonError(f"nothing moves any more: {waits}")
        while any(not role.ended for role in self.roles):
            self.role = next(role for role in self.roles if not role.ended)
            self.role.turn.release()
            self.yielded.acquire()
        while self.queues and not self.error:
            self.act()  # a copy that nobody waits for still lands
        if self.error:
            raise self.error

    def act(self) -> None:
        """Let one engine do its next action."""
        queue = self.queues[self.random.randrange(len(self.queues))]
        action = queue.popleft()
        if not queue:
            self.queues.remove(queue)
        try:
            action()
        except GluonError as error:
            self.error = self.error or error
        self.progress()

    def enqueue(self, queue: collections.deque, action: Callable[[], None]) -> None:
        queue.append(action)
        if len(queue) == 1:
            self.queues.append(queue)


def _explain(error: BaseException) -> BaseException:
    """Return a keyword that a stand-in lacks as a GluonError that names both."""
    found = re.match(
        r"((?:gl|tma|mbarrier|async_copy|hopper|blackwell|ampere|tensor)\.\S+)\(\) (.*)", str(error)
    )
    if isinstance(error, TypeError) and found:
        return GluonError(f"{found[1]} {found[2]}, or the emulator does not know it").with_traceback(
            error.__traceback__
        )
    return error


class Stopped(BaseException):
    """Another role has failed."""


_here = threading.local()


def program() -> Program:
    """Return the program that the calling thread runs."""
    return _here.program


def refuse(what: str) -> None:
    """Raise the error that says what the emulator lacks."""
    raise GluonError(f"the emulator does not know {what}; the kernel can only run on a GPU")
