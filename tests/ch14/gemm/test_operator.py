import threading

import pytest
import torch
import triton
from cases import cases
from sentences import refused

from ch14 import gemm
from ch14.gemm import prepare
from ch14.gemm.configs import SETS, GemmConfig, configs
from ch14.gemm.lesson import experiments
from tilelab.measure import check
from tilelab.runtime import build, device
from tilelab.runtime.operands import Launch

GPU = device.current().capability is not None
WHERE = "cuda" if GPU else "cpu"
SMALL = [
    GemmConfig(64, 64, 16, 4, 2),
    *(GemmConfig(64, 64, 16, 4, 2, "persistent", parts) for parts in (1, 2)),
    GemmConfig(64, 192, 16, 4, 3, "persistent", 2),
    GemmConfig(64, 64, 16, 4, 2, "split", splits=3),
    GemmConfig(64, 80, 16, 4, 3, "persistent", 4),
    GemmConfig(128, 320, 16, 8, 3, "persistent", 4),
    GemmConfig(256, 160, 16, 8, 3, "persistent", 4),
    GemmConfig(64, 64, 16, 4, 3, "persistent", 4, swap=True),
    GemmConfig(64, 112, 16, 4, 3, "split", splits=2, swap=True),
    GemmConfig(64, 208, 16, 4, 3, "persistent", swap=True, pointers=True),
    GemmConfig(64, 48, 16, 4, 3, "split", 2, splits=3, pointers=True),
    GemmConfig(64, 64, 16, 4, 2, "persistent", 4, pointers=True),
]


def random(*shape, dtype=torch.float16):
    return torch.randn(*shape, device=WHERE).to(dtype)


def run_with(config):
    return lambda a, b, out: gemm.gemm(a, b, out=out, config=config)


def shape_of_c(a, b):
    return (a.shape[0], b.shape[1]), torch.float16


@pytest.mark.parametrize("config", SMALL, ids=lambda config: config.name)
def test_gemm_matches_its_spec_on_ragged_shapes(config):
    cases = []
    # the first has ten tiles for 8 programs
    for m, n, k in ((260, config.block_n + 8, 24), (1, 72, 40), (64, 8, 8)):
        a, weight = random(m, k), random(n, k)
        cases += [
            (f"{m},{n},{k} K-major", (a, weight.T)),
            (f"{m},{n},{k} row by row", (a, weight.T.contiguous())),
        ]
    rows = check.compare(run_with(config), gemm.spec, cases, out=shape_of_c)
    assert [row for row in rows if row["status"] != "ok"] == []


def test_split_launches_give_the_same_again_and_again():
    """The program that adds up the parts sets the counter of its tile back, and adds in one order."""
    a, b = random(130, 640), random(72, 640).T
    launch = prepare(a, b, config=next(config for config in SMALL if config.kernel == "split"))
    first = launch().clone()
    for _ in range(3):
        launch.out.fill_(float("nan"))
        assert torch.equal(launch(), first)


def test_padded_rows_are_read_and_left_alone():
    wide_a, wide_b, wide_out = random(40, 96), random(48, 104), random(40, 64)
    a, b, out = wide_a[:, :72], wide_b[:, :72].T, wide_out[:, 8:56]
    before = wide_out.clone()
    gemm.gemm(a, b, out=out, config=SMALL[1])
    assert check.relative_error(out, gemm.spec(a, b)) < 1e-3
    assert torch.equal(wide_out[:, :8], before[:, :8]) and torch.equal(wide_out[:, 56:], before[:, 56:])


@pytest.mark.parametrize("config", SMALL[:2], ids=lambda config: config.name)
def test_a_single_row_may_have_any_stride(config):
    cases = [
        (f"stride {stride}", (random(64).as_strided((1, 64), (stride, 1)), random(64, 64)))
        for stride in (1, 3, 68)
    ]
    rows = check.compare(run_with(config), gemm.spec, cases, out=shape_of_c)
    assert [row for row in rows if row["status"] != "ok"] == []


def test_out_is_made_when_not_given():
    a, b = random(32, 32), random(32, 32)
    c = gemm.gemm(a, b, config="64,64,32,4,1 plain")
    assert c.dtype == a.dtype and check.relative_error(c, gemm.spec(a, b)) < 1e-3


@cases(
    "change, message",
    (lambda a, b: (a[0], b), r"a must be a matrix; its shape is \(64,\)"),
    (lambda a, b: (a[:, :32], b), "the inner extents differ: a is 64 x 32 and b is 64 x 64"),
    (lambda a, b: (a, b.bfloat16()), "b must be float16; it is bfloat16"),
    (lambda a, b: (a.float(), b.float()), "a must be bfloat16, float16 or float8_e4m3fn; it is float32"),
    (lambda a, b: (a.T, b), "a must be stored row by row"),
    (lambda a, b: (random(64, 68)[:, :64], b), "a row of a must take a multiple of 16 bytes"),
    (lambda a, b: (a, random(64, 128)[:, ::2]), "b must be stored row by row"),
    (lambda a, b: (a, random(60, 64).T), "N must be a multiple of 8"),
)
def test_bad_matrix_is_one_sentence(change, message):
    with refused(message):
        gemm.gemm(*change(random(64, 64), random(64, 64)))


@cases(
    "options, message",
    ({"out": random(64, 32)}, "out must be 64 x 64; it is 64 x 32"),
    ({"out": random(64, 64).T}, "out must be stored row by row"),
    ({"scale_a": torch.ones((), device=WHERE)}, "scale_a must be one value, for float8 .*; it has 1"),
    ({"out": random(64, 68)[:, :64]}, "a row of out must take .* 16 bytes; its stride is 136"),
    ({"scale_b": 0.5}, "scale_b must be a torch.Tensor; it is a float"),
)
def test_bad_option_is_one_sentence(options, message):
    with refused(message):
        gemm.gemm(random(64, 64), random(64, 64), **options)


def test_out_may_not_share_memory_with_an_input():
    wide = random(64, 128)
    for out in (wide[:, :64], wide[:, 64:]):
        with pytest.raises(ValueError, match="out lies in the memory of a: give it memory of its own"):
            gemm.gemm(wide[:, :64], random(64, 64), out=out)
    a, b = (random(64, 64).to(torch.float8_e4m3fn) for _ in range(2))
    out = torch.empty(64, 64, dtype=torch.bfloat16, device=WHERE)
    with pytest.raises(ValueError, match="out lies in the memory of scale_a"):
        gemm.gemm(a, b.T, out=out, scale_a=out.view(torch.float32)[0, :1])
    with pytest.raises(ValueError, match="a must be a torch.Tensor; it is a list"):
        gemm.gemm([[1.0]], random(64, 64))


def test_float8_wants_k_contiguous_and_float32_scales():
    a, b = (random(64, 64).to(torch.float8_e4m3fn) for _ in range(2))
    with pytest.raises(ValueError, match="float8 needs B with K contiguous"):
        gemm.gemm(a, b)
    with pytest.raises(ValueError, match="scale_b must be one value, for float8 inputs; it has 64"):
        gemm.gemm(a, b.T, scale_b=torch.ones(64, device=WHERE))
    with pytest.raises(ValueError, match="scale_a must be float32; it is float64"):
        gemm.gemm(a, b.T, scale_a=torch.ones((), dtype=torch.float64, device=WHERE))


def test_bfloat16():
    a, b = random(100, 72, dtype=torch.bfloat16), random(72, 104, dtype=torch.bfloat16)
    assert check.relative_error(gemm.gemm(a, b), gemm.spec(a, b)) < check.TOLERANCE[torch.bfloat16]


def test_a_set_says_what_it_passed_over():
    ready = prepare(random(64, 64), random(64, 64), config="proposed")
    assert isinstance(ready, Launch) and ready.fallback == ""
    assert ready.config.name in configs("proposed")
    reasons = {str(config): reason for config, reason in ready.skipped}
    if not GPU or device.current().target == "sm_90a":
        assert set(reasons) == {*[config.name for config in configs("proposed").values()][:4]}
        assert "232,448 B" in reasons["128×128×128 · 8 warps · 4 stages · plain"]
    assert all(reasons.values())


def test_a_set_runs():
    a, b = random(100, 72), random(72, 104)
    for which in (*SETS, "best"):
        assert check.relative_error(gemm.gemm(a, b, config=which), gemm.spec(a, b)) < 1e-3, which


def test_tma_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("TILES_TMA", "0")
    a, b = random(40, 40)[:, :33], random(33, 72)
    launch = prepare(a, b)  # K is no multiple of what a thread loads
    assert launch.config.pointers and launch.config.name.endswith("by pointers")
    assert gemm.parse(launch.config.name) == launch.config
    assert check.relative_error(launch(), gemm.spec(a, b)) < 1e-3
    monkeypatch.setenv("TILES_TMA", "off")
    with refused("TILES_TMA must be 0 .* or 1 .*; it is 'off'"):
        prepare(random(48, 32), random(32, 48))


def test_falling_back_is_reported(monkeypatch):
    monkeypatch.setattr(
        gemm,
        "rank_configs",
        lambda which, *_: [] if which == "proposed" else [*configs("conservative").values()],
    )
    with pytest.warns(
        UserWarning,
        match="no configuration of the set 'proposed' runs on .*; "
        "the conservative configuration 64×64×32 · 4 warps · 1 stage · plain is used instead",
    ):
        gemm.gemm(random(64, 64), random(64, 64), config="proposed")


def test_one_configuration_that_cannot_run_is_unsupported():
    says = "no configuration .* runs on .*: 256×256×128 · 16 warps · 5 stages · plain: .*"
    with pytest.raises(device.Unsupported, match=says):
        gemm.gemm(random(64, 64), random(64, 64), config="256,256,128,16,5 plain")


@pytest.mark.gpu
@cases("dtype, layout", ("bf16", "k"), ("bf16", "n"), ("fp16", "k"), ("fp16", "n"), ("fp8", "k"))
def test_every_configuration_on_ragged_shapes(dtype, layout):
    target = device.current().target
    chosen = configs(None, dtype, target).values()
    shapes = experiments.RAGGED_FP8 if dtype == "fp8" else experiments.RAGGED
    wrong = [
        (config.name, shape, row["reason"])
        for config in chosen
        for shape in shapes
        if (row := experiments.verify(config, *shape, dtype, layout))["status"] != "ok"
    ]
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*configs("course").values()][:5], ids=lambda config: config.name)
def test_the_same_bits_every_time(config):
    a, b, out, *_ = experiments.make_inputs(520, 1032, 2056)
    ready = prepare(a, b, out=out, config=config)
    first = ready().clone()
    for _ in range(50):
        out.fill_(float("nan"))
        assert torch.equal(ready(), first)


@pytest.mark.gpu
def test_plain_kernel_from_another_thread():
    """triton.set_allocator sets a ContextVar, which a new thread does not inherit."""
    a, b, out, *_ = experiments.make_inputs(256, 256, 256)
    failures = []

    def run():
        try:
            gemm.gemm(a, b, out=out, config="conservative")
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures and check.relative_error(out, gemm.spec(a, b)) < 1e-2


@pytest.mark.gpu
def test_back_to_back_launches_do_not_overtake_each_other():
    """Programmatic dependent launch: a kernel that starts before its producer is done must wait before it reads."""
    a, b, out, *_ = experiments.make_inputs(2048, 2048, 2048)
    second = torch.empty_like(out)
    with_pdl = next(config for config in configs("course").values() if config.pdl)
    first, then = prepare(a, b, out=out, config=with_pdl), prepare(out, b, out=second, config=with_pdl)
    expected = torch.mm(torch.mm(a, b), b)
    for _ in range(30):
        out.fill_(float("nan"))
        first()
        then()
        assert check.relative_error(second, expected) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", ["conservative", "128×256×64 · 8 warps · 4 stages · persistent · C in 2 parts"]
)
def test_what_was_launched_moves_its_tiles_by_tma(config, monkeypatch):
    launched, run = [], triton.JITFunction.run

    def recorded(*args, **kwargs):
        launched.append(run(*args, **kwargs))
        return launched[-1]

    monkeypatch.setattr(triton.JITFunction, "run", recorded)
    a, b, out, *_ = experiments.make_inputs(256, 256, 256)
    gemm.gemm(a, b, out=out, config=config)
    assert launched
    for kernel in launched:
        counts = build.sass_counts(kernel.asm["cubin"])
        assert counts["UTMALDG"] and counts["UTMASTG"]
