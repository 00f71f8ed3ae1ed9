"""The experiments, the sweep and the command line of flash attention, as far as they go without a GPU."""

import pytest

from ch14.attention import experiments, sweep
from ch14.attention.__main__ import main
from tilelab import device


def test_flops_of_a_mask():
    assert experiments.count_flops((1, 1, 1, 4, 4, 64, True)) == 4 * 64 * 10
    assert experiments.count_flops((2, 3, 1, 4, 5, 64, False)) == 4 * 64 * 2 * 3 * 20


def test_the_sweep_names_each_configuration_once_and_says_why_one_cannot_run():
    grid = sweep.grid()
    space = sweep.TUNABLE_KERNEL.space((4, 16, 4096, 128), "bf16", "sm_100a")
    labels = [space.label(config)["kernel"] for config in grid]
    assert len(set(labels)) == len(grid)
    assert {bool(space.reject(config)) for config in grid} == {True, False}
    for shape in ((4, 16, 4096), (1, 1, 64, 96), (1, 1, 1 << 20, 64)):
        with pytest.raises(ValueError, match="D 64 or 128"):
            sweep.TUNABLE_KERNEL.space(shape, "bf16", None)


def test_command_line_refuses(capsys):
    assert main(["--target", "sm_120a", "--step", "overlap"]) == 2
    assert "wgmma" in capsys.readouterr().out
    for bad in (["--shape", "1,3,2,64,64"], ["--shape", "1,2"], ["--step", "fast"],
                ["--shape", "9" * 30 + ",1,1,64,64"], ["--shape", "9" * 4301 + ",1,1,64,64"]):
        with pytest.raises(SystemExit) as caught:
            main(bad)
        said = capsys.readouterr().err
        assert caught.value.code == 2 and said.count("\n") == 1 and len(said) < 400


@pytest.mark.skipif(device.current().has_tma, reason="this GPU has TMA")
def test_command_line_without_a_gpu(capsys):
    assert main([]) == 2
    assert "--target sm_100a" in capsys.readouterr().err
