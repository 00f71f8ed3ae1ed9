"""How the WGMMA GEMM gets a configuration for a shape: families of tiles, and a model of their time.

tilelab.runtime.choice corrects the model by the times that were measured at other shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ch10.wgmma_gemm.configs import BOX_K, SMEM_BYTES, WgmmaConfig, count_usable_sms, fits, rejection
from tilelab.runtime import choice

MOST_STAGES = 16
USUAL_STAGES = 4  # more stages are not worth a C that is stored in more parts


class Family(NamedTuple):
    """A configuration but for the width of the tile and the number of stages.

    Without `block_n`, operands are swapped, and the rows of C, which are tokens in a language model, are cut into as
    few equal tiles as possible, or `more` tiles than that. A tile is as wide as its tokens, rounded up to 8.
    """

    kernel: str
    block_m: int
    block_n: int = 0
    more: int = 0
    cluster: int = 1
    cluster_n: int = 1
    boxes: int = 1
    swap: bool = True
    group_m: int = 8

    @property
    def name(self) -> str:
        """The family in a table: "split 64×tokens+0, cluster 4×1, 2 boxes"."""
        width = self.block_n or f"tokens+{self.more}"
        text = f"{self.kernel} {self.block_m}×{width}, cluster {self.cluster}×{self.cluster_n}"
        text += f", {self.boxes} boxes" * (self.boxes > 1) + f", groups of {self.group_m}" * (
            self.group_m != 8
        )
        return text + ", swapped" * (self.swap and self.block_n > 0)

    def config(self, m: int, n: int, k: int) -> WgmmaConfig | None:
        """Return the family's configuration for C (m, n) with inner extent k, or None if it has none there."""
        columns, rows = (m, n) if self.swap else (n, m)  # of the product that the kernel computes
        width = self.block_n
        if not width:
            tiles = math.ceil(columns / 256) + self.more
            if tiles > 11 or self.more and columns <= 8 * self.more:
                return None
            width = math.ceil(columns / tiles / 8) * 8
        elif width >= 2 * max(columns, 16):
            return None
        split = self.kernel == "split"
        below = 1 if split else self.cluster
        if math.ceil(rows / self.block_m) < below or self.cluster_n > math.ceil(columns / width):
            return None
        config = _fill(self._replace(block_n=width, more=0))
        return config if config and fits(config, k) else None


@functools.lru_cache(maxsize=4096)
def _fill(family: Family) -> WgmmaConfig | None:
    """Return the configuration of a family with a width: with at least four stages, or else with the most that fit."""
    split, best = family.kernel == "split", None
    consumers = {64: 1, 128: 2, 192: 3, 256: 2}[family.block_m]
    for parts in (1,) if split else range(1, 13):
        unit = 8 if family.swap else 32 if parts > 1 else 16
        if family.block_n % (unit * parts):
            continue
        two = WgmmaConfig(
            *(family.kernel, family.block_m, family.block_n, 2, consumers, family.cluster, family.cluster_n),
            persistent=not split,
            epilogue_subtile=parts,
            group_m=family.group_m,
            swap=family.swap,
            pdl=True,
            boxes_per_stage=family.boxes,
        )
        free = SMEM_BYTES - (0 if split else two.smem_bytes - 2 * two.stage_bytes)
        stages = min(MOST_STAGES // family.boxes, free // (two.stage_bytes + 16))
        key = min(stages, USUAL_STAGES), two.box, -parts
        if not rejection(two) and stages > 1 and (best is None or key > best[0]):
            best = key, dataclasses.replace(two, num_stages=stages)
    return best[1] if best else None


def _families() -> tuple[Family, ...]:
    """Return the families: those that were best or nearly so at one of 2,500 measured shapes, and their neighbours."""
    either = (1, 1), (2, 1), (1, 2)
    found = []
    for rows, more, (cluster, cluster_n) in itertools.product((64, 128, 192), (0, 1, 2), either):
        found.append(Family("specialised", rows, 0, more, cluster, cluster_n))
    found += [
        Family("specialised", *each) for each in ((64, 0, 0, 4), (64, 0, 1, 4), (64, 0, 2, 4), (128, 0, 0, 4))
    ]
    found += [Family("specialised", rows, 0, 3) for rows in (64, 128)] + [
        Family("specialised", 128, 0, 1, 2, 2)
    ]
    found += [Family("specialised", rows, 0, 0, cluster, boxes=2) for rows in (64, 128) for cluster in (1, 4)]
    found += [Family("specialised", 64, 0, 1, 1, 2, boxes=2), Family("specialised", 192, 0, 1, 2, 2)]
    found += [Family("specialised", 64, 0, more, boxes=2) for more in (1, 2)]
    # Many tokens: tiles of a fixed width.
    found += [
        Family("specialised", rows, columns, cluster_n=beside)
        for rows, widths in ((128, (176, 208, 256)), (192, (160, 176)), (256, (160, 176, 192)))
        for columns in widths
        for beside in (1, 2)
    ]
    found.append(Family("specialised", 192, 192))
    plain = functools.partial(Family, "specialised", swap=False)
    found += [plain(64, columns) for columns in (64, 96, 128, 192)] + [plain(64, 96, cluster_n=2)]
    found += [plain(128, columns) for columns in (80, 96, 128, 144, 160, 192, 208, 224, 256)]
    found += [plain(128, columns, cluster=2) for columns in (160, 192, 256)] + [
        plain(192, 160),
        plain(256, 192),
    ]
    found += [plain(128, columns, group_m=16) for columns in (128, 224, 256)]
    found += [Family("split", 64, 0, 0, parts, boxes=boxes) for parts in (2, 3, 4, 6) for boxes in (1, 2)]
    found += [Family("split", 64, 0, more, 2, boxes=2) for more in (1, 2)] + [Family("split", 64, 0, 1, 3)]
    found += [Family("split", 128, 0, 0, parts) for parts in (2, 3, 4, 5)]
    found += [Family("split", 192, 0, 0, parts) for parts in (2, 3, 4, 5, 8)]
    found += [Family("split", 128, 0, 1, parts) for parts in (2, 3)]
    return tuple(dict.fromkeys(found))


FAMILIES = {family.name: family for family in _families()}


def candidates(m: int, n: int, k: int) -> dict[str, WgmmaConfig]:
    """Return the configuration of each family that has one for C (m, n) with inner extent k."""
    found = {name: family.config(m, n, k) for name, family in FAMILIES.items()}
    return {name: config for name, config in found.items() if config}


@dataclass(frozen=True)
class Rates:
    """Rates per microsecond and fixed costs in microseconds, fitted to 32,000 times of 632 shapes on H200s."""

    flops: float = 6.5e6  # of an SM, with random data, which lowers the clock
    bytes_in: float = 106e3  # from L2 into an SM, if the other SM of its pair (TPC) loads as well
    bytes_alone: float = 150e3  # if it does not
    lines: float = 0.15  # more time take loads of rows that start within lines of 128 bytes
    sectors: float = 0.4  # and again, if they start within sectors of 32 bytes
    multicast: float = 0.34  # of an operand's cost vanishes as more CTAs share its loads
    latency_us: float = 1.15  # from the issue of a load to its data
    dram_bytes: float = 4.27e6  # of all SMs together
    pair_bytes: float = 127e3  # from DRAM into a pair of SMs, when the other pairs are done
    launch_us: float = 1.5  # launch, first fill and last store, which overlap with nothing
    tile_us: float = 0.54  # end of a tile, beside the store
    start_us: float = 1.0  # start of a CTA that is not persistent
    cluster_us: float = 0.42  # start and end of a cluster
    split_us: float = 0.24  # adding sums through the cluster's shared memory
    split_traffic: float = 1.44  # and what a byte of them costs, in bytes from L2
    blend: float = 3.2  # how sharply the longer of two overlapping activities decides: the exponent of a norm


@functools.lru_cache
def rates_of(gpu: str) -> Rates:
    """Return the rates of a GPU by its name: an H200's, with the GPU's shares."""
    dram, flops = choice.find_shares(gpu)
    return Rates(dram_bytes=Rates.dram_bytes * dram, flops=Rates.flops * flops)


def count_resident_ctas(config: WgmmaConfig) -> int:
    """Return how many CTAs share an SM of sm_90a."""
    if config.persistent or config.kernel != "one_group":
        return 1
    registers = config.accumulators + 40
    return max(1, min(233472 // (config.smem_bytes + 1024), 65536 // (config.threads * registers)))


def _describe(config: WgmmaConfig, sms: int, rates: Rates) -> tuple[float, ...]:
    """Return what `_predict` knows of a configuration. Numbers of several configurations may come as arrays."""
    split = config.cluster if config.kernel == "split" else 1
    below = 1 if split > 1 else config.cluster
    resident = count_resident_ctas(config)
    products = 2 * config.block_m * config.block_n * config.block_k / rates.flops
    # With multicast, the other CTAs of the cluster load parts of A and B for this one.
    rows = config.block_m * (1 - rates.multicast * (1 - 1 / config.cluster_n))
    rows += config.block_n * (1 - rates.multicast * (1 - 1 / below))
    if config.num_stages == 1:
        waiting = (rates.latency_us + products) / resident
    else:
        waiting = rates.latency_us / (config.num_stages - 1) / resident
    store_us = config.block_m * config.block_n * 2 / rates.bytes_in
    ends = rates.tile_us + store_us
    if config.kernel == "specialised" and not config.persistent:
        ends += rates.start_us + rates.latency_us
    ends = 0 if resident > 1 else ends  # other CTAs of the SM multiply meanwhile
    fixed = rates.launch_us + rates.cluster_us * (config.cluster_size > 1)
    if split > 1:
        fixed += rates.split_us + split * 2 * store_us * rates.split_traffic
    tile = config.block_m * below, config.block_n * config.cluster_n
    return (
        *(tile[::-1] if config.swap else tile),
        config.cluster_size,
        count_usable_sms(config.cluster_size, sms) * resident,
        config.block_k * split,
        resident,
        max(products, waiting),
        rows * config.block_k * 2 / rates.bytes_in,
        rates.bytes_in / rates.bytes_alone if config.cluster_size == 1 else 1,
        ends,
        fixed,
    )


def _predict(numbers, m: int, n: int, k: int, sms: int, rates: Rates):
    """Return the predicted times in microseconds, and how often the tiles fill the GPU."""
    tile_m, tile_n, ctas, slots, depth, resident, busy, loads, alone, ends, fixed = numbers
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n) * ctas
    steps, pairs = np.ceil(k / depth) * resident, sms // 2
    traffic = ((m + n) * k + m * n) * 2 / rates.dram_bytes / tiles
    loads = loads * (1 + rates.lines * (k % BOX_K > 0) + rates.sectors * (k % 16 > 0))
    waves = np.floor(tiles / slots)
    rest = tiles - waves * slots
    # DRAM serves all pairs of SMs alike, and then those with a second tile.
    late, second = rest > pairs, pairs + rates.dram_bytes / rates.pair_bytes
    beside = np.where(late, np.maximum(rest, second), rest)
    step = np.maximum(busy, loads)
    last = np.where(late, step, np.maximum(busy, loads * alone))
    # Of the longer and the shorter of two activities, a norm decides; logarithms take less time than powers.
    norm = np.log(((steps * step, steps * last), (traffic * slots, traffic * beside + 1e-9)))
    full, last = np.exp(np.logaddexp(*(norm * rates.blend)) / rates.blend) + ends
    return fixed + waves * full + (rest > 0) * last, tiles / slots


def predict_us(config: WgmmaConfig, m: int, n: int, k: int, sms: int, rates: Rates = Rates()) -> float:
    """Return the predicted time in microseconds: of waves of tiles, each as long as its steps or as its part of DRAM.

    A step along K takes as long as the slowest of three things: its products, the loads of its operands from L2, and
    the latency of a load divided by the loads in flight. Between two tiles, a CTA stores; one that is not persistent
    also starts and fills its ring. The last wave may have fewer tiles, which then have more of DRAM and of L2.
    """
    return float(_predict(_describe(config, sms, rates), m, n, k, sms, rates)[0])


# Families of one group have tiles of the same width: fixed ones, and the tokens' by `more`.
GROUPS = {
    more: [f for f in FAMILIES.values() if (f.block_n == 0) * (f.more + 1) == more] for more in range(5)
}
NAMES = tuple(family.name for group in GROUPS.values() for family in group)


@functools.lru_cache(maxsize=1024)
def _describe_group(more: int, width: int, sms: int, gpu: str) -> np.ndarray:
    """Return a column for each family of a group: the least M, N and K, and what `_predict` knows."""
    columns, rates = [], rates_of(gpu)
    for family in GROUPS[more]:
        wide = family._replace(block_n=family.block_n or width, more=0)
        if not wide.block_n or not (config := _fill(wide)):
            columns.append([math.inf] * 3 + [1.0] * 11)
            continue
        split = config.cluster if config.kernel == "split" else 1
        narrow = 8 * family.more if more else config.block_n / 2 * (config.block_n >= 32)
        beside = max(config.block_n * (config.cluster_n - 1), narrow)
        below = config.block_m * (config.cluster // split - 1)
        least = (beside, below) if family.swap else (below, beside)
        numbers = _describe(config, sms, rates)
        columns.append([*least, config.block_k * (split - 1), *numbers])
    return np.array(columns).T


@functools.lru_cache(maxsize=256)
def _describe_families(m: int, sms: int, gpu: str) -> np.ndarray:
    """Return the columns of all groups, in the order of NAMES."""
    parts = [_describe_group(0, 0, sms, gpu)]
    for more in range(4):
        tiles = math.ceil(m / 256) + more
        parts.append(_describe_group(more + 1, math.ceil(m / tiles / 8) * 8 if tiles <= 11 else 0, sms, gpu))
    return np.concatenate(parts, 1)


def predict(m: int, n: int, k: int, sms: int, gpu: str) -> tuple[np.ndarray, np.ndarray]:
    """Return for all families (NAMES) the predicted times, infinite where one has no configuration, and the traits."""
    least_m, least_n, least_k, *numbers = _describe_families(m, sms, gpu)
    us, waves = _predict(numbers, m, n, k, sms, rates_of(gpu))
    us[(least_m >= m) | (least_n >= n) | (least_k >= k)] = math.inf
    return us, np.array((waves, choice.measure_padding(m, n, *numbers[:2])))


def correct(
    table: choice.Table, m: int, n: int, k: int, without: Callable[[choice.Shape], bool] | None = None
) -> dict[str, float]:
    """Return the corrected time of each family on the table's GPU; shapes for which `without` is true do not count."""
    us, traits = predict(m, n, k, choice.SMS, table.gpu)
    corrected, _ = table.correct(NAMES, us, (m, n, k), traits, predict, without)
    return {name: time for name, time in zip(NAMES, corrected.tolist()) if time < math.inf}


def rank(m: int, n: int, k: int, sms: int, gpu: str, most: int = len(NAMES)) -> tuple[list[WgmmaConfig], str]:
    """Return the `most` fastest candidates for C (m, n) with inner extent k in order, and what the order rests on."""
    us, traits = predict(m, n, k, sms, gpu)
    order, why = choice.order("wgmma_gemm", gpu, NAMES, us, (m, n, k), traits, predict)
    found = (FAMILIES[NAMES[place]].config(m, n, k) for place in order[:most])
    return [config for config in found if config], why
