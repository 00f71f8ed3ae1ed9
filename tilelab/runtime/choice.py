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

from tilelab.runtime import device, files, tuned

NEAREST = 8  # shapes that correct a prediction
AXES = (2.0, 2.0, 1.0)  # how much an octave counts in M, N and K
REACH = 0.8  # octaves, after which a shape's error counts 0.6 of that of the shape itself
UNKNOWN = 0.05, 0.1  # weight and size of the error that a family is given in advance

Shape = tuple[int, int, int]


class Table:
    """The errors of a kernel's model at the measured shapes of a GPU."""

    def __init__(
        self, gpu: str, families: Sequence[str], shapes: Sequence[Shape], errors: Sequence[Sequence]
    ):
        self.gpu, self.shapes = gpu, [tuple(shape) for shape in shapes]
        self.places = {family: place for place, family in enumerate(families)}
        self.errors = [[None if each is None else each / 1000 for each in row] for row in errors]
        self._logs = [tuple(map(math.log2, shape)) for shape in self.shapes]

    def nearest(
        self, m: int, n: int, k: int, without: Callable[[Shape], bool] | None = None
    ) -> list[tuple[float, int]]:
        """Return (weight, place) of the nearest shapes; those for which `without` is true do not count."""
        at = math.log2(m), math.log2(n), math.log2(k)
        found = sorted(
            (sum(axis * (a - b) ** 2 for axis, a, b in zip(AXES, at, logs)), place)
            for place, logs in enumerate(self._logs)
            if without is None or not without(self.shapes[place])
        )[:NEAREST]
        if found and found[0][0] == 0:
            found = found[:1]  # the shape itself was measured
        return [(math.exp(-distance / (2 * REACH**2)), place) for distance, place in found]

    def correct(self, predicted: Mapping[str, float], near: Sequence[tuple[float, int]]) -> dict[str, float]:
        """Return the corrected times of families, from their predicted ones and `nearest` shapes."""
        errors = [(weight, self.errors[place]) for weight, place in near]
        known = [
            (weight, row[place])
            for weight, row in errors
            for place in self.places.values()
            if row[place] is not None
        ]
        total = sum(weight for weight, _ in known)
        usual = sum(weight * error for weight, error in known) / total if total > 1e-9 else 0.0
        advance, more = UNKNOWN
        found = {}
        for family, us in predicted.items():
            weights, sums = advance, advance * (usual + more)
            if (place := self.places.get(family)) is not None:
                for weight, row in errors:
                    if (error := row[place]) is not None:
                        weights, sums = weights + weight, sums + weight * error
            found[family] = us * math.exp(sums / weights)
        return found


def path(kernel: str, gpu: str) -> pathlib.Path:
    """Return the file of the errors of `kernel`'s model on a GPU, by the name that its driver gives it."""
    return tuned.folder() / device.Device(gpu).slug / f"{kernel}_families.json"


@functools.lru_cache(maxsize=16)
def load(kernel: str, gpu: str) -> Table | None:
    """Return the table of a GPU, or None where there is none or it is damaged."""
    try:
        found = json.loads(path(kernel, gpu).read_text())
        return Table(gpu, found["families"], found["shapes"], found["errors"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def rank(
    kernel: str, gpu: str, predicted: Mapping[str, float], m: int, n: int, k: int
) -> tuple[list[str], str]:
    """Return the families that `predicted` has times of, the fastest first, and in words what the order rests on.

    Without a table of this GPU, the one of an H200 serves: the model knows the rates of the GPU here, and how it errs
    depends on the kernel more than on the GPU.
    """
    table = load(kernel, gpu) or load(kernel, "NVIDIA H200")
    if table is None:
        return sorted(predicted, key=predicted.__getitem__), "by the model"
    near = table.nearest(m, n, k)
    corrected = table.correct(predicted, near)
    where = "" if table.gpu == gpu else f" on an {table.gpu}"
    nearest = " × ".join(map(str, table.shapes[near[0][1]])) if near else ""
    return sorted(corrected, key=corrected.__getitem__), f"by the model and its errors near {nearest}{where}"


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
