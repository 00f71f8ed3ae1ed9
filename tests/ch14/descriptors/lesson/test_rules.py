import re

import pytest
from builds import build_in_order
from cases import cases

from ch14.descriptors.lesson import experiments, rules
from ch14.descriptors.lesson.rules import RULES
from tilelab.runtime import build

KEPT_BY_NOBODY = (
    "none is broken",
    "tiles start at 16 bytes",
    "an allocator is set",
    "a context in the thread",
)


def test_the_launcher_has_a_sentence():
    for rule in RULES:
        sentence = rules.quote_checks(rule)["launcher"]
        assert rule in KEPT_BY_NOBODY or sentence.startswith("ValueError: ") and sentence.endswith("."), rule


def test_each_rule_has_its_reason():
    assert [rule for rule, (why, _) in RULES.items() if not why] == ["none is broken"]


def test_what_triton_s_class_lets_pass():
    passed = {rule for rule in RULES if not rules.quote_checks(rule)["triton"]}
    assert passed == {*KEPT_BY_NOBODY, "tile 16 bytes wide", "rows end at 16 bytes"}


def test_the_table_says_in_few_words_who_notices():
    table = {row["broken rule"]: row for row in rules.tabulate_outcomes(rules.run_broken_rules.load().rows)}
    assert list(table) == list(RULES) and table["none is broken"]["host"] == "right"
    assert table["rows 16 bytes apart"]["device"] == "wrong, no error"
    known = {"broken rule": "", "the course": "refuses", "TensorDescriptor": "", "host": "overwrites memory"}
    known |= {"device": "overwrites memory"}
    assert table["rows end at 16 bytes"] | {"broken rule": ""} == known
    assert all(len(row[way]) < 20 for row in table.values() for way in rules.WAYS)


def test_what_lies_outside():
    zeros, nans = rules.load_past_edge("zero"), rules.load_past_edge("nan")
    assert zeros == [*map(float, range(1, 13)), 0, 0, 0, 0]
    assert nans[:12] == zeros[:12] and all(value != value for value in nans[12:])


POINTERS = {
    **dict.fromkeys(("x", "out"), "*i16"),
    **dict.fromkeys(("rows", "columns", "stride_x", "stride_out"), "i32"),
}
REFUSED = {
    (8, 4, 1): "must have at least 16 bytes in the last dimension",
    (8, 48, 1): "must be a power of 2",
    (2048, 1024, 1): "exceeds triton maximum tensor numel",
    (8, 64, 2): "last dim must be 1 but got 2",
}


@pytest.mark.compile
def test_the_compiler_uses_tma_and_refuses_what_breaks_its_rules_on_the_device():
    jobs = {
        (block_m, block_n, last): build.Job(
            "ch14.descriptors.lesson.rules:one_device_kernel",
            POINTERS,
            {"LAST": last, "BLOCK_M": block_m, "BLOCK_N": block_n, "SHIFT": 0},
            "sm_90a",
        )
        for block_m, block_n, last in [(8, 64, 1), *REFUSED]
    }
    tile = dict.fromkeys(("x", "out"), "tensordesc<i16[8, 64]>")
    jobs["host"] = build.Job("ch14.descriptors.lesson.rules:one_host_kernel", tile, {"SHIFT": 0}, "sm_90a")
    reports = dict(zip(jobs, build_in_order(jobs.values())))
    host, made = reports["host"].counts, reports[8, 64, 1].counts
    assert host["tma_load"] == host["tma_store"] == made["tma_load"] == made["tma_store"] == 1
    assert made["tensormap_replace"]
    for case, message in REFUSED.items():
        assert reports[case].status == "failed" and message in reports[case].reason


def test_the_sentence_of_an_error():
    def bare():
        raise AssertionError

    for say, expected in (
        (lambda: int("x"), "ValueError: invalid literal for int() with base 10: 'x'"),
        (bare, "AssertionError: raise AssertionError"),
    ):
        with pytest.raises((ValueError, AssertionError)) as caught:
            say()
        assert rules.describe_error(caught.value) == expected


def test_variables_that_do_not_exist():
    words = ["TRITON_TMA_ENABLE", "TRITON_CUDNN_ALGOS", "DISABLE_TMA", "TRITON_ALWAYS_COMPILE"]
    assert [word for word, there in experiments.find_words("triton", words).items() if there] == words[3:]


@pytest.mark.gpu
@pytest.mark.parametrize("way", rules.WAYS)
def test_a_tile_that_keeps_the_rules_is_right(way):
    assert rules.attempt(way, "none is broken") == "right"


@pytest.mark.gpu
@pytest.mark.parametrize("way", rules.WAYS)
def test_a_ragged_row_is_written_past_its_end(way):
    """Triton's issue 11583; should this fail, the launcher's guard can go."""
    found = rules.attempt(way, "rows end at 16 bytes")
    assert found == "right, and 8 elements behind its rows are overwritten"


@pytest.mark.gpu
def test_without_an_allocator():
    with pytest.raises(RuntimeError, match="no allocator was set"):
        rules.attempt("device", "an allocator is set")


@pytest.mark.gpu
@cases(
    "rule, found",
    ("start at 16 bytes", "RuntimeError: .*invalid argument"),
    ("rows 16 bytes apart", "RuntimeError: .*invalid arg"),
    ("last stride 1", r"AssertionError: assert strides\[-1\] == 1"),
    ("powers of two", "ValueError: Shape element 1"),
    ("a context in the thread", "RuntimeError: .*invalid device context"),
)
def test_what_stops_a_bad_host_descriptor(rule, found):
    with pytest.raises((RuntimeError, AssertionError, ValueError)) as caught:
        rules.attempt("host", rule)
    assert re.match(found, rules.describe_error(caught.value))


@pytest.mark.gpu
@pytest.mark.fault
def test_a_fault_in_the_worker_is_a_row():
    row = rules._run_rule("tiles start at 16 bytes")
    found = row["device"]
    assert row["host"] == found == "AcceleratorError: CUDA error: an illegal instruction was encountered"
