"""Check and time the versions of a kernel that grows in a notebook, one cell per version.

    ladder = lesson.Ladder("ch07_bulk_copy_ladder", "torch copy_", prepare_torch, make_inputs, check, nbytes=2 << 30)
    ladder.step(first_copy, prepare_first)     # below the cell that holds first_copy

Each step checks the version, times it together with the peer, and shows a table of all versions so far. Only × the peer
ranks them: the chip warms, so that milliseconds of different rows do not compare. Without a GPU a CUDA version is
checked in the emulator and a Triton version in the interpreter, and recorded figures are shown. Of a Triton or Gluon
version, `step` also prints what the compiler makes of it, GPU or not.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic, triton_cell
from tilelab.cells.launch_memory import LaunchMemory
from tilelab.cells.triton_cell import compile_launch as compile_launch  # notebooks take these from here
from tilelab.cells.triton_cell import define as define
from tilelab.cells.triton_cell import describe_report as describe_report
from tilelab.cells.triton_cell import lines as lines
from tilelab.cells.triton_cell import notebook_texts as notebook_texts
from tilelab.emulator import gluon as gluon_emulator
from tilelab.measure import bench, check
from tilelab.records import results
from tilelab.runtime import build, device, provenance

NOT_TIMED = "this version was not timed"
COLUMNS = {
    "version": "version",
    "ms": "ms",
    "gbps": "GB/s",
    "tflops": "TFLOP/s",
    "ratio": "× {peer}",
    "spread": "±",
    "gain": "gain",
    "check": "check",
}
SHOWN = 2  # the last rows of a ladder's table; those before are folded


def code_hash(kernel: Any, prepare: Callable | None = None) -> str:
    """Return 16 hex digits that change with the code of a kernel of a cell: CUDA C++, Triton or a Python function.

    For Triton the functions of cells that the kernel calls count too, and `prepare`, which holds its constants.
    """
    if isinstance(kernel, cuda_magic.CudaKernel):
        return kernel.source_hash()
    if triton_cell.is_triton(kernel):
        return triton_cell.code_hash(kernel, prepare)
    return provenance.source_hash(kernel)


def ladder_hash(codes: Sequence[str]) -> str:
    """Return the hash of a ladder's record from the hashes of its versions."""
    return hashlib.sha256(" ".join(codes).encode()).hexdigest()[:16]


def require_written(kernel: Any) -> None:
    """Raise NotImplementedError where a kernel still holds a comment "your ...": CUDA C++, or Triton."""
    if triton_cell.is_triton(kernel):
        if re.search(r"#\s*your ", inspect.getsource(kernel.fn)):
            raise NotImplementedError
    elif re.search(r"{\s*// your [^}]*}\s*$", kernel.source):
        raise NotImplementedError


def check_launch(
    prepare: Callable,
    cases: dict[str, Sequence],
    make_inputs: Callable,
    spec: Callable,
    tolerance: float | None = None,
    outputs: int = 1,
    where: str = "",
    judge_writers: Callable[..., str] | None = None,
) -> str:
    """Run a Triton version on each case and return "" or what is wrong with its outputs.

    `cases` maps "cuda" and "cpu" to cases; the latter run in the interpreter, where there is no GPU. `make_inputs(case,
    where)` returns the tensors for `prepare`, the last `outputs` of which are written. They lie between margins of NaN,
    so that a result with an element from outside is wrong. `spec(*inputs)` returns the result in float64, or a tuple;
    it gets copies, which the version cannot change. An integer result must be equal; for others `tolerance` replaces
    `check.TOLERANCE`. In the interpreter, `judge_writers(*writers)` says what is wrong with which program wrote which
    element, see `LaunchMemory.watch`.
    """
    where = where or ("cuda" if device.current().has_tma else "cpu")
    for case in cases[where]:
        memory = LaunchMemory(make_inputs(case, where), outputs, keep=False)
        expected = spec(*memory.given)
        fault = run_launch(memory, lambda *tensors: prepare(*tensors)())
        pairs = zip(memory.tensors[-outputs:], expected if isinstance(expected, tuple) else (expected,))
        fault = fault or next(filter(None, (_find_difference(*pair, tolerance) for pair in pairs)), "")
        fault = fault or memory.find_damage()
        if not fault and judge_writers and where == "cpu":
            fault = judge_writers(*memory.writers)
        if fault:
            return f"{case}: {fault}"
    return ""


def run_launch(memory: LaunchMemory, launch: Callable) -> str:
    """Call `launch(*tensors)`, which launches Triton kernels on those of `memory`; return "" or why that failed."""
    try:
        with memory.watch():
            launch(*memory.tensors)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except (torch.AcceleratorError, NotImplementedError):
        raise
    except Exception as error:
        while error.__cause__ is not None:  # the interpreter wraps what went wrong in an error per call
            error = error.__cause__
        return device.first_line(error)[:400]
    return ""


def require_launch(
    prepare: Callable, cases: dict[str, Sequence], make_inputs: Callable, spec: Callable, **how
) -> None:
    """Raise AssertionError, which says what is wrong, unless `check_launch` finds nothing."""
    if fault := check_launch(prepare, cases, make_inputs, spec, **how):
        raise AssertionError(fault)


def check_interpreted(check: Callable, kernel: Any, *functions: Callable) -> None:
    """Call `check(kernel, *functions)`, of a module, in Triton's interpreter, in a process of its own without a GPU.

    Where Triton compiles for a GPU, it cannot interpret in the same process. `functions` are of the kernel's cells.
    AssertionError says what is wrong.
    """
    names = [kernel.fn.__name__, *(function.__name__ for function in functions)]
    cell = "\n\n".join(triton_cell.collect(triton_cell.texts_of(kernel.fn), *names))
    text = f"""
from {check.__module__} import {check.__name__} as check  # before triton
from tilelab.cells.triton_cell import define
import sys

found = define(sys.argv[1])
try:
    check(*(found[name] for name in {names!r}))
except AssertionError as error:
    print(error)
"""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.fspath(ROOT),
    }
    command = [sys.executable, "-c", text, cell]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    if fault := done.stdout.strip():
        raise AssertionError(f"{fault} (in the interpreter)")


def _find_difference(out: torch.Tensor, expected: torch.Tensor, tolerance: float | None) -> str:
    if not out.is_floating_point():
        wrong = out != expected
        return f"{int(wrong.sum()):,} of {out.numel():,} elements are wrong" if bool(wrong.any()) else ""
    missing = int((~torch.isfinite(out.double())).sum())
    if missing:
        return f"{missing:,} of {out.numel():,} elements are not finite: not written, or read from outside"
    error, limit = check.relative_error(out, expected), tolerance or check.TOLERANCE[out.dtype]
    if error <= limit:
        return ""
    wrong = (out.double() - expected).abs() > limit * expected.abs().max()
    return f"{int(wrong.sum()):,} of {out.numel():,} elements are wrong, the first at {wrong.nonzero()[0].tolist()}"


def run_everywhere(run: Callable[[str], str]) -> str:
    """Call `run(where)` with "cpu" for each timing of the emulator's engine, then with "cuda" where there is a GPU.

    Return the first answer that is not "", or the rule that a kernel broke. A kernel that would hang or damage memory
    is found in the emulator, before it reaches the GPU. Raises emulator.NotEmulated for a kernel that only a GPU runs,
    where there is none.
    """
    if emulator.is_available():
        for seed in emulator.SEEDS:
            try:
                with emulator.with_seed(seed):
                    fault = run("cpu")
            except emulator.EmulationError as error:
                fault = str(error)
            except emulator.NotEmulated:
                if device.current().has_tma:
                    break
                raise
            if fault:
                return f"{fault} (in the emulator)"
    elif not device.current().has_tma:
        return "not run: that needs a GPU with TMA, or g++ for the emulator"
    return run("cuda") if device.current().has_tma else ""


def run_cases(
    prepare: Callable, make_inputs: Callable, find_wrong: Callable, cases: dict[str, object], where: str
) -> str:
    """Run a CUDA version on each of `cases` at "cpu", in the emulator, or at "cuda"; return "" or what is wrong.

    `make_inputs(case, where)` returns the tensors for `prepare`. The last one is the output, in which every element is
    wrong. `find_wrong(*tensors)` marks the elements of the output that are wrong after the launch; it gets copies of
    the inputs, which the version cannot change.
    """
    for name, case in cases.items():
        memory = LaunchMemory(make_inputs(case, where))
        prepare(*memory.tensors)()
        if fault := memory.find_fault(find_wrong(*memory.given, memory.tensors[-1])):
            return f"{name}: {fault}"
    return ""


def check_kernel(
    prepare: Callable,
    make_inputs: Callable,
    find_wrong: Callable,
    cases: dict[str, object],
    on_gpu: dict[str, object] | None = None,
) -> str:
    """Run a CUDA version on `cases` everywhere, and on `on_gpu` where there is a GPU; return "" or what is wrong.

    The arguments are those of `run_cases`.
    """
    return run_everywhere(
        lambda where: run_cases(
            prepare, make_inputs, find_wrong, cases | ((on_gpu or {}) if where == "cuda" else {}), where
        )
    )


def require_right(kernel, prepare: Callable, *how) -> None:
    """Raise AssertionError unless `check_kernel(prepare, *how)` finds nothing wrong with a kernel of the reader.

    NotImplementedError where the kernel is not written yet.
    """
    require_written(kernel)
    fault = check_kernel(prepare, *how)
    assert not fault, fault


@functools.cache
def _copy_buffers(nbytes: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (nbytes // 2,), device="cuda", dtype=torch.uint8) for _ in range(2)]


def prepare_copy(nbytes: int) -> Callable[[], torch.Tensor]:
    """Return torch's copy that reads and writes `nbytes` in all, in buffers that are kept."""
    old, new = _copy_buffers(nbytes)
    return lambda: new.copy_(old)


class Ladder:
    """The versions of one kernel, from the first to the last.

    `prepare_peer(*inputs)` and the `prepare` of a step return a function that launches on these tensors, and
    `make_inputs()` returns fresh ones. `check(prepare)` runs a version on other inputs and returns "" or what is wrong;
    without a GPU it runs in the emulator. `nbytes` or `flops` of one call give the rates. A table repeats the rows of
    earlier cells, folded, unless `repeats` is False.
    """

    def __init__(
        self,
        experiment: str,
        peer: str,
        prepare_peer: Callable,
        make_inputs: Callable,
        check: Callable[[Callable], str],
        *,
        nbytes: float | None = None,
        flops: float | None = None,
        repeats: bool = True,
    ):
        self.experiment, self.peer, self.prepare_peer, self.repeats = experiment, peer, prepare_peer, repeats
        self.make_inputs, self.check, self.nbytes, self.flops = make_inputs, check, nbytes, flops
        self.rows: list[dict] = []
        self._example: Sequence = ()

    def step(
        self,
        kernel: Any,
        prepare: Callable,
        name: str = "",
        *,
        changed_from: Any = None,
        ptx: str = "",
        sass: str = "",
    ) -> results.Table:
        """Check and time a version, and return the table of all versions so far, or of the last ones.

        The gain is over the last row of the same cell with other constants, or over the version that this one was
        changed from, or over the fastest one before. Of a Triton or Gluon function it first prints what the compiler
        makes of the launch. With `changed_from`, a function of a cell above, it also prints which lines changed, with
        `ptx` and `sass` the matching instructions.
        """
        name, code = name or getattr(kernel, "name", "") or kernel.__name__, code_hash(kernel, prepare)
        problem = ""
        if triton_cell.is_triton(kernel):
            problem = self._show_build(kernel, prepare, name, changed_from, ptx, sass)
        if device.current().has_tma:
            with device.explain_missing_memory(name):
                label = self._measure(kernel, name, prepare, code, changed_from)
        else:
            label = self._find_recorded(kernel, name, prepare, code, problem, changed_from)
        columns = [column for column in COLUMNS if any(column in row for row in self.rows)]
        named = {column: COLUMNS[column].format(peer=self.peer) for column in columns}
        rows = [{named[column]: row.get(column) for column in columns} for row in self.rows]
        if len(self.rows) > 1:
            label += f"; only × {self.peer} compares rows, milliseconds do not: the chip warms"
        folded = max(0, len(rows) - SHOWN)
        if not self.repeats:
            rows, folded = rows[folded:], 0
        return dataclasses.replace(results.table(rows, label, list(named.values())), folded=folded)

    def _add(self, kernel, row: dict, changed_from: Any = None) -> None:
        """Append a row, and say in it what the version gains over its baseline."""
        origin = getattr(kernel, "changed_from", "") or (changed_from and changed_from.fn.__name__) or ""
        timed = [each for each in self.rows if each.get("ratio")]
        name = getattr(kernel, "name", "") or getattr(kernel, "__name__", "")
        if not changed_from and any(each["version"].split(",")[0] == name for each in timed):
            origin = name  # the same text with other constants
        own = [each for each in timed if each["version"].split(",")[0] == origin]
        if timed and row.get("ratio"):
            baseline = own[-1] if own else max(timed, key=lambda each: each["ratio"])
            apart = abs(row["ratio"] - baseline["ratio"])
            row["gain"] = f"{row['ratio'] / baseline['ratio']:.2f} × {baseline['version']}"
            if apart <= max(each.get("spread", 0) for each in (row, baseline)):
                row["gain"] = f"no difference from {baseline['version']}"
        self.rows.append(row)

    def _show_build(self, kernel, prepare: Callable, name: str, changed_from, ptx: str, sass: str) -> str:
        """Compile what `prepare` launches, print it, and return why it cannot be launched, or ""."""
        self._example = self._example or self.make_inputs()
        report = compile_launch(prepare, self._example)
        print(describe_report(report, name))
        for kind, pattern in (("PTX", ptx), ("SASS", sass)):
            if pattern and report.cubin:
                print(f"{kind}:\n{lines(report.ptx if kind == 'PTX' else report.sass, pattern)}")
        if changed_from is not None:
            print(triton_cell.describe_changes(changed_from, kernel))
        return report.reason

    def _measure(self, kernel, name: str, prepare: Callable, code: str, changed_from: Any) -> str:
        if wrong := self.check(prepare):
            wrong_row = {"version": name, "code": code, "status": "wrong", "reason": wrong}
            self.rows.append(wrong_row | {"check": f"wrong: {wrong}"})
            return f"measured on {device.current().name}"
        timed = bench.compare(
            {self.peer: self.prepare_peer, name: prepare},
            self.make_inputs,
            self.peer,
            flops=self.flops,
            nbytes=self.nbytes,
        )
        self._add(kernel, {"version": name, "code": code, **timed[name].row(), "check": "ok"}, changed_from)
        record = results.make_record(
            self.experiment, self.rows, ladder_hash([row["code"] for row in self.rows])
        )
        if os.environ.get("TILES_RECORD") == "1":
            results.save(record)
        return results.Record(record, live=True).label()

    def _find_recorded(
        self, kernel, name: str, prepare: Callable, code: str, problem: str, changed_from: Any
    ) -> str:
        if triton_cell.is_gluon(kernel) and (problem or not gluon_emulator.is_enabled()):
            wrong, fine = problem and f"wrong: {problem}", f"compiled for {cuda_magic.default_target()}"
        else:
            wrong, fine = (
                "",
                f"ok in the {'interpreter' if triton_cell.is_interpreted(kernel) else 'emulator'}",
            )
            try:
                problem = self.check(prepare)
                wrong = problem and f"wrong: {problem}"
            except emulator.NotEmulated:
                fine = f"compiled for {cuda_magic.default_target()}"
        try:
            record = results.Record(results.load(self.experiment), live=False)
        except FileNotFoundError:
            self.rows.append({"version": name, "check": wrong or fine})
            return f"{self.experiment} is not recorded"
        row = next((row for row in record.rows if row["version"] == name), None)
        said = wrong or fine
        if row and row["code"] != code:  # figures of another text would be taken for this one's
            row = {"version": name}
            said += f"; {NOT_TIMED}"
        elif row and self._is_of_another_size(row):
            said += "; recorded at another size"
        row = {key: value for key, value in (row or {"version": name}).items() if key != "gain"}
        self._add(kernel, row | {"check": said}, changed_from)
        return record.label() if "code" in row else f"{name} is not recorded"

    def _is_of_another_size(self, row: dict) -> bool:
        """Return whether the rates in a row say that a call does more or less than `flops` or `nbytes`."""
        rates = ("tflops", self.flops, 1e9), ("gbps", self.nbytes, 1e6)
        return any(
            work and row.get(rate) and abs(row[rate] * row["ms"] * unit / work - 1) > 0.01
            for rate, work, unit in rates
        )

    def sweep(
        self, experiment: str, versions: dict[tuple, tuple], keys: Sequence[str], rounds: int = 8
    ) -> results.Record:
        """Time many versions against the peer in one run and return the Record, or the recorded one without a GPU.

        `versions` maps a tuple of values, named by `keys`, to a kernel and its `prepare`. The row of a Triton version
        also has its registers, its shared memory and the memory that it allocates (`extra_mib`). Before there is a
        record, and where it is one of other texts of the cells, the rows hold only what the compiler says.
        """

        def measure():
            built = self._build_all(versions)
            timed = bench.compare(
                {self.peer: self.prepare_peer} | {key: prepare for key, (_, prepare) in versions.items()},
                self.make_inputs,
                self.peer,
                flops=self.flops,
                nbytes=self.nbytes,
                rounds=rounds,
            )
            return [
                dict(zip(keys, key))
                | built.get(key, {})
                | timed[key].row()
                | self._measure_memory(kernel, prepare)
                | {"name": getattr(kernel, "__name__", str(kernel)), "code": code_hash(kernel, prepare)}
                for key, (kernel, prepare) in versions.items()
            ]

        texts = sorted({_hash_without_constants(*version) for version in versions.values()})
        try:
            record = results.experiment(experiment, lambda: ladder_hash(texts))(measure)()
        except FileNotFoundError:
            why = "but not yet timed"
        else:
            codes = {key: code_hash(*version) for key, version in versions.items()} if not record.live else {}
            found = {tuple(row.get(key) for key in keys): row["code"] for row in record.rows}
            if not record.stale and all(found.get(key, code) == code for key, code in codes.items()):
                return record
            why = f"but {NOT_TIMED}"
        built = self._build_all(versions)
        rows = [dict(zip(keys, key)) | built.get(key, {}) for key in versions]
        return results.Record(results.make_record(experiment, rows, ""), live=False, stale=why)

    def _build_all(self, versions: dict[tuple, tuple]) -> dict[tuple, dict]:
        """Return the resources of the Triton versions, compiled in parallel."""
        if not any(triton_cell.is_triton(kernel) for kernel, _ in versions.values()):
            return {}
        self._example = self._example or self.make_inputs()
        jobs = {
            key: triton_cell.job_of(
                triton_cell.record_launch(prepare, self._example), cuda_magic.default_target()
            )
            for key, (_, prepare) in versions.items()
        }
        reports = {id(report.job): report for report in build.build(jobs.values())}
        found = {key: reports[id(job)] for key, job in jobs.items()}
        fields = "registers spills smem programs_per_sm status reason".split()
        return {key: {name: getattr(found[key], name) for name in fields} for key in found}

    def _measure_memory(self, kernel, prepare: Callable) -> dict:
        """Return the MiB that a Triton version allocates beside its tensors, at most, while it runs."""
        if not triton_cell.is_triton(kernel):
            return {}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            prepare(*self._example)()
            torch.cuda.synchronize()
        except torch.AcceleratorError:
            raise
        except Exception:  # its row has the reason
            return {}
        return {"extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


def _hash_without_constants(kernel, prepare: Callable) -> str:
    if isinstance(kernel, cuda_magic.CudaKernel):
        return kernel.source_hash(with_constants=False)
    return triton_cell.code_hash(kernel, prepare, with_options=False)


def register(experiment: str, notebook: str | Sequence[str], *kernels: str, sweep: bool = False) -> None:
    """Make known which kernels of a notebook's cells an experiment measures, so that its record can be found stale.

    Several notebooks are read in their order: where two define the same name, the last definition counts.
    A kernel is the name of a CUDA kernel, or a Triton function and what prepares it, such as
    "gemm_ring:prepare_ring(stages=4)", with the keyword arguments of a functools.partial.
    `sweep` says that it is one of `Ladder.sweep`, whose constants are not those of the cells.
    """
    names = (notebook,) if isinstance(notebook, str) else notebook
    paths = [ROOT / "notebooks" / f"{name}.ipynb" for name in names]

    def source() -> str:
        found = {name: kernel for path in paths for name, kernel in cuda_magic.notebook_kernels(path).items()}
        texts = [text for path in paths for text in notebook_texts(path)]
        codes = [
            found[name].source_hash(with_constants=not sweep)
            if ":" not in name
            else triton_cell.registered_hash(texts, name, with_options=not sweep)
            for name in kernels
        ]
        return ladder_hash(sorted(set(codes)) if sweep else codes)

    results.register(experiment, lambda: results.load_record(experiment, source()), source)
