"""What a kernel offers to a sweep, and to the panel: how its configurations are named, refused, built and measured."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from tilelab import build, device, results


class Space(ABC):
    """What a sweep needs to know of a kernel at one shape. It is sent to the workers as JSON: define it in a module.

    A frozen dataclass of what `wire.pack` takes, as a configuration is: its repr is part of what a row is of. `target`
    is what it is built for; `live` says whether configurations are timed here too, or only built.
    """

    target: str
    can_measure: bool

    @abstractmethod
    def label(self, config: Any) -> dict:
        """The row's first fields; `kernel` is a name that no other configuration of the space has."""

    @abstractmethod
    def source(self) -> str:
        """results.source_hash of what is measured: a row of other code is not taken for one of this."""

    @abstractmethod
    def job(self, config: Any) -> build.Job:
        """How to build it, exactly as it will be launched: the GPU's worker then finds it in the compiler's cache."""

    @abstractmethod
    def measure(self, config: Any) -> dict:
        """Check, then time, in a worker on the GPU: a row with `status`, `reason` and, when ok, `ms` and `ratio`."""

    def reject(self, config: Any) -> str:
        """Why it cannot run on the target, in a sentence; empty when it may."""
        return ""

    def predicted_ms(self, config: Any) -> float | None:
        """What a model expects; those expected to be fastest go first."""
        return None

    def warm_up(self) -> dict:
        """What a worker does once before the first configuration: imports, the library's first call."""
        return {}

    def measure_finalists(self, configs: Sequence) -> list[dict]:
        """Time several against each other, interleaved, in a worker: {`ms`, `ratio`, ...}, one each, in their order."""
        return []


class TargetSpace(Space):
    """A Space for the target `on`; None stands for the GPU here, where configurations are timed too, or without one for
    the H200's."""

    compile_for: str | None

    @property
    def can_measure(self) -> bool:
        return self.compile_for is None and device.current().has_tma

    @property
    def target(self) -> str:
        return self.compile_for or (device.current().target if self.can_measure else "sm_90a")


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Axes and roofs: a configuration stands at `reach(config)`, its speed is the row's `speed` ("tflops") in `unit`.

    `flat` roofs are {label: speed in `unit`}, `slopes` {label: `unit` per unit of reach}.
    """

    reach_label: str
    speed: str
    unit: str
    reach: Callable[[Any], float]
    flat: dict[str, float] = dataclasses.field(default_factory=dict)
    slopes: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TunableKernel:
    """What a kernel offers to the panel: named shapes, presets and axes, and the Space of a choice.

    `presets` give the configurations of a preset for a dtype; `axes` what tells them apart (the first two are shown
    first); `space(shape, dtype, target)` takes target None for the GPU here, ValueError says what it cannot take;
    `recorded()` is a results.Record of earlier rows of any shape, `roofline(dtype)` the picture's axes.
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: tuple[str, ...]
    presets: dict[str, Callable[[str], list]]
    axes: dict[str, Callable[[Any], str]]
    space: Callable[[tuple[int, ...], str, str | None], Space]
    recorded: Callable[[], results.Record]
    roofline: Callable[[str], Roofline]
    peer: str = "cuBLAS"
