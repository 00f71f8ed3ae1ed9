"""The experiments of the grouped products, as far as they go without a GPU: small models, times that are pretended."""

import copy
import math
import sys
import types

import pytest
import torch
from cases import cases

from ch14 import moe
from ch14.moe.configs import GroupedConfig
from ch14.moe.lesson import command, experiments, figures, model, workloads
from ch14.moe.lesson.workloads import Model, make_masked, make_sorted
from tilelab.measure import bench, peers
from tilelab.records import results
from tilelab.runtime import device

WHERE = "cuda" if device.current().capability else "cpu"
TINY = Model(4, 2, 256, 128)
SIZES = [70, 0, 133, 1]


def multiply_padded(a, weight, out, experts):
    (a, scale_a), (weight, scale_b) = (
        each if isinstance(each, tuple) else (each, None) for each in (a, weight)
    )
    assert len(a) % 128 == 0 and (experts.unflatten(0, (-1, 128)) == experts[::128, None]).all()
    a, weight = moe._dequantise(a, scale_a, 1), moe._dequantise(weight, scale_b, 128)
    out.copy_(torch.stack([weight[expert] @ row for row, expert in zip(a, experts)]))


def multiply_masked(a, weight, out, counts, expected):
    assert a[1].mT[0].is_contiguous() and 1 <= expected <= a[0].shape[1]
    wide = moe._dequantise(*a, 1) @ moe._dequantise(*weight, 128).mT
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = wide[expert, :count]


LIBRARY = types.SimpleNamespace(
    m_grouped_bf16_gemm_nt_contiguous=multiply_padded,
    m_grouped_fp8_gemm_nt_contiguous=multiply_padded,
    m_grouped_fp8_gemm_nt_masked=multiply_masked,
)


@pytest.fixture
def small(monkeypatch):
    """Models and configurations for the interpreter, a peer like DeepGEMM, and times that are pretended."""

    def compare(candidates, make, peer, **timing):
        tensors = make()
        for candidate in candidates.values():
            candidate(*tensors)  # what is checked was launched before
        times = {name: 1.0 + place for place, name in enumerate(candidates)}
        return {
            name: bench.Timing(name, ms, peer, times[peer], ratios=(times[peer] / ms,) * 3)
            for name, ms in times.items()
        }

    monkeypatch.setattr(workloads, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(workloads, "HELD_OUT", {})
    monkeypatch.setattr(workloads, "BLIND", {"tiny": TINY})
    monkeypatch.setattr(experiments, "BLIND_CHOICES", ((("down", 2, "random"),), ()))
    monkeypatch.setattr(experiments, "BLIND_MASKED", ((("down", 2, "skewed"),), ()))
    monkeypatch.setattr(experiments, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(experiments, "LAYER_MODELS", ("tiny",))
    monkeypatch.setattr(experiments, "LAYER_TOKENS", (3,))
    monkeypatch.setattr(experiments, "SKEWED", (("tiny", "up", 40),))
    monkeypatch.setattr(experiments, "GRADIENTS", (("tiny", "up", 40, "random"),))
    monkeypatch.setattr(experiments, "CHOICES", (("down", 20, "random"),))
    monkeypatch.setattr(experiments, "MASKED_CHOICES", (("down", 20, "skewed"),))
    monkeypatch.setattr(experiments, "PADDED", (2, 256, 64))
    monkeypatch.setattr(experiments, "PADDED_ROWS", (16, 80))
    monkeypatch.setattr(experiments, "CHECKED", {"ragged": SIZES, "nothing": [0] * 4})
    monkeypatch.setattr(bench, "compare", compare)
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(peers, "find", lambda name: peers.Peer("DeepGEMM", "0", library=LIBRARY))


def record(name):
    """The record that the experiment would make of its rows."""
    rows = getattr(experiments, f"measure_{name}").__wrapped__()
    made = results.make_record(f"ch14_moe_{name}", rows, "0" * 16)
    results.to_json(made)  # it refuses NaN
    return results.Record(made, live=True)


@pytest.mark.parametrize("routing", workloads.ROUTINGS)
def test_each_token_has_its_experts(routing):
    sizes = workloads.route(Model(16, 4, 0, 0), 100, routing)
    assert (
        sum(sizes) == 400 and len(sizes) == 16 and sizes == workloads.route(Model(16, 4, 0, 0), 100, routing)
    )
    assert (
        max(sizes) == {"equal": 25, "one": 400}.get(routing, max(sizes)) <= (400 if routing == "one" else 100)
    )


def test_no_model_is_in_two_sets_and_there_are_enough_cases():
    sets = workloads.MODELS, workloads.HELD_OUT, workloads.BLIND
    products = [model.product(part) for each in sets for model in each.values() for part in ("up", "down")]
    assert len(set(products[-20:])) == 20 and not set(products[-20:]) & set(products[:-20])
    for choices in (experiments.BLIND_CHOICES, experiments.BLIND_MASKED):
        blind = workloads.list_blind(*choices)
        assert {case.model for case in blind} == workloads.BLIND.keys()
        assert {case.routing for case in blind} == {"random", "skewed"} and max(
            case.tokens for case in blind
        ) <= 4096
    assert max(case.tokens for case in blind) <= experiments.CAPACITY
    found = experiments.list_cases(experiments.CHOICES)
    assert all(sum(case.chosen_on == name for case in found) >= 20 for name in ("tuned", "held out"))
    assert {case.routing for case in found} >= {"equal", "random", "skewed"}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_peers_compute_the_same_rows(fp8):
    tensors = make_sorted(SIZES, 136, 256, fp8, WHERE)
    launch = experiments.prepare_deep_gemm(LIBRARY, *tensors)
    assert workloads.find_error(launch(), tensors, launch.places) < 2**-7
    if fp8:
        tensors = make_masked(SIZES, 133, 136, 256, fp8, WHERE)
        found = experiments.prepare_deep_gemm_masked(LIBRARY, *tensors)()
        assert workloads.find_error(found, tensors) < 2**-7


@cases("expert, row", (0, 0), (2, 69), (3, 203), (None, 0))
def test_a_wrong_row_is_found(expert, row):
    tensors = make_sorted(SIZES, 40, 64, False, WHERE)
    wanted = moe.spec(tensors[0], tensors[1].mT, tensors[2]).bfloat16()
    if expert is not None:
        begin = tensors[2].tolist()[expert] - SIZES[expert]
        wanted[begin : begin + SIZES[expert]] = float("nan")
    fault, error = experiments.find_product_fault(lambda *_: lambda: wanted, tensors)
    assert bool(fault) == (expert is not None) and math.isfinite(error) == (expert is None)


def test_a_wrong_or_missing_peer_is_not_timed(small):
    def refuse(*tensors):
        raise ValueError("no such layout")

    rivals = {
        peers.Peer("right", "1"): experiments.prepare_course,
        peers.Peer("wrong", "1"): lambda *tensors: lambda: tensors[3].zero_(),
        peers.Peer("refuses", "1"): refuse,
        peers.Peer("missing", reason="it is not here."): refuse,
    }
    small_tile = GroupedConfig(64, 64, 32, 4, 2)
    course = {"best": lambda *tensors: experiments.prepare_course(*tensors, config=small_tile)}
    rows = experiments.compare(
        course, rivals, lambda: make_sorted(SIZES, 40, 64, False, WHERE), experiments.find_product_fault
    )
    reasons = {row["peer"]: row["reason"] for row in rows}
    assert reasons["right"] == "" and "error" in reasons["wrong"] and "no such layout" in reasons["refuses"]
    assert reasons["missing"] == "it is not here." and [bool(row.get("ratio")) for row in rows] == [
        1,
        0,
        0,
        0,
    ]
    assert all(row["kernel"] == "best" for row in rows)


@pytest.mark.parametrize("name", ["shapes", "masked", "held_out", "gradient"])
def test_products_of_models(small, name):
    found = record(name)
    assert {row["status"] for row in found.rows} == {"ok"}, found.rows
    wanted = {"masked": {"DeepGEMM"}, "gradient": {"torch"}}.get(name, {"DeepGEMM", "torch"})
    assert {row["peer"] for row in found.rows} == wanted
    lines = figures.summarise(found, "kernel").splitlines()
    assert lines[-1] == found.label() and all(": " in line for line in lines[:-1])


def test_a_case_counts_beside_its_better_peer():
    row = {"kernel": "best", "model": "m", "status": "ok", "reason": ""}
    rows = [
        row | {"peer": "a", "ratio": 1.2},
        row | {"peer": "b", "ratio": 0.9},
        row | {"peer": "a", "ratio": 1.6, "tokens": 2},
        row | {"peer": "c", "status": "failed", "reason": "it is missing."},
    ]
    found = results.Record(results.make_record("ch14_moe_shapes", rows, "0" * 16), live=True)
    lines = figures.summarise(found, "kernel").splitlines()
    assert (
        lines[0] == "best: 1.20, lowest 0.90, 2 cases" and lines[1] == "1 rows have no ratio: it is missing."
    )


def test_skewed_routings(small):
    found = record("skew")
    assert [row["routing"] for row in found.rows] == [*workloads.ROUTINGS] * 2
    assert found.rows[3]["experts"] == 1 and found.rows[3]["tiles"] <= found.rows[0]["tiles"]
    assert "1.00 × equal" in figures.describe_skew(found)


def test_padded_tiles(small):
    found = record("padding")
    assert [row["rows"] for row in found.rows] == [16, 80]
    assert figures.describe_padding(found).startswith(" 16 rows per expert: tiles of 128 rows run at 0.50 ×")


def test_the_layer_agrees_with_the_loop(small, monkeypatch):
    for swiglu in (False, True):  # the interpreter takes longer for larger tiles
        monkeypatch.setitem(experiments.SETS, ("bf16", swiglu), [GroupedConfig(64, 64, 64, 4, 2)])
    found = record("layer")
    assert {row["status"] for row in found.rows} == {"ok"}, found.rows
    graphs = {row["peer"]: row["graph"] for row in found.rows}
    assert graphs == {"eager": False, "grouped": True, "compiled": True}
    assert "tiny, 3 tokens, moe fp8: " in figures.describe_layer(found)


def test_every_configuration_is_checked(small, monkeypatch):
    small_tile = {"bf16": GroupedConfig(64, 64, 64, 4, 2), "fp8": GroupedConfig(64, 64, 128, 4, 2)}
    monkeypatch.setattr(experiments, "SETS", {
        (dtype, swiglu): experiments.SETS[dtype, swiglu][:1] if swiglu else [tile]
        for dtype, tile in small_tile.items() for swiglu in (False, True)
    })  # fmt: skip
    monkeypatch.setattr(experiments.verify, "__defaults__", (128,))  # K
    found = record("checks")
    assert [row["status"] for row in found.rows] == ["ok"] * 9, found.rows
    assert figures.describe_checks(found).count("largest error") == 9


def test_a_tile_that_crosses_into_the_next_group_is_found(monkeypatch):
    """A launch that stores all rows of its tiles writes rows of no expert, after the last one."""
    prepare = moe.planner.prepare

    def store_too_much(tensors, out, config, kind):
        launch = prepare(tensors, out, config, kind)
        return lambda: [launch(), out[-1:].zero_()]

    monkeypatch.setattr(moe.planner, "prepare", store_too_much)
    fault, _ = experiments.verify(GroupedConfig(64, 64, 64, 4, 2), SIZES, False, "sorted", WHERE, 64)
    assert fault == "rows of no expert were stored"


# ---- in a model, and the command


def test_the_experts_of_a_model_are_one_call():
    x, gate_up, down, ids, weights, *_ = experiments.make_layer(TINY, 9, WHERE)
    layer = torch.nn.Module()
    layer.gate_up_proj, layer.down_proj = (torch.nn.Parameter(each) for each in (gate_up, down))
    model.quantise_experts(torch.nn.Sequential(layer))
    wanted = experiments.compute_layer(x, gate_up, down, ids, weights)
    with torch.no_grad():
        assert model.find_cosine(model.run_experts(layer, x, ids, weights), wanted) > 0.9999
        assert 0.99 < model.find_cosine(model.run_fp8_experts(layer, x, ids, weights), wanted) < 0.9999


@pytest.mark.gpu
def test_a_small_model_is_one_graph_and_has_the_logits_of_its_own_experts(monkeypatch):
    pytest.importorskip("transformers", "5")
    monkeypatch.setattr(model, "CALLS", {"prefill": (1, 80), "decode": (4, 1)})
    sizes = dict(hidden_size=256, moe_intermediate_size=128, num_experts=8, vocab_size=512)
    with torch.no_grad():
        made = model.make_model("cuda", **sizes)
        models = {name: model.use_experts(made, experts) for name, (experts, _) in model.VARIANTS.items()}
        assert models["eager"].lm_head.weight is made.lm_head.weight
        reference = copy.deepcopy(models["eager"]).float()
        for phase in model.CALLS:
            rows = model.measure_phase(models, reference, phase, lambda graph, inputs: graph)
            assert [row["status"] for row in rows] == ["ok"] * 4, rows
            assert [row["graphs"] for row in rows] == [0, 1, 1, 1] and all(
                "graph_ms" in row for row in rows[1:]
            )


def test_an_older_transformers_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    with pytest.raises(device.Unsupported, match="install transformers 5"):
        model.register_experts()


def test_a_variant_that_cannot_run_has_a_reason():
    row = {"phase": "decode", "sequences": 32, "tokens": 1, "status": "ok", "reason": "", "cosine": 0.99}
    rows = [
        row | {"name": "eager", "graphs": 0, "ms": 2.0, "ratio": 1.0},
        row | {"name": "compiled", "graphs": 1, "ms": 1.0, "ratio": 2.0, "graph_ratio": 1.0},
        row | {"name": "course bf16", "status": "failed", "reason": "no memory"},
    ]
    found = results.Record(results.make_record("ch14_moe_model", rows, "0" * 16), live=True)
    lines = figures.describe_model(found).splitlines()
    assert lines[1].endswith(
        "compiled: 2.00 × eager, 1.00 × compiled, in CUDA graphs 1.00 × compiled, "
        "graphs of torch.compile: 1, cosine 0.9900"
    )
    assert lines[2].endswith("course bf16: no memory")


def test_the_speed_of_two_gpus_and_a_missing_record_are_said(capsys):
    row = {"model": "m", "tokens": 32, "gpus": 2, "ms": 2.0, "ratio": 1.5, "exchange_ms": 0.5}
    found = results.Record(results.make_record("ch14_moe_parallel", [row], "0" * 16), live=True)
    figures.show(figures.describe_parallel, lambda: found)
    figures.show(figures.describe_parallel, lambda: results.load_record("ch14_moe_nothing", ""))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("m, 32 tokens on each of 2 GPUs: 1.50 ×") and "take 25% of" in first
    assert last == "ch14_moe_nothing is not recorded"


@pytest.mark.skipif(device.current().has_wgmma, reason="it measures")
def test_without_hopper_the_command_shows_what_is_recorded_of_the_model(monkeypatch, capsys):
    rows = [
        {"model": name, "ms": 1.0, "status": "ok", "reason": ""} for name in ("Qwen 3 30B", "DeepSeek-V3")
    ]
    data = results.make_record("ch14_moe_shapes", rows, "0" * 16)
    monkeypatch.setattr(experiments.measure_shapes, "load", lambda: results.Record(data, live=False))
    assert command.COMMAND.main(["--tokens", "1"]) == 0
    said = capsys.readouterr().out
    assert "recorded" in said and "Qwen 3 30B" in said and "DeepSeek" not in said
