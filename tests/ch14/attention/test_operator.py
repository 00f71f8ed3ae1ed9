"""Flash attention: against float64, what it refuses, and what every target gets."""

import json
from concurrent.futures import ThreadPoolExecutor

import pretended
import pytest
import torch

from ch14 import attention
from ch14.attention import AttentionConfig, configs, experiments, figures, job, sweep
from ch14.attention.__main__ import main
from ch14.attention.configs import HEAD_DIMS, best_config, estimate_balance, estimate_clocks, rejection
from tilelab import build, check, device

HERE = device.current()
DTYPE = torch.float16
SMALL = AttentionConfig(32, 16, 4, 2)


def case(b=1, h=2, hk=2, s=40, t=40, d=64):
    where = "cuda" if HERE.has_tma else "cpu"
    return [torch.randn(b, heads, length, d, device=where).to(DTYPE) for heads, length in ((h, s), (hk, t), (hk, t))]


def test_spec_is_torchs_attention():
    q, k, v = (torch.randn(2, heads, 30, 64, dtype=torch.float64) for heads in (4, 2, 2))
    for causal in (False, True):
        wanted = attention.spec(q, k, v, is_causal=causal)
        torch.testing.assert_close(wanted, torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True))
        torch.testing.assert_close(experiments.compute_reference(q, k, v, causal), wanted)
    assert not torch.allclose(attention.spec(q, k, v, scale=1.0), attention.spec(q, k, v))


def test_the_check_finds_nothing_wrong():
    rows = experiments.check_correctness()
    assert rows and [row for row in rows if row["status"] != "ok"] == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1, 64), (2, 6, 2, 33, 47, 64), (1, 2, 1, 50, 17, 128)], ids=str)
def test_attention(shape, causal):
    q, k, v = case(*shape)
    kept = [each.clone() for each in (q, k, v)]
    wanted = attention.spec(q, k, v, is_causal=causal)
    flat, touched = check.make_poisoned((q.numel() // q.shape[-1], q.shape[-1]), q.dtype, q.device)
    result = attention.attention(q, k, v, is_causal=causal, out=flat.view(q.shape), config=SMALL)
    assert result.data_ptr() == flat.data_ptr() and not touched()
    assert check.relative_error(result, wanted) < check.TOLERANCE[DTYPE]
    assert all(torch.equal(now, before) for now, before in zip((q, k, v), kept))


def test_large_scores_and_a_scale_of_ones_own():
    q, k, v = case(s=20, t=70)
    q *= 40
    for scale in (None, 0.5):
        wanted = attention.spec(q, k, v, scale=scale)
        assert check.relative_error(attention.attention(q, k, v, scale=scale, config=SMALL), wanted) < 2**-9


def test_transposed_tensors_are_taken_as_they_are():
    q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in case(2, 3, 3, 37, 37))
    assert not q.is_contiguous()
    result = attention.attention(q, k, v, is_causal=True, config=SMALL)
    assert check.relative_error(result, attention.spec(q, k, v, is_causal=True)) < 2**-9


def test_no_queries_and_no_keys():
    q, k, v = case()
    launch = attention.prepare(q[:, :, :0], k, v)
    assert launch().shape == (1, 2, 0, 64) and launch.config == best_config(64, HERE.target if HERE.has_tma else None)
    assert not attention.attention(q, k[:, :, :0], v[:, :, :0], config="plain").any()


def refused(message, *changes, error=ValueError, **options):
    q, k, v = case()
    given = {"q": q, "k": k, "v": v} | dict(changes)
    with pytest.raises(error, match=message):
        attention.attention(**given, **options)


def test_bad_input_gets_one_sentence():
    q, k, v = case()
    refused("q must be a tensor of 4 dimensions", ("q", q[0]))
    refused("k must be float16; it is float64", ("k", k.double()))
    refused("k and v must be", ("v", v[:, :, :-1]))
    refused("k and v must be", ("k", k.repeat(2, 1, 1, 1)), ("v", v.repeat(2, 1, 1, 1)))
    refused("64 or 128", *zip("qkv", (each[..., :32].contiguous() for each in (q, k, v))))
    refused("multiple of those of k", *zip("kv", (each.repeat(1, 2, 1, 1)[:, :3] for each in (k, v))))
    refused("strides", ("q", q.mT.contiguous().mT))
    refused("strides", *zip("kv", (each[:, :1].expand(-1, 2, -1, -1) for each in (k, v))))
    refused("16 bytes", ("q", torch.cat([q.flatten(), q.flatten()])[1:1 + q.numel()].view(q.shape)))
    refused("backward", ("q", q.clone().requires_grad_()))
    for scale in (float("nan"), 0, -1, 1e38, "0.1", 0.1j, torch.tensor(0.1), torch.ones(2)):
        refused("2.-100 to 2.100", scale=scale)
    refused("unknown configuration 'fast'; choose best, plain", config="fast")
    refused("overlaps itself", out=torch.as_strided(torch.zeros(800, dtype=DTYPE, device=q.device), q.shape,
                                                    (400, 200, 8, 1)))
    refused("out must be 1 x 2 x 40 x 64", out=k[:, :, :5])
    refused("out lies in the memory of q", ("q", q), out=q)


@pytest.mark.skipif(HERE.has_tma, reason="without a GPU")
def test_the_interpreter_refuses_what_it_gets_wrong():
    q, k, v = (each.bfloat16() for each in case())
    with pytest.raises(device.Unsupported, match="bfloat16"):
        attention.attention(q, k, v)
    with pytest.raises(device.Unsupported, match="Gluon"):
        attention.attention(*case(), config="overlap")


@pytest.mark.parametrize("changes, message", [
    ({"kernel": "fast"}, "choose plain or hopper"), ({"block_m": 96}, "power of two"), ({"block_n": 8}, "16 to 256"),
    ({"num_stages": 0}, "0 stages"), ({"overlap": True}, "kernel='hopper'"), ({"num_warps": 64}, "from 1 to 32"),
    ({"kernel": "hopper", "block_m": 64}, "two warp groups"), ({"kernel": "hopper", "num_stages": 1}, "1 stages")])
def test_bad_configurations_get_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**changes)


def test_the_choice_can_run_where_it_is_made_for():
    for target in device.TARGETS[1:]:
        for d in HEAD_DIMS:
            assert not rejection(best_config(d, target), target)
    assert "wgmma" in rejection(configs(128)["overlap"], "sm_100a")
    assert "TMA" in rejection(AttentionConfig(), "sm_80")


@pytest.mark.parametrize("target", device.TARGETS[1:])
def test_the_ladder_of_every_gpu_has_a_step_that_fits(target, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device("a GPU", (9, 0), target))
    for d in HEAD_DIMS:
        steps = experiments.ladder_here(d)
        assert steps == configs(d) if target == "sm_90a" else [*steps] == ["plain"]
        assert all(report.launchable for report in build.build(
            job(config, target, d) for config in steps.values()))


def test_every_target_gets_tma_and_its_tensor_core():
    unit = {"sm_90a": "wgmma", "sm_100a": "tcgen05_mma", "sm_103a": "tcgen05_mma", "sm_120a": "mma_sync",
            "sm_121a": "mma_sync"}
    rows = experiments.compile_for_targets()
    assert {row["target"] for row in rows} == set(unit) and len(rows) == len(configs(128)) + 4
    for row in rows:
        assert row["status"] == "ok" and row["spills"] <= 16, row  # Triton 3.6 spills 8 bytes on sm_120a, 3.7 none
        assert row["tma_load"] > 0 and row["tma_store"] > 0 and row[unit[row["target"]]] > 0
        assert (row["setmaxnreg"] > 0) == ("hopper" in row["config"])


def test_the_hopper_kernel_loads_and_multiplies_in_sass():
    report = build.build_one(job(configs(128)["overlap"], "sm_90a", 128, True))
    assert all(opcode in report.sass for opcode in ("UTMALDG.4D", "UTMASTG.4D", "HGMMA", "USETMAXREG"))
    assert not build.ptxas_remarks(report.ptx, "sm_90a")  # "wgmma serialized" would be one


def test_clocks_say_what_bounds_a_head_dimension():
    assert estimate_clocks(64)["exponential"] == estimate_clocks(64)["products"]
    assert estimate_clocks(128)["products"] == 2 * estimate_clocks(128)["exponential"]


def test_the_model_of_who_is_busy():
    """64 blocks: in lockstep the units take turns, the sum of all costs; free of each other the slower one is busy."""
    for d in HEAD_DIMS:
        cost = estimate_clocks(d)
        softmax = cost["exponential"] + cost["float32"]
        shares = {step: figures.schedule(step, d, 64)[1] for step in ("lockstep", "roles", "overlap")}
        assert shares["lockstep"] == pytest.approx(cost["products"] / (cost["products"] + softmax), abs=0.02)
        assert shares["roles"] == pytest.approx(min(1, cost["products"] / softmax), abs=0.02)
        assert shares["overlap"] >= shares["roles"]
        for step in shares:  # a unit does one thing at a time
            spans = sorted((unit, begin, end) for unit, _, begin, end in figures.schedule(step, d)[0])
            assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(spans, spans[1:]))


def test_pairs_are_equal_work():
    """Busy SMs by hand: four tiles of 5, 4, 3 and 2 on two programs, and in pairs of 7."""
    assert estimate_balance(4, 1, 2, paired=False) == 14 / (2 * (5 + 3))
    assert estimate_balance(4, 1, 2, paired=True) == 1
    assert estimate_balance(3, 1, 1, paired=True) == 1  # the middle one stays alone


def test_pictures_draw():
    for picture in (figures.blocks_picture(), figures.blocks_picture(100, 300, causal=False),
                    *map(figures.timeline_picture, HEAD_DIMS)):
        assert picture._repr_png_().startswith(b"\x89PNG")


def test_flops_of_a_mask():
    assert experiments.count_flops((1, 1, 1, 4, 4, 64, True)) == 4 * 64 * 10
    assert experiments.count_flops((2, 3, 1, 4, 5, 64, False)) == 4 * 64 * 2 * 3 * 20


def test_command_line(capsys):
    assert main(["--target", "sm_100a", "--json", "-"]) == 0
    row, = json.loads(capsys.readouterr().out)["rows"]
    assert row["status"] == "ok" and row["tcgen05_mma"] > 0
    assert main(["--target", "sm_120a", "--step", "overlap"]) == 2
    assert "wgmma" in capsys.readouterr().out
    for bad in (["--shape", "1,3,2,64,64"], ["--shape", "1,2"], ["--step", "fast"],
                ["--shape", "9" * 30 + ",1,1,64,64"]):
        with pytest.raises(SystemExit) as caught:
            main(bad)
        said = capsys.readouterr().err
        assert caught.value.code == 2 and said.count("\n") == 1
    if not HERE.has_tma:
        assert main([]) == 2
        assert "--target sm_100a" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("name", ["plain", "roles", "overlap", "ping-pong", "persistent"])
def test_every_step_on_the_gpu(name, d):
    config = configs(d)[name]
    for causal in (False, True):  # the second has more tiles than the GPU has SMs
        for shape in ((2, 6, 2, 700, 900, d), (8, 32, 8, 391, 391, d)):
            row = experiments.verify(config, (*shape, causal))
            assert row["status"] == "ok", row


@pytest.mark.gpu
def test_a_tile_too_large_is_a_sentence():
    q, k, v = (torch.randn(1, 1, 256, 128, device="cuda").bfloat16() for _ in range(3))
    with pytest.raises(device.Unsupported, match="cannot run on"):
        attention.attention(q, k, v, config=AttentionConfig(256, 256, 8, 4))


LAUNCHED = """
import torch
import pretended
from ch14 import attention
from ch14.attention import experiments
from tilelab import device

jobs = []


def launch(config, case, dtype=torch.bfloat16):
    b, h, hk, s, t, d, causal = case
    q, k, v = (torch.empty(b, heads, length, d, dtype=dtype) for heads, length in ((h, s), (hk, t), (hk, t)))
    try:
        attention.prepare(q, k, v, is_causal=causal, config=config)
    except device.Unsupported as error:  # it wants to load the binary
        assert "NoneType" in str(error), error
    return {"status": "not checked"}


pretended.begin()
device.current = lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a", 132)
attention._check_operands = lambda *_: None  # tensors are on the CPU
experiments.verify, experiments.compare_with_cudnn = launch, lambda *_, **__: [{"name": "cuDNN"}]
experiments.build.compile_ahead = jobs.extend
for experiment in (experiments.check_correctness, experiments.measure_ladder.__wrapped__):
    jobs.clear()
    launched = pretended.list_launch_lookups(experiment)
    built = pretended.list_build_lookups(jobs)
    assert launched and launched <= built, (experiment, len(launched), len(built), len(launched & built))
    assert experiment is not experiments.check_correctness or launched == built
"""


def test_a_launch_finds_what_was_built_for_it():
    """The compiler's cache is looked up by hashes of the options and of the source, which names each argument as a
    launch sees it."""
    pretended.run(LAUNCHED)


def test_the_sweep_names_each_configuration_once_and_says_why_one_cannot_run():
    grid = sweep.grid()
    space = sweep.TUNABLE_KERNEL.space((4, 16, 4096, 128), "bf16", "sm_100a")
    labels = [space.label(config)["kernel"] for config in grid]
    assert len(set(labels)) == len(grid)
    assert {bool(space.reject(config)) for config in grid} == {True, False}
    for shape in ((4, 16, 4096), (1, 1, 64, 96), (1, 1, 1 << 20, 64)):
        with pytest.raises(ValueError, match="D 64 or 128"):
            sweep.TUNABLE_KERNEL.space(shape, "bf16", None)


@pytest.mark.gpu
def test_a_new_thread_can_launch():
    q = torch.randn(1, 2, 300, 128, device="cuda").bfloat16()
    launch = attention.prepare(q, q, q)
    with ThreadPoolExecutor(1) as pool:  # Triton would encode the maps there before the thread has a CUDA context
        assert torch.equal(pool.submit(launch).result(), launch())
