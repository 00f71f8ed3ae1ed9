"""The versions of the notebook are right, and each planted wrong answer fails its check."""

import pytest
import torch
from cases import cases
from cells import define

from ch14.moe.lesson import exercises
from tilelab import ROOT
from tilelab.cells import lesson
from tilelab.runtime import device

NOTEBOOKS = ROOT / "notebooks"
VERSIONS = lesson.notebook_texts(NOTEBOOKS / "18_ch14_moe.ipynb")
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "18_ch14_moe.ipynb")
pytestmark = pytest.mark.compile


def check_prepared(ladder, name, change=("", "")):
    """What the check of a ladder says of a version in which one text is changed."""
    names = {"loop": "one_expert", "separate": "scaled"}
    _, prepare = define(VERSIONS, names.get(name, name), f"prepare_{name}", change=change)
    return getattr(exercises, f"make_{ladder}")().check(prepare)


@cases(
    "name, change",
    ("loop", ("", "")),
    ("one_launch", ("", "")),
    ("one_launch", ("(row < end) & ", "")),
    ("one_launch", ("len(a) // 128 + groups", "len(a) // 128")),
    ("one_launch", ("return expert, tile_id - first", "return expert, tile_id")),
    ("persistent", ("", "")),
    ("persistent", ("sums <= tile_id", "sums < tile_id")),
    ("persistent", ("tile // tiles_m, end", "tile // 2, end")),
    ("persistent", ("* (expert > 0).to(tl.int32)", "")),
    ("whole_tiles", ("", "")),
    ("whole_tiles", ("m + part.shape[0] <= end", "m < end")),
    ("whole_tiles", ("BLOCK_N + BLOCK_N // 2", "BLOCK_N")),
)
def test_sorted_rows(name, change):
    fault = check_prepared("ladder", name, change)
    assert bool(fault) == bool(change[0]), fault


@cases(
    "change",
    ("", ""),
    ("expert * tl.cdiv(N, 128)", "expert * (N // 128)"),
    ("+ row, row < end, 0)", "+ row, row < end, 0) * 0 + 0.01"),
    ("a_scale.stride(1)", "a_scale.stride(1) + 1"),
    ("product * scale[:, None]", "product"),
)
def test_block_scales(change):
    fault = check_prepared("fp8_ladder", "scaled", change)
    assert bool(fault) == bool(change[0]), fault


@cases(
    "name, change",
    ("separate", ("", "")),
    ("swiglu", ("", "")),
    ("swiglu", ("gate / (1 + tl.exp(-gate)) * value", "value / (1 + tl.exp(-value)) * gate")),
    ("swiglu", ("arange(0, 256) < 128", "arange(0, 256) < 256")),
    ("swiglu", ("tl.max(tl.abs(result), 1)", "tl.max(result, 1)")),
    ("swiglu", ("row, scale, row < end", "row, scale, row < end - 1")),
    ("swiglu", (", (row < end)[:, None])", ")")),
)
def test_the_epilogue(name, change):
    fault = check_prepared("swiglu_ladder", name, change)
    assert bool(fault) == bool(change[0]), fault


@cases(
    "change, said",
    (("", ""), ""),
    (("begin + tl.load(counts + expert)", "begin + capacity"), "that hold no token were stored"),
    (("sums <= tile_id", "sums < tile_id"), "are wrong"),
    (("expert * capacity", "expert * BLOCK_M"), "different values"),
)
def test_masked_rows(change, said):
    fault = check_prepared("masked_ladder", "masked", change)
    assert bool(fault) == bool(said) and said in fault, fault


def test_a_replay_reads_the_counts_of_its_time():
    a, weight, counts, out = exercises.make_masked(([0] * 3, 5, 40, 64))
    _, prepare = define(VERSIONS, "masked", "prepare_masked")
    replay = exercises.capture(prepare(a, weight, counts, out))
    counts.copy_(torch.tensor([2, 0, 5]))
    out.fill_(float("nan"))
    assert exercises.find_masked_fault(a, weight, counts, out) == "rows of expert 0 are wrong"
    replay()
    assert exercises.find_masked_fault(a, weight, counts, out) == "" and out[1].isnan().all()


def test_waves_are_counted():
    table = exercises.tabulate_waves({"three": ([5 * 128, 3 * 128 - 1, 0, 4 * 128], 128)}, sms=8)
    assert table.rows[0][1:] == ["3", "12", "3", "2", "50%", "75%", "100%"]


@pytest.mark.skipif(device.current().capability is not None, reason="the interpreter knows who wrote what")
def test_uneven_shares_are_found():
    writers = torch.tensor([0, 0, 1, 1, 0]).repeat_interleave(2)[:, None].expand(-1, 2)
    assert exercises.find_uneven(2, 4, [4, 0, 4, 2], writers) == ""
    assert "one program" in exercises.find_uneven(2, 2, [6, 2, 2], -1 - 0 * writers)
    assert "one computes 3 tiles" in exercises.find_uneven(2, 4, [4, 4, 2], 0 * writers)


@cases(
    "check, name, change",
    ("block_m", "my_block_m", ("0.6", "0.5")),
    ("block_m", "my_block_m", ("rows, 64", "rows, 65")),
    ("gradient", "my_gradient", ("(row < end) & (column_n", "(row < rows) & (column_n")),
    ("gradient", "my_gradient", ("(row < end) & (column_k", "(row < rows) & (column_k")),
    ("gradient", "my_gradient", ("left.T, right, acc", "left.T, right")),
    ("grouped", "my_grouped", ("(row < end) & ", "")),
    ("grouped", "my_grouped", ("        first += tiles\n", "")),
    ("grouped", "my_grouped", ("        begin = end", "        pass")),
    ("grouped", "my_grouped", ("tile_id += tl.num_programs(0)", "tile_id += 1")),
    ("grouped", "my_grouped", ("[expert, n, k]", "[0, n, k]")),
)
def test_a_wrong_answer_fails(check, name, change):
    with pytest.raises(AssertionError):
        getattr(exercises, f"check_{check}")(*define(SOLUTIONS, name, change=change))
