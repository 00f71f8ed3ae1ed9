"""Turn the compiler's report on a build into a row for a table or a record.

The hash of the three recorded experiments covers `failure` and `row_of`, and the Tritons that made those records are
gone from this machine. Their names, parameters and code therefore stay as they were recorded.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

from ch14.bug_hunt.hunts import Hunt, operands, threads
from tilelab.runtime import build

COUNTS = {
    "tcgen05": ("tcgen05_mma",),
    "wgmma": ("wgmma",),
    "mma_sync": ("mma_sync",),
    "block_scale": ("block_scale",),
    "tma": ("tma_load", "tma_store"),
    "setmaxnreg": ("setmaxnreg",),
}


def failure(said: str) -> dict[str, str]:
    """Return {"stage", "message", "exception"} of a failed build, from everything that the compiler wrote.

    stage: the MLIR pass, "ptxas", "process" (the compiler died or hung) or "frontend". message: one line without paths.
    exception: what Python raised, empty if the process died.
    """
    died = re.match(r"the compiler (died|gave no answer|closed)", said)
    exception = "" if died else said.partition(":")[0]
    if failed_pass := re.search(r"executing \[?`(\w+)`", said):
        errors = re.findall(
            r"error: (?!Failures have been)(.+)|(LLVM ERROR: .+)|(Assertion `.+?') failed", said
        )
        lines = dict.fromkeys(next(filter(None, error)).strip().rstrip(".") for error in errors)
        return {
            "stage": failed_pass[1],
            "message": "; ".join(lines) or "without a message",
            "exception": exception,
        }
    if failed_pass := re.search(r"ptxas (?:\S+, line \d+; )?(?:fatal|error)\s*: (?:\(C\d+\) )?(.+)", said):
        return {"stage": "ptxas", "message": failed_pass[1].strip(), "exception": exception}
    lines = [line.strip() for line in said.splitlines() if line.strip(" ^")] or ["no message"]
    return {
        "stage": "process" if died else "frontend",
        "message": lines[0 if died else -1][:300],
        "exception": exception,
    }


def row_of(hunt: Hunt, triton: str, config: dict, report: build.Report) -> dict:
    """Return the row of a build. `report.said` is what the compiler wrote: see `make_row`."""
    row = {
        "hunt": hunt.name,
        "triton": triton,
        "target": report.job.target,
        **config,
        "outcome": hunt.outcome(report),
        "status": report.status,
    }
    if report.status == "failed":
        return row | failure(report.said or report.reason)
    counts = {name: sum(report.counts[part] for part in parts) for name, parts in COUNTS.items()}
    found = {
        "reason": report.reason,
        "threads": threads(report.ptx),
        "operands": operands(report.ptx),
    } | counts
    return row | {name: value for name, value in found.items() if value}


def make_row(hunt: Hunt, triton: str, config: dict, report: build.Report) -> dict:
    """Return a build as a flat row: hunt, triton, target, the axes, outcome and status.

    A failed build adds `failure`. Any other build adds, if they are not zero, the threads per block, the operand type
    of its products, and how many instructions of each kind its PTX has.
    """
    found = {**vars(report), "counts": report.counts, "said": report.compiler_output}
    return row_of(hunt, triton, config, SimpleNamespace(**found))


def locate_failing_pass(compiler_output: str) -> str:
    """Return the failing pass with its options and its position in the dumped pipeline, or "" without a dump.

    For example: "tritongpu-assign-latencies{num-stages=4}, pass 21 of 46".
    """
    dump = re.search(r'pipeline: "builtin\.module\((.+)\)"', compiler_output)
    failed = re.search(r"executing \[?`(\w+)`", compiler_output)
    if not dump or not failed:
        return ""

    def normalise(name):
        return re.sub(r"\W", "", name.partition("{")[0]).lower().replace("triton", "")

    passes = re.findall(r"[\w-]+(?:\{[^}]*\})?", dump[1])
    positions = [index for index, name in enumerate(passes) if normalise(name) == normalise(failed[1])]
    return f"{passes[positions[0]]}, pass {positions[0] + 1} of {len(passes)}" if len(positions) == 1 else ""
