import pytest
import torch
from cases import cases

from ch14 import descriptors
from ch14.descriptors.configs import TileConfig
from ch14.descriptors.lesson import experiments, launch_cost


@pytest.mark.gpu
def test_every_way_to_launch_copies():
    rows = launch_cost.measure_cost()
    assert len(rows) == 9 and {row["status"] for row in rows} == {"ok"}
    assert all(row["us"] > 0 for row in rows)


@pytest.mark.gpu
@cases(
    "op, way, block",
    ("copy", "host", (64, 64)),
    ("add", "host", (0, 1024)),
    ("add", "device", (8, 64)),
    ("add", "pointers", (4, 256)),
    ("gather", "host", (1, 256)),
    ("gather", "device", (1, 1024)),
)
def test_a_bound_launch_computes_the_same(op, way, block):
    given = experiments.make_inputs(op, 333, 1032, torch.float32)
    inputs = {name: tensor for name, tensor in given.items() if name != "out"}
    launch = descriptors.prepare(op, config=TileConfig(way, *block, 1), **given)
    call = launch_cost.bind(launch)
    for _ in range(2):
        given["x"].normal_()
        given["out"].fill_(float("nan"))
        call()
        # the exact sum, rounded once
        assert torch.equal(given["out"], descriptors.spec(op, **inputs).float())
