"""A space whose configurations or whose own functions go wrong in ways of their own, for tests/test_sweep.py."""

import dataclasses
import math
import os
import subprocess
import time

from tilelab.faults import FaultSpace

MEASURED = {"ratio": {"ratio": math.nan}, "text": {"ms": "fast"}, "infinite": {"ms": math.inf},
            "no status": {"status": None}, "long": {"status": "failed", "reason": "x" * 10**6},
            "surrogate": {"status": "failed", "reason": "\udc80"}}


@dataclasses.dataclass(frozen=True)
class OddSpace(FaultSpace):
    """`fault` of a Config says what is odd about it; `own` what is odd about the space."""

    own: str = ""

    def label(self, config):
        if config.fault == "label":
            raise KeyError("no label")
        return super().label(config)

    def predicted_ms(self, config):
        return "soon" if config.fault == "predicted text" else float(config.block)

    def reject(self, config):
        time.sleep(0.05 if self.own == "slow" else 0)
        return 1 / 0 if config.fault == "reject" else ""

    def job(self, config):
        return super().job(dataclasses.replace(config, fault=""))

    def measure(self, config):
        row = {"status": "ok", "reason": "", "ms": float(config.block)}
        if config.fault == "list":
            return [row]
        if config.fault == "set":
            return {**row, "extra": {1, 2}}
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
        if config.fault == "raises":
            raise ValueError("the true reason")
        return {**row, **MEASURED.get(config.fault, {})}

    def measure_finalists(self, configs):
        if self.own == "slow finals":
            open(os.path.join(self.folder, "finals"), "w").close()
            time.sleep(1)
        if self.own == "finals die":
            os._exit(1)
        if self.own == "finals hang":
            time.sleep(300)
        return [{"ms": float(config.block)} for config in configs]
