"""Check and time the versions of a kernel that grows in a notebook, one cell per version.

    ladder = lesson.Ladder("ch07_bulk_copy_ladder", "torch copy_", prepare_torch, make_inputs, check, nbytes=2 << 30)
    ladder.step(first_copy, prepare_first)     # below the cell that holds first_copy

Each step checks the version, times it together with the peer and the version before, and shows a table of all versions
so far. Without a GPU a CUDA version is checked in the emulator, and the recorded figures are shown.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence

import torch

from tilelab import bench, cuda_magic, device, emulator, results
from tilelab.worker_pool import ROOT

COLUMNS = {"version": "version", "ms": "ms", "gbps": "GB/s", "tflops": "TFLOP/s", "ratio": "× {peer}",
           "gain": "× version before", "check": "check"}


def code_hash(kernel) -> str:
    """Return 16 hex digits that change with the code of a kernel of a cell: CUDA C++, Triton or a Python function."""
    if isinstance(kernel, cuda_magic.CudaKernel):
        return kernel.source_hash()
    return results.source_hash(kernel)


def ladder_hash(codes: Sequence[str]) -> str:
    """Return the hash of a ladder's record from the hashes of its versions."""
    return hashlib.sha256(" ".join(codes).encode()).hexdigest()[:16]


def require_written(kernel: cuda_magic.CudaKernel) -> None:
    """Raise NotImplementedError where the body of a kernel still consists of a comment "your ..."."""
    if re.search(r"{\s*// your [^}]*}\s*$", kernel.source):
        raise NotImplementedError


GUARD_BYTES, GUARD = 1 << 15, 0x5A  # around an output that is checked; no kernel may change them


def make_guarded(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of a 1-D tensor inside a larger buffer of bytes, and the buffer, for `find_fault`."""
    buffer = torch.full((tensor.nbytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=tensor.device)
    inside = buffer[GUARD_BYTES:-GUARD_BYTES].view(tensor.dtype)
    inside.copy_(tensor)
    return inside, buffer


def find_fault(out: torch.Tensor, buffer: torch.Tensor, wrong: torch.Tensor) -> str:
    """Return "" or what is wrong with a guarded output: elements, as `wrong` marks them, or the memory around it."""
    if count := int(wrong.sum()):
        first = int(wrong.nonzero()[0])
        return f"{count:,} of {out.numel():,} elements are wrong, the first at index {first:,}"
    around = torch.cat([buffer[:GUARD_BYTES], buffer[-GUARD_BYTES:]])
    return "memory outside of out was overwritten" if bool((around != GUARD).any()) else ""


def run_everywhere(run: Callable[[str], str]) -> str:
    """Call `run(where)` with "cpu" for each timing of the emulator's engine, then with "cuda" where there is a GPU.

    Return the first answer that is not "", or the rule that a kernel broke. A kernel that would hang or damage memory
    is found in the emulator, before it reaches the GPU.
    """
    if emulator.is_available():
        for seed in emulator.SEEDS:
            try:
                with emulator.with_seed(seed):
                    fault = run("cpu")
            except emulator.EmulationError as error:
                fault = str(error)
            if fault:
                return f"{fault} (in the emulator)"
    elif not device.current().has_tma:
        return "not run: that needs a GPU with TMA, or g++ for the emulator"
    return run("cuda") if device.current().has_tma else ""


class Ladder:
    """The versions of one kernel, from the first to the last.

    `prepare_peer(*inputs)` and the `prepare` of a step return a function that launches on these tensors, and
    `make_inputs()` returns fresh ones. `check(prepare)` runs a version on other inputs and returns "" or what is wrong;
    without a GPU it runs in the emulator. `nbytes` or `flops` of one call give the rates.
    """

    def __init__(self, experiment: str, peer: str, prepare_peer: Callable, make_inputs: Callable,
                 check: Callable[[Callable], str], *, nbytes: float | None = None, flops: float | None = None):
        self.experiment, self.peer, self.prepare_peer = experiment, peer, prepare_peer
        self.make_inputs, self.check, self.nbytes, self.flops = make_inputs, check, nbytes, flops
        self.rows: list[dict] = []
        self._before: tuple[str, Callable] | None = None

    def step(self, kernel, prepare: Callable, name: str = "") -> results.Table:
        """Check and time a version, and return the table of all versions so far."""
        name, code = name or getattr(kernel, "name", "") or kernel.__name__, code_hash(kernel)
        if device.current().has_tma:
            label = self._measure(name, prepare, code)
        else:
            label = self._find_recorded(name, prepare, code)
        columns = [column for column in COLUMNS if any(column in row for row in self.rows)]
        named = {column: COLUMNS[column].format(peer=self.peer) for column in columns}
        rows = [{named[column]: row.get(column) for column in columns} for row in self.rows]
        return results.table(rows, label, list(named.values()))

    def _measure(self, name: str, prepare: Callable, code: str) -> str:
        if wrong := self.check(prepare):
            self.rows.append({"version": name, "code": code, "status": "wrong", "reason": wrong,
                              "check": f"wrong: {wrong}"})
            return f"live on {device.current().name}"
        before = {self._before[0]: self._before[1]} if self._before else {}
        timed = bench.compare({self.peer: self.prepare_peer, **before, name: prepare}, self.make_inputs, self.peer,
                              flops=self.flops, nbytes=self.nbytes)
        gain = {"gain": timed[self._before[0]].ms / timed[name].ms} if before else {}
        self.rows.append({"version": name, "code": code, **timed[name].row(), **gain, "check": "ok"})
        self._before = name, prepare
        record = results.make_record(self.experiment, self.rows, ladder_hash([row["code"] for row in self.rows]))
        if os.environ.get("TILES_RECORD") == "1":
            results.save(record)
        return results.Record(record, live=True).label()

    def _find_recorded(self, name: str, prepare: Callable, code: str) -> str:
        wrong = self.check(prepare)
        try:
            record = results.Record(results.load(self.experiment), live=False)
        except FileNotFoundError:
            self.rows.append({"version": name, "check": wrong or "ok in the emulator"})
            return f"{self.experiment} is not recorded"
        row = next((row for row in record.rows if row["version"] == name), None)
        said = wrong or "ok in the emulator"
        if row and row["code"] != code:
            said += "; figures of an earlier text of the cell"
        self.rows.append({**(row or {"version": name}), "check": said})
        return record.label() if row else f"{name} is not recorded"

    def sweep(self, experiment: str, versions: dict[tuple, tuple], keys: Sequence[str]) -> results.Record:
        """Time many versions against the peer in one run and return the Record, or the recorded one without a GPU.

        `versions` maps a tuple of values, named by `keys`, to a kernel and its `prepare`.
        """
        def measure():
            timed = bench.compare({self.peer: self.prepare_peer} | {key: prepare for key, (_, prepare) in
                                                                    versions.items()},
                                  self.make_inputs, self.peer, flops=self.flops, nbytes=self.nbytes, rounds=8)
            return [dict(zip(keys, key)) | timed[key].row() | {"name": str(kernel), "code": code_hash(kernel)}
                    for key, (kernel, _) in versions.items()]

        texts = sorted({kernel.source_hash(with_constants=False) for kernel, _ in versions.values()})
        return results.experiment(experiment, lambda: ladder_hash(texts))(measure)()


def register(experiment: str, notebook: str, *kernels: str, sweep: bool = False) -> None:
    """Make known which kernels of a notebook's cells an experiment measures, so that its record can be found stale.

    `sweep` says that it is one of `Ladder.sweep`, whose constants are not those of the cells.
    """
    path = ROOT / "notebooks" / f"{notebook}.ipynb"

    def source() -> str:
        found = cuda_magic.notebook_kernels(path)
        codes = [found[name].source_hash(with_constants=not sweep) for name in kernels]
        return ladder_hash(sorted(codes) if sweep else codes)

    results.register(experiment, lambda: results.load_record(experiment, source()), source)
