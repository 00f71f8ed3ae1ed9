"""Measure the grouped products and the layer made of them beside DeepGEMM and torch, and check them in float64."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from unittest import mock

import torch
import torch.nn.functional as F

from ch14 import moe
from ch14.moe import kernels, native
from ch14.moe.configs import SETS, best_config, rejection
from ch14.moe.lesson import exercises, workloads
from ch14.moe.lesson.workloads import MODELS, Case, find_error, list_cases, make_masked, make_sorted
from tilelab.measure import bench, check, peers
from tilelab.records import results
from tilelab.runtime import build, device, provenance

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
FOLDER = pathlib.Path(moe.__file__).parent
SOURCES = (moe, kernels, native, *(FOLDER / name for name in ("configs.py", "grouped.cu", "swapped.cu")))
CAPACITY = 128  # rows of each expert in the masked layout

CHOICES = (("up", 256, "random"), ("down", 1024, "skewed"), ("up", 4096, "random"), ("down", 16384, "equal"))
MASKED_CHOICES = (("up", 1, "random"), ("up", 16, "random"), ("down", 64, "random"), ("up", 128, "skewed"))
# Each blind model has each number of tokens. Every second model has the other product and the other routing: more
# products would take longer, because DeepGEMM compiles each.
BLIND_CHOICES = (
    (("up", 64, "random"), ("up", 512, "skewed"), ("up", 4096, "random")),
    (("down", 64, "skewed"), ("down", 512, "random"), ("down", 4096, "skewed")),
)
BLIND_MASKED = (("up", 64, "random"),), (("down", 64, "skewed"),)
SKEWED = (("Qwen 3 30B", "up", 4096), ("DeepSeek-V3", "down", 4096))
LAYER_MODELS, LAYER_TOKENS = ("Qwen 3 30B", "Mixtral 8x7B"), (1, 32, 512, 4096)
GRADIENTS = (("Mixtral 8x7B", "up", 4096, "equal"), ("Qwen 3 30B", "up", 4096, "random"))
GRADIENTS += (("gpt-oss 20B", "down", 4096, "skewed"), ("OLMoE 7B", "up", 4096, "random"))
PADDED, PADDED_ROWS = (64, 4096, 2048), (16, 64, 80, 128, 160, 192, 256, 320)  # experts, N, K; rows of each
QUICK = dict(rounds=10, warm_s=0.1)


def experiment(name: str, *sources, can_run: Callable[[], bool] = lambda: True):
    """Decorate a function that measures rows on Hopper."""
    return results.experiment(
        name,
        functools.partial(provenance.source_hash, *SOURCES, *sources),
        can_run=lambda: device.current().has_wgmma and can_run(),
    )


def _where() -> str:
    return "cuda" if device.current().capability else "cpu"


# ---- kernels and peers, each a candidate of `bench.compare` on the tensors of `make_sorted` or `make_masked`


def prepare_course(a, weight, ends, out, scale_a, scale_b, config="best"):
    """Prepare the kernel of a configuration, or the kernel that "best" chooses."""
    scale_b = None if scale_b is None else scale_b.mT
    return moe.prepare(a, weight.mT, ends, scale_a=scale_a, scale_b=scale_b, out=out, config=config)


def prepare_triton(a, weight, ends, out, scale_a, scale_b):
    """Prepare the Triton kernel, in the configuration that it has where no CUDA kernel runs."""
    rows, dtype = out.numel() / out.shape[-1] / len(weight), moe.DTYPES[a.dtype]
    config = best_config(rows, out.shape[-1], dtype, False, "sm_90a")
    return prepare_course(a, weight, ends, out, scale_a, scale_b, config)


def prepare_torch(a, weight, ends, out, scale_a, scale_b):
    """Prepare torch's grouped product in bf16. With scales of blocks torch has none."""
    return lambda: torch._grouped_mm(a, weight.mT, offs=ends)


def pad_rows(offsets: torch.Tensor, alignment: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expert of each row, or -1, if each expert gets whole blocks of rows, and the new place of each row."""
    bounds, padded = workloads.find_bounds(offsets.tolist()), []
    places = [torch.empty(0, dtype=torch.long)]
    for expert, begin, end in bounds:
        places.append(torch.arange(end - begin) + len(padded))
        padded += [expert] * (math.ceil((end - begin) / alignment) * alignment)
    return torch.tensor(padded, dtype=torch.int32).to(offsets.device), torch.cat(places).to(offsets.device)


def prepare_deep_gemm(library, a, weight, offsets, out, scale_a, scale_b):
    """Prepare DeepGEMM's product of sorted rows, which wants each expert's rows padded; they are copied here."""
    experts, places = pad_rows(offsets)
    padded = torch.zeros(len(experts), a.shape[1], dtype=BF16, device=a.device).to(a.dtype)
    padded.view(torch.uint8)[places] = a.view(torch.uint8)
    result = torch.empty(len(experts), out.shape[1], dtype=BF16, device=a.device)
    if scale_a is None:

        def run():
            library.m_grouped_bf16_gemm_nt_contiguous(padded, weight, result, experts)
            return result
    else:
        scales = torch.ones(len(experts), scale_a.shape[1], device=a.device)
        scales[places] = scale_a
        scales = peers.align_columns(scales)

        def run():
            library.m_grouped_fp8_gemm_nt_contiguous((padded, scales), (weight, scale_b), result, experts)
            return result

    run.places = places
    return run


def prepare_deep_gemm_masked(library, a, weight, counts, out, scale_a, scale_b):
    """Prepare DeepGEMM's masked product, which wants the scales column by column for each expert."""
    expected = max(1, math.ceil(float(counts.float().mean())))
    scales = torch.stack([peers.align_columns(each).T for each in scale_a]).mT
    name = "m_grouped_fp8_gemm_nt_masked"
    multiply = getattr(library, name, None) or library.fp8_m_grouped_gemm_nt_masked

    def run():
        multiply((a, scales), (weight, scale_b), out, counts, expected)
        return out

    return run


def find_peers(fp8: bool, masked: bool = False) -> dict[peers.Peer, Callable]:
    """Return {peer: candidate}; a peer that is missing has a reason."""
    deep_gemm = peers.find("deep_gemm")
    prepare = prepare_deep_gemm_masked if masked else prepare_deep_gemm
    found = {deep_gemm: functools.partial(prepare, deep_gemm.library)}
    return found if fp8 else found | {peers.Peer("torch", torch.__version__): prepare_torch}


def compare(
    course: dict[str, Callable],
    rivals: dict[peers.Peer, Callable],
    make: Callable[[], tuple],
    find_fault: Callable[[Callable, tuple], tuple[str, float]],
    **timing,
) -> list[dict]:
    """Check and time kernels of the course beside peers, all interleaved; return a row for each pair.

    `find_fault(candidate, tensors)` returns "" or what is wrong, and the error. What is wrong is not timed.
    """
    tensors, faults = make(), {}
    candidates = course | {peer.name: prepare for peer, prepare in rivals.items()}
    reasons = {peer.name: peer.reason for peer in rivals}
    for name, candidate in candidates.items():
        try:
            faults[name] = (
                (reasons.get(name), math.inf) if reasons.get(name) else find_fault(candidate, tensors)
            )
        except torch.AcceleratorError:
            raise  # the CUDA context is lost, and with it everything that follows
        except Exception as error:  # a library may refuse the operands
            faults[name] = f"{type(error).__name__}: {device.first_line(error)[:200]}", math.inf
    del tensors
    able = {name: candidate for name, candidate in candidates.items() if not faults[name][0]}
    first = next((name for name in course if name in able), None)
    found = bench.compare(able, make, first, **timing) if first and len(able) > 1 else {}
    rows = []
    for name in course:
        for peer in rivals:
            fault = faults[name][0] or faults[peer.name][0]
            if name in found and peer.name in found:
                row = peers.relate(found[name], found[peer.name], peer)
            else:
                row = peers.fail(peer, fault or "nothing could be timed beside it.")
            measured = {"error": faults[name][1]} if math.isfinite(faults[name][1]) else {}
            rows.append(row | {"kernel": name} | measured)
    return rows


def find_product_fault(candidate: Callable, tensors: tuple) -> tuple[str, float]:
    """Run a candidate in poisoned memory; return "" or what is wrong with its product, and the error."""
    tensors[3].fill_(float("nan"))
    launch = candidate(*tensors)
    error = find_error(launch(), tensors, getattr(launch, "places", None))
    limit = check.TOLERANCE[BF16]
    return "" if error <= limit else f"the error {error:.1e} is above {limit:.1e}", error


def count_work(sizes: Sequence[int], n: int, k: int, fp8: bool) -> dict[str, float]:
    """Return the operations and bytes of a product, in which only experts with rows are read."""
    rows, active = sum(sizes), sum(size > 0 for size in sizes)
    return {
        "flops": 2 * rows * n * k,
        "nbytes": (rows * k + active * n * k) * (1 if fp8 else 2) + 2 * rows * n,
    }


def describe(case: Case, fp8: bool) -> dict:
    """Return what a row says of its case."""
    n, k = case.layer.product(case.part)
    about = {"set": case.chosen_on, "model": case.model, "part": case.part, "tokens": case.tokens}
    return about | {"routing": case.routing, "dtype": "fp8" if fp8 else "bf16", "shape": [n, k]}


def compile_chosen(cases: Sequence[Case], dtypes: Sequence[bool], masked: bool = False) -> None:
    """Compile the CUDA kernels that "best" means for these cases, in parallel."""
    jobs = {}
    for case, fp8 in ((case, fp8) for case in cases for fp8 in dtypes):
        (n, k), layer = case.layer.product(case.part), case.layer
        rows = layer.experts * CAPACITY if masked else sum(case.sizes)
        if not (fp8 and k % moe.BLOCK):
            config = native.choose_config(rows, layer.experts, n, k, fp8, False, masked)
            jobs[config, fp8] = native.job(config, "sm_90a", fp8)
    if device.current().has_wgmma:
        build.compile_ahead(jobs.values())


# ---- the experiments


@experiment("ch14_moe_shapes", prepare_triton, prepare_deep_gemm, pad_rows, workloads)
def measure_shapes():
    """Measure the products of models beside DeepGEMM, in bf16 also beside torch; sorted rows in many routings."""
    cases = list_cases(CHOICES)
    compile_chosen(cases, (False, True))
    return [row for case in cases for fp8 in (False, True) for row in measure_case(case, fp8)]


def measure_case(
    case: Case, fp8: bool, masked: bool = False, kernels: Sequence[str] = ("best", "Triton")
) -> list[dict]:
    """Check and time one product beside its peers; none in fp8 if K is not of whole blocks."""
    (n, k), sizes = case.layer.product(case.part), case.sizes
    if fp8 and k % moe.BLOCK:
        return []
    course = {name: prepare_course if name == "best" else prepare_triton for name in kernels}
    make = functools.partial(make_sorted, sizes, n, k, fp8, _where())
    if masked:
        make = functools.partial(make_masked, sizes, CAPACITY, n, k, fp8, _where())
    timing = count_work(sizes, n, k, fp8) | QUICK
    found = compare(course, find_peers(fp8, masked), make, find_product_fault, **timing)
    return [describe(case, fp8) | row for row in found]


@experiment("ch14_moe_masked", prepare_triton, prepare_deep_gemm_masked, workloads)
def measure_masked():
    """Measure the masked products of 1 to 128 tokens in fp8 beside DeepGEMM; short launches run in a CUDA graph."""
    cases = list_cases(MASKED_CHOICES)
    compile_chosen(cases, (True,), masked=True)
    return [row for case in cases for row in measure_case(case, True, masked=True)]


@experiment("ch14_moe_held_out", prepare_deep_gemm, prepare_deep_gemm_masked, pad_rows, workloads)
def measure_held_out():
    """Measure what "best" chooses for models that nothing was fitted to, beside DeepGEMM, in bf16 also beside torch."""
    rows = []
    for layout, choices, dtypes in (
        ("sorted", BLIND_CHOICES, (False, True)),
        ("masked", BLIND_MASKED, (True,)),
    ):
        cases, masked = workloads.list_blind(*choices), layout == "masked"
        compile_chosen(cases, dtypes, masked)
        for case, fp8 in ((case, fp8) for case in cases for fp8 in dtypes):
            rows += [{"layout": layout} | row for row in measure_case(case, fp8, masked, ("best",))]
    return rows


@experiment("ch14_moe_skew", workloads)
def measure_skew():
    """Measure routings of equally many tokens beside equal shares, with the tiles and waves that they ask for."""
    rows = []
    for (model, part, tokens), fp8 in ((each, fp8) for each in SKEWED for fp8 in (False, True)):
        layer = MODELS[model]
        (n, k), sizes = (
            layer.product(part),
            {each: workloads.route(layer, tokens, each) for each in workloads.ROUTINGS},
        )

        def make(sizes=sizes, n=n, k=k, fp8=fp8):
            tensors = make_sorted(sizes["equal"], n, k, fp8, _where())
            others = torch.tensor(list(sizes.values()), device=tensors[0].device).cumsum(1).int()
            return *tensors, others

        def prepare(place, a, weight, _, out, scale_a, scale_b, others):
            return prepare_course(a, weight, others[place], out, scale_a, scale_b)

        candidates = {each: functools.partial(prepare, place) for place, each in enumerate(sizes)}
        config, found = prepare(0, *make()).config, bench.compare(candidates, make, "equal", **QUICK)
        for routing, counts in sizes.items():
            tiles = sum(math.ceil(size / config.block_m) for size in counts) * math.ceil(n / config.block_n)
            about = {"model": model, "part": part, "tokens": tokens, "dtype": "fp8" if fp8 else "bf16"}
            about |= {"routing": routing, "config": str(config), "experts": sum(size > 0 for size in counts)}
            about |= {"tiles": tiles, "waves": math.ceil(tiles / max(device.current().sms, 1))}
            rows.append(about | found[routing].row())
    return rows


@experiment("ch14_moe_padding", prepare_course, workloads)
def measure_padding():
    """Measure Triton's tiles of 128 rows beside those of 64, for experts that all have as many rows."""
    rows, (large, small) = [], SETS["bf16", False][:2]
    candidates = {
        config.block_m: functools.partial(prepare_course, config=config) for config in (small, large)
    }
    for each in PADDED_ROWS:
        make = functools.partial(make_sorted, [each] * PADDED[0], *PADDED[1:], False, _where())
        found = bench.compare(candidates, make, small.block_m, **QUICK)
        rows.append({"rows": each, "config": str(large), "beside": str(small)} | found[large.block_m].row())
    return rows


def run_eager(x, gate_up, down, ids, weights):
    """Loop over the experts that have tokens, as the experts of Hugging Face's models do."""
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, choice = torch.where(ids == expert)
        gate, value = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        result = F.linear(F.silu(gate) * value, down[expert])
        out.index_add_(0, token, result * weights[token, choice, None].to(x.dtype))
    return out


def run_grouped(x, gate_up, down, ids, weights):
    """Compute the layer with torch's grouped product."""
    tokens, top_k = ids.shape
    order = ids.flatten().argsort()
    experts = torch.arange(len(gate_up), device=x.device)
    offsets = torch.searchsorted(ids.flatten()[order], experts, right=True, out_int32=True)
    gate, value = torch._grouped_mm(x[order // top_k], gate_up.mT, offs=offsets).chunk(2, -1)
    result = torch._grouped_mm(F.silu(gate) * value, down.mT, offs=offsets)
    return (result[order.argsort()].view(tokens, top_k, -1) * weights[..., None]).sum(1).to(x.dtype)


def make_layer(layer: workloads.Model, tokens: int, where: str) -> tuple:
    """Return x, gate_up, down, ids and weights in bf16, then both weights and their scales in fp8.

    Both kinds hold the same numbers but for rounding: gate_up and down in bf16 are made from those in fp8.
    """
    made = [
        workloads.make_operand((layer.experts, *layer.product(part)), moe.BLOCK, True, where)
        for part in ("up", "down")
    ]
    wide = []
    for values, scales in made:
        scales /= math.sqrt(values.shape[-1])
        wide.append(torch.empty(values.shape, dtype=BF16, device=where))
        for expert, matrix in enumerate(wide[-1]):
            matrix.copy_(moe._dequantise(values[expert], scales[expert], moe.BLOCK))
    x = torch.randn(tokens, layer.hidden, device=where).to(BF16)
    ids = torch.rand(tokens, layer.experts, device=where).topk(layer.top_k).indices
    weights = torch.rand(tokens, layer.top_k, device=where).softmax(-1)
    return x, *wide, ids, weights, *(tensor for pair in made for tensor in pair)


def compute_layer(x, gate_up, down, ids, weights) -> torch.Tensor:
    """Return the layer in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        token, choice = torch.where(ids == expert)
        gate, value = (x[token].double() @ gate_up[expert].double().T).chunk(2, -1)
        result = (F.silu(gate) * value) @ down[expert].double().T
        out.index_add_(0, token, weights[token, choice, None].double() * result)
    return out


def prepare_layer(x, gate_up, down, ids, weights, *in_fp8):
    """Prepare the layer in bf16."""
    return lambda: moe.moe(x, gate_up, down, ids, weights)


def prepare_fp8_layer(x, _, __, ids, weights, gate_up, of_gate_up, down, of_down):
    """Prepare the layer in fp8."""
    return lambda: moe.moe(x, gate_up, down, ids, weights, scale_gate_up=of_gate_up, scale_down=of_down)


def find_layer_fault(candidate: Callable, tensors: tuple) -> tuple[str, float]:
    """Run a candidate and compare its first tokens; return "" or what is wrong, and the error."""
    x, gate_up, down, ids, weights, *_ = tensors
    wanted = compute_layer(x[:8], gate_up, down, ids[:8], weights[:8])
    error = check.relative_error(candidate(*tensors)()[:8], wanted)
    # In fp8, x and the values between both products are rounded to four bits.
    limit = 0.1 if candidate is prepare_fp8_layer else 2**-6
    return "" if error <= limit else f"the error {error:.1e} is above {limit:.1e}", error


@experiment("ch14_moe_layer", run_eager, run_grouped, make_layer, workloads)
def measure_layer():
    """Measure the layer in bf16 and fp8 beside a loop over the experts, and torch's grouped products.

    The host needs longer to launch a layer of few tokens than the GPU to compute it, so launches are captured in CUDA
    graphs. The loop waits for the GPU, which no graph can, so beside it the layer is launched plainly.
    """

    def bind(run):
        return lambda *tensors: functools.partial(run, *tensors[:5])

    rows, course = [], {"moe bf16": prepare_layer, "moe fp8": prepare_fp8_layer}
    for model, tokens in ((model, tokens) for model in LAYER_MODELS for tokens in LAYER_TOKENS):
        torch._dynamo.reset()  # each number of tokens gets code of its own
        compiled = torch.compile(run_grouped, dynamic=False)
        make = functools.partial(make_layer, MODELS[model], tokens, _where())
        for graph, others in (
            (True, {"grouped": run_grouped, "compiled": compiled}),
            (False, {"eager": run_eager}),
        ):
            rivals = {peers.Peer(name, torch.__version__): bind(run) for name, run in others.items()}
            with torch.no_grad(), mock.patch.object(bench, "GRAPH_BELOW_US", math.inf if graph else 0):
                found = compare(course, rivals, make, find_layer_fault, **QUICK)
            rows += [{"model": model, "tokens": tokens, "graph": graph} | row for row in found]
    return rows


def prepare_gradient(g, a, offsets, out):
    """Prepare the gradient of the weights, G^T A over the rows of each expert."""
    return moe.gradient_planner.prepare((g, a, offsets), None)


def prepare_torch_gradient(g, a, offsets, out):
    """Prepare torch's."""
    return lambda: torch._grouped_mm(g.T, a, offs=offsets)


def find_gradient_fault(candidate: Callable, tensors: tuple) -> tuple[str, float]:
    """Run a candidate, compare a few experts in float64, and return the fault ("" if none) and the error."""
    g, a, offsets, _ = tensors
    found, worst = candidate(*tensors)(), 0.0
    bounds = workloads.find_bounds(offsets.tolist())
    for expert, begin, end in bounds[:: max(1, len(bounds) // 3)]:
        wanted = g[begin:end].double().T @ a[begin:end].double()
        worst = max(worst, check.relative_error(found[expert], wanted))
    limit = check.TOLERANCE[BF16]
    return "" if worst <= limit else f"the error {worst:.1e} is above {limit:.1e}", worst


@experiment("ch14_moe_gradient", prepare_torch_gradient, workloads)
def measure_gradient():
    """Measure the gradient of the weights in bf16 beside torch's grouped product along K."""
    rows = []
    for model, part, tokens, routing in GRADIENTS:
        chosen_on = "tuned" if model in MODELS else "held out"
        case = Case(chosen_on, model, part, tokens, routing)
        (n, k), sizes = case.layer.product(part), case.sizes

        def make(sizes=sizes, n=n, k=k):
            g, a = (workloads.make_operand((sum(sizes), each), 1, False, _where())[0] for each in (n, k))
            offsets = torch.tensor(sizes, device=a.device).cumsum(0).int()
            return g, a, offsets, torch.empty(1, device=a.device)

        rivals = {peers.Peer("torch", torch.__version__): prepare_torch_gradient}
        timing = {"flops": 2 * sum(sizes) * n * k} | QUICK
        found = compare({"gradient": prepare_gradient}, rivals, make, find_gradient_fault, **timing)
        rows += [describe(case, False) | row for row in found]
    return rows


# ---- errors

CHECKED = {
    "ragged": [70, 0, 133, 1, 64, 300],
    "one has all": [0, 0, 0, 500, 0, 0],
    "whole tiles": [128] * 6,
    "one row each": [1] * 6,
    "nothing": [0] * 6,
}
LAYOUTS = ("sorted", "masked", "SwiGLU")


def verify(
    config, sizes: Sequence[int], fp8: bool, layout: str, where: str, k: int = 512
) -> tuple[str, float]:
    """Run a configuration in poisoned memory; return "" or what is wrong, and the largest error of any expert."""
    masked, swiglu = layout == "masked", layout == "SwiGLU"
    n = 256 if swiglu else 200
    if masked:
        a, weight, ends, _, scale_a, scale_b = make_masked(sizes, max(*sizes, 8) + 3, n, k, fp8, where)
    else:
        spare = [*sizes[:-1], sizes[-1] + 3]  # the last three rows belong to nobody
        a, weight, ends, _, scale_a, scale_b = make_sorted(spare, (1 + swiglu) * n, k, fp8, where)
        ends[-1] -= 3
    weight_scale = 1 / math.sqrt(k)
    if fp8:
        scale_b *= weight_scale
    else:
        weight *= weight_scale
    shape, dtype = (*a.shape[:-1], n), FP8 if fp8 and swiglu else BF16
    flat, find_damage = check.make_poisoned((math.prod(shape[:-1]), n), dtype, where)
    out, out_scale = flat.view(shape), None
    if fp8 and swiglu:
        out_scale = peers.align_columns(torch.full((len(a), n // moe.BLOCK), float("nan"), device=where))
    planner = moe.masked_planner if masked else moe.planner
    kind = {"sorted": "rows", "masked": "masked", "SwiGLU": "swiglu"}[layout]
    of_b = None if scale_b is None else scale_b.mT
    planner.prepare((a, weight.mT, ends, scale_a, of_b, out_scale), out, config, kind)()
    found = moe._dequantise(flat, out_scale, 1)
    is_stored, worst = torch.zeros(len(flat), dtype=torch.bool, device=where), 0.0
    rows_a, rows_s = a.flatten(0, -2), None if scale_a is None else scale_a.flatten(0, -2)
    for expert, begin, end in workloads.find_bounds(ends.tolist(), a.shape[1] if masked else 0):
        left = moe._dequantise(rows_a[begin:end], None if rows_s is None else rows_s[begin:end], 1)
        right = moe._dequantise(weight[expert], None if scale_b is None else scale_b[expert], moe.BLOCK)
        wanted = left @ right.T
        if swiglu:
            gate, value = wanted.chunk(2, -1)
            wanted = F.silu(gate) * value
        is_stored[begin:end] = True
        worst = max(worst, check.relative_error(found[begin:end], wanted))
    limit = 2**-4 if dtype == FP8 else check.TOLERANCE[BF16]
    fault = find_damage()
    if worst > limit:
        fault = f"the error {worst:.1e} is above {limit:.1e}"
    elif not bool(found[~is_stored].isnan().all()):
        fault = "rows of no expert were stored"
    return fault, worst


def verify_layer(fp8: bool, where: str) -> tuple[str, float]:
    """Run a small layer where a wait for the GPU raises; return "" or what is wrong, and the error."""
    tensors = make_layer(workloads.Model(8, 2, 256, 128), 37, where)
    prepare = prepare_fp8_layer if fp8 else prepare_layer
    launch = prepare(*tensors)
    launch()  # it compiles
    if where == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch()
        except RuntimeError as error:
            return f"it waits for the GPU: {device.first_line(error)}", math.inf
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return find_layer_fault(prepare, tensors)


def verify_gradient(sizes: Sequence[int], where: str) -> tuple[str, float]:
    """Run the gradient of the weights, where rows of no expert are NaN; return "" or what is wrong, and the error."""
    a, g, offsets, _ = exercises.make_gradient((sizes, 3, 200, 136), where)
    error = check.relative_error(
        prepare_gradient(g, a, offsets, None)(), exercises.multiply_rows(a, g, offsets)
    )
    limit = check.TOLERANCE[BF16]
    return "" if error <= limit else f"the error {error:.1e} is above {limit:.1e}", error


def list_checked(fp8: bool, layout: str) -> list[tuple[str, object]]:
    """Return (kernel, configuration) that are checked on this machine."""
    here, swiglu = device.current(), layout == "SwiGLU"
    target, dtype = here.target or "sm_90a", "fp8" if fp8 else "bf16"
    able = [each for each in SETS[dtype, swiglu] if not rejection(each, target, dtype, swiglu)]
    found = [("Triton", config) for config in able]
    if here.has_wgmma:
        every = native.configs(fp8, swiglu).values()
        found += [("CUDA", each) for each in every if native.smem_bytes(each, 6, fp8) <= native.SMEM_BYTES]
    return found


@experiment("ch14_moe_check", workloads)
def measure_checks():
    """Check every configuration in every layout and routing against float64; return a row per kernel and layout."""
    rows, here = [], device.current()
    for fp8, layout in ((fp8, layout) for fp8 in (False, True) for layout in LAYOUTS):
        checked = list_checked(fp8, layout)
        if here.has_wgmma:
            build.compile_ahead(native.job(each, "sm_90a", fp8) for kind, each in checked if kind == "CUDA")
        for kind in dict.fromkeys(kind for kind, _ in checked):
            configs = [config for each, config in checked if each == kind]
            found = {
                f"{config}, {name}": verify(config, sizes, fp8, layout, _where())
                for config in configs
                for name, sizes in CHECKED.items()
            }
            rows.append(_judge(found, fp8, layout, kind, len(configs), len(CHECKED)))
    for fp8 in (False, True):
        rows.append(_judge({"": verify_layer(fp8, _where())}, fp8, "the layer, without a wait", "best", 1, 1))
    found = {name: verify_gradient(sizes, _where()) for name, sizes in CHECKED.items()}
    return [*rows, _judge(found, False, "the gradient of the weights", "Triton", 1, len(CHECKED))]


def _judge(
    found: dict[str, tuple[str, float]], fp8: bool, layout: str, kind: str, configs: int, routings: int
):
    """Return the row of checks, each {what was run: (what is wrong, error)}."""
    error = max(error for _, error in found.values())
    row = {"dtype": "fp8" if fp8 else "bf16", "layout": layout, "kernel": kind, "configurations": configs}
    row |= {"routings": routings} | ({"error": error} if math.isfinite(error) else {})
    reason = "; ".join(f"{what}: {fault}" for what, (fault, _) in found.items() if fault)[:400]
    return row | {"status": "wrong" if reason else "ok", "reason": reason}


def sanitizer_cases() -> None:
    """Run every configuration in every layout on one routing. Raise AssertionError where a result is wrong."""
    for fp8, layout in ((fp8, layout) for fp8 in (False, True) for layout in LAYOUTS):
        for _, config in list_checked(fp8, layout):
            fault, _ = verify(config, CHECKED["ragged"], fp8, layout, _where(), k=256)
            assert not fault, f"{config}, {layout}: {fault}"


@experiment("ch14_moe_sanitizer", workloads, can_run=check.can_sanitize)
def run_sanitizers():
    """Return what each tool of compute-sanitizer finds in `sanitizer_cases`."""
    return check.sanitize("ch14.moe.lesson.experiments", "grouped")
