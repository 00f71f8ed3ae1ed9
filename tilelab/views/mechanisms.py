"""Compute five mechanisms of the course step by step: ring, warp roles, raster, softmax in pieces, and experts.

Each is a small simulation of its rules. It returns a list of states, one per step, with a sentence `say` in each.
tilelab/views/stepper.py draws them.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
from collections.abc import Iterator

TILES, PROGRAMS, GROUP_M = 64, 264, 8  # of the raster: 8192 cubed in tiles of 128 × 128, two programs per SM
# 128 rows of 8,192 bf16; L2 of an H200; parts that a strip is loaded in
STRIP_MIB, L2_MIB, PARTS = (2.0, 60.0, 8)
SCORES = ((1, 3), (5, 2), (4, 1))  # of one query, in blocks of two keys
EXPERT_ROWS, TILE_ROWS, TILE_COLUMNS, SHARERS = (70, 0, 133, 1), 128, 2, 3  # of a grouped product; programs
VALUES = (((8, 0), (4, 4)), ((2, 8), (0, 16)), ((4, 2), (16, 0)))  # the row of V for each key


@dataclasses.dataclass
class Barrier:
    """An mbarrier: its phase, and the arrivals and bytes that this phase still waits for."""

    count: int
    phase: int = 0
    arrivals: int = 0
    nbytes: int = 0

    def __post_init__(self):
        self.arrivals = self.count

    def arrive(self, arrivals: int = 1, announced: int = 0) -> None:
        """Count arrivals and announce bytes. Raise RuntimeError for more arrivals than are pending."""
        if arrivals > self.arrivals:
            raise RuntimeError(f"{arrivals} arrivals are too many; {self.arrivals} are pending.")
        self.arrivals -= arrivals
        self.land(-announced)

    def land(self, nbytes: int) -> None:
        """Count bytes that have landed. The phase ends when neither arrivals nor bytes are pending."""
        self.nbytes -= nbytes
        if not self.arrivals and not self.nbytes:
            self.phase, self.arrivals = self.phase + 1, self.count

    def lets_pass(self, parity: int) -> bool:
        """Return whether a wait for this parity returns, because the current phase has the other one."""
        return self.phase % 2 != parity


class Pipeline:
    """A ring of stages between a producer, the copy engine and consumers. One role moves at a time.

    A consumer releases a stage `lag` tiles late, and `warps` are its arrivals, one group after the other. `steps` holds
    a state per step, and `waits` holds (role, barrier, its phase, the phase that must have ended, whether it passes).
    RuntimeError where a tile is read too early or overwritten too early, and where nobody can move any more.
    """

    def __init__(self, stages: int, tiles: int, consumers: int, warps: tuple[int, ...], lag: int, parts: int,
                 nbytes: int, unit: str):  # fmt: skip
        self.stages, self.tiles, self.warps, self.lag = stages, tiles, warps, lag
        self.parts, self.nbytes, self.unit = parts, nbytes, unit
        self.consumers = [f"consumer {i}" if consumers > 1 else "consumer" for i in range(consumers)]
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(sum(warps) * consumers) for _ in range(stages)]
        self.tile: list[int | None] = [None] * stages
        self.landed = [0] * stages  # bytes
        self.unread: list[set[str]] = [set() for _ in range(stages)]  # the consumers that still need its tile
        self.holders: list[set[str]] = [set() for _ in range(stages)]  # the roles that may touch it now
        self.loads: list[tuple[int, int]] = []
        self.moves = {"producer": self._produce(), "copy engine": self._copy()}
        self.moves |= {role: self._consume(role) for role in self.consumers}
        self.doing = {role: ("has not begun", "") for role in self.moves}
        self.steps: list[dict] = []
        self.waits: list[tuple[str, str, int, int, bool]] = []
        self._keep("All stages are empty, and every barrier is in phase 0. Nobody has begun.")

    def run(self, order: str) -> list[dict]:
        """Let roles move in this order (p, e, and 0, 1, … for consumers), then in turn until all have ended."""
        roles = {"p": "producer", "e": "copy engine", **dict(zip("01", self.consumers))}
        for letter in order:
            self.move(roles[letter])
        while any([self.move(role) for role in self.moves]):
            pass
        if any(self.unread) or self.tile.count(None) or max(filter(None, self.tile)) < self.tiles - 1:
            raise RuntimeError(f"nobody can move any more: {self.doing}.")
        return self.steps

    def move(self, role: str) -> bool:
        """Let a role take its next step. Return whether it could."""
        sentence = next(self.moves[role], None)
        if sentence:
            self._keep(sentence)
        return bool(sentence)

    def _keep(self, sentence: str) -> None:
        barriers = {name: [copy.copy(one) for one in getattr(self, name)] for name in ("full", "empty")}
        holders = [set(each) for each in self.holders]
        self.steps.append({"say": sentence, **barriers, "tile": list(self.tile), "landed": list(self.landed),
                           "nbytes": self.nbytes, "holders": holders, "doing": dict(self.doing)})  # fmt: skip

    def _wait(self, role: str, kind: str, stage: int, phase: int, then: str) -> Iterator[str | None]:
        barrier, name, parity = getattr(self, kind)[stage], f"{kind}[{stage}]", phase % 2
        who = role if role[-1].isdigit() else f"the {role}"
        asks = f"{who[0].upper()}{who[1:]} waits for parity {parity} of {name}."
        passes = barrier.lets_pass(parity)
        self.waits.append((role, name, barrier.phase, phase, passes))
        why = (
            f"Phase {phase} has ended already"
            if phase >= 0
            else "A new barrier is in phase 0, with the other parity"
        )
        self.doing[role] = ("returns at once" if passes else "blocks", f"wait for parity {parity} of {name}")
        if not passes:
            yield f"{asks} Phase {phase} has not ended, so the wait blocks."
            while not barrier.lets_pass(parity):
                yield None
            self.doing[role] = ("goes on", f"waited for parity {parity} of {name}")
        self.holders[stage].add(role)
        if passes:
            yield f"{asks} {why}: the wait returns at once. {then}"
        else:
            yield f"Phase {phase} of {name} has ended, so {who} goes on. {then}"

    def _produce(self) -> Iterator[str | None]:
        for tile in range(self.tiles):
            use, stage = divmod(tile, self.stages)
            yield from self._wait("producer", "empty", stage, use - 1, f"Stage {stage} may be overwritten.")
            if self.unread[stage]:
                raise RuntimeError(f"tile {tile} overwrites what {self.unread[stage]} has not read.")
            self.full[stage].arrive(announced=self.nbytes)
            self.tile[stage], self.landed[stage] = tile, 0
            self.unread[stage], self.holders[stage] = set(self.consumers), {"copy engine"}
            self.loads.append((tile, stage))
            load = f"{self.unit} {tile} into stage {stage}"
            self.doing["producer"] = ("issues a load", load)
            if len(self.loads) == 1:
                self.doing["copy engine"] = ("has a load to do", load)
            yield (
                f"The producer arrives on full[{stage}], announces {self.nbytes:,} bytes and issues the load of {load}."
            )
        self.doing["producer"] = ("has ended", "all loads are issued")

    def _copy(self) -> Iterator[str | None]:
        while True:
            if not self.loads:
                yield None
                continue
            tile, stage = self.loads[0]
            for part in range(1, self.parts):
                self.landed[stage] = self.nbytes * part // self.parts
                self.full[stage].land(self.nbytes // self.parts)
                self.doing["copy engine"] = ("writes", f"{self.unit} {tile} into stage {stage}")
                yield f"{self.landed[stage]:,} bytes of {self.unit} {tile} have landed, so as many fewer are pending."
            phase, self.landed[stage] = self.full[stage].phase, self.nbytes
            self.full[stage].land(self.nbytes // self.parts)
            self.holders[stage].clear()
            self.loads.pop(0)
            self.doing["copy engine"] = ("has written", f"{self.unit} {tile} into stage {stage}")
            ends = f"Nothing is pending on full[{stage}], so phase {phase} ends: stage {stage} may be read."
            yield f"All bytes of {self.unit} {tile} have landed. {ends}"

    def _consume(self, role: str) -> Iterator[str | None]:
        for now in range(self.tiles + self.lag):
            if now < self.tiles:
                use, stage = divmod(now, self.stages)
                act = "It issues the products of" if self.lag else "It reads"
                yield from self._wait(role, "full", stage, use, f"{act} {self.unit} {now}.")
                if self.tile[stage] != now or self.landed[stage] < self.nbytes:
                    raise RuntimeError(f"{role} reads {self.unit} {now} before it has landed.")
            if now < self.lag:
                continue
            use, stage = divmod(now - self.lag, self.stages)
            for number, arrivals in enumerate(self.warps, 1):
                if number == len(self.warps):
                    self.holders[stage].discard(role)
                    self.unread[stage].discard(role)
                barrier, old = self.empty[stage], f"{self.unit} {now - self.lag}"
                barrier.arrive(arrivals)
                self.doing[role] = (
                    "arrives",
                    f"on empty[{stage}], {sum(self.warps[:number])} of {sum(self.warps)} warps",
                )
                done = f"Warp {number - 1} of the {role} has read {old} and arrives"
                if self.lag:
                    done = f"The products of {old} are done, and the {arrivals} warps of {role} arrive"
                rest = f"Arrivals pending: {barrier.arrivals}."
                if barrier.phase > use:
                    rest = f"Phase {use} ends: stage {stage} may be overwritten."
                yield f"{done} on empty[{stage}]. {rest}"
        self.doing[role] = ("has ended", f"every {self.unit} is done")


def make_ring() -> Pipeline:
    """Return a ring of two stages, with two warps that read each tile."""
    return Pipeline(2, 4, consumers=1, warps=(1, 1), lag=0, parts=2, nbytes=4096, unit="tile")


def make_roles() -> Pipeline:
    """Return a producer, the copy engine and two consumers that share three stages, as in a GEMM."""
    return Pipeline(3, 4, consumers=2, warps=(4,), lag=1, parts=1, nbytes=32768, unit="step")


def run_ring() -> list[dict]:
    """Return the states of a ring in which consumer and producer wait for each other."""
    return make_ring().run("pppp0ee0pee00p0p000ppee0ee")


def run_roles() -> list[dict]:
    """Return the states of the warp roles: consumer 0 is ahead of consumer 1."""
    return make_roles().run("pppp0eepp01e0p10p1ep0")


def tile_coordinates(tile: int, group_m: int) -> tuple[int, int]:
    """Return row and column of a tile in groups of `group_m` rows, as the kernels compute it."""
    first, within = tile // (group_m * TILES) * group_m, tile % (group_m * TILES)
    rows = min(TILES - first, group_m)
    return first + within % rows, within // rows


def load_waves(group_m: int) -> list[dict]:
    """Return what each wave of programs loads and what L2 then holds. The programs of a wave walk along K together.

    A wave goes through the parts of its strips. L2 keeps the parts that were used last, and loads what it misses.
    """
    l2: collections.OrderedDict = collections.OrderedDict()
    loaded = asked = 0.0
    empty: dict = {"tiles": [], "A": 0, "B": 0, "wave": 0.0, "loaded": 0.0, "asked": 0.0, "held": {}}
    waves = [empty]
    for first in range(0, TILES**2, PROGRAMS):
        tiles = [tile_coordinates(tile, group_m) for tile in range(first, min(first + PROGRAMS, TILES**2))]
        strips = sorted({("A", row) for row, _ in tiles} | {("B", column) for _, column in tiles})
        before = loaded
        for part in range(PARTS):
            for strip in strips:
                loaded += STRIP_MIB / PARTS * ((strip, part) not in l2)
                l2[strip, part] = True
                l2.move_to_end((strip, part))
                if len(l2) * STRIP_MIB / PARTS > L2_MIB:
                    l2.popitem(last=False)
        asked += len(tiles) * 2 * STRIP_MIB
        counts = collections.Counter(matrix for matrix, _ in strips)
        held = collections.Counter(strip for strip, _ in l2)
        shares = {strip: held[strip] / PARTS for strip in sorted(held)}
        wave = {"tiles": tiles, **counts, "wave": loaded - before}
        waves.append(wave | {"loaded": loaded, "asked": asked, "held": shares})
    return waves


def run_raster() -> list[dict]:
    """Return the states of two orders of the same tiles, row by row and in groups of rows, wave by wave."""
    orders = load_waves(1), load_waves(GROUP_M)
    steps = []
    for number, (rows, groups) in enumerate(zip(*orders)):
        first, count = (number - 1) * PROGRAMS, len(rows["tiles"])
        say = (
            f"Wave {number}: programs {first:,} to {first + count - 1:,} ask for {count * 2 * STRIP_MIB:,.0f} MiB. L2 "
            f"loads {rows['wave']:,.0f} MiB of them from memory row by row, and {groups['wave']:,.0f} MiB in groups."
        )
        if not number:
            say = (
                f"A model: {PROGRAMS} programs run at a time and walk along K together. L2 has {L2_MIB:.0f} MiB and "
                f"keeps what was used last. A strip, 128 rows of A or columns of B, has {STRIP_MIB:.0f} MiB."
            )
        steps.append({"say": say, "rows": orders[0][: number + 1], "groups": orders[1][: number + 1]})
    return steps


def format_number(value: float) -> str:
    """Return a number with four significant digits and a true minus sign."""
    return f"{value:.4g}".replace("-inf", "−∞").replace("-", "−")


def run_softmax() -> list[dict]:
    """Return the states of one row of attention in pieces, with weights as powers of two."""
    row_max, row_sum, out = float("-inf"), 0.0, [0.0, 0.0]
    weights: list[float] = []
    steps: list[dict] = []

    def keep(say: str, blocks: int, rescale: tuple = (), new: bool = False) -> None:
        values = {"maximum": [row_max], "rescale": rescale, "sum": [row_sum], "output": out}
        steps.append({"say": say, "blocks": blocks, "weights": weights, "new": new, "values": values})

    keep("No key has been seen. The maximum is −∞, and the sum and the output are 0.", 0)
    for block, (scores, values) in enumerate(zip(SCORES, VALUES), 1):
        came = f"Block {block - 1} arrives, with scores {scores[0]} and {scores[1]}."
        keep(f"{came} The maximum is still {format_number(row_max)}.", block)
        old, row_max = row_max, max(row_max, *scores)
        rescale = 2 ** (old - row_max)
        row_sum, out, weights = row_sum * rescale, [x * rescale for x in out], [x * rescale for x in weights]
        change = f"stays {row_max}: nothing shrinks"
        if old < row_max:
            factor = f"2^({format_number(old)} − {row_max}) = {format_number(rescale)}"
            change = f"rises to {row_max}, so the old sum and the old output are multiplied by {factor}"
        keep(f"The maximum {change}.", block, (rescale,))
        new = [2 ** (score - row_max) for score in scores]
        weights, row_sum = weights + new, row_sum + sum(new)
        out = [x + sum(weight * value[d] for weight, value in zip(new, values)) for d, x in enumerate(out)]
        both = f"2^(score − {row_max}): {format_number(new[0])} and {format_number(new[1])}"
        say = f"The new weights are {both}. They join the sum, and multiply their rows of V for the output."
        keep(say, block, (rescale,), new=True)
    out, weights = [x / row_sum for x in out], [weight / row_sum for weight in weights]
    keep(f"At the end the output is divided by the sum, {format_number(row_sum)}.", len(SCORES))
    return steps


def find_tile(tile_id: int, sums: list[int]) -> dict[str, int]:
    """Return the expert of a tile, its first row and column in C, and where the expert's rows end."""
    expert = sum(each <= tile_id for each in sums)
    ends = [0, *itertools.accumulate(EXPERT_ROWS)]
    tile, tiles_m = tile_id - (sums[expert - 1] if expert else 0), -(-EXPERT_ROWS[expert] // TILE_ROWS)
    row = ends[expert] + tile % tiles_m * TILE_ROWS
    return {
        "tile_id": tile_id,
        "expert": expert,
        "row": row,
        "column": tile // tiles_m,
        "end": ends[expert + 1],
    }


def run_experts() -> list[dict]:
    """Return the states of a persistent grouped product: programs count the tiles once, then each finds its tiles."""
    tiles = [-(-rows // TILE_ROWS) * TILE_COLUMNS for rows in EXPERT_ROWS]
    sums, total = list(itertools.accumulate(tiles)), sum(EXPERT_ROWS)
    now: list[dict | None] = [None] * SHARERS
    state: dict = {"tiles": [], "sums": [], "done": [], "now": list(now), "latest": None}
    offsets = ", ".join(map(str, itertools.accumulate(EXPERT_ROWS)))
    steps = [
        state | {"say": f"The offsets lie in the GPU's memory: {offsets}. Every program reads all of them."}
    ]
    state = state | {"tiles": tiles, "sums": sums}
    say = f"Every program counts the tiles of each expert, with {TILE_COLUMNS} columns of tiles, and adds them up."
    steps.append(state | {"say": f"{say} There are {sums[-1]} tiles for {SHARERS} programs."})
    done: list[dict] = []
    for tile_id in range(-(-sums[-1] // SHARERS) * SHARERS):
        program = tile_id % SHARERS
        if now[program]:
            done = [*done, now[program]]
        say = f"Program {program} comes to tile_id {tile_id}, but there are {sums[-1]} tiles: it ends."
        if tile_id >= sums[-1]:
            now[program] = None
        else:
            now[program] = tile = find_tile(tile_id, sums)
            expert, first, last = tile["expert"], tile["row"], min(tile["row"] + TILE_ROWS, tile["end"])
            found = f"{expert} sums are" if expert else "no sum is"
            stored = f"rows {first} to {last - 1}" if last - first > 1 else f"row {first}"
            say = f"Program {program}, tile_id {tile_id}: {found} at most {tile_id}, so it belongs to expert {expert}."
            say += f" It stores {stored}."
            if others := min(first + TILE_ROWS, total) - last:
                say += f" Its box has {others} row{'s' * (others > 1)} of the next expert, too."
            elif first + TILE_ROWS > total:
                say += " The rest of its box lies beyond C."
        steps.append(state | {"say": say, "done": done, "now": list(now), "latest": program})
    return steps
