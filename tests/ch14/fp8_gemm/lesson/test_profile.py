"""What is profiled, and how the profiler's answer becomes rows and a table."""

import pytest

from ch14.fp8_gemm.lesson import impacts, profile
from ch14.fp8_gemm.lesson.command import COMMAND, MODES
from tilelab.measure import profiler
from tilelab.runtime import device

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


def test_each_launch_becomes_a_row_with_its_three_longest_stalls(monkeypatch):
    cases = profile.find_cases()
    assert [shape for _, shape in cases[::6]] == [(4096, 4096, 7168), (8192, 8192, 1024)] and len(cases) == 12
    counters = dict.fromkeys(profile.METRICS, 1.0) | {
        "stalled, GMMA": 7.5,
        "stalled, barrier": 4.0,
        "read_bytes": 8e7,
        "stalled, wait": 2.0,
        "tensor_percent": 81.0,
    }
    names = ['"ID"', '"Kernel Name"', *(f'"{metric}"' for metric in profile.METRICS.values())]
    line = ",".join(['"0"', '"fp8_blocks(TensorMap)"', *(f'"{counters[name]}"' for name in profile.METRICS)])
    monkeypatch.setattr(
        profiler, "run_ncu", lambda options, given: "\n".join([",".join(names), '""', *[line] * 12])
    )
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(device, "current", lambda: HOPPER)
    record = profile.profile_parts()
    rows = record.rows
    assert [(row["name"], tuple(row["shape"])) for row in rows] == cases and rows[0]["kernel"] == "fp8_blocks"
    shown = str(profile.tabulate(record))
    assert "GMMA 7.5, barrier 4.0, wait 2.0" in shown and "81" in shown


@pytest.mark.skipif(bool(device.current().capability), reason="needs no GPU")
def test_the_modes_show_what_is_recorded_or_say_that_nothing_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    for mode in MODES:
        assert COMMAND.main(["--mode", mode]) == 0
        assert capsys.readouterr().out == f"ch14_blockscaled_{mode} is not recorded.\n"


def test_a_mode_takes_no_other_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        COMMAND.main("--mode profile --compile".split())
    assert stopped.value.code == 2 and "--mode stands alone; --compile" in capsys.readouterr().err


def test_the_workers_of_an_epilogue_share_a_ring():
    assert {config.num_stages for name, config in impacts.WORKERS.items() if "5" not in name} == {4}
    row = dict(shape=[8192, 8192, 1024], tile="64×64", held_out=False)
    rows = [
        row | {"name": name, "ratio": ratio}
        for name, ratio in (("4 warps", 1.0), ("0 warps", 1.5), ("2 warps", 1.25), ("3 warps", 0.8))
    ]
    split = [
        {"name": name, "shape": list(impacts.SPLIT), "ratio": 1.0, "config": "tile"}
        for name in ("course", "unsplit, square")
    ]
    (found,) = (each for each in impacts.verdicts([], [], split, workers=rows) if each["claim"] == "warps")
    assert (found["from"], found["to"], found["time saved"]) == ("4 warps", "2 warps", "20%")
