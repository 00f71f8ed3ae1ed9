"""Chapter 10's records: of today's kernels, and right."""

import pytest
from records import held

from ch10.tile_pipeline import broken_programs, experiments, sweep
from ch10.wgmma_gemm import experiments as wgmma_gemm_experiments
from ch10.wgmma_gemm import sweep as wgmma_gemm_sweep
from tilelab import device, results

EXPERIMENTS = {
    "ch10_tile_check": experiments.checked, "ch10_tile_dump": experiments.dumped, "ch10_tile_speed": experiments.speed,
    "ch10_tile_swizzle": experiments.swizzles, "ch10_tile_stages": experiments.staged,
    "ch10_tile_multicast": experiments.multicast, "ch10_tile_reduction": experiments.reduction,
    "ch10_tile_boxes": experiments.boxes, "ch10_tile_sweep": sweep.swept,
    "ch10_tile_sanitizer": experiments.sanitized,
    "ch10_gemm_check": wgmma_gemm_experiments.checked, "ch10_gemm_ladder": wgmma_gemm_experiments.ladder,
    "ch10_gemm_squares": wgmma_gemm_experiments.squares, "ch10_gemm_llm": wgmma_gemm_experiments.llm,
    "ch10_gemm_ragged": wgmma_gemm_experiments.ragged, "ch10_gemm_raster": wgmma_gemm_experiments.raster,
    "ch10_gemm_width": wgmma_gemm_experiments.width, "ch10_gemm_timeline": wgmma_gemm_experiments.timeline,
    "ch10_gemm_broken": wgmma_gemm_experiments.broken, "ch10_gemm_first": wgmma_gemm_experiments.first,
    "ch10_gemm_sweep": wgmma_gemm_sweep.swept, "ch10_gemm_sanitizer": wgmma_gemm_experiments.sanitized}


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_record_is_of_todays_kernels(name):
    assert results.stale_reason(held(name), EXPERIMENTS[name].source()) == ""


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in ("ch10_gemm_broken", "ch10_gemm_sweep",
                                                                             "ch10_tile_sweep")])
def test_nothing_recorded_is_wrong(name):
    rows = held(name)["rows"]
    assert rows and [row for row in rows if row["status"] != "ok"] == []


def test_no_product_errs_more_than_cublas_by_half():
    rows = [row for name in ("check", "squares", "llm", "ragged") for row in held(f"ch10_gemm_{name}")["rows"]]
    assert all(row["error"] <= 1.5 * row["peer_error"] for row in rows if "error" in row)


def test_a_sweep_finds_no_wrong_result():
    rows = held("ch10_gemm_sweep")["rows"] + held("ch10_tile_sweep")["rows"]
    assert {row["status"] for row in rows} <= {"ok", "rejected"}


def test_the_whole_kernel_is_right_and_breaking_the_phase_is_found():
    found = {row["name"]: row["status"] for row in held("ch10_gemm_broken")["rows"]}
    assert found["nothing"] == "ok" and {found["phase"], found["expect_less"]} <= {"wrong", "failed"}


def test_each_broken_rule_shows_and_the_controls_do_not():
    found = {row["program"]: row["result"] for row in held("ch10_tile_broken")["rows"]}
    assert list(found) == list(broken_programs.PROGRAMS)
    assert found["load from column 4"] == found["load from column -4"] == "it loads"
    assert all("illegal instruction" in found[f"load from column {column}"] for column in (1, -1))
    assert found["store rows of 31 floats"].endswith("holds 0.0")
    assert found["expect +0 bytes"] == "wrong in 0 of 200 runs" != found["expect -8,192 bytes"]


def test_the_time_stamps_show_an_overlap():
    rows = [row for row in held("ch10_gemm_timeline")["rows"] if row["name"] == "persistent"]
    store = next(row for row in rows if row["event"] == "store")
    assert any((row["role"], row["event"], row["tile"]) == ("producer", "load", store["tile"] + 1)
               and row["begin"] < store["end"] for row in rows)


@pytest.mark.parametrize("argument", ["bogus", "--help", "load from column 1"])
def test_the_command_line_of_broken_rules(argument, capsys):
    if argument == "load from column 1":
        if device.current().has_tma:
            pytest.skip("it would lose this process's GPU")
        assert broken_programs.main([argument]) == 0 and "an illegal instruction" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as ended:
        broken_programs.main([argument])
    said = capsys.readouterr()
    assert ended.value.code == 2 * (argument == "bogus") and said.err.count("\n") == (argument == "bogus")
