"""Walk a space of configurations: rejected by a model, built in parallel, checked, then timed; a row as each finishes.

Every configuration ends as one row with a `status`: ok, rejected (it cannot run here, with the reason), wrong (it ran,
the result is not right) or failed (it could not be built or launched).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tilelab import build


@dataclass(frozen=True)
class Space:
    """What a sweep needs to know of a kernel.

    label(config) gives the row's first fields; reject(config) a sentence or ""; job(config) a build.Job;
    measure(config) a row with `status` and, when ok, `ms` and `ratio` (None: build only, as without a GPU).
    """

    label: Callable[[Any], dict]
    reject: Callable[[Any], str]
    job: Callable[[Any], build.Job]
    measure: Callable[[Any], dict] | None = None


def sweep(configs: Iterable, space: Space, workers: int | None = None) -> Iterator[dict]:
    """Yield one row a configuration as it finishes; those that the model rejects come first and are never built.

    Rows hold the label's fields, `status`, `reason`, and from the build `registers`, `spills`, `smem` and `build_s`.
    Close the iterator to cancel: what is being built or timed is finished, nothing more is begun.
    """
    configs = list(configs)
    jobs = []
    for config in configs:
        if reason := space.reject(config):
            yield {**space.label(config), "status": "rejected", "reason": reason}
        else:
            jobs.append((config, dataclasses.replace(space.job(config))))  # a job of its own, even for equal ones
    config_of = {id(job): config for config, job in jobs}
    for report in build.build([job for _, job in jobs], workers):
        config = config_of[id(report.job)]
        row = {**space.label(config), "status": report.status, "reason": report.reason, "registers": report.registers,
               "spills": report.spills, "smem": report.smem, "build_s": round(report.seconds, 3)}
        if report.launchable and space.measure:
            try:
                row |= space.measure(config)
            except Exception as error:
                if "AcceleratorError" in type(error).__name__:
                    raise  # the CUDA context is lost, and nothing more can be measured in this process
                row |= {"status": "failed", "reason": (str(error).splitlines() or [type(error).__name__])[0]}
        yield row
