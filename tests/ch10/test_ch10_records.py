"""Chapter 10's records: what is asked of them."""

from h200_records import load_h200

from ch10.tile_pipeline import broken_programs


def test_no_product_errs_more_than_cublas_by_half():
    rows = [row for name in ("check", "squares", "llm", "ragged") for row in load_h200(f"ch10_gemm_{name}")["rows"]]
    assert all(row["error"] <= 1.5 * row["peer_error"] for row in rows if "error" in row)


def test_the_whole_kernel_is_right_and_breaking_the_phase_is_found():
    found = {row["name"]: row["status"] for row in load_h200("ch10_gemm_broken")["rows"]}
    assert found["nothing"] == "ok" and {found["phase"], found["expect_less"]} <= {"wrong", "failed"}


def test_each_broken_rule_shows_and_the_controls_do_not():
    found = {row["program"]: row["result"] for row in load_h200("ch10_tile_broken")["rows"]}
    assert list(found) == list(broken_programs.PROGRAMS)
    assert found["load from column 4"] == found["load from column -4"] == "it loads"
    assert all("illegal instruction" in found[f"load from column {column}"] for column in (1, -1))
    assert found["store rows of 31 floats"].endswith("holds 0.0")
    assert found["expect +0 bytes"] == "wrong in 0 of 200 runs" != found["expect -8,192 bytes"]


def test_the_time_stamps_show_an_overlap():
    rows = [row for row in load_h200("ch10_gemm_timeline")["rows"] if row["name"] == "persistent"]
    store = next(row for row in rows if row["event"] == "store")
    assert any((row["role"], row["event"], row["tile"]) == ("producer", "load", store["tile"] + 1)
               and row["begin"] < store["end"] for row in rows)
