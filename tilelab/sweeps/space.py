"""Describe a kernel to the sweep engine, to the tuner and to the panel, in one class."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tilelab.records import results
from tilelab.runtime import build, device
from tilelab.sweeps import launched


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


def make_copy_roofline(intensity_label: str, intensity: Callable[[Any], float]) -> Roofline:
    """Return the axes of a kernel that only moves data, under the recorded speed of torch's copy."""
    roof = {"torch's copy": load_ceiling("copy", "gbps")[0]}
    return Roofline(intensity_label, "gbps", "GB/s", intensity, roof)


def _require_built(measure: Callable[[Any, Any], dict]) -> Callable[[Any, Any], dict]:
    """Return `measure` such that a row fails where it launched another binary than the space's `job` builds."""

    @functools.wraps(measure)
    def measure_built(space: Any, config: Any) -> dict:
        with launched.watch_launches() as launches:
            row = measure(space, config)
        if isinstance(row, dict) and row.get("status") == "ok":
            if reason := launched.find_difference(space.job(config), launches):
                return {"status": "failed", "reason": reason}
        return row

    return measure_built


@dataclasses.dataclass(frozen=True)
class Space(ABC):
    """A kernel at one shape: its configurations, and how each is named, rejected, predicted, built and measured.

    A subclass is a frozen dataclass in a module: worker processes unpickle its objects, and the repr of an object is
    part of a row's key. The class itself is the kernel at any shape; its class variables say what the panel offers and
    which table keeps the tuner's results. `compile_for` is the target to compile for. None stands for the GPU here,
    which then measures, or else for sm_90a. Raises ValueError for a shape that the kernel cannot take.
    """

    # For the panel: the name of the kernel, named shapes, dtypes, presets (a function from dtype to configurations) and
    # axes (a function from configuration to tick label; the panel starts with the first two).
    title: ClassVar[str] = ""
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)
    presets: ClassVar[dict[str, Callable[[str], Sequence]]] = {}
    axes: ClassVar[dict[str, Callable[[Any], str]]] = {}
    # What a word of a name means here, where it is another thing than tilelab.views.panel.words says.
    words: ClassVar[dict[str, str]] = {}
    record: ClassVar[str] = ""  # the experiment whose rows are shown before a sweep
    peer: ClassVar[str] = "cuBLAS"  # what speeds are compared with
    needs: ClassVar[str] = "has_tma"  # the predicate of tilelab.runtime.device that the GPU must have
    # For the tuner, whose shapes are (M, N, K): the table of tuned shapes, or "" for none; its dtype; the numbers that
    # must divide N and K; and the share of the candidates that is tried. With 15 % this finds the fastest of all at
    # half of the shapes.
    table: ClassVar[str] = ""
    table_dtype: ClassVar[str] = "bf16"
    multiples: ClassVar[tuple[int, int]] = (8, 8)
    share: ClassVar[float] = 0.15

    shape: tuple[int, ...]
    dtype: str = "bf16"
    compile_for: str | None = None

    def __post_init__(self):
        self.check_shape()

    def __init_subclass__(cls, **options):
        """Let each way to measure fail that launches another binary than `job` builds."""
        super().__init_subclass__(**options)
        for name in ("measure", "measure_quickly"):
            if name in vars(cls):
                setattr(cls, name, _require_built(vars(cls)[name]))

    # ---- the shape and the target

    def check_shape(self) -> None:  # noqa: B027, most kernels override it
        """Raise ValueError, in one sentence, for a shape that the kernel cannot take."""

    @classmethod
    def parse_shape(cls, text: str) -> tuple[int, ...]:
        """Return the sizes of a shape that has a name or is written as "4096,4096,4096"; else ValueError."""
        if text in cls.shapes:
            return cls.shapes[text]
        sizes = re.split(r"\s*[,;x×]\s*|\s+", text.strip())
        if not all(re.fullmatch(r"[0-9]{1,18}", size) for size in sizes):
            example = ",".join(map(str, next(iter(cls.shapes.values()))))
            raise ValueError(
                f"a shape is a name of the menu or whole numbers such as {example}; it is {text[:60]!r}."
            )
        return tuple(map(int, sizes))

    @property
    def can_measure(self) -> bool:
        """Return whether this machine measures configurations, or only builds them."""
        return self.compile_for is None and bool(getattr(device.current(), self.needs))

    @property
    def target(self) -> str:
        """Return the target to compile for."""
        return self.compile_for or (device.current().target if self.can_measure else "sm_90a")

    # ---- one configuration

    def label(self, config: Any) -> dict[str, Any]:
        """Return the first fields of the row. `kernel` is a name that no other configuration of the space has."""
        return {
            "name": "sweep",
            "config": str(config),
            "kernel": str(config),
            "shape": list(self.shape),
            "dtype": self.dtype,
        }

    @classmethod
    @abstractmethod
    def source(cls) -> str:
        """Return the provenance.source_hash of what is measured. Rows of other code are not resumed."""

    def reject(self, config: Any) -> str:
        """Return a sentence that says why it cannot run on the target, or "" when it may."""
        return ""

    def predict_us(self, config: Any) -> float | None:
        """Return the time that a model expects. The sweep starts with those expected to be fastest."""
        return None

    @abstractmethod
    def job(self, config: Any) -> build.Job:
        """Return how to build it, exactly as it is launched, so that the launch finds it in the compiler's cache.

        Pass `num_warps`, `num_stages` and other options to build.Job too, not only the constants.
        """

    def warm_up(self) -> dict:
        """Do what a worker needs once before the first configuration: imports, the first call of a library."""
        return {}

    @abstractmethod
    def measure(self, config: Any) -> dict:
        """Check the result, then time it, on the GPU: return `status`, `reason` and, when ok, `ms` and `ratio`.

        It fails where it launches the kernel of `job` with other warps or stages.
        """

    def measure_finalists(self, configs: Sequence) -> list[dict]:
        """Time several configurations again: return {`ms`, `ratio`, ...} for each, in their order.

        A space that can time them interleaved should do so, because the chip's clock changes.
        """
        rows = [self.measure(config) for config in configs]
        return [row if row["status"] == "ok" else {} for row in rows]

    # ---- for the panel

    @classmethod
    def load_record(cls) -> results.Record:
        """Return the recorded rows, of any shape. FileNotFoundError where there are none."""
        return results.load_record(cls.record, cls.source())

    @classmethod
    def roofline(cls, dtype: str) -> Roofline:
        """Return the axes of the plot; the panel calls it for each drawing. ValueError where there are none."""
        raise ValueError(f"{cls.title} has no roofline.")

    # ---- for the tuner, which measures quickly, on operands of its own

    def candidates(self) -> Sequence:
        """Return the configurations that the tuner may choose from at this shape."""
        raise NotImplementedError

    @classmethod
    def tuned_source(cls) -> str:
        """Return the hash of the kernel's code that a tuned row keeps."""
        return cls.source()

    def make_inputs(self) -> tuple:
        """Return tensors of which the third is the result."""
        raise NotImplementedError

    def prepare(self, config: Any, *tensors: Any) -> Callable[[], Any]:
        """Return a launch of a configuration on the tensors of `make_inputs`."""
        raise NotImplementedError

    def prepare_peer(self, *tensors: Any) -> Callable[[], Any]:
        """Return a launch of the peer on the tensors of `make_inputs`."""
        raise NotImplementedError

    def measure_quickly(self, config: Any) -> dict:
        """Check against the peer's result and time in one CUDA graph; return what `measure` does."""
        from tilelab.sweeps import quick

        return _require_built(quick.measure)(self, config)

    def measure_finalists_quickly(self, configs: Sequence) -> list[dict]:
        """Time several configurations interleaved with the peer, on the tensors of `measure_quickly`."""
        from tilelab.sweeps import quick

        return quick.measure_finalists(self, configs)
