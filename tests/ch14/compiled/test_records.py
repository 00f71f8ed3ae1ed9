"""Records of `ch14_compiled`: what the notebook says of them."""

import pytest
from h200_records import load_h200

from ch14.compiled import experiments


@pytest.fixture(scope="module")
def cells():
    rows = load_h200("ch14_compiled_cells")["rows"]
    return {(row["workload"], tuple(row["shape"]), row["name"]): row for row in rows}


def cell(cells, workload, name):
    return next(row for (family, shape, mode), row in cells.items() if (family, mode) == (workload, name))


def test_every_case_is_there_and_within_its_tolerance(cells):
    assert list(cells) == [(family, shape, mode) for family, shape, modes in experiments.CASES for mode in modes]
    assert all(row["error"] <= row["tolerance"] and row["ms"] > 0 and row["kernels"] for row in cells.values())


def test_a_compile_time_is_given_where_caches_were_cold(cells):
    for row in cells.values():
        assert ("compile_s" in row) == (row.get("caches") == row["name"]), row["name"]


def test_no_kernel_claims_tma_without_a_count(cells):
    counters = load_h200("ch14_compiled_ncu")["rows"]
    found = [each for row in cells.values() for each in experiments.list_kernels(row, counters)]
    assert all((each["UTMALDG"] is None) == (each["proof"] == "none") for each in found)
    large = [row for row in cells.values() if row["name"] != "unfused" and row["shape"] != [1, 16, 16, 2048, 128]]
    assert all(row["proof"] in ("SASS", "ncu") for row in experiments.make_table(large, counters))


def test_eager_loads_by_tma_and_max_autotune_has_no_template_for_it(cells):
    counters = load_h200("ch14_compiled_ncu")["rows"]
    row, = experiments.make_table([cell(cells, "matmul", "eager")], counters)
    assert row["UTMALDG"] > 0 and row["proof"] == "ncu"
    choices = load_h200("ch14_compiled_choices")["rows"]
    offered = {row["name"] for row in choices if row["whose"] == "Triton, persistent TMA"}
    assert offered == {"persistent-tma", "tma-only"}
    assert "max-autotune" in {row["name"] for row in choices if row["whose"] == "Triton, pointers"}
    assert not any("USE_TMA=True" in row["what"] for row in choices if row["name"] == "flex-max-autotune")
    assert all(cell(cells, "matmul", mode)["calls"] == ["library mm"] for mode in ("default", "max-autotune"))


def test_descriptors_in_the_code_are_tma_in_the_kernel(cells):
    for row in cells.values():
        if row.get("triton"):
            loads = sum(counts["UTMALDG"] for counts in row["triton"].values())
            assert (loads > 0) == (row["descriptors"] > 0), row["name"]


def test_what_compiling_gains(cells):
    assert cell(cells, "mlp", "default")["ratio"] >= 1.02
    products = [row for row in cells.values() if row["workload"] in ("matmul", "mlp")]
    assert max(row["ratio"] for row in products) < 1.2  # the title of a picture
    copied, plain = (cell(cells, "matmul", mode)["ratio"] for mode in ("max-autotune", experiments.TUNED))
    assert copied < 0.95 * plain


def test_attention_is_the_librarys_kernel_in_every_mode(cells):
    counters = load_h200("ch14_compiled_ncu")["rows"]
    rows = [cell(cells, "attention", name) for name in ("cuDNN", "eager", "default", "max-autotune", "unfused-default")]
    assert len({row["main"] for row in experiments.make_table(rows, counters)}) == 1
    slow = cell(cells, "attention", "unfused")["ratio"]
    assert all(cell(cells, "attention", name)["ratio"] > 1.3 * slow for name in ("flash", "efficient"))
