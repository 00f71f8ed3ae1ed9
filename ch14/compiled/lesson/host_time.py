"""Measure what the CPU pays for a repeated call of each operator, beside torch's own, and where the time goes.

A model of small layers is as slow as the CPU starts its kernels. `python -m ch14.compiled.lesson.host_time` prints the
rows.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ch07 import resample
from ch10 import wgmma_gemm
from ch14 import attention, blockscaled, fp4_decode, fp8_gemm, gemm, mx_formats
from ch14.blockscaled import emulated
from ch14.blockscaled import operator as blockscaled_operator
from ch14.descriptors.lesson.launch_cost import measure_enqueue_us
from ch14.fp8_gemm.lesson.verification import fp8_operands
from ch14.mx_formats import number_formats
from tilelab import cli
from tilelab.measure import check
from tilelab.records import results
from tilelab.runtime import device, operators, plans, provenance, triton_launch
from tilelab.runtime.cuda import PreparedLaunch

WHERE = "cuda"
SIZE = 512  # the GPU is done before the CPU asks for more
BF16 = torch.bfloat16


@dataclasses.dataclass
class Case:
    """A call of the course's function, torch's own call beside it, and what the course's call returns.

    `plan` finds the plan of the call and `launch` runs it into a result of `make_out`; they are None where a call has
    several plans.
    """

    name: str
    call: Callable[[], object]
    peer: str
    peer_call: Callable[[], object]
    reference: Callable[[], torch.Tensor]
    traced: tuple = ()
    plan: Callable[[], object] | None = None
    make_out: Callable[[], object] | None = None
    launch: Callable[[object], object] | None = None


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=WHERE).to(BF16)


def _planned(name, call, beside, planner, inputs, *options) -> Case:
    """Return the case of a function with a Planner; `beside` is (peer, its call, reference)."""

    def find():
        return planner.find(inputs, None, *options)

    plan = find()
    return Case(name, call, *beside, inputs, find, plan.make_out, lambda out: plan.launch(*inputs, out))


def make_bf16_cases() -> list[Case]:
    """Return the products of bf16 and attention."""
    a, b = _random(SIZE, SIZE), _random(SIZE, SIZE).T
    mm = "torch.mm", lambda: torch.mm(a, b), lambda: a.double() @ b.double()
    q, k, v = (_random(1, 8, SIZE, 128) for _ in range(3))

    def attend(function):
        return lambda: function(q, k, v, is_causal=True)

    sdpa = "SDPA", attend(F.scaled_dot_product_attention), attend(attention.spec)
    options = True, None, "best"
    cases = [
        _planned("ch14.gemm", lambda: gemm.gemm(a, b), mm, gemm.planner, (a, b, None, None), "best"),
        Case("torch.ops.tiles.gemm", lambda: torch.ops.tiles.gemm(a, b), *mm),
        _planned("ch14.attention", attend(attention.attention), sdpa, attention.planner, (q, k, v), *options),
    ]
    if device.current().has_wgmma:
        own = wgmma_gemm.planner, (a, b), "best"
        cases.append(_planned("ch10.wgmma_gemm", lambda: wgmma_gemm.gemm(a, b), mm, *own))
    return cases


def make_product_cases() -> list[Case]:
    """Return the block-scaled products beside torch's scaled_mm and torch.mm."""
    x, (weight, packed) = _random(8, SIZE), (mx_formats.quantise(_random(SIZE, SIZE), "mxfp4") for _ in "ab")
    dense, wide = mx_formats.dequantise(weight).T, mx_formats.dequantise(packed)

    def multiply(name, left, plain, *own):
        beside = "torch.mm", lambda: torch.mm(plain, dense), lambda: blockscaled.spec(left, weight.T)
        return _planned(name, lambda: blockscaled.matmul(left, weight.T), beside, *own)

    tensors = x, weight.values, weight.scales
    cases = [multiply("blockscaled.matmul, decode", x, x, fp4_decode.planner, tensors, "best")]
    if device.current().target not in blockscaled.NATIVE:
        tensors, *kinds = emulated.describe_operands(packed, weight)
        own = emulated.planner, tensors, *kinds, "best"
        cases.append(multiply("blockscaled.matmul, mxfp4", packed, wide, *own))
    if device.current().has_wgmma:
        a, b, *scales, _ = fp8_operands(SIZE, SIZE, SIZE, WHERE)
        (scale_a, scale_b), one = scales, torch.ones((), device=WHERE)
        beside = (
            "torch._scaled_mm, one scale",
            lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=BF16),
            lambda: fp8_gemm.spec(a, b, scale_a, scale_b),
        )
        own = fp8_gemm.planner, (a, b, scale_a, scale_b, None, None), None, "best", None
        cases.append(
            _planned(
                "blockscaled.matmul, fp8",
                lambda: blockscaled.matmul((a, scale_a), (b, scale_b)),
                beside,
                *own,
            )
        )
        cases.append(
            Case("torch.ops.tiles.fp8", lambda: torch.ops.tiles.fp8(a, b, scale_a, scale_b), *beside)
        )
    return cases


def make_pass_cases() -> list[Case]:
    """Return the passes over memory beside torch's copy."""
    x, room = _random(SIZE, SIZE), torch.empty(SIZE, SIZE, dtype=BF16, device=WHERE)

    def beside(form, scale=None):
        def restore():
            made = number_formats.quantise(x, number_formats.lookup(form), scale=scale)
            return number_formats.dequantise(made)

        return "copy_", lambda: room.copy_(x), restore

    def quantise(name, form, scale=None) -> Case:
        options = form, "floor", False, scale is not None, "best"

        def find():
            return mx_formats.quantise_planner.find((x, None, None, None), None, *options)

        plan = find()
        return Case(
            name,
            lambda: mx_formats.quantise(x, form, tensor_scale=scale),
            *beside(form, None if scale is None else torch.full((1,), scale, device=WHERE)),
            (x,),
            find,
            plan.allocate,
            lambda out: plan.launch(x, out.values, out.scales, out.pair),
        )

    packed = mx_formats.quantise(x, "nvfp4")
    own = mx_formats.dequantise_planner, (packed.values, packed.scales, packed.pair), packed.format.name
    own += packed.shape, packed.tiled, "best"
    cases = [
        quantise("quantise, mxfp8", "mxfp8_e4m3"),
        quantise("quantise, nvfp4, scale given", "nvfp4", 0.5),
        quantise("quantise, nvfp4", "nvfp4"),
        _planned("dequantise, nvfp4", lambda: mx_formats.dequantise(packed), beside("nvfp4"), *own),
    ]
    features = _random(2, SIZE, 64)
    times = torch.arange(float(SIZE), device=WHERE).expand(2, -1).contiguous()
    given = features, times, torch.rand(2, SIZE, device=WHERE) * SIZE
    moved = torch.empty_like(features)
    copy = "copy_", lambda: moved.copy_(features), lambda: resample.spec(*given)

    def planned_resample(name, validate) -> Case:
        def call():
            return resample.resample(*given, validate=validate)

        return _planned(name, call, copy, resample.planner, given, "best")

    return [*cases, planned_resample("resample, validate=False", False), planned_resample("resample", True)]


def check_case(case: Case) -> dict:
    """Return {status, error} of the course's result against the reference."""
    found = case.call()
    found = mx_formats.dequantise(found) if isinstance(found, mx_formats.Packed) else found
    error = check.relative_error(found, case.reference())
    return {"status": "ok" if error <= 1e-2 else "wrong", "error": error}


def measure_stages(case: Case) -> dict[str, float]:
    """Return the microseconds of the parts of a call.

    `traced_us`: is the call traced? `find_us`: find the plan. `allocate_us`: take memory for the result. `launch_us`:
    launch at the same addresses. `moved_us`: launch with a result that lies elsewhere than in the launch before.
    """
    if case.plan is None:
        return {}
    out, other = case.make_out(), case.make_out()
    stages = {
        "traced_us": lambda: operators.is_traced(*case.traced),
        "find_us": case.plan,
        "allocate_us": case.make_out,
        "launch_us": lambda: case.launch(out),
    }
    found = measure_enqueue_us(stages, 100, 9)
    both = measure_enqueue_us({"both": lambda: (case.launch(out), case.launch(other))}, 50, 9)["both"]
    return found | {"moved_us": both / 2}


def measure_case(case: Case) -> dict:
    """Check a case, and return its row.

    `us` is the CPU's time of a repeated call that nobody waits for, `peer_us` torch's, `ratio` their quotient. Both are
    medians of five rounds; a round is the median of five interleaved batches of 200 calls. The quartiles of the rounds
    are `spread` of `us` apart. A call of `resample` that checks the times waits for the GPU.
    """
    checked = check_case(case)
    rounds = [measure_enqueue_us({"ours": case.call, "peer": case.peer_call}, 200, 5) for _ in range(5)]
    ours, peers = ([each[who] for each in rounds] for who in ("ours", "peer"))
    low, us, high = statistics.quantiles(ours, n=4)
    peer_us = statistics.median(peers)
    return {
        "name": case.name,
        **checked,
        "us": us,
        "peer": case.peer,
        "peer_us": peer_us,
        "ratio": us / peer_us,
        "spread": (high - low) / us,
        **measure_stages(case),
    }


def source() -> str:
    """Return the hash of what a call runs on the CPU, and of how it is measured."""
    launches = plans, operators, triton_launch, PreparedLaunch
    functions = gemm.gemm, wgmma_gemm.gemm, attention.attention, resample.resample, resample._plan
    scaled = blockscaled_operator, blockscaled, fp4_decode._plan, emulated._plan, emulated.run
    scaled += fp8_gemm._plan, fp8_gemm.run, mx_formats
    measured = measure_enqueue_us, measure_case, measure_stages
    cases = _planned, make_bf16_cases, make_product_cases, make_pass_cases
    return provenance.source_hash(*launches, *functions, *scaled, *measured, *cases)


@results.experiment("ch14_compiled_host_time", source)
def measure_host_time():
    """Measure what the CPU pays for a repeated call of every operator, with its parts."""
    with torch.no_grad():
        return [
            measure_case(case)
            for make in (make_bf16_cases, make_product_cases, make_pass_cases)
            for case in make()
        ]


COMMAND = cli.Command(
    module="ch14.compiled.lesson.host_time",
    description=__doc__.splitlines()[0],
    options={},
    columns="name status us peer peer_us ratio spread traced_us find_us allocate_us launch_us moved_us error",
    source=source,
    measure=lambda options: measure_host_time(),
)

if __name__ == "__main__":
    COMMAND.run()
