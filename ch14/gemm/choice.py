"""How the Triton GEMM gets a configuration for a shape: families of tiles, one of which suits each shape.

`configs.predict_us` expects a time of each family's configuration. tilelab.runtime.choice corrects it by the times that
were measured at other shapes.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ch14.gemm.configs import GemmConfig, predict_us, rejection
from tilelab.runtime import choice

MOST_STAGES = {64: 16, 128: 10, 256: 6}  # by the steps along K: more are in flight than the latency needs
USUAL_STAGES = {64: 5, 128: 4, 256: 3}  # more stages are not worth a C that is stored in more parts
ROUND_WIDTHS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320)


class Family(NamedTuple):
    """A configuration but for what follows from the shape.

    Without `block_n`, operands are swapped, and the rows of C, which are tokens in a language model, are cut into as
    few equal tiles as possible, or `more` tiles than that. A tile is as wide as its tokens, rounded up to 16, or with
    `round` to one of ROUND_WIDTHS, which need fewer products of 16 columns. Without `block_n` and `swap`, a tile is as
    wide as one wave of tiles wants, or `more` waves than that. With `waves`, programs split the steps of
    each tile so that all programs make up at most so many waves. `registers` is a_in_registers, and `early` is pdl.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    programs_per_sm: int = 1
    swap: bool = False
    more: int = 0
    round: bool = False
    waves: int = 0
    group_m: int = 8
    registers: bool = False
    early: bool = True

    @property
    def name(self) -> str:
        """The family in a table: "64×tokens/1×64, 4 warps, swapped"."""
        width = (
            self.block_n
            or ("tokens" if self.swap else "wave")
            + f"/+{self.more}" * (self.more > 0)
            + " rounded" * self.round
        )
        parts = {
            f"{self.block_m}×{width}×{self.block_k}": True,
            f"{self.num_warps} warps": True,
            f"{self.programs_per_sm} per SM": self.programs_per_sm > 1,
            "swapped": self.swap,
            "registers": self.registers,
            f"split to {self.waves}": self.waves,
            "late": not self.early,
            f"groups of {self.group_m}": self.group_m != 8,
        }
        return ", ".join(part for part, is_said in parts.items() if is_said)

    def config(self, m: int, n: int, k: int, sms: int) -> GemmConfig | None:
        """Return the family's configuration for C (m, n) with inner extent k, or None if it has none there."""
        rows, columns = (n, m) if self.swap else (m, n)  # of the product that the kernel computes
        width = self.block_n
        if not width and not self.swap:
            tiles = (self.more + 1) * sms // math.ceil(rows / self.block_m)
            width = _widen(math.ceil(columns / tiles), self.round) if tiles else 512
            if not 32 <= width <= 320 or self.block_m >= 2 * max(rows, 16):
                return None
        elif not width:
            tiles = self.more + (math.ceil(columns / 256) if columns > 320 else 1)
            width = _widen(math.ceil(columns / tiles), self.round)
            if width > 320 or self.more and width < 48:
                return None
        elif (
            self.swap
            and width >= 2 * max(columns, 16)
            or self.block_m >= 2 * max(rows, 32 if self.swap else 16)
        ):
            return None
        if self.registers and width.bit_count() == 1 or self.block_m < 64 and m > self.block_m:
            return None
        splits = 1
        if self.waves:
            tiles = math.ceil(rows / self.block_m) * math.ceil(columns / width)
            splits = min(self.waves * sms // tiles, k // (3 * self.block_k), 16)
            if splits < 2:
                return None
        return _fill(self._replace(block_n=width, more=0, round=False, waves=0), splits)


def _widen(width: int, is_round: bool) -> int:
    """Return the least width of a tile for so many columns."""
    if is_round:
        return next((each for each in ROUND_WIDTHS if each >= width), 512)
    width = max(math.ceil(width / 16), 1) * 16
    while width.bit_count() > 3:
        width += 16
    return width


@functools.lru_cache(maxsize=4096)
def _fill(family: Family, splits: int) -> GemmConfig | None:
    """Return the configuration of a family with a width: with the usual stages, or else with the most that fit."""
    best = None
    for parts in (1, 2, 4):
        for stages in range(MOST_STAGES[family.block_k], 1, -1):
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
                    a_in_registers=family.registers,
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
    """Return the families that were best or nearly so at one of the measured shapes."""
    # Few tokens: (rows of the tile, step of K, warps, programs per SM), and (more, waves) of each.
    thin = {
        (64, 64, 4, 1): ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1)),
        (64, 128, 4, 1): ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1)),
        (64, 64, 4, 2): ((0, 1), (1, 1)),
        (64, 128, 4, 2): ((0, 0), (0, 1)),
        (128, 64, 4, 1): ((0, 0), (1, 0), (0, 1)),
        (128, 64, 4, 2): ((0, 0), (0, 1)),
        (128, 64, 8, 1): ((0, 0), (1, 0), (0, 1), (1, 1)),
        (128, 64, 8, 2): ((0, 0),),
    }
    found = [
        Family(rows, 0, k, warps, programs, True, more, waves=waves, registers=registers)
        for (rows, k, warps, programs), ways in thin.items()
        for more, waves in ways
        for registers in (False, True)[: programs % 2 + 1]
    ]
    found += [
        Family(rows, 0, 64, 8, 1, True, more, True, waves)
        for rows in (128, 256)
        for more, waves in ((0, 0), (1, 0), (0, 1))
    ]
    found += [
        Family(rows, 0, k, warps, more=more, registers=registers)
        for rows, k, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8))
        for more in (0, 1)
        for registers in (False, True)
    ]
    # Many tokens: tiles of a fixed width.
    found += [
        Family(128, 256, 64, 8, group_m=group_m, early=early)
        for group_m in (8, 16)
        for early in (True, False)
    ]
    found += [Family(128, 256, 64, 8, 1, True, group_m=group_m) for group_m in (4, 16)]
    found += [Family(128, 128, 64, 4, 1, True, group_m=group_m) for group_m in (4, 16)]
    found += [
        Family(128, 128, 64, 4, 1, group_m=16),
        Family(128, 128, 64, 4, 2),
        Family(128, 128, 64, 4, 2, group_m=16),
    ]
    found += [Family(128, 192, 64, 4, group_m=group_m) for group_m in (8, 16)]
    found += [Family(256, 128, 64, 8, group_m=4), Family(256, 128, 64, 8, 1, True, group_m=4)]
    found += [Family(128, 160, 64, 4), Family(128, 160, 64, 8, registers=True), Family(64, 128, 64, 4, 2)]
    found += [Family(64, columns, 64, 4) for columns in (160, 256, 320)]
    found += [Family(64, columns, 64, 4, registers=True) for columns in (160, 192, 320)]
    found += [Family(64, columns, 128, 4) for columns in (64, 80, 96, 128)] + [
        Family(64, 96, 128, 4, registers=True)
    ]
    found += [
        Family(64, 64, 128, 4, waves=1),
        Family(64, 128, 128, 4, waves=1),
        Family(128, 256, 64, 8, waves=1),
    ]
    found += [Family(16, columns, 256, 4) for columns in (64, 128)]
    return tuple(dict.fromkeys(found))


FAMILIES = {family.name: family for family in _families()}


def candidates(m: int, n: int, k: int, sms: int) -> dict[str, GemmConfig]:
    """Return the configuration of each family that has one for C (m, n) with inner extent k."""
    found = {name: family.config(m, n, k, sms) for name, family in FAMILIES.items()}
    return {name: config for name, config in found.items() if config}


def rank(m: int, n: int, k: int, sms: int, gpu: str) -> tuple[list[GemmConfig], str]:
    """Return the candidates for C (m, n) with inner extent k, the fastest first, and what the order rests on."""
    configs = candidates(m, n, k, sms)
    predicted = {name: predict_us(config, m, n, k, "bf16", sms) for name, config in configs.items()}
    names, why = choice.rank("gemm", gpu, predicted, m, n, k)
    return [configs[name] for name in names], why
