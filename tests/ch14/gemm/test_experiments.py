"""The experiments, the sweep and the command line, as far as they go without a GPU; and what the records must say."""

import pytest

from ch14.gemm import experiments
from ch14.gemm.configs import GemmConfig, configs, predicted_ms, rank_configs, rejection
from ch14.gemm.experiments import GemmSpace
from ch14.gemm.sweep import grid
from tilelab import build, device, results
from tilelab.plots import rank_correlation
from tilelab.sweep import Sweep, sort_by_speed

H200 = {name: results.load(name, "nvidia-h200") for name in
        ("sweep_race", "sweep_faults", "sweep_gpus", "sweep_autotune_faults", "sweep_cancel", "sweep_memory",
         "ch14_gemm_square", "ch14_gemm_llm", "ch14_gemm_ragged", "ch14_gemm_fp8", "ch14_gemm_claim",
         "ch14_gemm_sweep", "ch14_gemm_latency", "ch14_gemm_copy", "ceilings")}


def ok(rows):
    return [row for row in rows if row["status"] == "ok"]


# ---- records: what README and notebooks state stays true of the code they describe


@pytest.mark.parametrize("name", ["ch14_gemm_square", "ch14_gemm_llm", "ch14_gemm_fp8", "ch14_gemm_ragged"])
def test_record_is_of_what_best_takes_today(name):
    for row in H200[name]["rows"]:
        best = rank_configs("course", *row["shape"], row["dtype"], "sm_90a", 132)[0]
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
            config = configs("proposed")[row["kernel"]]
            assert (row["status"] == "rejected") == bool(rejection(config, "sm_90a", "bf16"))
            assert row["reason"] == rejection(config, "sm_90a", "bf16")
    assert len([row for row in H200["ch14_gemm_claim"]["rows"] if row["status"] == "rejected"]) == 3 * 4


@pytest.mark.parametrize("side", experiments.SQUARES)
def test_the_model_ranks_the_recorded_sweep(side):
    rows = sort_by_speed(row for row in H200["ch14_gemm_sweep"]["rows"] if row["shape"][0] == side)
    predicted = [row["predicted_ms"] for row in rows]
    assert len(rows) > 60 and rank_correlation([1 / row["ratio"] for row in rows], predicted) >= 0.8
    # Finalists within 1 % of each other are a tie: the chip's clock decides which of them comes first in a recording.
    finalists = [row for row in rows if "final_ratio" in row]
    ties = [row for row in finalists if row["final_ratio"] >= 0.99 * finalists[0]["final_ratio"]]
    best_rank = min(sum(other < row["predicted_ms"] for other in predicted) for row in ties)
    assert best_rank < 10, "the fastest is not among the ten predicted fastest"


def test_record_of_the_sweep_reaches_the_targets():
    ours, autotune = H200["sweep_race"]["rows"]
    assert ours["configurations"] == 96 and ours["seconds"] <= autotune["seconds"] / 3
    assert ours["ms"] <= 1.01 * autotune["ms"], "the winner of triton.autotune is faster"
    one, several = H200["sweep_gpus"]["rows"]
    assert one["gpus"] == 1 < several["gpus"], "several GPUs of one model"
    assert one["timing_s"] >= 3.5 / 4 * several["gpus"] * several["timing_s"]  # asked for was 3.5 with four
    assert several["ms"] <= 1.01 * one["ms"], "more GPUs found a slower winner"
    assert all(row["answered_ms"] < 500 and row["rows"] > 0 == row["lost"] for row in H200["sweep_cancel"]["rows"])
    memory, = H200["sweep_memory"]["rows"]
    assert memory["configurations"] >= 500 and memory["after_mib"] - memory["before_mib"] < 50


def test_record_of_the_faults_lost_nothing():
    *rows, end = H200["sweep_faults"]["rows"]
    assert [row["status"] for row in rows if row["kernel"].isdigit()] == ["ok"] * 8
    assert all(row["status"] in ("failed", "wrong") for row in rows if not row["kernel"].isdigit())
    assert len(rows) == 15 and end["restarts"] == 2


# ---- the sweep


def test_a_build_is_what_a_launch_at_that_shape_asks_for():
    """Triton makes other kernels of sizes that are one, or no multiple of 16; the sweep builds the right one."""
    persistent, plain = configs()["128,256,64,8,4 persistent /2"], GemmConfig(64, 64, 32, 4, 1)
    even, odd, one = (GemmSpace(m, n, 4096).job(persistent) for m, n in ((4096, 4096), (1000, 1000), (1, 4096)))
    assert set(even.aligned) == {"M", "N", "K"} and set(odd.aligned) == {"K"}
    assert one.constants["M"] == 1 and "M" not in one.signature
    strided = GemmSpace(4096, 1000, 4096, layout="n").job(plain)
    assert {"stride_a", "M", "K"} <= set(strided.aligned) and not {"stride_b", "stride_c", "N"} & set(strided.aligned)
    scaled = GemmSpace(2048, 2048, 2048, "fp8").job(next(iter(configs("course", "fp8").values())))
    assert scaled.signature["scale_a_ptr"] == "*fp32"
    for job in (even, odd, one, strided, scaled):
        assert build.build_one(job).launchable


def test_every_named_set_gives_a_row_each_and_a_reason():
    rows = Sweep(configs().values(), GemmSpace(4096, 4096, 4096, compile_for="sm_90a")).finish()
    assert sorted(row["kernel"] for row in rows) == sorted(configs())
    rejected = [row for row in rows if row["status"] == "rejected"]
    assert len(rejected) == 4 and all(row["reason"] and "registers" not in row for row in rejected)


@pytest.mark.gpu
def test_what_was_built_is_what_runs(tmp_path, monkeypatch):
    """The worker on the GPU finds every build in the compiler's cache: nothing is compiled twice."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for shape, dtype, layout in (((1024, 1024, 1024), "bf16", "k"), ((1000, 1000, 1000), "bf16", "n"),
                                 ((1, 2048, 2048), "bf16", "k"), ((1024, 1024, 1024), "fp8", "k")):
        for config in (next(iter(configs("course", dtype, device.current().target).values())),
                       GemmConfig(64, 64, 32, 4, 1)):
            case = config, *shape, dtype, layout
            experiments.compile_ahead([case])
            before = len(list(tmp_path.glob("*/*.cubin")))
            assert before and experiments.verify(*case)["status"] == "ok"
            assert len(list(tmp_path.glob("*/*.cubin"))) == before, case


def test_each_build_is_made_once_and_before_the_first_is_timed(monkeypatch):
    happened = []
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30)
    monkeypatch.setattr(device, "current", lambda: here)
    monkeypatch.setattr(build, "compile_ahead", lambda jobs: happened.append(sorted(job.kernel for job in jobs)))
    monkeypatch.setattr(experiments, "measure", lambda config, *case: happened.append(case) or {"status": "ok"})
    sides = (1024, 2048, 1000)
    rows = experiments.measure_best((side, side, side, "bf16", "n") for side in (*sides, 2048))
    assert [row["shape"][0] for row in rows] == [*sides, 2048] and all(row["predicted_ms"] > 0 for row in rows)
    built, *timed = happened
    assert len(timed) == 4 and 2 <= len(built) < 4 and set(built) == {"ch14.gemm.kernels:gemm_persistent_kernel"}


def test_predictions_are_recorded_beside_what_was_measured():
    by_name = {config.name: config for config in grid()}
    for row in ok(H200["ch14_gemm_sweep"]["rows"]):
        config = by_name[row["kernel"]]
        assert row["predicted_ms"] == pytest.approx(predicted_ms(config, *row["shape"], "bf16", 132))
