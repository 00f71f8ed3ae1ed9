"""Check a kernel against its spec: float64 reference, random data, ragged shapes, poisoned and guarded outputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tilelab import ROOT
from tilelab.runtime import device

# Twice the largest error of one rounding to the format, which leaves room for the errors of a float32 sum (bf16 has 8
# significant bits, fp16 11, e4m3 4). A float32 result has only the errors of the sum, and gets about 17 steps of the
# format. Errors are relative to the largest result, because small results are differences of large terms.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float8_e4m3fn: 2**-3}
# {dtype: (significant bits, exponent of the smallest step)}
FORMAT = {torch.float32: (24, -149), torch.bfloat16: (8, -133), torch.float16: (11, -24)}
GUARD_ROWS = 2
SANITIZERS = ("memcheck", "racecheck", "synccheck")
_INFINITE = float("inf")


def make_poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, where: torch.device | str
) -> tuple[torch.Tensor, Callable[[], str]]:
    """Return an output full of NaN inside a larger buffer, and a function that checks the memory around it.

    `shape` is (rows, columns) or (n,). The function returns "" or a sentence that says that memory was overwritten.
    """
    rows, row = (shape[0], shape[1:]) if len(shape) > 1 else (1, shape)
    buffer = torch.full((rows + 2 * GUARD_ROWS, *row), float("nan"), dtype=dtype, device=where)
    bits = buffer.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    poison = bits.flatten()[0].item()

    def find_damage() -> str:
        around = torch.cat([bits[:GUARD_ROWS].flatten(), bits[-GUARD_ROWS:].flatten()])
        wrong = int((around != poison).sum())
        return f"{wrong} elements outside the output were overwritten" if wrong else ""

    return buffer[GUARD_ROWS:-GUARD_ROWS].reshape(shape), find_damage


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference from the float64 reference over its largest magnitude; infinite if not finite."""
    reference = reference.double()
    if result.shape != reference.shape:
        return _INFINITE
    difference = (result.double() - reference).abs_()
    if not bool(torch.isfinite(difference).all()):
        return _INFINITE
    scale = torch.linalg.vector_norm(reference, _INFINITE).clamp_min(1e-30)
    return float(difference.max() / scale)


def ulps(result: torch.Tensor, reference: torch.Tensor, least: float = 0.0) -> float:
    """Return the largest difference from the float64 reference in units in the last place of result's dtype.

    The unit belongs to the reference, or to `least` if `least` is larger. A correctly rounded result has at most 0.5.
    Infinite if the shapes differ or a value is not finite.
    """
    if result.shape != reference.shape or not bool(torch.isfinite(result.double() + reference).all()):
        return _INFINITE
    if not result.numel():
        return 0.0
    bits, lowest = FORMAT[result.dtype]
    magnitude = reference.double().abs().clamp(min=max(least, 2.0**-1000))  # frexp gives zero the exponent 0
    unit = torch.exp2((torch.frexp(magnitude)[1] - bits).clamp(min=lowest).double())
    return float(((result.double() - reference).abs() / unit).max())


def _reason(result: torch.Tensor, reference: torch.Tensor, error: float, tolerance: float) -> str:
    """Return why a result is wrong or proves nothing; "" for a right one."""
    if reference.shape != result.shape or not bool(torch.isfinite(reference.double()).all()):
        return f"the reference proves nothing: its shape is {tuple(reference.shape)}, or it is not finite"
    if tolerance == _INFINITE:
        return "the peer sets no tolerance: its result is not finite"
    if error == _INFINITE:
        missing = int((~torch.isfinite(result.double())).sum())
        return f"{missing} of {result.numel()} elements are not finite, or were never written"
    return f"the error {error:.1e} is above {tolerance:.1e}" if error > tolerance else ""


def compare(
    kernel: Callable,
    spec: Callable,
    cases: Iterable[tuple[str, tuple]],
    *,
    out: Callable,
    peer: Callable | None = None,
) -> list[dict]:
    """Run a kernel on each case and return rows {name, shape, dtype, error, tolerance, peer_error, status, reason}.

    A case is (name, inputs). `kernel(*inputs, out=tensor)` writes into a poisoned tensor of `out(*inputs)`, a (shape,
    dtype) pair; `spec(*inputs)` is the float64 reference. The tolerance is TOLERANCE of the output's dtype or, with
    `peer`, 1.5 times the error of `peer(*inputs)`. `error` is `relative_error`, None where it is infinite.
    """
    rows = []
    for name, inputs in cases:
        shape, dtype = out(*inputs)
        first = next(value for value in inputs if isinstance(value, torch.Tensor))
        result, find_damage = make_poisoned(shape, dtype, first.device)
        reference = spec(*inputs)  # before the kernel, which might damage its inputs
        errors = {"tolerance": TOLERANCE[dtype]}
        if peer:
            errors["peer_error"] = relative_error(peer(*inputs).clone(), reference)
            errors["tolerance"] = 1.5 * errors["peer_error"]
        kernel(*inputs, out=result)
        if first.is_cuda:
            torch.cuda.synchronize()
        errors["error"] = relative_error(result, reference)
        reason = find_damage() or _reason(result, reference, errors["error"], errors["tolerance"])
        # JSON has no infinity.
        finite = {key: value if value < _INFINITE else None for key, value in errors.items()}
        row = {"name": name, "shape": list(shape), "dtype": str(dtype)[6:], **finite}
        rows.append(row | {"status": "wrong" if reason else "ok", "reason": reason})
    return rows


class NotChecked(Exception):
    """An answer cannot be judged on this machine; the text says why."""


def check_exercise(name: str, test: Callable[[], None]) -> None:
    """Print whether an exercise is solved. `test` raises an error if it is not; the notebook goes on in any case."""
    try:
        test()
    except NotImplementedError:
        print(f"{name}: not solved yet.")
    except NotChecked as reason:
        print(f"{name}: not checked ({reason}).")
    except SystemExit:
        print(f"{name}: not yet right (the answer calls exit, which would end the notebook).")
    except Exception as error:
        said = str(error).strip() or type(error).__name__
        if isinstance(error, LookupError):  # its text is only what was looked up
            said = f"{type(error).__name__}: {said}"
        print(f"{name}: not yet right ({said.splitlines()[0]}).")
    else:
        print(f"{name}: solved.")


def make_checker(checks: dict[str, Callable[..., None]]) -> Callable[..., None]:
    """Return `check(exercise, *answers)`, which prints whether `checks[exercise]` accepts a reader's answers."""

    def check(exercise: str, *answers: Any) -> None:
        """Print whether an exercise is solved."""
        check_exercise(exercise, lambda: checks[exercise](*answers))

    return check


def run_side_by_side(*experiments: Callable[[], Any]) -> list:
    """Run experiments that time nothing at the same time, one thread each, and return their results in order.

    This helps where processes of their own (compilers, sanitizers) take most of the time. The first error is raised.
    Without a GPU the experiments only read records and run one after the other.
    """
    with ThreadPoolExecutor(1 if device.current().capability is None else len(experiments)) as pool:
        return list(pool.map(lambda run: run(), experiments))


def run_snippet(code: str, limit_s: float) -> tuple[int | None, str, str]:
    """Run Python `code`, which may fault or hang, in a process of its own; return (exit status, output, errors).

    The code prints one line when it has opened the GPU, which takes a varying time, and then has `limit_s` seconds.
    That line is not part of the output. The status is None if the process was killed at the limit.
    """
    # Unbuffered, because a buffer might read the second line together with the first.
    with subprocess.Popen(
        [sys.executable, "-c", code], 0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as run:
        try:
            run.stdout.readline()
            output, errors = run.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None, "", ""
        finally:
            run.kill()
    return run.returncode, output.decode(errors="replace"), errors.decode(errors="replace")


def try_snippet(code: str, limit_s: float) -> str:
    """Run `code` as `run_snippet` does; return the last line that it printed, its CUDA error, or its last error."""
    status, output, errors = run_snippet(code, limit_s)
    if status is None:
        return f"no answer within {limit_s:g} s"
    said = output if status == 0 else errors or output
    lines = [line for line in said.splitlines() if line.strip()] or [f"exit status {status}"]
    return next((line[line.index("CUDA error") :] for line in lines if "CUDA error" in line), lines[-1])


def try_rows(code: str, limit_s: float) -> dict:
    """Return the row that `code` prints as JSON (see `try_snippet`), or {status, reason} of how its process ended."""
    said = try_snippet(code, limit_s)
    return json.loads(said) if said.startswith("{") else {"status": "failed", "reason": said[:300]}


def require_right(rows: dict[str, dict]) -> None:
    """Raise AssertionError, which gives the reasons, unless each of the rows {name: row} is "ok"."""
    wrong = [f"{name}: {row['reason']}" for name, row in rows.items() if row["status"] != "ok"]
    if wrong:
        raise AssertionError("; ".join(wrong))


def can_sanitize() -> bool:
    """Return whether this machine has a GPU with TMA, and compute-sanitizer."""
    return device.current().has_tma and shutil.which("compute-sanitizer") is not None


def _sanitize_share(module: str, kernels: str, tool: str, share: int, shares: int) -> dict:
    """Run one tool of compute-sanitizer on one share of the cases and return its row."""
    cases = (
        f"from {module} import sanitizer_cases; sanitizer_cases({f'{share}, {shares}' if shares > 1 else ''})"
    )
    # cuda-python asks the driver for functions that it may lack, which is not an error of a kernel.
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    command += ["--kernel-name", f"kernel_substring={kernels}"] if kernels else []
    command += [sys.executable, "-c", cases]
    # Each tensor gets memory of its own from the driver, so that memcheck knows where it ends.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", cwd=ROOT, env=env, check=False
    )
    lines = [line.strip("= ") for line in (done.stdout + done.stderr).splitlines() if line.strip("= ")]
    summary = next((line for line in lines if "SUMMARY" in line), "")
    clean, found = done.returncode == 0 and summary, done.returncode == 9
    if not clean and not found and "out of memory" in done.stderr:
        raise torch.OutOfMemoryError(f"{tool} ended without a verdict: its cases found no memory on the GPU.")
    if not summary:  # the tool has checked nothing
        summary = f"no summary, exit status {done.returncode}" + (f" ({lines[-1]})" if lines else "")
    elif not clean and not found:  # the cases themselves failed
        summary += (
            f", exit status {done.returncode} ({(done.stderr.strip().splitlines() or ['no message'])[-1]})"
        )
    elif found and len(lines) > 1:
        summary = f"{lines[1]}: {summary}"
    row = {"tool": tool, "status": "ok" if clean else "wrong", "reason": summary[:200]}
    races = {match[1] for line in lines if (match := re.search(r"Race reported between (\S.*?) in ", line))}
    return row | ({"races": sorted(races)} if races else {})


def sanitize(module: str, kernels: str = "", shares: int = 1) -> list[dict]:
    """Run `sanitizer_cases()` of a module under each tool of compute-sanitizer; return rows {tool, status, reason}.

    The tools run at the same time, each in its own process. `kernels` limits them to kernels with this text in their
    names, because libraries have hazards of their own. The row of racecheck lists the places of races in `races`.
    racecheck takes several times as long as the other tools. With `shares`, several processes run
    `sanitizer_cases(share, shares)`, each with every `shares`-th case, and the first finding becomes the row. Raises
    tilelab.runtime.device.Unsupported without the tools, and torch.OutOfMemoryError if the cases do not fit on the GPU.
    """
    if shutil.which("compute-sanitizer") is None:
        raise device.Unsupported(
            "compute-sanitizer is not on the PATH: install the CUDA toolkit's, or read the "
            "records in results/."
        )
    runs = [
        (tool, share, count)
        for tool in SANITIZERS
        for count in [shares if tool == "racecheck" else 1]
        for share in range(count)
    ]
    with ThreadPoolExecutor(len(runs)) as pool:
        rows = list(pool.map(lambda run: _sanitize_share(module, kernels, *run), runs))
    rows.sort(key=lambda row: (SANITIZERS.index(row["tool"]), row["status"] == "ok"))
    return [next(row for row in rows if row["tool"] == tool) for tool in SANITIZERS]
