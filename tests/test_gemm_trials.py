"""The experiments, the sweep and the command line, as far as they go without a GPU; and what the records must say."""

import json
import re
from pathlib import Path

import pytest

from ch14 import gemm_configs, gemm_trials
from tilelab import device, results
from tilelab.sweep import Space, sweep

H200 = {name: results.load(name, "nvidia-h200") for name in
        ("ch14_gemm_square", "ch14_gemm_llm", "ch14_gemm_ragged", "ch14_gemm_fp8", "ch14_gemm_claim",
         "ch14_gemm_sweep", "ch14_gemm_latency", "ch14_gemm_copy", "ceilings")}


def ok(rows):
    return [row for row in rows if row["status"] == "ok"]


# ---- records: what README and notebooks state stays true of the code they describe


@pytest.mark.parametrize("record", H200.values(), ids=H200)
def test_record_has_its_provenance(record):
    assert record["device"]["name"] == "NVIDIA H200" and record["device"]["sms"] == 132
    assert all(record["versions"][name] for name in ("python", "torch", "triton", "cuda", "driver"))
    assert record["recorded"].endswith("Z") and len(record["source"]) == 16
    for row in record["rows"]:
        assert row["status"] in ("ok", "rejected", "failed")
        assert row["status"] == "ok" or row["reason"]
        if "ratio" in row:
            assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ms"])


@pytest.mark.parametrize("name", [name for name in H200 if name.startswith("ch14_gemm_") and "copy" not in name])
def test_record_is_of_todays_kernel(name):
    assert results.stale(H200[name], gemm_trials.source()) == ""


@pytest.mark.parametrize("name", ["ch14_gemm_square", "ch14_gemm_llm", "ch14_gemm_fp8", "ch14_gemm_ragged"])
def test_record_is_of_what_best_takes_today(name):
    for row in H200[name]["rows"]:
        best = gemm_configs.ranked("course", *row["shape"], row["dtype"], "sm_90a", 132)[0]
        assert row["kernel"] == best.name
        assert row["error"] <= 1.5 * row["peer_error"]


@pytest.mark.parametrize("name, layout, mean, lowest", [
    ("ch14_gemm_square", "k", 1.00, 0.97), ("ch14_gemm_square", "n", 1.00, 0.97), ("ch14_gemm_llm", "k", 0.97, 0.88)])
def test_record_reaches_the_targets(name, layout, mean, lowest):
    ratios = [row["ratio"] for row in H200[name]["rows"] if row["layout"] == layout]
    assert results.geometric_mean(ratios) >= mean and min(ratios) >= lowest


def test_record_of_fp8_and_copy_reaches_the_targets():
    assert next(row for row in H200["ch14_gemm_fp8"]["rows"] if row["shape"][0] == 8192)["ratio"] >= 1
    assert max(row["ratio"] for row in H200["ch14_gemm_copy"]["rows"]) >= 0.98


def test_record_of_the_claim_rejects_what_the_model_rejects():
    for row in H200["ch14_gemm_claim"]["rows"]:
        if row["name"] == "proposed":
            config = next(c for c in gemm_configs.configs("proposed") if str(c) == row["config"])
            assert (row["status"] == "rejected") == bool(gemm_configs.rejection(config, "sm_90a", "bf16"))
            assert row["reason"] == gemm_configs.rejection(config, "sm_90a", "bf16")
    assert len([row for row in H200["ch14_gemm_claim"]["rows"] if row["status"] == "rejected"]) == 3 * 4


def test_the_model_ranks_the_recorded_sweep():
    from tilelab.plots import rank_correlation

    of = {config.name: config for config in gemm_trials.grid()}
    rows = sorted(ok(H200["ch14_gemm_sweep"]["rows"]), key=lambda row: row["ms"])
    predicted = [gemm_configs.predicted_ms(of[row["kernel"]], *row["shape"], "bf16", 132) for row in rows]
    assert rank_correlation([row["ms"] for row in rows], predicted) > 0.9
    assert sorted(predicted).index(predicted[0]) < 10, "the fastest is not among the ten predicted fastest"


# ---- the sweep


def test_sweep_gives_every_configuration_one_row_and_a_reason():
    configs = [config for which in gemm_configs.SETS for config in gemm_configs.configs(which)]
    rows = list(sweep(configs, gemm_trials.space(4096, 4096, 4096, target="sm_90a")))
    assert sorted(row["kernel"] for row in rows) == sorted(config.name for config in configs)
    rejected = [row for row in rows if row["status"] == "rejected"]
    assert len(rejected) == 4 and all(row["reason"] and "registers" not in row for row in rejected)
    assert all(row["registers"] and row["smem"] for row in rows if row["status"] == "ok")


def test_sweep_keeps_what_measuring_says():
    walk = gemm_trials.space(64, 64, 64, target="sm_90a")
    walk = Space(walk.label, walk.reject, walk.job, lambda config: {"status": "wrong", "reason": "it is"})
    rows = list(sweep(gemm_configs.configs("conservative"), walk))
    assert [row["status"] for row in rows] == ["wrong"] * 3


def test_sweep_keeps_equal_configurations_apart_and_outlives_a_measure_that_raises():
    def measure(config):
        raise RuntimeError("no luck")

    walk = gemm_trials.space(64, 64, 64, target="sm_90a")
    one = gemm_configs.configs("conservative")[0]
    rows = list(sweep([one, one, one], Space(walk.label, walk.reject, walk.job, measure)))
    assert [(row["status"], row["reason"]) for row in rows] == [("failed", "no luck")] * 3


# ---- the command line


def run(capsys, *arguments):
    status = gemm_trials.main(list(arguments))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_command_line_compiles_for_another_gpu(capsys):
    status, out, _ = run(capsys, "--target", "sm_100a", "--config", "proposed", "--json", "-")
    record = json.loads(out)
    assert status == 0 and [row["status"] for row in record["rows"]].count("rejected") == 4
    assert set(results.KEYS) <= set(record)
    status, out, _ = run(capsys, "--target", "sm_90a", "--config", "128,256,64,8,4")
    assert status == 0 and "229,408 B of shared memory" in out


def test_command_line_writes_a_file(capsys, tmp_path):
    status, out, _ = run(capsys, "--target", "sm_121a", "--config", "conservative", "--json", str(tmp_path / "x.json"))
    assert status == 0 and len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 3 and "64,64,32,4,1" in out


@pytest.mark.parametrize("arguments, message", [
    (["--mnk", "4096,4096"], "--mnk takes three sizes such as 4096,4096,4096; here it is '4096,4096'"),
    (["--mnk", "0,1,1"], "sizes must be at least 1"),
    (["--target", "sm_42"], "unknown target 'sm_42'"),
    (["--target", "sm_90a", "--config", "fast"], "a configuration is BLOCK_M"),
    (["--target", "sm_90a", "--config", "96,96,64,4,3"], "block_m must be a power of two"),
])
def test_command_line_bad_usage_is_one_line_and_two(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and message in err and len(err.splitlines()) == 1 and not out


@pytest.mark.skipif(device.current().has_tma, reason="this GPU has TMA")
@pytest.mark.parametrize("arguments", [[], ["--copy"], ["--sweep"]])
def test_command_line_without_a_gpu(capsys, arguments):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and "needs TMA" in err and len(err.splitlines()) == 1


def test_command_line_rejected_tile(capsys):
    status, out, _ = run(capsys, "--target", "sm_90a", "--config", "256,256,128,16,5")
    assert status == 2 and "registers" in out


@pytest.mark.gpu
def test_command_line_measures(capsys):
    status, out, _ = run(capsys, "--mnk", "1024,1024,1024", "--json", "-")
    row = json.loads(out)["rows"][0]
    assert status == 0 and row["status"] == "ok" and row["ratio"] > 0.5 and row["error"] <= 1.5 * row["peer_error"]


def test_readme_states_what_the_records_hold():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    stated = re.search(r"a copy reaches ([\d.]+) TB/s, the library's bf16 product (\d+) TFLOP/s.*"
                       r"runs at ([\d.]+) × cuBLAS on squares .*, ([\d.]+) × on decoder shapes", readme, re.DOTALL)
    copy, tensor = H200["ceilings"]["rows"]
    squares, llm = ([row["ratio"] for row in H200[name]["rows"]] for name in ("ch14_gemm_square", "ch14_gemm_llm"))
    held = [copy["gbps"] / 1e3, tensor["tflops"], *map(results.geometric_mean, (squares, llm))]
    assert [float(figure) for figure in stated.groups()] == pytest.approx(held, rel=0.04)
