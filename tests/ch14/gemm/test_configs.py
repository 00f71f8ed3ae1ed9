import pytest
from cases import cases

from ch14.gemm.configs import SETS, GemmConfig, configs, parse, predict_us, rank_configs, rejection
from ch14.gemm.lesson.sweep import grid, tuned_configs


def test_four_of_the_six_proposed_cannot_run_on_hopper():
    reasons = [rejection(config, "sm_90a", "bf16") for config in configs("proposed").values()]
    assert "128 of them for the accumulator" in reasons[0]
    assert ["393,216" in reasons[1], "393,216" in reasons[2], "262,144" in reasons[3]] == [True] * 3
    assert reasons[4:] == ["", ""]


def test_the_grid_is_of_96_and_hopper_takes_68():
    found = [rejection(config, "sm_90a", "bf16") for config in grid()]
    assert len(found) == len({config.name for config in grid()}) == 96 and found.count("") == 68


def test_old_and_small_gpus():
    assert "has no TMA" in rejection(GemmConfig(64, 64, 32, 4, 1), "sm_80", "bf16")
    assert configs("course", target="sm_121a") and configs("course", "fp8", "sm_120a")
    assert all(
        config.smem_bytes("bf16", "sm_121a") < 101376
        for config in configs("course", target="sm_121a").values()
    )


@cases(
    "shape, expected",
    ((512, 6144, 4096), "128×192×64 · 4 warps · 5 stages"),
    ((64, 4096, 4096), "64×64×128 · 4 warps · 6 stages"),
    ((512, 4096, 4096), "128×128×64 · 4 warps · 6 stages"),
    ((8192, 8192, 8192), "128×128×64 · 4 warps · 3 stages"),
)
def test_the_model_picks_the_tile_that_was_fastest(shape, expected):
    assert rank_configs("course", *shape, "bf16", "sm_90a", 132)[0].name.startswith(expected)


@cases(
    "config", *configs("course").values(), *configs("conservative").values(), ids=lambda config: config.name
)
def test_prediction_grows_with_the_work(config):
    times = [predict_us(config, size, size, size, "bf16", 132) for size in (256, 1024, 4096, 8192)]
    assert times == sorted(times) and times[0] > 0
    assert predict_us(config, 4096, 4096, 4096, "fp8", 132) <= times[2]


def test_name_tells_what_the_tile_leaves_out():
    assert GemmConfig(64, 64, 32, 4, 1).name == "64×64×32 · 4 warps · 1 stage · plain"
    assert list(configs("course"))[:2] == [
        "128×256×64 · 8 warps · 4 stages · persistent · C in 2 parts",
        "128×128×64 · 4 warps · 3 stages · persistent · C in 4 parts · 2 per SM · early",
    ]
    assert len(configs()) == 17 == sum(len(configs(which)) for which in SETS)
    found = GemmConfig(64, 64, 32, 4, 1, group_m=4).name
    assert found == "64×64×32 · 4 warps · 1 stage · plain · groups of 4"


def test_a_part_of_the_epilogue_is_at_least_sixteen_bytes_wide():
    """A descriptor's row is 16 bytes or more: four elements of C are refused by the compiler, so earlier here too."""
    with pytest.raises(ValueError, match="epilogue_subtile"):
        GemmConfig(64, 16, 16, 4, 2, epilogue_subtile=4)


def test_parse():
    config = configs()["128×256×64 · 8 warps · 4 stages · persistent · C in 2 parts"]
    for text in ("128,256,64,8,4", "128x256x64, 8 warps, 4 stages", config.name):
        assert parse(text) == config, text
    assert parse("128,256,64,8,3") == GemmConfig(128, 256, 64, 8, 3, kernel="persistent")
    assert parse("64,64,32,4,1").kernel == "plain" and parse("128,256,64,8,4 plain").kernel == "plain"
    for config in tuned_configs():
        assert parse(config.name) == config
    split = GemmConfig(16, 64, 256, 4, 6, "split", pdl=True, splits=2, group_m=16)
    assert parse(split.name) == split
    swapped = GemmConfig(64, 208, 64, 4, 5, "persistent", 2, pdl=True, swap=True)
    found = parse(swapped.name)
    assert parse("64×208×64, 4 warps, 5 stages, swapped, persistent, C in 2 parts, early") == found == swapped
    both = GemmConfig(128, 128, 64, 4, 3, "persistent", 4, 16, 2, True)
    assert parse(both.name) == both
    for text in ("", "fast", "128,256", "1,2,3,4,x", "128,256,64,8,4,2", "9" * 4301 + ",1,1,1,1"):
        with pytest.raises(ValueError, match="unknown configuration .{,70}; choose best, a set"):
            parse(text)


@cases(
    "numbers, options, message",
    ((96, 128, 64, 4, 3), {}, "block_m must be one of 16, 32, 64, 128, 256, 512; it is 96"),
    ((128, 96, 64, 4, 3), {}, "block_n must be one of 16, .*; it is 96"),
    ((128, 192, 64, 4, 3), {}, "block_n must be one of 16, .*; it is 192"),
    ((128, 128, 8, 4, 3), {}, "block_k must be one of 16"),
    ((128, 128, 64, 64, 3), {}, "num_warps must be one of 1, 2, 4, 8, 16, 32; it is 64"),
    ((128, 128, 64, 4, 0), {}, "num_stages must be one of 1, .*; it is 0"),
    ((128, 128, 64, 4, 3), {"group_m": 0}, "group_m and programs_per_sm must be at least 1"),
    ((128, 128, 64, 4, 3), {"kernel": "fast"}, "kernel must be one of plain, persistent"),
    ((128, 128, 64, 4, 3), {"epilogue_subtile": 3}, "epilogue_subtile must be one of 1, 2, 4"),
    ((128, 240, 64, 8, 3), {"kernel": "persistent"}, "block_n must be a sum of at most three powers"),
    ((64, 8, 64, 4, 3), {"kernel": "split", "splits": 2}, "block_n must be a sum of .*; it is 8"),
    ((64, 16, 64, 4, 3), {"swap": True}, "swap must be False for the kernel plain"),
)
def test_bad_configuration_is_one_sentence(numbers, options, message):
    with pytest.raises(ValueError, match=message):
        GemmConfig(*numbers, **options)


def test_unknown_sets():
    with pytest.raises(ValueError, match="unknown set 'bold'; choose conservative, proposed, course"):
        configs("bold")
    with pytest.raises(ValueError, match="unknown dtype 'fp32'; choose bf16, fp16, fp8"):
        configs("course", "fp32")
