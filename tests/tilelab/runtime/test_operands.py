import dataclasses

import pytest
import torch
from cases import cases

from tilelab.runtime import operands
from tilelab.runtime.device import Unsupported


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int


def test_launch_runs_again_and_returns_out():
    runs = []
    launch = operands.Launch(lambda: runs.append(1), out="C", config=Config(8))
    assert [launch(), launch()] == ["C", "C"] and runs == [1, 1] and launch.config == Config(8)


@cases(
    "given, demands, words",
    ([1], {}, "x must be a torch.Tensor; it is a list"),
    (torch.ones(2).to_sparse(), {}, "x must be a dense tensor of plain numbers"),
    (torch.ones(2, device="meta"), {}, "x must be in memory"),
    (torch.ones(2, requires_grad=True), {}, "copy has no backward pass and x requires a gradient"),
    (torch.ones(2, dtype=torch.complex64).conj(), {}, "conjugates or negates"),
    (torch.ones(2, dtype=torch.complex64).conj().imag, {}, "conjugates or negates"),
    (torch.ones(2), {"ndim": 2}, r"x must be a matrix; its shape is \(2,\)"),
    (torch.ones(2, 3), {"shape": (3, 2)}, "x must be 3 x 2; it is 2 x 3"),
    (torch.ones(0), {"not_empty": True}, "x must have at least one element"),
    (torch.ones(2), {"dtype": (torch.bfloat16, torch.float16)}, "x must be bfloat16 or float16; it is"),
    (torch.ones(2), {"on": torch.device("cuda:0")}, "all tensors must be on one device"),
    (torch.ones(2, 3).T, {"contiguous": True}, "x must be contiguous"),
    (torch.ones(9)[1:], {"aligned": 16}, "x must start at a multiple of 16 bytes; it starts 4 bytes"),
)
def test_require_tensor(given, demands, words):
    with pytest.raises(ValueError, match=words):
        operands.require_tensor("x", given, "copy", **demands)


def test_require_tensor_returns_what_it_accepts():
    x = torch.ones(4, 4, requires_grad=True)
    with torch.no_grad():
        assert (
            operands.require_tensor("x", x, "copy", ndim=2, dtype=torch.float32, aligned=16, contiguous=True)
            is x
        )


@cases(
    "matrix, words",
    (torch.ones(4, 8).T, "stored row by row"),
    (torch.ones(1, 8).expand(4, 8), "the rows of x overlap"),
    (torch.ones(65)[1:].view(8, 8), "start at a multiple of 16 bytes"),
    (torch.ones(8, 9)[:, :8], "a row of x must take a multiple of 16 bytes"),
)
def test_require_rows(matrix, words):
    with pytest.raises(ValueError, match=words):
        operands.require_rows("x", matrix)


def test_require_rows_accepts_one_row_of_any_stride():
    operands.require_rows("x", torch.ones(8, 12)[:, :8])
    one = torch.ones(1, 5)
    operands.require_rows("x", one)
    assert operands.row_stride(one) == 8 and operands.row_stride(torch.ones(2, 12)[:, :5]) == 12


def test_require_disjoint():
    memory = torch.ones(64)
    operands.require_disjoint({"out": memory[:32]}, {"a": memory[32:], "b": None, "c": memory[:0]})
    with pytest.raises(ValueError, match="out lies in the memory of a"):
        operands.require_disjoint({"out": memory[:33]}, {"a": memory[32:]})
    with pytest.raises(ValueError, match="scales lies in the memory of out"):
        operands.require_disjoint({"out": memory, "scales": memory[:4]}, {})
    assert operands.address_range(memory.view(8, 8)[:, :2]) == (memory.data_ptr(), memory.data_ptr() + 4 * 58)


@cases(
    "shape, strides",
    ((3, 16, 16), (16, 16, 1)),
    ((3, 16, 16), (4, 16, 1)),
    ((4, 8), (0, 1)),
    ((2, 5), (4, 1)),
)
def test_a_tensor_that_overlaps_itself(shape, strides):
    says = "^out overlaps itself: its shape is .*; give it memory of its own.$"
    with pytest.raises(ValueError, match=says):
        operands.require_no_self_overlap("out", torch.zeros(1000).as_strided(shape, strides))


@cases(
    "shape, strides",
    ((3, 16, 16), (256, 16, 1)),
    ((2, 8, 64), (64, 128, 1)),
    ((1, 8), (0, 1)),
    ((3, 4, 10), (58, 16, 1)),
    ((), ()),
)
def test_a_tensor_with_memory_of_its_own(shape, strides):
    operands.require_no_self_overlap("out", torch.zeros(1024).as_strided(shape, strides))


def test_require_number():
    for value in (1, 0.5, -1.0):
        operands.require_number("scale", value, -1.0, 1.0, "from -1 to 1")
    wrong = [(2, "2"), (float("nan"), "nan"), (True, "a bool"), ("0.5", "a str"), (0.5j, "a complex")]
    for value, found in (*wrong, (torch.ones(2), "a Tensor"), (None, "a NoneType")):
        with pytest.raises(ValueError, match=f"^scale must be a Python number from -1 to 1; it is {found}.$"):
            operands.require_number("scale", value, -1.0, 1.0, "from -1 to 1")


def test_require_gpu_lets_the_interpreter_run():
    operands.require_gpu(torch.ones(1), "gemm", interpreted=True)
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="gemm needs .*use torch.mm"):
            operands.require_gpu(torch.ones(1), "gemm", instead="use torch.mm")


def test_choose_config():
    named = {"small": Config(8), "large": Config(64)}
    choose = [
        operands.choose_config(given, named, Config, lambda: Config(1))
        for given in (Config(3), "best", "large")
    ]
    assert choose == [Config(3), Config(1), Config(64)]

    def parse(text):
        return Config(int(text.removeprefix("tile ")))

    assert operands.choose_config("tile 64", named, Config, lambda: Config(1), parse) == named["large"]
    for wrong in ("fast", "tile 65", None, 3):
        says = "unknown configuration .*; choose best, small, large, or pass a Config"
        with pytest.raises(ValueError, match=says):
            operands.choose_config(wrong, named, Config, lambda: Config(1))
        with pytest.raises(ValueError, match="unknown configuration .*; choose best, small, large"):
            operands.choose_config(wrong, named, Config, lambda: Config(1), parse)
    for wrong in (8.0, True, "8", None):
        with pytest.raises(ValueError, match=f"^tile of a Config must be a whole number; it is {wrong!r}.$"):
            operands.choose_config(Config(wrong), named, Config, lambda: Config(1))
