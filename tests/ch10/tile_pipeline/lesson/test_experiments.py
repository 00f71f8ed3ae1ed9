"""What is measured and swept: told apart, counted and hashed as it should be."""

import pytest
import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.configs import DIMENSIONS, TileConfig
from ch10.tile_pipeline.lesson import box_dump, broken_programs, experiments, sweep
from tilelab.measure import bench
from tilelab.records import results
from tilelab.runtime import build, device, provenance


def test_a_space_rejects_what_cannot_run_there():
    config = TileConfig("stencil", 64, 128, 128, stages=4)
    spaces = {target: sweep.TileSpace((1024, 1024), "stencil", target) for target in device.TARGETS}
    assert spaces["sm_80"].reject(config) == "sm_80 has no TMA: tensor maps need sm_90a or newer."
    found = spaces["sm_121a"].reject(config)
    assert found == "it needs 144,000 B of shared memory per block; sm_121a has 101,376 B."
    assert spaces["sm_90a"].reject(config) == ""
    known = {"name": "stencil", "config": str(config), "kernel": str(config), "shape": [1024, 1024]}
    known |= {"dtype": "stencil"}
    assert spaces["sm_90a"].label(config) == known
    assert spaces["sm_100a"].job(config) == tile_pipeline.job(config, "sm_100a")


@pytest.mark.parametrize("op", experiments.OPS)
def test_what_is_swept_can_be_told_apart_and_launched(op):
    chosen, space = sweep.grid(op), sweep.TileSpace((1024,) * DIMENSIONS[op], op, "sm_90a")
    assert len(set(map(str, chosen))) == len(chosen) >= 9
    assert [space.reject(config) for config in chosen] == [""] * len(chosen)


def test_the_panel_s_kernel():
    kernel = sweep.TileSpace
    for op in kernel.dtypes:
        for preset in kernel.presets.values():
            assert all(axis(config) for axis in kernel.axes.values() for config in preset(op))
    for shape, op in (((6,), "copy"), ((0, 4), "copy"), ((4, 4), "accumulate"), ((4, 4, 4), "transpose")):
        with pytest.raises(ValueError, match=f"a shape of {op} must be "):
            kernel(shape, op)


def test_records_go_stale_with_the_code_that_makes_them(monkeypatch):
    monkeypatch.setattr(provenance, "source_hash", lambda *things: set(things))
    every = {tile_pipeline, tile_pipeline.SOURCE.with_name("configs.py"), tile_pipeline.SOURCE}
    for made in (
        experiments.check_correctness,
        experiments.measure_speed,
        experiments.run_sanitizers,
        sweep.measure_sweep,
    ):
        assert every <= made.source()
    assert every | {box_dump} <= broken_programs.run_programs.source()


def test_what_is_moved():
    assert experiments.bytes_moved("copy", (3, 5)) == experiments.bytes_moved("transpose", (3, 5)) == 120
    assert experiments.bytes_moved("add_shared", (2, 3, 5)) == 300
    assert experiments.bytes_moved("accumulate", (2, 3, 5)) == 180


def test_torch_s_own_ways_mean_the_same():
    x, out = torch.randn(6, 9), torch.empty(6, 9)
    experiments.torch_candidates("stencil")["torch slices"](x, out)()
    expected = tile_pipeline.spec("stencil", x, centre=experiments.CENTRE, edge=experiments.EDGE)
    assert torch.allclose(out.double(), expected, rtol=1e-6, atol=1e-6)
    turned = torch.empty(9, 6)
    experiments.torch_candidates("transpose")["torch x.T copy_"](x, turned)()
    assert torch.equal(turned, x.T)
    padded, target = (tile_pipeline.empty_padded((3, 5), torch.float32, "cpu").fill_(fill) for fill in (1, 2))
    experiments.torch_candidates("copy")["torch copy_"](padded, target)()
    assert torch.equal(*(tensor.as_strided((15,), (1,)).view(torch.int32) for tensor in (padded, target)))
    batch, y, total = torch.randn(2, 6, 9), torch.randn(6, 9), torch.empty(2, 6, 9)
    experiments.torch_candidates("add_shared")["torch add"](batch, total, y)()
    assert torch.equal(total, batch + y)
    experiments.torch_candidates("accumulate")["torch sum"](batch, out)()
    assert torch.equal(out, batch.sum(0))


def test_rows_are_those_of_the_record(monkeypatch):
    monkeypatch.setattr(build, "compile_ahead", list)
    monkeypatch.setattr(
        bench,
        "compare",
        lambda candidates, make_inputs, peer, **_: {
            name: bench.Timing(name, 1.0, peer, 2.0) for name in candidates
        },
    )
    for measure, record in (
        (experiments.measure_speed, "speed"),
        (experiments.measure_boxes, "boxes"),
        (experiments.measure_multicast, "multicast"),
    ):
        rows, recorded = measure.__wrapped__(), results.load(f"ch10_tile_{record}", results.PREFERRED)["rows"]
        measured = {"ms", "peer_ms", "ratio", "gbps", "spread"}
        found = [{key: row[key] for key in row.keys() - measured} for row in rows]
        assert found == [{key: row[key] for key in row.keys() - measured} for row in recorded]
