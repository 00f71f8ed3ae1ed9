"""Check a kernel against its spec: float64 reference, random data, ragged shapes, poisoned and guarded outputs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tilelab import device, worker_pool

T = TypeVar("T")

# Twice the relative step of the result's format, for one rounding of a result whose sum was kept in float32 (bf16 has
# 8 significant bits, fp16 11, e4m3 4), measured against the largest result: small ones are differences of large terms.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float8_e4m3fn: 2**-3}
GUARD_ROWS = 2


def make_poisoned(shape: tuple[int, ...], dtype: torch.dtype, where) -> tuple[torch.Tensor, Callable[[], str]]:
    """An output full of NaN inside a larger buffer, and a function that says whether that buffer's rest was touched.

    `shape` is (rows, columns) or (n,). The function returns "" or a sentence.
    """
    rows, row = (shape[0], shape[1:]) if len(shape) > 1 else (1, shape)
    buffer = torch.full((rows + 2 * GUARD_ROWS, *row), float("nan"), dtype=dtype, device=where)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    before = buffer.view(bits).flatten()[0].item()
    inside = buffer[GUARD_ROWS:-GUARD_ROWS].reshape(shape)

    def touched() -> str:
        raw = buffer.view(bits)
        around = torch.cat([raw[:GUARD_ROWS].flatten(), raw[-GUARD_ROWS:].flatten()])
        wrong = int((around != before).sum())
        return f"{wrong} elements outside the output were overwritten" if wrong else ""

    return inside, touched


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference from the float64 reference over its largest magnitude; infinite where either is not finite."""
    reference = reference.double()
    if result.shape != reference.shape:
        return float("inf")
    difference = (result.double() - reference).abs_()
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    scale = torch.linalg.vector_norm(reference, float("inf")).clamp_min(1e-30)
    return float(difference.max() / scale)


# Significant bits, and the exponent of the smallest step, of each format.
FORMAT = {torch.float32: (24, -149), torch.bfloat16: (8, -133), torch.float16: (11, -24)}


def ulps(result: torch.Tensor, reference: torch.Tensor, least: float = 0.0) -> float:
    """Largest difference from the float64 reference, in units in the last place of result's format at the reference, or
    at `least` where that is more; a result rounded correctly is within a half. Infinite where either is not finite."""
    if result.shape != reference.shape or not bool(torch.isfinite(result.double() + reference).all()):
        return float("inf")
    if not result.numel():
        return 0.0
    bits, lowest = FORMAT[result.dtype]
    exponent = torch.frexp(reference.double().abs().clamp(min=max(least, 2.0**-1000)))[1]  # of zero it would be 0
    unit = torch.exp2((exponent - bits).clamp(min=lowest).double())
    return float(((result.double() - reference).abs() / unit).max())


def compare(kernel: Callable, spec: Callable, cases: Iterable[tuple[str, tuple]], *, out: Callable,
            peer: Callable | None = None) -> list[dict]:
    """Rows {name, shape, dtype, error, tolerance, peer_error, status, reason}, one a case.

    A case is (name, inputs). `kernel(*inputs, out=tensor)` writes a poisoned tensor of `out(*inputs)`, a (shape, dtype)
    pair; `spec(*inputs)` is the float64 reference. The tolerance is TOLERANCE of the output's dtype or, with `peer`,
    1.5 times the error of `peer(*inputs)`. `error` is `relative_error`.
    """
    rows = []
    for name, inputs in cases:
        shape, dtype = out(*inputs)
        first = next(value for value in inputs if isinstance(value, torch.Tensor))
        result, touched = make_poisoned(shape, dtype, first.device)
        reference = spec(*inputs)  # before the kernel, which might damage what it reads
        known = peer(*inputs).clone() if peer else None
        kernel(*inputs, out=result)
        if first.is_cuda:
            torch.cuda.synchronize()
        error, tolerance, reason = relative_error(result, reference), TOLERANCE[dtype], touched()
        row = {"name": name, "shape": list(shape), "dtype": str(dtype)[6:]}
        if peer:
            row["peer_error"] = relative_error(known, reference)
            tolerance = 1.5 * row["peer_error"]
        if reference.shape != result.shape or not bool(torch.isfinite(reference.double()).all()):
            reason = reason or f"the reference is no proof: its shape is {tuple(reference.shape)}, or it is not finite"
        elif tolerance == float("inf"):
            reason = reason or "the peer is no measure: its result is not finite"
        elif error == float("inf"):
            missing = int((~torch.isfinite(result.double())).sum())
            reason = reason or f"{missing} of {result.numel()} elements are not finite, or were never written"
        elif error > tolerance:
            reason = reason or f"the error {error:.1e} is above {tolerance:.1e}"
        row |= {key: None for key, value in row.items() if value == float("inf")}  # JSON has no infinity
        rows.append({**row, "error": error if error < float("inf") else None,
                     "tolerance": tolerance if tolerance < float("inf") else None,
                     "status": "wrong" if reason else "ok", "reason": reason})
    return rows


def assert_matches(kernel: Callable, spec: Callable, cases: Iterable[tuple[str, tuple]], *, out: Callable,
                   peer: Callable | None = None) -> list[dict]:
    """`compare`, raising AssertionError that names each case that is wrong."""
    rows = compare(kernel, spec, cases, out=out, peer=peer)
    wrong = [f"{row['name']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    if wrong or not rows:  # no assert statement: python -O would drop the check
        raise AssertionError("; ".join(wrong) or "no case was checked")
    return rows


def check_exercise(name: str, test: Callable[[], None]) -> None:
    """Print whether an exercise is solved; `test` raises what is still wrong, and the notebook goes on."""
    try:
        test()
    except NotImplementedError:
        print(f"{name}: not solved yet.")
    except Exception as error:
        print(f"{name}: not yet right ({(str(error).strip() or type(error).__name__).splitlines()[0]}).")
    else:
        print(f"{name}: solved.")


def run_side_by_side(*experiments: Callable[[], T]) -> list[T]:
    """What they return, in their order: a thread each, at the same time. For experiments that time nothing, most of
    whose time goes to processes of their own: compilers, sanitizers, programs that hang. The first error is raised.
    Without a GPU, where there is nothing to wait for, one after the other."""
    with ThreadPoolExecutor(1 if device.current().capability is None else len(experiments)) as pool:
        return list(pool.map(lambda run: run(), experiments))


def run_snippet(code: str, limit_s: float) -> tuple[int | None, str, str]:
    """(exit status, output, errors) of Python `code` in a process of its own, which may fault or hang. It prints a line
    once it has opened the GPU, which takes longer at some times than at others, and then has `limit_s`; the status of
    one that is killed is None, and the line no part of the output."""
    # Without a buffer, or the first line might take the second with it.
    with subprocess.Popen([sys.executable, "-c", code], 0, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          cwd=worker_pool.ROOT) as run:
        try:
            run.stdout.readline()
            said, errors = run.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None, "", ""
        finally:
            run.kill()
    return run.returncode, said.decode(errors="replace"), errors.decode(errors="replace")


SANITIZERS = ("memcheck", "racecheck", "synccheck")


def can_sanitize() -> bool:
    """Whether there is a GPU with TMA here, and compute-sanitizer."""
    return device.current().has_tma and shutil.which("compute-sanitizer") is not None


def sanitize(module: str, kernels: str = "", shares: int = 1) -> list[dict]:
    """Rows {tool, status, reason}: what each tool of compute-sanitizer finds while `sanitizer_cases()` of `module` runs
    in a process of its own, all at once; of kernels with `kernels` in their names alone, where that is given: libraries
    have hazards of their own. A row of races names them: `races`. tilelab.device.Unsupported without the tools.

    With `shares` as many processes of racecheck, which takes several times as long as the others, run
    `sanitizer_cases(share, shares)`, every so-manyth case from that on; the row is of the first that finds something.
    torch.OutOfMemoryError where the GPU has no room for the cases.
    """
    if shutil.which("compute-sanitizer") is None:
        raise device.Unsupported("compute-sanitizer is not on the PATH: install the CUDA toolkit's, or read the "
                                 "records in results/.")

    def row(tool: str, share: int, shares: int) -> dict:
        # cuda-python asks the driver for functions that it may lack: such a question is no error of a kernel.
        command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9",
                   *(["--kernel-name", f"kernel_substring={kernels}"] if kernels else []),
                   sys.executable, "-c", f"from {module} import sanitizer_cases; "
                   f"sanitizer_cases({f'{share}, {shares}' if shares > 1 else ''})"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=worker_pool.ROOT, check=False)
        said = [line.strip("= ") for line in (done.stdout + done.stderr).splitlines() if line.strip("= ")]
        summary = next((line for line in said if "SUMMARY" in line), "")
        good = done.returncode == 0 and summary
        if not good and done.returncode != 9 and "out of memory" in done.stderr:
            raise torch.OutOfMemoryError(f"{tool} ended without a verdict: its cases found no memory on the GPU.")
        if not summary:  # it has checked nothing
            summary = f"no summary, exit status {done.returncode}" + (f" ({said[-1]})" if said else "")
        elif not good and done.returncode != 9:  # no finding of the tool's: the cases themselves failed
            summary += f", exit status {done.returncode} ({(done.stderr.strip().splitlines() or ['nothing said'])[-1]})"
        first = f"{said[1]}: " if done.returncode == 9 and len(said) > 1 else ""
        races = sorted({found[1] for line in said if (found := re.search(r"Race reported between (\S.*?) in ", line))})
        return {"tool": tool, "status": "ok" if good else "wrong", "reason": (first + summary)[:200],
                **({"races": races} if races else {})}

    every = [(tool, share, of) for tool in SANITIZERS for of in [shares if tool == "racecheck" else 1]
             for share in range(of)]
    with ThreadPoolExecutor(len(every)) as pool:
        rows = list(pool.map(row, *zip(*every)))
    return [next((row for row in rows if row["tool"] == tool and row["status"] != "ok"),
                 next(row for row in rows if row["tool"] == tool)) for tool in SANITIZERS]
