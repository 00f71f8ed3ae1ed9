"""How the Triton GEMM gets a configuration for a shape: families of tiles, one of which suits each shape.

A model predicts the time of each family's configuration. tilelab.runtime.choice corrects it by the times that were
measured at other shapes. `configs.predict_us`, which is simpler, ranks the sets of the course on any GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ch14.gemm.configs import GemmConfig, count_programs_per_sm, rejection
from tilelab.runtime import choice, device

MOST_STAGES = {64: 16, 128: 10, 256: 6}  # by the steps along K: more are in flight than the latency needs
USUAL_STAGES = {64: 5, 128: 4, 256: 3}  # more stages are not worth a C that is stored in more parts
ROUND_WIDTHS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320)


class Family(NamedTuple):
    """A configuration but for what follows from the shape.

    Without `block_n`, operands are swapped, and the rows of C, which are tokens in a language model, are cut into as
    few equal tiles as possible, or `more` tiles than that. A tile is as wide as its tokens, rounded up to 16, or with
    `is_round` to one of ROUND_WIDTHS, which need no product of 16 columns beside a wide one. With `is_split`, as many
    programs share a tile as one wave has room for. `early` is pdl.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    programs_per_sm: int = 1
    swap: bool = False
    more: int = 0
    is_round: bool = False
    is_split: bool = False
    group_m: int = 8
    early: bool = True

    @property
    def name(self) -> str:
        """The family in a table: "64×tokens/+1×64, 4 warps, swapped, split"."""
        width = self.block_n or "tokens" + f"/+{self.more}" * (self.more > 0) + " rounded" * self.is_round
        parts = {
            f"{self.block_m}×{width}×{self.block_k}": True,
            f"{self.num_warps} warps": True,
            f"{self.programs_per_sm} per SM": self.programs_per_sm > 1,
            "swapped": self.swap,
            "split": self.is_split,
            "late": not self.early,
            f"groups of {self.group_m}": self.group_m != 8,
        }
        return ", ".join(part for part, is_said in parts.items() if is_said)

    def config(self, m: int, n: int, k: int, sms: int) -> GemmConfig | None:
        """Return the family's configuration for C (m, n) with inner extent k, or None if it has none there."""
        rows, columns = (n, m) if self.swap else (m, n)  # of the product that the kernel computes
        width = self.block_n
        if not width:
            if not (width := _choose_width(columns, self.more, self.is_round)):
                return None
        elif self.swap and width >= 2 * max(columns, 16):
            return None
        elif self.block_m >= 2 * max(rows, 32 if self.swap else 16):
            return None
        splits = 1
        if self.is_split:
            tiles = math.ceil(rows / self.block_m) * math.ceil(columns / width)
            splits = min(sms // tiles, k // (3 * self.block_k), 16)
            if splits < 2:
                return None
        return _fill(self._replace(block_n=width, more=0, is_round=False, is_split=False), splits)


def _choose_width(tokens: int, more: int, is_round: bool) -> int:
    """Return the width of a tile that is as wide as its tokens, or 0 if it would be too wide or too narrow."""
    width = math.ceil(tokens / (more + (math.ceil(tokens / 256) if tokens > 320 else 1)))
    if is_round:
        width = next((each for each in ROUND_WIDTHS if each >= width), 512)
    else:
        width = max(math.ceil(width / 16), 1) * 16
        while width.bit_count() > 3:
            width += 16
    return 0 if width > 320 or more and width < 48 else width


@functools.lru_cache(maxsize=4096)
def _fill(family: Family, splits: int) -> GemmConfig | None:
    """Return the configuration of a family with a width: with the usual stages, or else with the most that fit."""
    best = None
    stage_bytes = (family.block_m + family.block_n) * family.block_k * 2
    most = min(MOST_STAGES[family.block_k], device.target_limits("sm_90a").smem_per_block // stage_bytes + 1)
    for parts in (1, 2, 4):
        if best and best[0][0] == USUAL_STAGES[family.block_k]:
            break
        for stages in range(most, 1, -1):
            try:
                config = GemmConfig(
                    *(family.block_m, family.block_n, family.block_k, family.num_warps, stages),
                    kernel="split" if splits > 1 else "persistent",
                    epilogue_subtile=parts,
                    group_m=family.group_m,
                    programs_per_sm=family.programs_per_sm,
                    pdl=family.early,
                    splits=splits,
                    swap=family.swap,
                )
            except ValueError:
                break
            if parts > 1 and config.columns[0] < 32 * parts:
                break
            if not rejection(config, "sm_90a", "bf16"):
                key = min(stages, USUAL_STAGES[family.block_k]), -parts
                if best is None or key > best[0]:
                    best = key, config
                break
    return best[1] if best else None


def _families() -> tuple[Family, ...]:
    """Return the families that were best or nearly so at one of 2,500 measured shapes."""
    # Few tokens: (rows of the tile, step of K, programs per SM), and (more, is_split) of each.
    thin = {
        (64, 64, 1): ((0, False), (0, True), (1, False)),
        (64, 64, 2): ((0, True), (1, True)),
        (64, 128, 1): ((0, False), (0, True), (1, False), (1, True)),
        (64, 128, 2): ((0, False), (0, True)),
        (128, 64, 1): ((0, False), (0, True), (1, False)),
        (128, 64, 2): ((0, False), (0, True)),
    }
    found = [
        Family(rows, 0, k, 4, programs, True, more, is_split=is_split)
        for (rows, k, programs), ways in thin.items()
        for more, is_split in ways
    ]
    found += [
        Family(64, 0, 128, 4, 1, True, 2),
        Family(128, 0, 64, 4, 1, True, 2),
        Family(64, 0, 64, 4, 3, True),
    ]
    rounded = functools.partial(Family, block_n=0, block_k=64, num_warps=8, swap=True, is_round=True)
    found += [Family(128, 0, 64, 8, swap=True), rounded(128), rounded(128, is_split=True), rounded(256)]
    found += [rounded(64, num_warps=4), rounded(128, num_warps=4, is_split=True)]
    found += [Family(64, columns, 128, 4) for columns in (64, 80, 96, 128)]
    found += [Family(64, 64, 128, 4, is_split=True), Family(128, 256, 64, 8, is_split=True)]
    # Many tokens: tiles of a fixed width.
    found += [Family(64, columns, 64, 4) for columns in (160, 192, 256, 320)] + [Family(64, 128, 64, 4, 2)]
    found += [Family(128, 128, 64, 4, swap=True, group_m=group_m) for group_m in (4, 16)]
    found += [Family(128, columns, 64, 4) for columns in (128, 160, 192)] + [
        Family(128, 160, 64, 4, is_split=True)
    ]
    found += [Family(128, 256, 64, 8), Family(256, 192, 64, 8)]
    found += [Family(256, 128, 64, 8, swap=True), Family(128, 192, 64, 4, swap=True)]
    found += [Family(128, columns, 64, 4, group_m=16) for columns in (128, 192)]
    found += [Family(128, 256, 64, 8, group_m=group_m, early=False) for group_m in (8, 16)]
    found.append(Family(128, 256, 64, 8, swap=True, group_m=16))
    return tuple(found)


FAMILIES = {family.name: family for family in _families()}


def candidates(m: int, n: int, k: int, sms: int) -> dict[str, GemmConfig]:
    """Return the configuration of each family that has one for C (m, n) with inner extent k."""
    found = {name: family.config(m, n, k, sms) for name, family in FAMILIES.items()}
    return {name: config for name, config in found.items() if config}


@dataclass(frozen=True)
class Rates:
    """Rates per microsecond and fixed costs in microseconds, fitted to 48,000 times of 1,600 shapes on an H200."""

    flops: float = 7.3e6  # of an SM with wgmma
    mma_flops: float = 5.4e6  # and with mma.sync, whose tiles have 16 rows
    smem_bytes: float = 286e3  # that wgmma and TMA move in an SM's shared memory
    bytes_in: float = 133e3  # from L2 into an SM
    lines: float = 0.2  # more time take loads of rows that start within lines of 128 bytes
    sectors: float = 0.65  # and again, if they start within sectors of 32 bytes
    latency_us: float = 0.8  # from the issue of a load to its data
    contention: float = 0.12  # of the loads' time is added to the products beside them
    pair: float = 0.61  # how much of a tile's products two programs on an SM lose to each other
    load_us: float = 0.0115  # to issue a load and to wait for it, per step
    dram_bytes: float = 4.49e6  # of all SMs together
    launch_us: float = 1.5
    tile_us: float = 0.88  # end of a tile whose loop is fused with the next one's
    end_us: float = 2.4  # end of another tile, with the first loads of the next
    split_us: float = 0.125
    split_bytes: float = 32e3  # of the parts of a tile that its programs exchange
    blend: float = (
        2.49  # how sharply the longer of two overlapping activities decides: the exponent of a norm
    )


@functools.lru_cache
def rates_of(gpu: str) -> Rates:
    """Return the rates of a GPU by its name: an H200's, with the GPU's shares."""
    dram, flops = choice.find_shares(gpu)
    rates = dict(dram_bytes=Rates.dram_bytes * dram, flops=Rates.flops * flops)
    return Rates(**rates, mma_flops=Rates.mma_flops * flops)


def _describe(config: GemmConfig, rates: Rates) -> tuple[float, ...]:
    """Return what `_predict` knows of a configuration. Numbers of several configurations may come as arrays."""
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    parts, loads = columns.bit_count(), (rows + columns) * depth * 2
    products = 2 * rows * columns * depth / rates.mma_flops
    if rows >= 64:  # wgmma reads 64 rows of A again for each part, and all of B again for each 64 rows
        reads = depth / 16 * rows / 64 * (2048 * parts + 32 * columns) + loads
        products = max(2 * rows * columns * depth / rates.flops, reads / rates.smem_bytes)
    is_persistent, is_split = config.kernel == "persistent", config.splits > 1
    resident = config.programs_per_sm if is_persistent else count_programs_per_sm(config, "bf16")
    issue, latency = rates.load_us * (parts + 1), rates.latency_us / max(config.num_stages - 1, 1)
    end, ends_beside = rates.tile_us, 0.0  # other programs multiply meanwhile
    if parts > 1 or is_split:
        end, ends_beside = rates.end_us, 0.3 * rates.end_us
    tile = (columns, rows) if config.swap else (rows, columns)
    return (
        *tile,
        depth,
        resident,
        products,
        issue,
        loads / rates.bytes_in,
        latency + issue,
        end + rows * columns * 2 / rates.bytes_in,
        ends_beside,
        rates.launch_us + is_split * rates.split_us,
        is_split * rows * columns * 4 / rates.split_bytes,
    )


def _predict(numbers, splits, m: int, n: int, k: int, sms: int, rates: Rates):
    """Return the predicted times in microseconds, and how often the programs fill the GPU."""
    tile_m, tile_n, depth, resident, products, issue, loads, least, end, end_beside, fixed, exchange = numbers
    programs = np.ceil(m / tile_m) * np.ceil(n / tile_n) * splits
    slots = sms * resident
    waves = np.floor(programs / slots)
    rest = programs - waves * slots
    together = np.array((slots + 0 * rest, rest))  # programs of a full wave, and of the last one
    beside = np.maximum(np.minimum(resident, np.ceil(together / sms)), 1)  # programs on one SM
    fetch = beside * loads * (1 + rates.lines * (k % 64 > 0) + rates.sectors * (k % 16 > 0))
    busy = np.where(beside == 1, products + issue, (beside + rates.pair) * products)
    step = np.maximum(np.maximum(busy, fetch), least) + rates.contention * fetch
    dram = 2 * (m * k + n * k + m * n) / rates.dram_bytes / programs * together
    # Of the longer and the shorter of two activities, a norm decides; logarithms take less time than powers.
    norm = np.log((np.ceil(k / (depth * splits)) * step, dram + 1e-9)) * rates.blend
    full, last = np.exp(np.logaddexp(*norm) / rates.blend) + np.where(beside == 1, end, end_beside)
    return fixed + waves * full + (rest > 0) * last + splits * exchange, programs / slots


def predict_us(config: GemmConfig, m: int, n: int, k: int, sms: int, rates: Rates = Rates()) -> float:
    """Return the predicted time in microseconds on Hopper: of waves of programs, each with its steps or part of DRAM.

    A step takes as long as the slowest of four things: its products, what wgmma and TMA move in shared memory, the
    loads from L2, and the latency of a load divided by the loads in flight.
    """
    return float(_predict(_describe(config, rates), config.splits, m, n, k, sms, rates)[0])


def _group(family: Family) -> tuple[bool, int] | None:
    """Return what decides how wide a family's tile is, beside the tokens; None where its width is fixed."""
    return None if family.block_n else (family.is_round, family.more)


GROUPS = {
    group: [family for family in FAMILIES.values() if _group(family) == group]
    for group in dict.fromkeys(map(_group, FAMILIES.values()))
}
NAMES = tuple(family.name for group in GROUPS.values() for family in group)
MAY_SPLIT = np.array([FAMILIES[name].is_split for name in NAMES])


@functools.lru_cache(maxsize=1024)
def _describe_group(group: tuple[bool, int] | None, width: int, gpu: str) -> np.ndarray:
    """Return a column for each family of a group: the least M and N, the parts of a tile, and what `_predict` knows."""
    columns, rates = [], rates_of(gpu)
    for family in GROUPS[group]:
        wide = family._replace(block_n=family.block_n or width, more=0, is_round=False, is_split=False)
        config = _fill(wide, 2 if family.is_split else 1) if wide.block_n else None
        if not config:
            columns.append([math.inf] * 2 + [1.0] * 13)
            continue
        along_m = wide.block_n if family.swap else wide.block_m
        least_m = along_m / 2 if family.block_n and along_m >= 32 else 0.0
        least_n = wide.block_m / 2 if family.block_n and family.swap else 0.0
        parts = (wide.block_n if family.swap else config.block_n).bit_count()
        columns.append([least_m, least_n, parts, *_describe(config, rates)])
    return np.array(columns).T


@functools.lru_cache(maxsize=256)
def _describe_families(m: int, gpu: str) -> np.ndarray:
    """Return the columns of all groups, in the order of NAMES."""
    widths = ((group, _choose_width(m, group[1], group[0]) if group else 0) for group in GROUPS)
    return np.concatenate([_describe_group(group, width, gpu) for group, width in widths], 1)


def predict(m: int, n: int, k: int, sms: int, gpu: str) -> tuple[np.ndarray, np.ndarray]:
    """Return for all families (NAMES) the predicted times, infinite where one has no configuration, and the traits."""
    least_m, least_n, parts, *numbers = _describe_families(m, gpu)
    tiles = np.ceil(m / numbers[0]) * np.ceil(n / numbers[1])
    splits = np.minimum(np.minimum(sms // tiles, k // (3 * numbers[2])), 16)
    fails = (least_m >= m) | (least_n >= n) | MAY_SPLIT & (splits < 2)
    us, waves = _predict(numbers, np.where(MAY_SPLIT & ~fails, splits, 1), m, n, k, sms, rates_of(gpu))
    us[fails] = math.inf
    return us, np.array((waves, choice.measure_padding(m, n, *numbers[:2]), parts + 0 * waves))


def rank(m: int, n: int, k: int, sms: int, gpu: str, most: int = len(NAMES)) -> tuple[list[GemmConfig], str]:
    """Return the `most` fastest candidates for C (m, n) with inner extent k in order, and what the order rests on."""
    us, traits = predict(m, n, k, sms, gpu)
    order, why = choice.order("gemm", gpu, NAMES, us, (m, n, k), traits, predict)
    found = (FAMILIES[NAMES[place]].config(m, n, k, sms) for place in order[:most])
    return [config for config in found if config], why
