"""Sixteen pointwise and reduction functions, each compiled with and without tensor descriptors, checked and timed.

Without descriptors Inductor's kernels load by pointers, 16 bytes per thread. With `triton.use_tensor_descriptor` they
build descriptors in the kernel where Inductor finds that it may, and load and store by TMA. Other settings are equal.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import pathlib
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ch14.compiled.lesson import process, reading
from ch14.compiled.lesson.generated import DESCRIPTORS
from tilelab.measure import bench, check
from tilelab.records import results
from tilelab.runtime import build, provenance, worker_pool

MODULE, WHAT = "ch14.compiled.lesson.pointwise", "the process that compiles pointwise functions"
LIMIT_S = 300
POINTERS = {"triton.use_tensor_descriptor": False, "assume_aligned_inputs": True}


def silu_mul(g, u):
    return F.silu(g) * u


def silu_mul_halves(both):
    """The same where g and u are the halves of one tensor, so that their rows are not contiguous."""
    g, u = both.chunk(2, dim=1)
    return F.silu(g) * u


def add_bias(x, bias):
    return x + bias


def add_transposed(x, y):
    return x.t() + y


def widen(x):
    return x.float()


def sum_rows(x):
    return x.sum(1)


def sum_columns(x):
    return x.sum(0)


def softmax(x):
    return x.softmax(1)


def rms_norm(x, weight):
    return x * (x.float().square().mean(1, keepdim=True) + 1e-6).rsqrt().to(x.dtype) * weight


def largest(x):
    return x.amax()


@dataclasses.dataclass(frozen=True)
class Case:
    """One function at one shape. `rows` and `columns` are of its first tensor."""

    name: str
    function: Callable
    rows: int
    columns: int
    reduces: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its tensors."""
        whole = (self.rows, self.columns)
        row = (self.columns,)
        second = {silu_mul: (whole,), add_transposed: (whole,), add_bias: (row,), rms_norm: (row,)}
        return (whole, *second.get(self.function, ()))

    @property
    def nbytes(self) -> int:
        """The bytes that a call must move in bf16: every input once, every result once."""
        out = {
            silu_mul_halves: self.rows * self.columns // 2,
            sum_rows: self.rows,
            sum_columns: self.columns,
            largest: 1,
            widen: 2 * self.rows * self.columns,
        }.get(self.function, self.rows * self.columns)
        return 2 * (sum(map(math.prod, self.shapes)) + out)

    def describe(self) -> dict:
        """Return the fields that every row has; `aligned`: rows of whole 16 bytes."""
        return {
            "case": self.name,
            "kind": "reduction" if self.reduces else "pointwise",
            "rows": self.rows,
            "columns": self.columns,
            "aligned": 2 * self.columns % 16 == 0,
            "mib": self.nbytes / 2**20,
        }


CASES = (
    Case("silu(g)·u, large", silu_mul, 8192, 14336),
    Case("silu(g)·u, small", silu_mul, 1024, 1024),
    Case("silu(g)·u, odd rows", silu_mul, 8191, 14335),
    Case("halves, aligned", silu_mul_halves, 8192, 28672),
    Case("halves, odd", silu_mul_halves, 8192, 28666),
    Case("x + bias", add_bias, 8192, 8192),
    Case("x.T + y", add_transposed, 8192, 8192),
    Case("bf16 to fp32", widen, 8192, 8192),
    Case("sum of rows, large", sum_rows, 8192, 16384, True),
    Case("sum of rows, small", sum_rows, 512, 1024, True),
    Case("sum of rows, odd", sum_rows, 8192, 16383, True),
    Case("sum of columns", sum_columns, 8192, 8192, True),
    Case("softmax, short rows", softmax, 65536, 1024, True),
    Case("softmax, long rows", softmax, 2048, 65536, True),
    Case("RMS norm", rms_norm, 16384, 4096, True),
    Case("largest of all", largest, 8192, 16384, True),
)


# ---- the caller's side


def source() -> str:
    """Return the hash of the functions, the shapes and the way they are measured."""
    return provenance.source_hash(pathlib.Path(__file__), process, reading)


@results.experiment("ch14_compiled_pointwise", source)
def measure():
    """Compile, check and time every case with pointers and with descriptors, interleaved."""
    rows = []
    # The kernels are few and small, so one thread compiles them.
    with worker_pool.lease_worker(MODULE, WHAT, TORCHINDUCTOR_COMPILE_THREADS="1") as worker:
        # after a kernel that faults, the next request starts a new process
        for index, case in enumerate(CASES):
            answer = worker.ask({"index": index}, LIMIT_S)
            died = {"status": "failed", "reason": answer.get("reason", "the process died")}
            rows.append(case.describe() | (answer if "status" in answer else died))
        worker.stop()  # frees its memory on the GPU
    return rows


# ---- in the process


def _read(folder: pathlib.Path) -> dict:
    """Return what the generated kernels hold: descriptors in the text, TMA and global loads and stores in the SASS."""
    graphs, _ = reading.find_modules()
    code = reading.read_code(graphs)
    launchers = [launcher for module in graphs for launcher in reading.list_launchers(module).values()]
    counts: collections.Counter = collections.Counter()
    for path in filter(None, (reading.find_cubin(launcher, folder) for launcher in launchers)):
        counts.update(build.sass_counts(path.read_bytes()))
    blocks = [getattr(getattr(launcher, "config", None), "kwargs", {}) for launcher in launchers]
    return {
        "kernels": reading.list_calls(code),
        "descriptors": len(reading.DESCRIPTOR.findall(code)),
        "blocks": "; ".join(
            ", ".join(f"{name} {value}" for name, value in sizes.items()) for sizes in blocks
        ),
        "tma_loads": counts["UTMALDG"],
        "tma_stores": counts["UTMASTG"],
        "pointer_loads": counts["LDG"],
    }


def _compile(case: Case, inputs, options: dict) -> tuple[Callable, dict]:
    """Return the compiled function and what its kernels hold."""
    with tempfile.TemporaryDirectory(prefix="compiled-") as folder, process.use_caches(folder):
        function = torch.compile(case.function, fullgraph=True, dynamic=False, options=options)
        function(*inputs)
        torch.cuda.synchronize()
        return function, _read(pathlib.Path(folder))


def _make_inputs(case: Case) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*shape, device="cuda").bfloat16() for shape in case.shapes)


def _measure(index: int) -> dict:
    torch._dynamo.reset()
    case = CASES[index]
    inputs = _make_inputs(case)
    expected = case.function(*(tensor.double() for tensor in inputs))
    functions, found = {}, {}
    for name, options in (("pointers", POINTERS), ("descriptors", DESCRIPTORS)):
        functions[name], found[name] = _compile(case, inputs, options)
        error = check.relative_error(functions[name](*inputs), expected)
        limit = 4 * check.TOLERANCE[torch.bfloat16]  # a result of several operations is rounded several times
        if error > limit:
            reason = f"{name}: the error {error:.1e} is above {limit:.1e}"
            return {"status": "wrong", "reason": reason, **found["descriptors"]}
    del expected
    candidates = {name: functools.partial(functools.partial, each) for name, each in functions.items()}
    timing = {"nbytes": case.nbytes, "rounds": 12, "warm_s": 0.1, "burst_ms": 2.0}
    timed = bench.compare(candidates, functools.partial(_make_inputs, case), "pointers", **timing)
    timed = timed["descriptors"]
    kept = {key: value for key, value in timed.row().items() if key not in ("name", "peer")}
    return kept | found["descriptors"] | {"peer_blocks": found["pointers"]["blocks"]}


if __name__ == "__main__":
    worker_pool.serve(process.answer_with(_measure))
