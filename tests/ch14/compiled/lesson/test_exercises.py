"""The kernels of the notebook are right, the solutions pass, and each planted wrong answer fails its check."""

import functools

import pytest
import torch
from cases import cases
from cells import define

from ch14.compiled.lesson import exercises
from tilelab import ROOT
from tilelab.cells import cuda_magic, lesson
from tilelab.runtime import device

NOTEBOOKS = ROOT / "notebooks"
VERSIONS = lesson.notebook_texts(NOTEBOOKS / "11_ch14_compiled.ipynb")
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "11_ch14_compiled.ipynb")
pytestmark = pytest.mark.compile


def prepare(name, change=("", "")):
    return define(VERSIONS, f"prepare_{name}", change=change)[0]


@functools.cache
def cuda_kernel(change=("", "")):
    path = NOTEBOOKS / "11_ch14_compiled.ipynb"
    kernel = cuda_magic.notebook_kernels(path)["silu_mul"]
    assert change[0] in kernel.source
    return cuda_magic.find_kernels(kernel.source.replace(*change), list(kernel.options))["silu_mul"]


@pytest.mark.parametrize("name, loads", [("pointers", 0), ("device", 2), ("host", 2)])
def test_the_triton_versions_are_right_and_load_as_they_say(name, loads):
    assert exercises.check_version(prepare(name)) == ""
    report = lesson.compile_launch(prepare(name), exercises.make_case((64, 1024), "cpu"), "sm_90a")
    assert report.launchable and report.counts["tma_load"] == loads
    assert bool(report.counts["tensormap_replace"]) == (name == "device")


@cases(
    "name, change",
    ("pointers", ("g * tl.sigmoid(g) * u", "g * tl.sigmoid(u) * u")),
    ("device", ("out.store([start]", "out.store([0]")),
    ("host", ("u_desc.load([start])", "g_desc.load([start])")),
)
def test_a_wrong_triton_version_fails(name, change):
    assert exercises.check_version(prepare(name, change))


def test_the_cuda_version_is_right_and_moves_16_bytes():
    assert exercises.check_version(exercises.prepare_packs(cuda_kernel())) == ""
    found = [line.split()[0] for line in cuda_kernel().sass("LDG|STG")]
    assert found == ["LDG.E.128", "LDG.E.128", "STG.E.128"]


@cases("change", ("if (i >= packs) return;", ""), ("k < 8", "k < 6"), ("gate[k + 1]", "gate[k]"))
def test_a_wrong_cuda_version_fails(change):
    if not change[1] and device.current().has_tma:
        pytest.skip("writes past the end of a buffer on the GPU")
    try:
        fault = exercises.check_version(exercises.prepare_packs(cuda_kernel(change)))
    except Exception as error:
        fault = str(error)
    assert fault


def test_a_norm_whose_result_is_like_a_contiguous_x_passes():
    """`empty_like` keeps a stride of x where the size is 1, and such a stride moves nothing."""
    change = (
        "out = torch.empty(x.shape, dtype=x.dtype, device=x.device)",
        "out = torch.empty_like(x.contiguous())",
    )
    exercises.check_norm(*define(SOLUTIONS, "make_norm", change=change))


def test_a_step_that_sees_the_index_fails():
    with pytest.raises(AssertionError, match="graphs for 12 calls"):
        exercises.check_recompilations(*define(VERSIONS, "step", "run"))
    step, _ = define(SOLUTIONS, "step", "run")
    with pytest.raises(AssertionError, match="never called"):
        exercises.check_recompilations(step, lambda compiled, x, weights, index: step(x, weights[index]))
    with pytest.raises(AssertionError, match="is wrong"):
        exercises.check_recompilations(step, lambda compiled, x, weights, index: compiled(x, weights[0]))
    for idle, run in (
        (step, lambda compiled, x, weights, index: (step if index else compiled)(x, weights[index])),
        (lambda x: x + 1, lambda compiled, x, weights, index: (compiled(x), step(x, weights[index]))[1]),
    ):
        with pytest.raises(AssertionError, match="[01] of 12 calls run tanh in a compiled graph"):
            exercises.check_recompilations(idle, run)


def test_a_step_of_one_size_may_serve_all_calls():
    step, _ = define(SOLUTIONS, "step", "run")

    def run(compiled, x, weights, index):
        return compiled(torch.nn.functional.pad(x, (0, 0, 0, 12 - len(x))), weights[index])[: len(x)]

    exercises.check_recompilations(step, run)


@cases(
    "change, reason",
    (('mutates_args=("g",)', "mutates_args=()"), "names nothing"),
    (('mutates_args=("g",)', 'mutates_args=("g", "u")'), "names g, u"),
    (("    @gate_in_place.register_fake\n", ""), "register a fake kernel"),
    (("prepare_pointers(g, u, g)()", "prepare_pointers(g, u, u)()"), "input 1 was overwritten"),
    (("prepare_pointers(g, u, g)()", "prepare_pointers(g, u, g)"), "g is not silu"),
    (("        return None\n", "        return torch.empty_like(g)\n"), "to return None"),
)
def test_a_wrong_operator_fails(change, reason):
    with pytest.raises(AssertionError, match=reason):
        exercises.check_operator(*define(SOLUTIONS, "make_operator", change=change))


FAKE_SUM = (
    "def fake_sum_of_rows(x):\n    return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)"
)


@cases(
    "change, reason",
    ((", device=x.device", ""), "of a meta tensor the fake makes a result on cpu"),
    (("torch.float32", "x.dtype"), "dtype"),
    (("x.shape[0], ", "x.shape[0], 1, "), "shape"),
    (("x.shape[0]", "x.shape[1]"), "shape"),
)
def test_a_fake_kernel_that_is_not_mended_fails(change, reason):
    change = FAKE_SUM, FAKE_SUM.replace(*change)
    with pytest.raises(AssertionError, match=reason):
        exercises.check_fake(*define(SOLUTIONS, "sum_of_rows", "fake_sum_of_rows", change=change))


FAKE = """    def fake_norm(x, weight, eps):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)"""
LAUNCH = "norm_kernel[(x.shape[0],)](x.contiguous(), weight.contiguous(), out, x.shape[1], eps, WIDE=wide, BLOCK=block)"


@cases(
    "change, reason",
    # the result
    ((" / columns", ""), "the error is"),
    (("x.contiguous()", "x"), "transposed the error is"),
    (("x.contiguous()", "(x if x.stride(1) == 1 else x.contiguous())"), "cut from wider rows the error"),
    (("triton.next_power_of_2(x.shape[1])", "512"), "the error is|not finite"),
    (
        ("x * scale * weight, mask", "(x * scale).to(out_ptr.dtype.element_ty).to(WIDE) * weight, mask"),
        "round once",
    ),
    (("WIDE=wide", "WIDE=tl.float32"), "float64"),
    (("        return out\n", "        x.zero_()\n        return out\n"), "was overwritten"),
    ((LAUNCH, "out.copy_(torch.rms_norm(x, x.shape[1:], weight, eps))"), "launches no Triton kernel"),
    # what is declared
    (("    @norm.register_fake\n", ""), "register a fake kernel"),
    ((FAKE, FAKE.replace(", device=x.device", ', device="meta"')), "the fake's result is on meta"),
    ((FAKE, FAKE.replace("dtype=x.dtype, ", "")), "the fake says torch.float32"),
    ((FAKE, FAKE.partition("return")[0] + "return torch.empty_like(x)"), "transposed the strides"),
    # the gradient
    (("    norm.register_autograd(norm_backward, setup_context=save_inputs)\n", ""), "no autograd formula"),
    (("(weighted - normed * (weighted * normed).mean(1, keepdim=True))", "weighted"), "gradcheck"),
    (
        (
            "    scale = (wide.",
            "    wide = wide if wide.is_contiguous() else wide.T.reshape(x.shape)\n    scale = (wide.",
        ),
        "a gradient in bfloat16",
    ),
)
def test_a_wrong_norm_fails(change, reason):
    if device.current().has_tma and "<=" in change[1]:
        pytest.skip("reads past the end of a buffer on the GPU")
    with pytest.raises(AssertionError, match=reason):
        exercises.check_norm(*define(SOLUTIONS, "make_norm", change=change))


def test_a_triton_operator_without_a_fake_kernel_fails():
    function = define(SOLUTIONS, "make_norm")[0](exercises.new_name())._init_fn
    with pytest.raises(AssertionError, match="register a fake kernel"):
        exercises.check_norm(lambda name: torch.library.triton_op(name, function, mutates_args=()))


def test_a_norm_that_names_what_it_does_not_change_fails():
    (make,) = define(SOLUTIONS, "make_norm", change=("mutates_args=()", 'mutates_args=("x",)'))
    with pytest.raises(RuntimeError, match="non-functional"):
        exercises.check_norm(make)


def test_a_gradient_is_lost_refused_or_right():
    g, u, _ = exercises.make_case((4, 16), "cpu")
    (gradients,) = define(VERSIONS, "silu_mul_gradients")

    @torch.library.custom_op(exercises.new_name(), mutates_args=())
    def operator(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(g) * u

    def around(g, u):
        return operator(g * 2, u) + 1

    assert exercises.describe_gradient(lambda g, u: around(g, u).detach(), g, u) == "lost, without a word"
    assert exercises.describe_gradient(around, g, u) == "refused: no formula"
    operator.register_autograd(
        lambda ctx, grad: gradients(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert exercises.describe_gradient(around, g, u).startswith("right, error")
