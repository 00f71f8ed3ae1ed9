"""Why the transpose is slower than a copy: the kernels that do half of its work, and the counters as rows."""

import ctypes
import dataclasses

import pytest
import torch
from cases import cases

from ch10 import tile_pipeline
from ch10.tile_pipeline.configs import TileConfig, configs
from ch10.tile_pipeline.lesson import audit
from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.emulator.tensor_map import make_tensor_map
from tilelab.measure import bench, profiler
from tilelab.measure.patch import patched_source
from tilelab.runtime import device

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")
ACROSS, DOWN = (configs("transpose")[name] for name in ("across", "down"))
SWIZZLED = dataclasses.replace(ACROSS, swizzle="128B")


def cut(x, order):
    """Return x cut into tiles of 64 x 64 (axes 0 and 2 count tiles), with the axes in another order."""
    return x.view(x.shape[0] // 64, 64, x.shape[1] // 64, 64).permute(order).reshape(x.shape)


@pytest.mark.compile
@pytest.mark.skipif(not emulator.is_available(), reason="needs g++")
@cases(
    "config, changes, meaning",
    (ACROSS, (), torch.t),
    (ACROSS, (audit.KEEP_ELEMENTS,), lambda x: cut(x, (2, 1, 0, 3))),
    (ACROSS, (audit.KEEP_PLACE,), lambda x: cut(x, (0, 3, 2, 1))),
    (DOWN, (), torch.t),
    (SWIZZLED, (), torch.t),
    (TileConfig("transpose", 96, 96, 96, block=4, raster=3), (), torch.t),
)
def test_a_transpose_and_its_halves_emulated(config, changes, meaning):
    with patched_source(tile_pipeline.SOURCE, *changes) as path:
        constants = [f"-D{name}={value}" for name, value in config.constants().items()]
        kernel = cuda_magic.find_kernels(path.read_text(), constants)["transpose"]
    x = torch.randn((192, 192) if changes else (100, 260))
    out = torch.full(meaning(x).shape, 7.0)
    maps = [make_tensor_map(tensor, config.box(), swizzle=config.swizzle) for tensor in (x, out)]
    for seed in range(2):
        out.fill_(7)
        given = [*maps, *map(ctypes.c_uint32, config.tiles(x.shape))]
        emulator.run(kernel, config.blocks(x.shape), config.block_threads, given, config.smem_bytes(), seed)
        assert torch.equal(out, meaning(x))


def test_a_gap_consists_of_more_bytes_and_a_lower_rate():
    copy = {"ms": 1.0, "dram_bytes": 100.0}
    slower = audit.split_gap(copy, {"ms": 1.21, "dram_bytes": 110.0})
    assert slower == pytest.approx({"gap": 0.21, "bytes_share": 0.5})
    assert audit.split_gap(copy, copy) == {"gap": 0.0, "bytes_share": None}


def test_rows_have_counters_times_and_a_finding(monkeypatch):
    names = list(audit.list_candidates())
    slower = {
        "walk across": 1.1,
        "walk across, swizzled": 1.155,
        "tiles move, elements stay": 1.08,
        "walk down": 1.02,
    }
    lines = [
        "==PROF== Connected",
        ",".join(f'"{name}"' for name in ("Kernel Name", *audit.METRICS.values())),
        '""',
    ]
    lines += [",".join(['"kernel"', *(f'"{value}"' for value in (1000, 1000, 90, 500, 60, 60, 0))])] * len(
        names
    )
    monkeypatch.setattr(profiler, "run_ncu", lambda options, command: "\n".join(lines))
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(device, "current", lambda: HOPPER)
    monkeypatch.setattr(
        bench,
        "compare",
        lambda candidates, make_inputs, peer, **_: {
            name: bench.Timing(name, slower.get(name, 1.0), peer, 1.0) for name in candidates
        },
    )
    rows = audit.count_transpose().rows
    assert [row["name"] for row in rows] == names and all(row["dram_bytes"] == 2000 for row in rows)
