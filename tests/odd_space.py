"""Spaces whose configurations or whose own functions go wrong in ways of their own, for the tests of the sweep."""

import dataclasses
import math
import os
import pathlib
import subprocess
import time

from tilelab.runtime import build, files
from tilelab.sweeps import faults
from tilelab.sweeps.faults import FaultSpace
from tilelab.sweeps.space import Roofline

HUGE = 10**400  # more than a float can hold
MEASURED = {
    "ratio": {"ratio": math.nan},
    "text": {"ms": "fast"},
    "infinite": {"ms": math.inf},
    "huge": {"ms": HUGE},
    "no status": {"status": None},
    "long": {"status": "failed", "reason": "x" * 10**6},
    "surrogate": {"status": "failed", "reason": "\udc80"},
    "set": {"extra": {1, 2}},
    "wrong": {"status": "wrong", "reason": "an element is wrong"},
    "own key": {"key": "another", "kernel": "x"},
}


def build_nothing(*_):
    """Stand in for `sweep.build_configuration`."""
    return {"status": "ok", "reason": "", "registers": 32}


def call_here(method, space, arguments, *_):
    """Stand in for `sweep.call_in_gpu_worker`: measure in this process."""
    try:
        return {"value": getattr(space, method)(*arguments)}
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {error}"}


@dataclasses.dataclass(frozen=True)
class OddSpace(FaultSpace):
    """`fault` of a Config says what is odd about it; `own` what is odd about the space. Its kernel is empty."""

    own: str = ""

    def label(self, config):
        if config.fault == "label":
            raise KeyError("no label")
        return super().label(config)

    def warm_up(self):
        return {}

    def predict_us(self, config):
        return {"predicted text": "soon", "predicted NaN": math.nan}.get(config.fault, float(config.block))

    def reject(self, config):
        time.sleep(0.05 if self.own == "slow" else 0)
        if config.fault == "reject":
            return 1 / 0
        return "it has no tensor cores" if config.fault == "rejected" else ""

    def job(self, config):
        path = pathlib.Path(self.folder, "empty.cu")
        files.write_atomically(path, 'extern "C" __global__ void empty() {}')
        return build.Job(f"{path}:empty", {}, {}, self.target)

    def measure(self, config):
        self._log("begin", config)
        row = {"status": "ok", "reason": "", "ms": float(config.block)}
        if config.fault == "gate":
            self._wait_for_gate()
        if config.fault == "list":
            return [row]
        if config.fault == "fork":
            os.fork()
        if config.fault == "closes":
            os.close(1), os.close(2)
        if config.fault == "exit":
            os._exit(0)
        if config.fault == "leaves a process":
            started = subprocess.Popen(["sleep", "300"])
            pathlib.Path(self.folder, "left").write_text(str(started.pid))
            os.abort()
        if config.fault == "hang":
            time.sleep(300)
        if config.fault == "raises":
            raise ValueError("the true reason")
        self._log("end", config)
        return {**row, **MEASURED.get(config.fault, {})}

    def measure_finalists(self, configs):
        self._log("finals", configs[0])
        if self.own == "gate":
            self._wait_for_gate()
        if self.own == "finals die":
            os._exit(1)
        finals = [{"ms": float(config.block)} for config in configs]
        return {"huge finals": [{"ms": HUGE}], "no finals": 5}.get(self.own, finals)

    def _wait_for_gate(self):
        """Wait until the test makes the file `gate`."""
        while not pathlib.Path(self.folder, "gate").exists():
            time.sleep(0.01)


@dataclasses.dataclass(frozen=True)
class OddPanelSpace(OddSpace):
    """A few faults for the panel. Its files are in the folder that ODD_FOLDER names."""

    title = "faults"
    shapes = {"1,000": (faults.SIZE,)}
    dtypes = ("fp32",)
    presets = {"all": lambda _: faults.configs(("raises", "wrong", "long"))}
    axes = {"block": lambda config: str(config.block), "fault": lambda config: config.fault or "none"}
    peer = "torch"

    folder: str = dataclasses.field(default_factory=lambda: os.environ["ODD_FOLDER"])

    @property
    def can_measure(self):
        return True  # whatever target the panel chose

    @classmethod
    def load_record(cls):
        raise FileNotFoundError("no record")

    @classmethod
    def roofline(cls, dtype):
        return Roofline("block", "gbps", "GB/s", lambda config: config.block, {"roof": 1.0})
