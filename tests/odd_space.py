"""A space whose configurations, and whose own functions, do what they should not: for tests/test_sweep.py."""

import dataclasses
import math
import os
import subprocess
import time

from tilelab.faults import Config, FaultSpace

MEASURED = {"ratio": {"ratio": math.nan}, "infinite": {"ms": math.inf}, "text": {"ms": "3"}, "negative": {"ms": -1.0},
            "no status": {"status": None}, "surrogate": {"status": "failed", "reason": "\udc80"},
            "long": {"status": "failed", "reason": "x" * 10**6}}


class NoText(Config):
    def __str__(self):
        raise KeyError("no text")


class Long(Config):
    def __repr__(self):
        return str(10**5000)


@dataclasses.dataclass(frozen=True)
class Twice(Config):
    """Made anew of its fields it is another one."""

    def __post_init__(self):
        object.__setattr__(self, "block", 2 * self.block)


@dataclasses.dataclass(frozen=True)
class Later(Config):
    """Holds what its constructor does not take."""

    half: int = dataclasses.field(init=False, default=0)


@dataclasses.dataclass(frozen=True)
class OddSpace(FaultSpace):
    """`fault` of a Config says what is odd about it; `own` what is odd about the space."""

    own: str = ""

    def label(self, config):
        if config.fault == "label":
            raise KeyError("no label")
        return {**super().label(config), **({"extra": {1, 2}} if config.fault == "label of a set" else {})}

    def predicted_ms(self, config):
        odd = {"predicted nan": math.nan, "predicted text": "soon", "predicted": None}
        return odd.get(config.fault, float(config.block))

    def reject(self, config):
        time.sleep(0.05 if self.own == "slow" else 0)
        return 1 / 0 if config.fault == "reject" else ""

    def job(self, config):
        return super().job(Config(config.block))

    def measure(self, config):
        row = {"status": "ok", "reason": "", "ms": float(config.block)}
        if config.fault == "list":
            return [row]
        if config.fault == "own key":
            return {**row, "key": "another", "kernel": "another"}
        if config.fault == "fork":
            os.fork()
        if config.fault == "closes":
            os.close(1), os.close(2)
        if config.fault == "exit":
            os._exit(0)
        if config.fault == "leaves a process":
            started = subprocess.Popen(["sleep", "300"])
            open(os.path.join(self.folder, "left"), "w").write(str(started.pid))
            os.abort()
        if config.fault == "true reason":
            time.sleep(1.5)
            raise ValueError("the true reason")
        return {**row, **MEASURED.get(config.fault, {})}

    def finals(self, configs):
        if self.own == "slow finals":
            open(os.path.join(self.folder, "finals"), "w").close()
            time.sleep(1)
        if self.own == "finals die":
            os._exit(1)
        if self.own == "finals hang":
            time.sleep(300)
        odd = {"finals nan": [{"ms": math.nan}] * 3, "finals dict": {}, "finals short": [{"ms": 1.0}]}
        return odd.get(self.own, [{"ms": float(config.block)} for config in configs])
