"""Inputs, the ladder and checks of `notebooks/ch14_compiled.ipynb`, for the reader's code among others."""

from __future__ import annotations

import contextlib
import itertools
import logging
import textwrap
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import triton

from ch14.compiled.lesson import generated, pointwise
from tilelab.cells import lesson
from tilelab.measure import bench, check
from tilelab.measure.check import check_exercise
from tilelab.records import results
from tilelab.runtime import device

SHAPE = (8192, 14336)  # of g and u in the MLP; a small one without a GPU, where only types count
BLOCK = 1024
CASES = {"cpu": [(3, 40), (37, 64), (1, 8)], "cuda": [(3, 40), (37, 64), (1, 8), (513, 14336)]}
STEPS = (
    "silu_mul",
    "silu_mul_pointers:prepare_pointers",
    "silu_mul_device:prepare_device",
    "silu_mul_host:prepare_host",
)
lesson.register("ch14_compiled_ladder", "ch14_compiled", *STEPS)
_numbers = itertools.count()


# ---- the ladder of silu(g) * u


def make_inputs() -> tuple[torch.Tensor, ...]:
    """Return g, u and out in bf16."""
    return make_case(SHAPE if device.current().capability else (64, 1024), device_here())


def device_here() -> str:
    """Return "cuda" where a GPU has TMA, else "cpu"."""
    return "cuda" if device.current().has_tma else "cpu"


def make_case(shape: tuple[int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return g, u and out of a shape in bf16."""
    g, u = torch.randn(2, *shape, device=where).bfloat16()
    return g, u, torch.empty_like(g)


def spec(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return silu(g) * u in float64."""
    return F.silu(g.double()) * u.double()


def check_version(prepare: Callable) -> str:
    """Run a version of silu(g) * u on small and ragged shapes; return "" or what is wrong."""
    return lesson.check_launch(prepare, CASES, make_case, spec)


def make_ladder() -> lesson.Ladder:
    """Return the ladder of the notebook's kernels for silu(g) * u, beside what Inductor makes of it."""
    compiled = torch.compile(pointwise.silu_mul, fullgraph=True, dynamic=False)

    def prepare_inductor(g, u, out):
        return lambda: compiled(g, u)

    return lesson.Ladder(
        "ch14_compiled_ladder",
        "Inductor",
        prepare_inductor,
        make_inputs,
        check_version,
        nbytes=3 * 2 * SHAPE[0] * SHAPE[1],
    )


def prepare_packs(kernel) -> Callable:
    """Return a `prepare` for a CUDA kernel (g, u, out, packs) with 256 threads per block and 8 elements per thread."""

    def prepare(g, u, out):
        packs = out.numel() // 8
        return kernel.prepare(triton.cdiv(packs, 256), 256, (g, u, out, packs))

    return prepare


# ---- what Dynamo makes of a function

CALLS = {
    "4 × 8": ((4, 8), torch.float32),
    "4 × 8 again": ((4, 8), torch.float32),
    "6 × 8": ((6, 8), torch.float32),
    "7 × 8": ((7, 8), torch.float32),
    "9 × 8": ((9, 8), torch.float32),
    "9 × 16": ((9, 16), torch.float32),
    "1 × 8": ((1, 8), torch.float32),
    "4 × 8, bf16": ((4, 8), torch.bfloat16),
    "4 × 8, transposed": ((8, 4), torch.float32),
}


def make_calls(*names: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the arguments (g, u) of CALLS by name, of all without names."""
    made = {}
    for name in names or CALLS:
        shape, dtype = CALLS[name]
        pair = tuple(torch.randn(shape).to(dtype) for _ in range(2))
        made[name] = tuple(part.T for part in pair) if "transposed" in name else pair
    return made


def tabulate_graphs(count: Callable, function: Callable, modes: dict[str, dict]) -> results.Table:
    """Return a table of `count(function, calls, **options)` for CALLS, with a column for each of `modes`."""
    numbers = {mode: count(function, make_calls().values(), **options) for mode, options in modes.items()}
    rows = [
        {"call": name, **{mode: column[index] for mode, column in numbers.items()}}
        for index, name in enumerate(CALLS)
    ]
    return results.table(rows, "graphs made so far")


def explain_recompilation(function: Callable, first: Sequence, second: Sequence) -> str:
    """Return the guard for which torch.compile compiles `function` again when `second` follows `first`; "" for none."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    compiled(*first)
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(*second)
    except torch._dynamo.exc.RecompileError as error:
        return next(line.strip() for line in str(error).splitlines() if line.strip().startswith("- "))[:90]
    return ""


def describe_breaks(function: Callable, *inputs) -> str:
    """Return the number of graphs and breaks, and the first line of each different reason, as torch explains them."""
    torch._dynamo.reset()
    try:
        with _quiet():
            found = torch._dynamo.explain(function)(*inputs)
    except Exception as error:
        return f"Dynamo gives up: {device.first_line(error)}"
    lines = [f"{found.graph_count} graph{'s' * (found.graph_count != 1)}, {found.graph_break_count} breaks"]
    for reason in dict.fromkeys(each.reason for each in found.break_reasons):
        text = [line.strip() for line in reason.splitlines() if line.strip()]
        lines.append("  " + " ".join(text[:2]).partition(" This function")[0][:200])
    return "\n".join(lines)


def run_operator(operator, *inputs) -> str:
    """Return the error of an operator for silu(g) * u against float64, or why it cannot run here."""
    try:
        error = check.relative_error(operator(*inputs), spec(*inputs))
    except RuntimeError as problem:  # torch 2.11 takes no interpreted kernel
        if device.current().has_tma:
            raise
        return f"not run here: {device.first_line(problem)}"
    return f"error {error:.1e}"


# ---- sixteen cases


def list_descriptors() -> list[dict]:
    """Return a row for each of the sixteen cases: the accesses by descriptor and by pointer in the generated text."""
    rows = []
    for case in pointwise.CASES:
        program = generated.generate(
            case.function, *case.shapes, **generated.as_keywords(generated.DESCRIPTORS)
        )
        text = "\n".join(program.kernels.values())
        by_pointer = text.count("tl.load(")
        rows.append(
            {
                **case.describe(),
                "kernels": len(program.kernels),
                "loads by descriptor": text.count(".load(") - by_pointer,
                "loads by pointer": by_pointer,
                "stores by descriptor": text.count(".store(") - text.count("tl.store("),
                "least block": ", ".join(f"{name} {size}" for name, size in program.least_blocks.items()),
            }
        )
    return rows


def measure_pointwise() -> results.Record:
    """Return the timed cases: live, recorded, or without times where there is no record yet."""
    try:
        return pointwise.measure()
    except FileNotFoundError:
        rows = [case.describe() | {"status": "not timed"} for case in pointwise.CASES]
        record = results.make_record("ch14_compiled_pointwise", rows, "")
        return results.Record(record, live=False, stale="but not yet timed")


def tabulate_pointwise(record: results.Record) -> results.Table:
    """Return the table of the timed cases. The reason of a failure is cut to what the GPU or the check said."""
    columns = (
        "mib",
        "ms",
        "peer_ms",
        "ratio",
        "spread",
        "tma_loads",
        "pointer_loads",
        "blocks",
        "peer_blocks",
        "status",
    )
    return results.table(
        [
            {
                "case": row["case"],
                **{key: row.get(key) for key in columns},
                "reason": _shorten(row.get("reason", "")),
            }
            for row in record.rows
        ],
        record.label(),
    )


def _shorten(reason: str) -> str:
    """Return the last part of a reason, such as "an illegal memory access was encountered", in at most 48 letters."""
    return textwrap.shorten(reason.rpartition("rror: ")[2], 48, placeholder=" …")


# ---- the reader's code


def check_recompilations(step: Callable, run: Callable) -> None:
    """Raise AssertionError unless 12 calls of `run(compiled step, x, weights, index)` are right with at most 2 graphs.

    The index of the layer changes from call to call, and so does the number of rows of x.
    """
    weights = [torch.randn(16) for _ in range(12)]
    made, used = [], []

    def backend(graph, inputs):
        made.append(graph)
        return lambda *given: used.append(graph) or graph.forward(*given)

    torch._dynamo.reset()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # the limit of graphs is a finding here
    compiled = torch.compile(step, backend=backend)
    for index, rows in enumerate((4, 4, 6, 9, 5, 7, 11, 3, 8, 2, 10, 12)):
        x = torch.randn(rows, 16)
        given = run(compiled, x, weights, index)
        assert torch.allclose(given, torch.tanh(x * weights[index])), f"call {index} is wrong"
    assert made, "the compiled step was never called"
    assert len(made) <= 2, f"it still makes {len(made)} graphs for 12 calls"
    count = sum("tanh" in graph.code for graph in used)
    assert count == 12, f"{count} of 12 calls run tanh in a compiled graph"


def make_halves(case: tuple[int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return x (rows, 2 columns), whose left half is g and whose right half is u, and out (rows, columns), in bf16."""
    rows, columns = case
    return (
        torch.randn(rows, 2 * columns, device=where).bfloat16(),
        torch.empty(rows, columns, dtype=torch.bfloat16, device=where),
    )


def spec_halves(x: torch.Tensor) -> torch.Tensor:
    """Return silu(left half) * right half in float64."""
    return spec(*x.chunk(2, dim=1))


def check_halves(kernel) -> None:
    """Raise AssertionError unless a Triton kernel (x_ptr, out_ptr, columns, BLOCK) gates the halves of x.

    A program computes BLOCK elements of a row; the grid is (rows, blocks per row).
    """
    lesson.require_written(kernel)

    def prepare(x, out):
        rows, columns = out.shape
        return lambda: kernel[(rows, triton.cdiv(columns, 256))](x, out, columns, BLOCK=256)

    cases = {where: [*CASES[where], (2, 300), (5, 257)] for where in CASES}
    fault = lesson.check_launch(prepare, cases, make_halves, spec_halves)
    assert not fault, fault
    x, out = make_halves((37, 64), device_here())
    x[0, :2] = torch.tensor([100.0, -100.0])  # g whose exponential overflows
    prepare(x, out)()
    wanted = spec_halves(x)
    wrong = ~((out.double() - wanted).abs() <= wanted.abs() / 255 + 1e-30)  # one rounding to bf16
    assert not wrong.any(), (
        f"{int(wrong.sum())} elements are off by more than one rounding: compute in float32"
    )


@contextlib.contextmanager
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def new_name() -> str:
    """Return a name for an operator that no other has."""
    return f"lesson_check::operator_{next(_numbers)}"


def _opcheck(operator, inputs: Sequence) -> None:
    try:
        with _quiet():
            torch.library.opcheck(operator, inputs)
    except NotImplementedError:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise AssertionError(f"opcheck: {lines[-1][:200]}") from error


def check_operator(make_operator: Callable) -> None:
    """Raise AssertionError unless `make_operator(name)` returns an operator that overwrites g with silu(g) * u."""
    operator = make_operator(new_name())
    written = [
        each.name
        for each in operator._opoverload._schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    assert written == ["g"], f"mutates_args must name g alone; it names {', '.join(written) or 'nothing'}"
    assert operator._abstract_fn is not None, "register a fake kernel, which says what the operator returns"
    where = device_here()
    for shape in ((37, 64), (5, 8)):
        g, u, _ = make_case(shape, where)
        memory = lesson.LaunchMemory([u, g])  # a crash or a write beside g becomes a sentence
        expected = spec(g, u)
        fault = lesson.run_launch(memory, lambda u, g: operator(g, u)) or memory.find_damage()
        assert not fault, fault
        error = check.relative_error(memory.tensors[1], expected)
        assert error <= check.TOLERANCE[torch.bfloat16], (
            f"g is not silu(g) * u afterwards: the error is {error:.1e}"
        )
        _opcheck(operator, (g, u))

    def function(g, u):
        doubled = g * 2
        operator(doubled, u)
        return doubled + 1

    g, u, _ = make_case((16, 64), where)
    torch._dynamo.reset()
    with _quiet():
        result = torch.compile(function, backend="aot_eager", fullgraph=True)(g, u)
    error = check.relative_error(result, spec(g * 2, u) + 1)
    assert error <= 2 * check.TOLERANCE[torch.bfloat16], "inside a compiled function the result is wrong"


def check_fake(run: Callable, fake: Callable) -> None:
    """Raise AssertionError unless `fake` describes what `run`, a sum over rows, returns, for all that it takes."""
    operator = torch.library.custom_op(new_name(), run, mutates_args=())
    operator.register_fake(fake)
    for shape, dtype in (((5, 64), torch.bfloat16), ((1, 8), torch.float32), ((7, 40), torch.float16)):
        x, found = torch.randn(*shape, device=device_here()).to(dtype), []
        memory = lesson.LaunchMemory([x], outputs=0)
        fault = (
            lesson.run_launch(memory, lambda x, found=found: found.append(operator(x)))
            or memory.find_damage()
        )
        assert not fault, fault
        real, said = found[0], fake(x.to("meta"))
        total, size = x.double().sum(1), x.double().abs().sum(1)
        assert bool(
            (
                (real.double().flatten() - total).abs() <= (1e-5 + check.TOLERANCE.get(real.dtype, 0)) * size
            ).all()
        ), "the sums are wrong"
        assert said.device.type == "meta", f"of a meta tensor the fake makes a result on {said.device}"
        for name in ("shape", "dtype"):
            a, b = (getattr(each, name) for each in (real, said))
            assert a == b, f"for {dtype} {list(shape)} the kernel returns {name} {a}, and the fake says {b}"
        assert real.stride() == said.stride(), "the strides differ"
        assert fake(x).device == x.device, "the fake's result is on another device"
        _opcheck(operator, (x,))


CHECKS = {
    "Exercise 1": check_recompilations,
    "Exercise 2": check_halves,
    "Exercise 3": check_operator,
    "Exercise 4": check_fake,
}


def check_answer(name: str, *answers) -> None:
    """Print whether an exercise is solved."""
    check_exercise(name, lambda: CHECKS[name](*answers))


def roof() -> bench.Ceilings:
    """Return the measured roofs of this GPU, or the recorded ones."""
    rows = bench.measured_roofs().rows
    return bench.Ceilings(copy_gbps=rows[0]["gbps"], bf16_tflops=rows[1]["tflops"])
