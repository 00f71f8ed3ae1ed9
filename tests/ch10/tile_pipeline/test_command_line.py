"""What the command of ch10.tile_pipeline compiles and measures; tests/test_commands.py has what all commands share."""

import commands
import pytest

from ch10.tile_pipeline.configs import DIMENSIONS, configs
from ch10.tile_pipeline.lesson import experiments

MODULE = "ch10.tile_pipeline"


@pytest.mark.compile
def test_it_compiles_what_suits_the_shape(capsys):
    status, record = commands.run_json(capsys, MODULE, "--shape 100,200 --target sm_90a")
    assert status == 0 and {row["name"]: row["config"] for row in record["rows"]} == {
        name: str(config) for name, config in configs("copy", (100, 200)).items()
    }
    assert all(row["UTMALDG"] > 0 and row["op"] == "copy" for row in record["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize("op", experiments.OPS)
def test_it_measures(capsys, op):
    shape = "4100,4100" if DIMENSIONS[op] == 2 else "4,2052,2052"
    status, record = commands.run_json(capsys, MODULE, f"--op {op} --shape {shape}")
    assert status == 0 and all(row["status"] == "ok" and row["gbps"] > 0 for row in record["rows"])
