"""What the command of ch10.tile_pipeline compiles and measures; tests/test_commands.py has what all commands share."""

import commands
import pytest

from ch10.tile_pipeline.configs import DIMENSIONS, configs
from ch10.tile_pipeline.lesson import experiments

MODULE = "ch10.tile_pipeline"


@pytest.mark.compile
@pytest.mark.parametrize("arguments", ["--op add_shared --target sm_100a", "--shape 100,200 --target sm_90a"])
def test_it_compiles(capsys, arguments):
    status, record = commands.run_json(capsys, MODULE, arguments)
    op = "add_shared" if "add_shared" in arguments else "copy"
    wanted = configs(op) if op == "add_shared" else configs(op, (100, 200))
    assert status == 0 and {row["name"]: row["config"] for row in record["rows"]} == {
        name: str(config) for name, config in wanted.items()
    }
    assert all(row["UTMALDG"] > 0 and row["op"] == op for row in record["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize("op", experiments.OPS)
def test_it_measures(capsys, op):
    shape = "4100,4100" if DIMENSIONS[op] == 2 else "4,2052,2052"
    status, record = commands.run_json(capsys, MODULE, f"--op {op} --shape {shape}")
    assert status == 0 and all(row["status"] == "ok" and row["gbps"] > 0 for row in record["rows"])
