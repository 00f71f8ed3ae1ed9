"""Choose a configuration for a shape that was never measured, from the times of others.

A *family* is a configuration but for what follows from the shape, such as a tile as wide as the tokens. A model
predicts the time of each family's configuration. It errs, and it errs alike at shapes that are alike. So its error at
the nearest measured shapes corrects the prediction.

The file tuned/<gpu>/<kernel>_families.json keeps these errors: for each measured shape and each family
1000 ln(measured / predicted), or null where the family has no configuration. `keep` writes it.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tilelab.runtime import device, files, tuned

NEAREST = 24  # shapes that correct a prediction
REACH = 0.6  # a shape at this distance counts 0.6 of a shape at no distance
# The square of the distance counts an octave of M, N and K by AXES. TRAITS count an octave of the number of waves, an
# octave of what the last wave leaves idle, an octave of padding, and one more part of a tile. UNALIGNED counts rows
# that start within lines of 128 bytes at one of two shapes only, and again rows that start within sectors of 32 bytes.
AXES, TRAITS, UNALIGNED = (4.0, 4.0, 1.0), (2.0, 4.0, 10.0, 2.0), 1.5
UNKNOWN = 0.05, 0.1  # weight and size of the error that a family is given in advance

Shape = tuple[int, int, int]
Predict = Callable[[int, int, int, int, str], tuple[np.ndarray, np.ndarray]]
H200, SMS = "NVIDIA H200", 132  # the GPUs of the tables have 132
# Shares of an H200's rates that DRAM and the tensor cores of an SM reach on GPUs without a table. The H100's are from
# the records of both ceilings, the H20's from data sheets. `python -m tilelab.sweeps.measure --rates` prints a line.
SHARES = {"NVIDIA H100 80GB HBM3": (0.72, 0.99), "NVIDIA H20": (0.83, 0.25)}


def find_shares(gpu: str) -> tuple[float, float]:
    """Return the shares of an H200's rates that a GPU reaches: in SHARES, or of the memory by the data sheet, or 1."""
    known, h200 = device.known_gpu(gpu), device.known_gpu(H200)
    by_sheet = known.peak_gbps / h200.peak_gbps if known and known.target == "sm_90a" else 1.0
    return SHARES.get(gpu, (by_sheet, 1.0))


class Table:
    """The errors of a kernel's model at the measured shapes of a GPU."""

    def __init__(
        self, gpu: str, families: Sequence[str], shapes: Sequence[Shape], errors: Sequence[Sequence]
    ):
        order = sorted(range(len(shapes)), key=lambda row: tuple(shapes[row]))
        self.gpu, self.shapes = gpu, [(m, n, k) for m, n, k in (shapes[row] for row in order)]
        self.places = {family: place for place, family in enumerate(families)}
        self._errors = np.array(errors, np.float32).reshape(len(shapes), len(families))[order] / 1000
        self._at = np.array([_locate(*shape) for shape in self.shapes], np.float32)
        self._rows = {shape: row for row, shape in enumerate(self.shapes)}
        self._aligned: dict[tuple[str, ...], np.ndarray] = {}

    @functools.cached_property
    def errors(self) -> list[list[float | None]]:
        """For each shape and family ln(measured / predicted), or None."""
        return [[None if each != each else round(each, 3) for each in row] for row in self._errors.tolist()]

    def _align(self, names: tuple[str, ...], predict: Predict | None) -> np.ndarray:
        """Return for each shape and family of `names`: the error, whether it is known, and `_place_traits`."""
        if names not in self._aligned:
            errors = np.full((len(self.shapes), len(self.places) + 1), np.nan, np.float32)
            errors[:, :-1] = self._errors
            errors = errors[:, [self.places.get(name, -1) for name in names]]
            rows = np.nan_to_num(errors), (~np.isnan(errors)).astype(np.float32)
            if predict:
                m, n, k = np.array(self.shapes)[:, :, None].swapaxes(0, 1)
                found = {}
                for tokens in set(m[:, 0].tolist()):
                    at = np.flatnonzero(m[:, 0] == tokens)
                    found |= zip(at.tolist(), predict(tokens, n[at], k[at], SMS, self.gpu)[1].swapaxes(0, 1))
                rows = *rows, *_place_traits(np.stack([found[row] for row in range(len(m))], 1))
            self._aligned[names] = np.stack(rows, 1)
        return self._aligned[names]

    def correct(
        self,
        names: tuple[str, ...],
        us: np.ndarray,
        shape: Shape,
        traits: np.ndarray | None = None,
        predict: Predict | None = None,
        without: Callable[[Shape], bool] | None = None,
    ) -> tuple[np.ndarray, int]:
        """Return the corrected times of families from their predicted ones, and the row of the nearest shape.

        traits: what makes two shapes alike for a family, beside their extents. The rows are how often its tiles fill
        the GPU and, where known, `measure_padding` and the parts of a tile. predict: a function of (m, n, k, sms, gpu)
        that returns (times, traits) and takes columns of n and k. Shapes for which `without` is true do not count. A
        measured shape counts alone.
        """
        learned = self._align(names, predict if traits is not None else None)
        if without is None and shape in self._rows:
            rows, distances = np.array([self._rows[shape]]), np.zeros(1, np.float32)
        else:
            here = np.array(_locate(*shape), np.float32)
            first, last = self._at[:, 0].searchsorted((here[0] - OCTAVE, here[0] + OCTAVE))
            if without or last - first < 4 * NEAREST:
                first, last = 0, len(self.shapes)
            apart = self._at[first:last] - here
            distances = (apart * apart) @ _ONES
            if without:
                distances[[row for row, each in enumerate(self.shapes) if without(each)]] = np.inf
            rows = distances.argpartition(min(NEAREST, len(distances) - 1))[:NEAREST]
            distances, rows = distances[rows], rows + first
        near = learned.take(rows, 0)
        weights = distances[:, None]
        if traits is not None:
            apart = near[:, 2:] - _place_traits(traits)
            apart *= apart
            weights = apart.sum(1) + weights
        weights = np.exp(-weights) * near[:, 1]
        total, sums = weights.sum(0), (weights * near[:, 0]).sum(0)
        advance, more = UNKNOWN
        more = advance * (float(sums.sum()) / max(float(total.sum()), 1e-9) + more)
        return us * np.exp((more + sums) / (advance + total)), int(rows[distances.argmin()])


_ONES = np.ones(4, np.float32)
_SCALES = tuple(math.sqrt(axis / 2) / REACH for axis in (*AXES, UNALIGNED))
OCTAVE = _SCALES[0]  # of M, beyond which nothing counts
_TRAIT_SCALES = np.sqrt(np.array(TRAITS, np.float32) / 2) / REACH


def _locate(m: int, n: int, k: int) -> tuple[float, ...]:
    """Return where a shape lies: two shapes count for each other exp(-d²), and d is how far apart they lie."""
    place = math.log2(m), math.log2(n), math.log2(k), (k % 64 > 0) + (k % 16 > 0)
    return tuple(scale * at for scale, at in zip(_SCALES, place))


def measure_padding(m: int, n: int, tile_m: np.ndarray, tile_n: np.ndarray) -> np.ndarray:
    """Return the octaves by which tiles are larger together than C."""
    return np.log2(np.ceil(m / tile_m) * tile_m * np.ceil(n / tile_n) * tile_n / (m * n))


def _place_traits(traits: np.ndarray) -> np.ndarray:
    """Return where families lie by their number of waves, what the last one leaves idle, and their other traits."""
    waves, *others = traits
    found = np.array((np.log2(np.minimum(waves, 8)), np.log2(np.ceil(waves) / waves), *others), np.float32)
    return found * _TRAIT_SCALES[: len(found)].reshape(-1, *[1] * waves.ndim)


def path(kernel: str, gpu: str) -> pathlib.Path:
    """Return the file of the errors of `kernel`'s model on a GPU, by the name that its driver gives it."""
    return tuned.folder() / device.Device(gpu).slug / f"{kernel}_families.json"


@functools.lru_cache(maxsize=16)
def load(kernel: str, gpu: str) -> Table | None:
    """Return the table of a GPU, or None where there is none, or it is damaged or empty."""
    try:
        found = json.loads(path(kernel, gpu).read_text())
        return Table(gpu, found["families"], found["shapes"], found["errors"]) if found["shapes"] else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _find(kernel: str, gpu: str) -> Table | None:
    return load(kernel, gpu) or load(kernel, H200)


def order(
    kernel: str,
    gpu: str,
    names: tuple[str, ...],
    us: np.ndarray,
    shape: Shape,
    traits: np.ndarray | None = None,
    predict: Predict | None = None,
) -> tuple[list[int], str]:
    """Return the places of families, the fastest first, and in words what the order rests on.

    us: the predicted times of the families `names`; `traits` and `predict` are described at `Table.correct`. Without a
    table of this GPU, the one of an H200 serves: the model knows the rates of the GPU here, and how it errs depends on
    the kernel more than on the GPU.
    """
    table = _find(kernel, gpu)
    if table is None:
        return us.argsort().tolist(), "by the model"
    corrected, row = table.correct(names, us, shape, traits, predict)
    where = "" if table.gpu == gpu else f" on an {table.gpu}"
    nearest = " × ".join(map(str, table.shapes[row]))
    return corrected.argsort().tolist(), f"by the model and its errors near {nearest}{where}"


def rank(
    kernel: str,
    gpu: str,
    predicted: Mapping[str, float],
    m: int,
    n: int,
    k: int,
    find_traits: Callable[[int, int, int], Mapping[str, tuple[float, ...]]] | None = None,
) -> tuple[list[str], str]:
    """Return the families of {family: predicted µs}, the fastest first, and what `order` says of it.

    find_traits: a function of a shape that returns for each family the first two traits of `Table.correct`.
    """
    table, traits, predict = _find(kernel, gpu), None, None
    names = tuple(dict.fromkeys((*(table.places if table else ()), *predicted)))
    us = np.array([predicted.get(name, math.inf) for name in names])
    if find_traits:

        def list_traits(*shape: int) -> list[tuple[float, ...]]:
            found = find_traits(*shape)
            return [found.get(name, (1.0, 0.0)) for name in names]

        def predict(m, n, k, *_):
            pairs = zip(n.ravel().tolist(), k.ravel().tolist())
            return us, np.moveaxis(np.array([list_traits(m, *pair) for pair in pairs]), 2, 0)

        traits = np.array(list_traits(m, n, k)).T
    places, why = order(kernel, gpu, names, us, (m, n, k), traits, predict)
    return [names[place] for place in places if names[place] in predicted], why


def keep(
    kernel: str, gpu: str, measured: Sequence[tuple[Shape, Mapping[str, float]]], predict: Callable
) -> None:
    """Write the table of a GPU from measured times.

    measured: (shape, {family: µs}) of each shape; a time of more than twice the prediction is a disturbed measurement
    and is left out. predict: a function of a shape that returns {family: predicted µs}.
    """
    families = sorted({family for _, times in measured for family in times})
    rows = []
    for shape, times in sorted(measured):
        expected = predict(*shape)
        errors = [
            round(1000 * math.log(times[family] / expected[family]))
            if family in times and family in expected and times[family] < 2 * expected[family]
            else None
            for family in families
        ]
        rows.append((shape, errors))
    text = json.dumps({"kernel": kernel, "gpu": gpu, "families": families})[:-1]
    shapes = ",\n".join(json.dumps(shape) for shape, _ in rows)
    errors = ",\n".join(json.dumps(each).replace(" ", "") for _, each in rows)
    files.write_atomically(path(kernel, gpu), f'{text}, "shapes": [\n{shapes}],\n"errors": [\n{errors}]}}\n')
    load.cache_clear()
