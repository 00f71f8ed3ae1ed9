"""Describe a kernel to the sweep engine and to the panel: its configurations, how they are built and measured."""

from __future__ import annotations

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilelab.records import results
from tilelab.runtime import build, device

if TYPE_CHECKING:
    from tilelab.sweeps.tune import Tunable


class Space(ABC):
    """A kernel at one shape, as a sweep needs to know it.

    Make it a frozen dataclass in a module: worker processes unpickle it, and its repr is part of a row's key. `target`
    is the target to compile for. `can_measure` says whether this machine measures configurations or only builds them.
    """

    target: str
    can_measure: bool

    @abstractmethod
    def label(self, config: Any) -> dict:
        """Return the first fields of the row. `kernel` is a name that no other configuration of the space has."""

    @abstractmethod
    def source(self) -> str:
        """Return the provenance.source_hash of what is measured. Rows of other code are not resumed."""

    @abstractmethod
    def job(self, config: Any) -> build.Job:
        """Return how to build it, exactly as it is launched, so that the launch finds it in the compiler's cache."""

    @abstractmethod
    def measure(self, config: Any) -> dict:
        """Check the result, then time it, on the GPU: return `status`, `reason` and, when ok, `ms` and `ratio`."""

    def reject(self, config: Any) -> str:
        """Return a sentence that says why it cannot run on the target, or "" when it may."""
        return ""

    def predicted_ms(self, config: Any) -> float | None:
        """Return the time that a model expects. The sweep starts with those expected to be fastest."""
        return None

    def warm_up(self) -> dict:
        """Do what a worker needs once before the first configuration: imports, the first call of a library."""
        return {}

    def measure_finalists(self, configs: Sequence) -> list[dict]:
        """Time several configurations interleaved: return {`ms`, `ratio`, ...} for each, in their order."""
        return []


class TargetSpace(Space):
    """A Space for the target `compile_for`; None stands for the GPU here, which then measures, or else for sm_90a."""

    compile_for: str | None

    @property
    def can_measure(self) -> bool:
        return self.compile_for is None and device.current().has_tma

    @property
    def target(self) -> str:
        return self.compile_for or (device.current().target if self.can_measure else "sm_90a")


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The axes and roofs of a roofline plot, both axes logarithmic.

    A configuration stands at `intensity(config)` on the x axis: operations per byte for a GEMM, bytes in flight or per
    tile for a copy. Its speed is the row's field `speed_field` ("tflops") in `unit`. `flat_roofs` are {label: speed},
    `bandwidth_roofs` {label: speed per unit of intensity}.
    """

    intensity_label: str
    speed_field: str
    unit: str
    intensity: Callable[[Any], float]
    flat_roofs: dict[str, float] = dataclasses.field(default_factory=dict)
    bandwidth_roofs: dict[str, float] = dataclasses.field(default_factory=dict)


def load_ceiling(name: str, field: str) -> tuple[float, dict]:
    """Return (the recorded speed of "copy" or "cuBLAS bf16" in "gbps" or "tflops", the GPU). ValueError without one."""
    record = results.load("ceilings")
    speed = next((row.get(field) for row in record["rows"] if row.get("name") == name), None)
    if not isinstance(speed, (int, float)) or not 0 < speed < math.inf:
        raise ValueError(
            f"the record of the ceilings has no {field} of {name}: make it again with make record."
        )
    return speed, record["device"]


@dataclasses.dataclass(frozen=True)
class TunableKernel:
    """A kernel as the panel offers it: named shapes, presets, axes, and the Space of a choice.

    `presets` map a name to a function from dtype to configurations. `axes` map a name to a function from configuration
    to tick label; the panel starts with the first two. `space(shape, dtype, target)` raises ValueError for what it
    cannot take; target None is the GPU here. `load_record()` returns recorded rows of any shape, `roofline(dtype)` the
    axes of the plot; the panel calls it for each drawing. `peer` names what speeds are compared with. `tuner` is the
    kernel as the tuner knows it, where there is a table of tuned shapes; the panel's Keep writes to this table.
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: tuple[str, ...]
    presets: dict[str, Callable[[str], list]]
    axes: dict[str, Callable[[Any], str]]
    space: Callable[[tuple[int, ...], str, str | None], Space]
    load_record: Callable[[], results.Record]
    roofline: Callable[[str], Roofline]
    peer: str = "cuBLAS"
    tuner: Tunable | None = None

    def parse_shape(self, text: str) -> tuple[int, ...]:
        """Return the sizes of a shape that has a name or is written as "4096,4096,4096"; else ValueError."""
        if text in self.shapes:
            return self.shapes[text]
        sizes = re.split(r"\s*[,;x×]\s*|\s+", text.strip())
        if not all(re.fullmatch(r"[0-9]{1,18}", size) for size in sizes):
            example = ",".join(map(str, next(iter(self.shapes.values()))))
            raise ValueError(
                f"a shape is a name of the menu or whole numbers such as {example}; it is {text[:60]!r}."
            )
        return tuple(map(int, sizes))
