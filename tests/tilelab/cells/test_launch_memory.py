"""What a kernel does to memory beside its output is found, however far away, and a wild pointer is one sentence."""

from tilelab.cells.launch_memory import GUARD_BYTES, AccessError, LaunchMemory  # isort: skip
import pytest
import torch
import triton
import triton.language as tl
from cases import cases

from tilelab.runtime import device

interpreted = pytest.mark.skipif(device.current().has_tma, reason="Triton compiles where there is a GPU")


def reach(tensor, offset):
    """Return one element `offset` elements from the first of a tensor, which may lie outside of it."""
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + offset)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bytes_away", [0, 4, 80_000, GUARD_BYTES])
def test_a_write_beside_an_output_is_found(dtype, bytes_away):
    x = torch.ones(100, dtype=dtype)
    for place, name in ((0, "input 1"), (1, "out")):
        for offset, said in (
            (100 + bytes_away // x.itemsize, f"{bytes_away:,} bytes past its end"),
            (-1 - bytes_away // x.itemsize, "before its begin"),
        ):
            memory = LaunchMemory([x, torch.zeros_like(x)])
            assert memory.find_fault(torch.zeros(100, dtype=torch.bool)) == ""
            reach(memory.tensors[place], offset).fill_(1)
            assert memory.find_damage().startswith(f"memory outside of {name} was overwritten, ")
            assert said in memory.find_damage()


def test_the_inputs_must_stay_and_the_expected_result_comes_from_copies():
    x = torch.randn(10)
    memory = LaunchMemory([x, torch.zeros(10)])
    for tensor in memory.tensors:
        tensor.zero_()
    assert torch.equal(memory.given[0], x)
    assert memory.find_fault(torch.zeros(10, dtype=torch.bool)) == "input 1 was overwritten"
    found = memory.find_fault(memory.tensors[-1] != 2 * x)
    assert found == "10 of 10 elements are wrong, the first at index 0"


def test_the_columns_between_the_rows_of_an_output_must_stay():
    out = torch.zeros(4, 16)[:, :12]
    memory = LaunchMemory([out])
    memory.tensors[0].fill_(1)
    assert memory.find_damage() == ""
    reach(memory.tensors[0], 12).fill_(1)
    assert memory.find_damage() == "memory outside of out was overwritten, between its rows"


def test_layouts_and_numbers_are_kept():
    x = torch.randn(3, 5).T
    memory = LaunchMemory([x, 7, torch.empty(0), torch.ones(2)], keep=False)
    assert torch.equal(memory.tensors[0], x) and memory.tensors[0].stride() == x.stride()
    assert memory.tensors[1] == 7 and memory.given[1] == 7 and memory.tensors[-1].isnan().all()


@triton.jit
def shift(x, out, n, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + OFFSET, mask=at < n), mask=at < n)


@triton.jit
def no_mask(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def same_place(x, out, VALUE: tl.constexpr):
    tl.store(out + tl.arange(0, 8), tl.program_id(0) * VALUE + tl.zeros((8,), tl.float32))


@interpreted
@cases(
    "launch, said",
    (
        lambda x, out: shift[4,](x, out, 50, OFFSET=1 << 40, BLOCK=16),
        r"program 0 reads 16 elements outside of its tensors, the first of them [45],39.* bytes past the "
        "end of .*: is a mask missing",
    ),
    (lambda x, out: shift[4,](x, out, 50, OFFSET=-1, BLOCK=16), "reads 1 element .* 4 bytes before the"),
    (lambda x, out: no_mask[4,](x, out, BLOCK=16), "program 3 reads 14 elements .* past the end of x"),
    (lambda x, out: same_place[3,](x, out, VALUE=1), "programs 0 and 1 write different values to one"),
)
def test_the_interpreter_says_which_access_is_wrong(launch, said):
    memory = LaunchMemory([torch.randn(50), torch.randn(50)])
    with pytest.raises(Exception) as caught, memory.watch():
        launch(*memory.tensors)
    error = caught.value
    while error.__cause__:
        error = error.__cause__
    assert isinstance(error, AccessError)
    assert caught.match(said)


@interpreted
def test_the_writer_of_each_element_is_known():
    memory = LaunchMemory([torch.randn(50), torch.randn(50)])
    with memory.watch():
        shift[4,](*memory.tensors, 40, OFFSET=0, BLOCK=16)
    assert memory.writers[0].tolist() == [0] * 16 + [1] * 16 + [2] * 8 + [-1] * 10
    with memory.watch():
        same_place[3,](*memory.tensors, VALUE=0)
    assert memory.writers[0].tolist() == [-2] * 8 + [-1] * 42
