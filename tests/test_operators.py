"""torch.ops.tiles: every operator traces, with dynamic shapes, and differentiates or says what to use instead.

The operators with a Triton kernel run in the interpreter. Those in CUDA C++ are traced with fake tensors of a GPU.
"""

import ast
import functools
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import cases
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from ch07 import resample
from ch10 import wgmma_gemm
from ch14 import attention, blockscaled, fp4_decode, gemm, mx_formats
from ch14.mx_formats import number_formats
from tilelab import ROOT
from tilelab.measure import check
from tilelab.runtime import device, operators

GPU = device.current().capability is not None
WHERE = "cuda" if GPU else "cpu"
TILES = torch.ops.tiles


def random(*shape, dtype=torch.float16):
    return torch.randn(*shape, device=WHERE).to(dtype)


def make_rows(count, form=None, **layout):
    """Return random rows of 96 numbers in bfloat16; with a format they are quantised."""
    x = random(count, 96, dtype=torch.bfloat16)
    return x if form is None else mx_formats.quantise(x, form, **layout)


def list_parts(packed, *arguments):
    return packed.values, packed.scales, packed.pair, *arguments


def call_quantise(form, tiled=False):
    return lambda: (TILES.quantise, (make_rows(40), form, "floor", tiled))


def call_dequantise(form, tiled=False):
    return lambda: (TILES.dequantise, list_parts(make_rows(40, form, tiled=tiled), form, 96, tiled))


def call_pair(form):
    """What torch.ops.tiles.quantise returns goes into torch.ops.tiles.dequantise, also the empty pair."""
    parts = TILES.quantise(make_rows(40), form)
    return lambda: (TILES.dequantise, (*parts, form, 96))


def call_decode():
    packed = make_rows(48, "mxfp4")
    return TILES.decode, (make_rows(4), packed.values, packed.scales)


# Each returns an operator that the interpreter can run, and arguments for it.
CALLS = {
    "gemm": lambda: (TILES.gemm, (random(64, 32), random(48, 32).T)),
    "gemm-row-by-row": lambda: (TILES.gemm, (random(5, 40)[:, :32], random(32, 48))),
    "attention": lambda: (
        TILES.attention,
        (random(1, 4, 24, 64), random(1, 2, 40, 64), random(1, 2, 40, 64), False, 0.2),
    ),
    "attention-transposed": lambda: (
        TILES.attention,
        tuple(random(2, 24, 2, 64).transpose(1, 2) for _ in range(3)),
    ),
    "quantise-mxfp8_e4m3-tiled": call_quantise("mxfp8_e4m3", tiled=True),
    "quantise-nvfp4": call_quantise("nvfp4"),
    "dequantise-mxfp8_e4m3-tiled": call_dequantise("mxfp8_e4m3", tiled=True),
    "dequantise-nvfp4": call_dequantise("nvfp4"),
    "dequantise-empty-pair": lambda: call_pair("mxfp4")(),
    "decode": call_decode,
    "block_scaled_mm": lambda: (
        TILES.block_scaled_mm,
        (
            *list_parts(make_rows(40, "mxfp4"), "mxfp4", False),
            *list_parts(make_rows(48, "mxfp4"), "mxfp4", False),
        ),
    ),
}


@pytest.mark.compile
@pytest.mark.skipif(GPU, reason="test_every_operator_passes_opcheck_on_a_gpu has larger shapes")
@pytest.mark.parametrize("name", CALLS)
def test_every_operator_passes_opcheck(name):
    op, arguments = CALLS[name]()
    assert set(opcheck(op.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.compile
@pytest.mark.skipif(GPU, reason="the CPU's kernels cannot compare float8")
def test_float8_passes_opcheck():
    a = random(64, 64).to(torch.float8_e4m3fn)
    scale = torch.ones(1)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    assert set(opcheck(TILES.gemm.default, (a, a.T, scale, scale), test_utils=tests).values()) == {"SUCCESS"}


@pytest.mark.gpu
def test_every_operator_passes_opcheck_on_a_gpu():
    a, weight = (random(rows, 512, dtype=torch.bfloat16) for rows in (256, 384))
    calls = [(TILES.gemm, (a, weight.T)), (TILES.attention, tuple(random(1, 2, 256, 128) for _ in range(3)))]
    if device.current().has_wgmma:
        left, right = mx_formats.quantise(a, "fp8_1x128"), random(384, 512).to(torch.float8_e4m3fn)
        scales = torch.ones(3, 4, device="cuda")
        calls += [
            (TILES.wgmma_gemm, (a, weight.T)),
            (TILES.fp8, (left.values.view(torch.float8_e4m3fn), right.T, left.scales, scales.T)),
        ]
    features, times = random(2, 64, 32), torch.linspace(0, 1, 64, device="cuda").expand(2, 64).contiguous()
    calls += [(TILES.resample, (features, times, times[:, ::2].contiguous()))]
    for op, arguments in calls:
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")[op is TILES.fp8 :]
        assert set(opcheck(op.default, arguments, test_utils=tests).values()) == {"SUCCESS"}, op


def multiply_quantised(x, y):
    return blockscaled.matmul(mx_formats.quantise(x, "mxfp4"), mx_formats.quantise(y, "mxfp4").T)


MODELS = {  # a function of tensors whose first one may have any number of rows, and what makes the others
    "gemm": (lambda a, b: gemm.gemm(a, b) * 2, lambda rows: (random(rows, 32), random(48, 32).T)),
    "gemm-out": (
        lambda a, b: gemm.gemm(a, b, out=a.new_empty(a.shape[0], b.shape[1])),
        lambda rows: (random(rows, 32), random(48, 32).T),
    ),
    "attention": (
        lambda q, k: attention.attention(q, k, k, is_causal=True) + 1,
        lambda rows: (random(1, 2, rows, 64), random(1, 2, 40, 64)),
    ),
    "quantise": (
        lambda x: mx_formats.dequantise(mx_formats.quantise(x, "nvfp4")),
        lambda rows: (random(rows, 96, dtype=torch.bfloat16),),
    ),
    "matmul": (
        multiply_quantised,
        lambda rows: (random(rows, 96, dtype=torch.bfloat16), random(48, 96, dtype=torch.bfloat16)),
    ),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_graph_for_any_number_of_rows(name):
    from torch._dynamo.testing import CompileCounterWithBackend  # its import takes seconds

    function, make = MODELS[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (24, 40):
            inputs = make(rows)
            assert torch.equal(compiled(*inputs), function(*inputs))
    assert counter.frame_count == 1


def test_operators_in_cuda_are_traced_without_a_gpu():
    """make_fx and torch.compile see shapes, strides and dtypes of a GPU's tensors, which are fake."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def trace(function, *tensors):
        graph = make_fx(function, tracing_mode="symbolic")(*tensors)
        return [node.target for node in graph.graph.nodes if node.op == "call_function"]

    def multiply_scaled(a, b, s, t):
        return blockscaled.matmul((a, s), (b.T, t.T))

    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        a, weight = (torch.empty(rows, 512, dtype=torch.bfloat16, device="cuda") for rows in (100, 384))
        codes = [matrix.to(torch.float8_e4m3fn) for matrix in (a, weight)]
        scales = [torch.empty(shape, device="cuda") for shape in ((100, 4), (3, 4))]
        trajectories = [torch.empty(shape, device="cuda") for shape in ((2, 64, 32), (2, 64), (2, 30))]
        for function, inputs, op, shape in (
            (lambda a, w: wgmma_gemm.gemm(a, w.T), (a, weight), TILES.wgmma_gemm, (100, 384)),
            (lambda a, w: gemm.gemm(a, w.T), (a, weight), TILES.gemm, (100, 384)),
            (multiply_scaled, (*codes, *scales), TILES.fp8, (100, 384)),
            (lambda f, s, t: resample.resample(f, s, t), trajectories, TILES.resample, (2, 30, 32)),
        ):
            found = function(*inputs)
            assert found.shape == shape and found.device.type == "cuda", op
            assert op.default in trace(function, *inputs)


@pytest.mark.parametrize("layout", ["k", "n"])
@cases("m, n, k", (24, 48, 32), (13, 16, 40), (8, 24, 20))  # M and K need not be multiples of 8
def test_gemm_has_a_backward_pass(layout, m, n, k):
    whole = (k + 7) // 8 * 8
    a = random(m, whole)[:, :k].requires_grad_()
    b = (random(n, whole)[:, :k].T if layout == "k" else random(k, n)).requires_grad_()
    c, gradient = gemm.gemm(a, b), random(m, n)
    assert c.grad_fn is not None
    for found, wanted in zip(
        torch.autograd.grad(c, (a, b), gradient),
        torch.autograd.grad(a.double() @ b.double(), (a, b), gradient.double()),
    ):
        assert check.relative_error(found, wanted) < 2e-3
    # the gradient of sum has strides of zero
    (only_b,) = torch.autograd.grad(gemm.gemm(a.detach(), b).sum(), b)
    assert check.relative_error(only_b, a.detach().double().sum(0)[:, None].expand(k, n)) < 2e-3


@pytest.mark.compile
def test_the_backward_pass_is_traced_and_differentiates_again():
    a, weight = random(16, 32).requires_grad_(), random(24, 32).requires_grad_()

    def loss(a, weight):
        return (gemm.gemm(a, weight.T).float() ** 2).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(
        torch.autograd.grad(compiled(a, weight), (a, weight)),
        torch.autograd.grad(loss(a, weight), (a, weight)),
    ):
        assert torch.equal(found, wanted)
    (first,) = torch.autograd.grad(loss(a, weight), a, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), weight)
    assert second.shape == weight.shape and second.any()


def test_a_linear_layer_learns():
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 8, bias=False, dtype=torch.float16, device=WHERE)
    x, target = random(64, 32), random(64, 8)
    losses = []
    for _ in range(20):
        loss = ((gemm.gemm(x, layer.weight.T) - target).float() ** 2).mean()
        layer.weight.grad = None
        loss.backward()
        with torch.no_grad():
            layer.weight -= 0.2 * layer.weight.grad
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_a_backward_pass_that_is_missing_names_the_alternative():
    q = random(1, 2, 24, 64)
    x = random(4, 96, dtype=torch.bfloat16)
    weight = mx_formats.quantise(random(48, 96, dtype=torch.bfloat16), "mxfp4")
    fp8 = random(64, 64).to(torch.float8_e4m3fn)
    one, by_torch = torch.ones(1, device=WHERE), "tiles::attention .*: use torch.nn.functional.scaled_dot_"
    for function, tensor, instead in (
        (lambda q: attention.attention(q, q, q), q, by_torch),
        (lambda x: blockscaled.matmul(x, weight.T), x, "tiles::decode .*: dequantise the .* torch.mm"),
        (lambda s: gemm.gemm(fp8, fp8.T, scale_a=s), one, "float8: use ch14.gemm with bf"),
    ):
        tensor = tensor.clone().requires_grad_()
        with pytest.raises(RuntimeError, match=instead):
            function(tensor).float().sum().backward()


def test_out_is_checked_where_the_operator_runs():
    a, b = random(16, 32).requires_grad_(), random(32, 24)
    says = r"out must be \(16, 24\) of torch.float16; it is \(24,\) of torch.float32"
    with pytest.raises(ValueError, match=says):
        gemm.gemm(a, b, out=torch.empty(24, device=WHERE))
    out = torch.empty(16, 24, dtype=torch.float16, device=WHERE)
    assert gemm.gemm(a, b, out=out) is out and torch.equal(out, gemm.gemm(a.detach(), b))


def test_a_call_that_nobody_traces_is_not_dispatched(monkeypatch):
    a, b = random(16, 32), random(32, 24)
    assert not operators.is_traced(a, b, None, "text") and operators.is_traced(a, b.clone().requires_grad_())
    monkeypatch.setattr(gemm, "gemm_operator", None)
    with torch.no_grad():
        gemm.gemm(a, torch.nn.Parameter(b))


def test_an_operator_that_nobody_traces_is_dispatched_once(monkeypatch):
    a, b = random(16, 32), random(32, 24)
    expected = TILES.gemm(a, b)

    def refuse(*arguments):
        raise AssertionError("dispatched again")

    monkeypatch.setattr(torch._ops.OpOverload, "redispatch", refuse)
    assert torch.equal(TILES.gemm(a, b), expected)
    with torch.no_grad():
        assert torch.equal(TILES.gemm(a, b.clone().requires_grad_()), expected)
    with pytest.raises(AssertionError, match="dispatched again"), FakeTensorMode(allow_non_fake_inputs=True):
        TILES.gemm(a, b)


def list_format_functions(size=264, depth=512):
    """Return the functions on block formats that keep plans, each with what makes its arguments and the same exactly.

    They run in the interpreter, too.
    """
    weight = mx_formats.quantise(random(40, depth, dtype=torch.bfloat16), "mxfp4")

    def make(rows=size):
        return [random(rows, depth, dtype=torch.bfloat16)]

    def restore(form):
        return lambda x: number_formats.dequantise(number_formats.quantise(x, number_formats.lookup(form)))

    def restore_scaled(x):
        scale = torch.tensor([0.3], device=x.device)
        return number_formats.dequantise(
            number_formats.quantise(x, number_formats.lookup("nvfp4"), scale=scale)
        )

    def multiply(form):
        def function(x):
            packed = mx_formats.quantise(x, form)
            return blockscaled.matmul(packed, packed.T, path="emulated")

        return function, make, lambda x: restore(form)(x).double() @ restore(form)(x).double().T

    def there_and_back(form, **options):
        return lambda x: mx_formats.dequantise(mx_formats.quantise(x, form, **options))

    functions = [
        (there_and_back(form, tiled=tiled), make, restore(form))
        for form, tiled in (("mxfp8_e4m3", False), ("mxfp4", True), ("nvfp4", False), ("fp8_1x128", False))
    ]
    functions += [(there_and_back("nvfp4", tensor_scale=0.3), make, restore_scaled)]
    functions += [multiply("mxfp4"), multiply("nvfp4")]
    decode = (lambda x: blockscaled.matmul(x, weight.T), lambda: make(5))
    return [*functions, (*decode, lambda x: blockscaled.spec(x, weight.T))]


FORMAT_FUNCTIONS = 8


@pytest.mark.parametrize("number", range(FORMAT_FUNCTIONS))
def test_a_repeated_call_follows_its_tensors_and_is_not_planned(number):
    function, make, spec = list_format_functions(8, 128)[number]  # the interpreter takes 0.1 s per row
    function(*make())
    planners = fp4_decode.planner, blockscaled.emulated.planner, mx_formats.dequantise_planner
    kept = [planner.make for planner in planners]
    for planner in planners:
        planner.make = None
    try:
        first, second = make(), make()
        for inputs in (first, second, first):
            assert check.relative_error(function(*inputs), spec(*inputs)) < 1e-2
    finally:
        for planner, make in zip(planners, kept):
            planner.make = make


def test_quantising_again_into_the_same_memory():
    for form, options in (("mxfp4", {"tiled": True}), ("nvfp4", {}), ("nvfp4", {"tensor_scale": 0.7})):
        out = mx_formats.empty((2, 96), form, WHERE, options.get("tiled", False))
        for _ in range(2):
            x = random(2, 96, dtype=torch.bfloat16)
            assert mx_formats.quantise(x, form, out=out, **options) is out
            again = mx_formats.quantise(x, form, **options)
            for name, tensor in again.tensors().items():
                assert torch.equal(tensor, out.tensors()[name]), (form, name)
            assert again.values.data_ptr() != out.values.data_ptr()
    for scale in (0.0, float("inf")):  # checked at each call
        with pytest.raises(ValueError, match="tensor_scale must be at least"):
            mx_formats.quantise(x, "nvfp4", tensor_scale=scale)


def list_functions():
    """Return the functions that keep plans, each with what makes its arguments and what computes the same."""

    def make():
        return [random(264, 512, dtype=torch.bfloat16) for _ in range(2)]

    def multiply_fp8(x):
        return blockscaled.matmul(mx_formats.quantise(x, "fp8_1x128"), (codes.T, scales.T))

    def multiply_fp8_exactly(x):
        exact = number_formats.dequantise(number_formats.quantise(x, number_formats.lookup("fp8_1x128")))
        factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return exact.double() @ (codes.double() * factors).T

    codes, scales = random(256, 8192).to(torch.float8_e4m3fn), torch.rand(2, 64, device=WHERE) + 0.5
    times = torch.rand(2, 100, device=WHERE).sort().values, torch.rand(2, 60, device=WHERE)

    def multiply(a, weight):
        return a.double() @ weight.double().T

    attend = (lambda q: attention.attention(q, q, q), lambda: [random(1, 2, 200, 128)])
    interpolate = (lambda x: resample.resample(x, *times, validate=False), lambda: [random(2, 100, 96)])
    found = [
        (lambda a, w: gemm.gemm(a, w.T), make, multiply),
        # descriptors made on the GPU
        (lambda a, w: gemm.gemm(a, w.T, config="conservative"), make, multiply),
        (*attend, lambda q: attention.spec(q, q, q)),
        *list_format_functions(),
        (*interpolate, lambda x: resample.spec(x, *times)),
    ]
    if device.current().has_wgmma:
        found += [(lambda a, w: wgmma_gemm.gemm(a, w.T), make, multiply)]
        for rows in (70, 200):  # with and without splits of K
            of_rows = functools.partial(random, rows, 8192, dtype=torch.bfloat16)
            found += [(multiply_fp8, lambda of_rows=of_rows: [of_rows()], multiply_fp8_exactly)]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(FORMAT_FUNCTIONS + 7))
def test_a_kept_plan_follows_addresses_streams_and_graphs(number):
    functions = list_functions()
    if number >= len(functions):
        pytest.skip("needs WGMMA")
    function, make, spec = functions[number]
    kept = [make() for _ in range(3)]  # three sets of addresses
    for inputs in kept * 2:
        assert check.relative_error(function(*inputs), spec(*inputs)) < 1e-2
    stream, late = torch.cuda.Stream(), [torch.empty_like(tensor) for tensor in kept[0]]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on any other stream would read `late` before it is filled
        for tensor, source in zip(late, kept[1]):
            tensor.copy_(source)
        found = function(*late)
    stream.synchronize()
    assert check.relative_error(found, spec(*kept[1])) < 1e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [function(*inputs) for inputs in kept]
    function(*late)  # moves the parameters, of which the graph has copies
    for tensor in kept[2]:
        tensor.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for result, inputs in zip(captured, kept):
        assert check.relative_error(result, spec(*inputs)) < 1e-2


@pytest.mark.gpu
def test_threads_share_a_plan():
    function, make, spec = list_functions()[0]
    cases = [make() for _ in range(8)]
    function(*cases[0])

    def work(inputs):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [function(*inputs) for _ in range(100)]
            torch.cuda.current_stream().synchronize()
        return results

    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        for inputs, results in zip(cases, pool.map(work, cases)):
            assert all(torch.equal(result, results[0]) for result in results)
            assert check.relative_error(results[0], spec(*inputs)) < 1e-2


@pytest.mark.gpu
def test_a_compiled_model_runs_in_cuda_graphs():
    weight = random(384, 512, dtype=torch.bfloat16)
    model = torch.compile(lambda x: gemm.gemm(x, weight.T).relu(), fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            x = random(256, 512, dtype=torch.bfloat16)
            assert check.relative_error(model(x).clone(), (x.double() @ weight.double().T).relu()) < 1e-2


@pytest.mark.gpu
def test_the_first_programs_of_the_page_of_operators_run():
    text = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    compiled, scaled = ({} for _ in range(2))
    for program, names in zip(re.findall(r"```python\n(.*?)```", text, re.S), (compiled, scaled)):
        exec(program, names)
    for tokens in (1, 7, 64, 512):  # few rows take the kernel that splits K, whose programs count themselves
        for _ in range(3):  # the second call captures a CUDA graph, and the third replays it
            x = random(tokens, 4096, dtype=torch.bfloat16)
            result = compiled["model"](x)
            found = check.relative_error(result.detach(), x.double() @ compiled["layer"].weight.double().T)
            assert found < 1e-2
            result.sum().backward()
            # A gradient is memory of the graph, which the next backward pass may not add to.
            compiled["layer"].weight.grad = None
    assert check.relative_error(scaled["c"], scaled["x"].double() @ scaled["weight"].double().T) < 0.05


def test_the_pages_program_for_attention_and_four_bits_runs():
    text = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    program, names = re.findall(r"```python\n(.*?)```", text, re.S)[2], {}
    if device.current().capability is None:
        for long, short in (('"cuda"', '"cpu"'), ("1024", "64"), ("4096", "256")):
            program = program.replace(long, short)
    exec(program, names)
    heads = [names[name].double() for name in ("queries", "keys", "values")]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    assert check.relative_error(names["mixed"], expected) < 1e-2
    exact = names["x"].double() @ names["weight"].double().T
    assert check.relative_error(names["c"], exact) < 0.2  # four bits


@pytest.mark.parametrize("page", ["README.md", "docs/operators.md"])
def test_programs_of_a_page_use_names_that_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, re.S)
    assert programs
    for program in programs:
        if "transformers" in program and not importlib.util.find_spec("transformers"):
            continue  # ch14/moe/lesson/model.py registers the same function
        tree, names = ast.parse(program), {}
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(imports, []), page, "exec"), names)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in names
            ):
                assert hasattr(names[node.value.id], node.attr), ast.unparse(node)


def test_the_weight_of_the_pages_recipe_is_taken_by_the_fp8_path():
    x, weight = random(40, 256, dtype=torch.bfloat16), random(136, 256, dtype=torch.bfloat16)
    q = number_formats.quantise(weight, "fp8_128x128")
    b = (q.codes.view(torch.float8_e4m3fn).T, q.scales.T)
    result = blockscaled.spec(mx_formats.quantise(x, "fp8_1x128"), b)
    assert check.relative_error(result, x.double() @ weight.double().T) < 0.1


FORMS = ("mxfp8_e4m3", "mxfp4", "nvfp4")


@pytest.mark.parametrize("form", FORMS)
def test_the_tensors_of_quantise_are_those_of_the_other_operators(form):
    x = make_rows(40)
    values, scales, pair = TILES.quantise(x, form)
    packed = mx_formats.quantise(x, form)
    assert torch.equal(TILES.dequantise(values, scales, pair, form, 96), mx_formats.dequantise(packed))
    product = TILES.block_scaled_mm(*(values, scales, pair, form, False) * 2)
    assert torch.equal(product, blockscaled.matmul(packed, packed.T))


def test_a_product_of_no_rows_is_that_of_torch_mm():
    a, b = random(0, 32), random(48, 32).T
    for x, y in ((a, b), (random(8, 32), random(0, 32).T), (random(8, 0), random(48, 0).T)):
        assert torch.equal(gemm.gemm(x, y), x @ y) and torch.equal(TILES.gemm(x, y), x @ y)
        assert torch.equal(gemm.prepare(x, y)(), x @ y)
    a, b = a.requires_grad_(), b.detach().requires_grad_()
    gemm.gemm(a, b).sum().backward()
    assert a.grad.shape == a.shape and not b.grad.any()
    rows = make_rows(0)
    q, k = random(1, 2, 0, 64), random(1, 2, 40, 64)
    assert attention.attention(q, k, k).shape == q.shape
    for form in FORMS:
        assert mx_formats.dequantise(mx_formats.quantise(rows, form)).shape == rows.shape


def test_the_transforms_of_torch_func_work():
    func, a, b = torch.func, random(3, 8, 32), random(48, 32).T

    def loss(multiply):
        return lambda x: multiply(x, b).float().square().sum()

    def agree(ours, theirs):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2)

    agree(func.vmap(gemm.gemm, in_dims=(0, None))(a, b), a @ b)
    agree(func.vmap(gemm.gemm, in_dims=(1, None), out_dims=1)(a, b), a @ b)
    agree(func.grad(loss(gemm.gemm))(a[0]), func.grad(loss(torch.mm))(a[0]))
    agree(func.vmap(func.grad(loss(gemm.gemm)))(a), func.vmap(func.grad(loss(torch.mm)))(a))
    small, narrow = a[0, :1], b[:, :8].contiguous()
    twice = [  # the levels of nested transforms all record
        func.jacrev(func.jacrev(lambda x, mm=mm: mm(x, narrow).float().square().sum()))(small)
        for mm in (gemm.gemm, torch.mm)
    ]
    assert twice[1].abs().max() > 1
    agree(*twice)
    x = random(3, 8, 96, dtype=torch.bfloat16)
    codes = func.vmap(lambda x: mx_formats.quantise(x, "mxfp8_e4m3").values)(x)
    assert torch.equal(codes[1], mx_formats.quantise(x[1], "mxfp8_e4m3").values)
    q = random(2, 1, 2, 16, 64)
    mixed = func.vmap(attention.attention)(q, q, q)
    assert torch.equal(mixed[1], attention.attention(q[1], q[1], q[1]))


def test_a_tangent_is_refused_and_not_lost():
    a, b = random(8, 32), random(48, 32).T
    refused = pytest.raises(
        RuntimeError, match="gemm has no forward-mode derivative, which jvp, jacfwd and hessian"
    )
    with refused:
        torch.func.jvp(lambda x: gemm.gemm(x, b), (a,), (a,))
    with refused:
        torch.func.hessian(lambda x: gemm.gemm(x, b).float().sum())(a)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, a)
        for call in (gemm.gemm, TILES.gemm, gemm.prepare):
            with refused:
                call(dual, b)
        assert gemm.gemm(a, b).shape == (8, 48)


def test_meta_tensors_give_shapes_or_the_reason():
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    a, weight = meta(8, 96), mx_formats.quantise(meta(48, 96), "mxfp4")
    assert gemm.gemm(a, meta(48, 96).T).shape == wgmma_gemm.gemm(a, meta(48, 96).T).shape == (8, 48)
    assert blockscaled.matmul(a, weight.T).shape == (8, 48)
    assert blockscaled.matmul(mx_formats.quantise(a, "mxfp4"), weight.T).shape == (8, 48)
    assert attention.attention(*(meta(1, 2, 16, 64) for _ in range(3))).shape == (1, 2, 16, 64)
    times = meta(2, 16, dtype=torch.float32)
    assert resample.resample(meta(2, 16, 8), times, times[:, :4]).shape == (2, 4, 8)
    for call, says in (
        (lambda: gemm.gemm(a, meta(96, 48, dtype=torch.float16)), "b must be bfloat16; it is float16"),
        (lambda: gemm.gemm(a, random(96, 48, dtype=torch.bfloat16)), "all tensors must be on one device"),
        (lambda: attention.attention(meta(1, 2, 16, 64), *[meta(1, 2, 16, 32)] * 2), "head dimension"),
        (lambda: gemm.prepare(a, meta(48, 96).T), "a must be in memory; it is on the meta device"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_threads_may_call_operators_at_the_same_time():
    def call(seed):
        a, b = random(8 + 8 * (seed % 3), 32), random(48, 32).T
        assert check.relative_error(gemm.gemm(a, b), gemm.spec(a, b)) < 2**-8
        x = make_rows(8)
        return float((mx_formats.dequantise(mx_formats.quantise(x, "mxfp8_e4m3")) - x).abs().max()) < 0.5

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(12)))
