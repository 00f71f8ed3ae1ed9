"""Inputs, the ladder and checks of `notebooks/11_ch14_compiled.ipynb`, for the reader's code among others."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import triton

from ch14.compiled.lesson import generated, pointwise
from tilelab.cells import lesson
from tilelab.measure import bench, check
from tilelab.measure.check import make_checker
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
lesson.register("ch14_compiled_ladder", "11_ch14_compiled", *STEPS)
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


# ---- four ways to launch a kernel


def compare_ways(ways: dict[str, tuple[Callable, str, Sequence]]) -> results.Table:
    """Return a table of ways to launch a kernel: the graphs, what Inductor sees of the launch, and the gradient.

    `ways` maps a name to a function of g and u, a regular expression for the launch in the program that Inductor
    writes ("" where there is none), and what the program needs beside the function, as `generate` takes it in `also`.
    """
    rows = []
    for name, (function, launch, also) in ways.items():
        g, u, _ = make_case((16, 64), device_here())
        if launch:  # under fullgraph=True, for an H200
            program = generated.generate(function, (8192, 14336), (8192, 14336), also=also)
            seen = "1 graph, 0 breaks", re.search(launch, program.body())[0]
        else:
            seen = describe_breaks(function, g, u).splitlines()[0], "nothing: Python runs between the graphs"
        gradient = describe_gradient(function, g, u)
        rows.append(dict(zip(("launch", "graphs", "Inductor sees", "gradient"), (name, *seen, gradient))))
    return results.table(rows, "four ways to launch one kernel; the gradient is that of an eager call")


def describe_gradient(function: Callable, g: torch.Tensor, u: torch.Tensor) -> str:
    """Return what becomes of the gradients of a function that computes silu(2 g) * u + 1."""
    exact = [part.double().requires_grad_() for part in (g, u)]
    wanted = torch.autograd.grad(spec(2 * exact[0], exact[1]).sum(), exact)
    leaves = [part.detach().requires_grad_() for part in (g, u)]
    try:
        result = function(*leaves)
        if not result.requires_grad:
            return "lost, without a word"
        found = torch.autograd.grad(result.sum(), leaves)
    except RuntimeError as error:
        reason = device.first_line(error)
        return "refused: no formula" if "no autograd formula" in reason else f"not run here: {reason}"
    return f"right, error {max(map(check.relative_error, found, wanted)):.1e}"


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


def spec_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean of x² per row + eps) * weight in float64."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def check_norm(make_operator: Callable) -> None:
    """Raise AssertionError unless `make_operator(name)` returns RMSNorm as an operator with a backward.

    The operator takes x (rows, columns), weight (columns,) and eps. It runs in three dtypes and on a transposed x.
    """
    operator, where, eps = make_operator(new_name()), device_here(), 0.25
    schema = operator._opoverload._schema
    written = [each.name for each in schema.arguments if each.alias_info is not None]
    assert not written, f"the operator changes no argument; mutates_args names {', '.join(written)}"
    assert operator._abstract_fn is not None, "register a fake kernel, which says what the operator returns"
    limits = {torch.bfloat16: check.TOLERANCE[torch.bfloat16], torch.float32: 1e-5, torch.float64: 1e-12}
    for shape, dtype in (((5, 40), torch.bfloat16), ((1, 4000), torch.float32), ((7, 16), torch.float64)):
        for layout in ("", ", transposed", ", cut from wider rows"):
            rows, columns = shape
            if layout == ", transposed":
                x = torch.randn(columns, rows, device=where).to(dtype).T
            else:
                x = torch.randn(rows, columns + 8 * bool(layout), device=where).to(dtype)[:, :columns]
            weight = torch.randn(columns, 2, device=where).to(dtype)[:, 0]
            what, given = f"for {dtype} {list(shape)}{layout}", (x.clone(), weight.clone())
            memory, found = lesson.LaunchMemory([x, weight], outputs=0), []
            fault = lesson.run_launch(memory, lambda x, w, found=found: found.append(operator(x, w, eps)))
            assert not (fault := fault or memory.find_damage()), f"{what} {fault}"
            (real,) = found
            exact = spec_norm(*given, eps)
            error = check.relative_error(real, exact)
            assert error <= limits[dtype], f"{what} the error is {error:.1e} of the largest result"
            assert dtype != torch.bfloat16 or check.ulps(real, exact) <= 0.51, (
                f"{what} round once, at the end"
            )
            try:
                said = operator(*(part.to("meta") for part in given), eps)
            except NotImplementedError:
                raise AssertionError(
                    "tensors without data reach the kernel: register a fake kernel"
                ) from None
            for name in ("shape", "dtype"):
                a, b = (getattr(each, name) for each in (real, said))
                assert a == b, f"{what} the operator returns {name} {a}, and the fake says {b}"
            assert said.device.type == "meta", f"of meta tensors the fake makes a result on {said.device}"
            fake = operator._abstract_fn(x, weight, eps)
            assert fake.device == x.device, f"the fake's result is on {fake.device}, and x on {x.device}"
            # a stride of a dimension of size 1 moves nothing, and Inductor does not assert it
            a, b = ([step for step, n in zip(each.stride(), shape) if n > 1] for each in (real, fake))
            assert a == b, f"{what} the strides are {real.stride()}; fake: {fake.stride()}"
    try:
        lesson.triton_cell.record_launch(lambda *given: lambda: operator(*given, eps), given)
    except ValueError:
        raise AssertionError("the operator launches no Triton kernel") from None
    pair = [torch.randn(size, dtype=torch.float64, device=where).requires_grad_() for size in ((3, 5), (5,))]
    try:
        with _quiet():
            torch.autograd.gradcheck(lambda x, weight: operator(x, weight, eps), pair)
    except RuntimeError as error:
        reason = " ".join(str(error).split()).partition(",numerical")[0].partition(", numerical")[0]
        raise AssertionError(f"gradcheck: {reason[:200]}") from None
    x, weight = (torch.randn(size, device=where).bfloat16() for size in ((300, 64), (300,)))
    narrow = [x.T.requires_grad_(), weight.requires_grad_()]
    exact = [part.detach().double().requires_grad_() for part in narrow]
    grad = torch.randn(300, 64, device=where).bfloat16().T
    found = torch.autograd.grad(operator(*narrow, eps), narrow, grad)
    wanted = torch.autograd.grad(spec_norm(*exact, eps), exact, grad.double())
    error = max(map(check.relative_error, found, wanted))
    assert error <= 1.1 * 2**-8, f"a gradient in bfloat16 is off by more than one rounding: {error:.1e}"
    _opcheck(operator, (*pair, eps))
    torch._dynamo.reset()
    with _quiet():
        compiled = torch.compile(
            lambda x, w: operator(x * 2, w, eps).square(), backend="aot_eager", fullgraph=True
        )
        found = torch.autograd.grad(compiled(*pair).sum(), pair)
    wanted = torch.autograd.grad(spec_norm(pair[0] * 2, pair[1], eps).square().sum(), pair)
    error = max(map(check.relative_error, found, wanted))
    assert error <= 1e-12, f"inside a compiled function the gradient is wrong: the error is {error:.1e}"


CHECKS = {
    "Exercise 1": check_recompilations,
    "Exercise 2": check_operator,
    "Exercise 3": check_fake,
    "Exercise 4": check_norm,
}
check_answer = make_checker(CHECKS)


def roof() -> bench.Ceilings:
    """Return the measured roofs of this GPU, or the recorded ones."""
    rows = bench.measured_roofs().rows
    return bench.Ceilings(copy_gbps=rows[0]["gbps"], bf16_tflops=rows[1]["tflops"])
