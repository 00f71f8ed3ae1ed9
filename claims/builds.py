"""Ask compilers and installed packages about the field notes' snippets. No GPU is needed; each answer is kept."""

from __future__ import annotations

import functools
import inspect
import os
import re

from ch14.descriptors.lesson.experiments import find_words
from ch14.gemm.configs import configs, job
from tilelab.runtime import build, cubin, cuda


@functools.cache
def proposed_on_b200() -> dict[str, str]:
    """Return, for each GEMM configuration that the note proposes, why a B200 (sm_100a) cannot launch it, or ""."""
    reports = build.build([job(config, "sm_100a") for config in configs("proposed").values()])
    return {report.job.name: report.reason for report in sorted(reports, key=lambda report: report.job.name)}


@functools.cache
def ptxas_error(listing: str, target: str) -> str:
    """Return ptxas's first complaint about a listing in PTX, or "" if it assembles."""
    try:
        cubin.ptxas_remarks(listing, target)
    except RuntimeError as error:
        found = re.search(r"error\s*:\s*([^\n\"]+)", str(error))
        return (found[1] if found else str(error)).strip()
    return ""


@functools.cache
def count_copies(listing: str, target: str) -> dict[str, int]:
    """Return how often a compiled listing holds an instruction of TMA, and one of cp.async (LDGSTS)."""
    counts = cubin.sass_counts(cuda.compile_cubin(listing, target, "listing.cu"))
    return {"TMA": counts["UBLKCP"] + counts["UTMALDG"], "LDGSTS": counts["LDGSTS"]}


@functools.cache
def nvrtc_error(listing: str, target: str) -> str:
    """Return NVRTC's first error in a listing, or "" if it compiles."""
    try:
        cuda.compile_cubin(listing, target, "listing.cu")
    except cuda.CompileError as error:
        found = re.search(r"error: (.+)\n\s*(.+)", str(error))
        return f"{found[1]}: {found[2].strip()}" if found else str(error).splitlines()[-1]
    return ""


@functools.cache
def autotuner_catches() -> tuple[str, ...]:
    """Return the exceptions after which the installed triton.autotune goes on to the next configuration."""
    from triton.runtime.autotuner import Autotuner

    clause = inspect.getsource(Autotuner._bench).partition("except (")[2].partition(")")[0]
    return tuple(name.strip() for name in clause.split(",") if name.strip())


@functools.cache
def variables_read(*variables: str) -> dict[str, list[str]]:
    """Return, for each environment variable, which of triton and torch hold its name in a source file or library."""
    # A torch for GPUs has gigabytes of libraries to search.
    found = {package: find_words(package, list(variables)) for package in ("triton", "torch")}
    return {variable: [package for package in found if found[package][variable]] for variable in variables}


def always_compiles() -> bool:
    """Return whether Triton compiles anew each time, without its cache, unless TRITON_ALWAYS_COMPILE says so."""
    from triton import knobs

    return knobs.compilation.always_compile if "TRITON_ALWAYS_COMPILE" not in os.environ else False
