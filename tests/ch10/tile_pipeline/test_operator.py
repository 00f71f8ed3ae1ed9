import dataclasses
import re

import pytest
import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline import box_dump, broken_programs, experiments, sweep
from ch10.tile_pipeline.configs import DIMENSIONS, TileConfig, configs
from tilelab import build, device, results

EVERY = [(op, name) for op in experiments.OPS for name in configs(op)]


@pytest.fixture(scope="module")
def built():
    """Reports by (op, variant, target); those of `all_configs` stand under (op, str(config), "sm_90a")."""
    jobs = {(op, name, target): tile_pipeline.job(configs(op)[name], target) for op, name in EVERY
            for target in device.TARGETS[1:]}
    jobs |= {(op, name, "sm_90a"): tile_pipeline.job(config, "sm_90a") for op in experiments.OPS
             for name, config in experiments.all_configs(op).items()}
    jobs |= {("copy", size, "sm_90a"): tile_pipeline.job(configs("copy")["ring"], "sm_90a", size) for size in (1, 2, 8)}
    jobs |= {("copy", "sm_80"): tile_pipeline.job(configs("copy")["single"], "sm_80")}
    named = [dataclasses.replace(job, name=" ".join(map(str, key))) for key, job in jobs.items()]
    reports = {report.job.name: report for report in build.build(named)}
    return {key: reports[" ".join(map(str, key))] for key in jobs}


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))


def sentence(caught):
    return "\n" not in str(caught.value) and str(caught.value).endswith(".")


# ---- what the compiler makes of it


@pytest.mark.parametrize("target", device.TARGETS[1:])
@pytest.mark.parametrize("op, name", EVERY)
def test_every_variant_compiles_and_holds_what_it_teaches(built, op, name, target):
    report, config = built[op, name, target], configs(op)[name]
    assert report.launchable and report.threads == config.block_threads, report.reason
    assert report.smem == config.smem_bytes()
    if not target.startswith("sm_12"):  # there a load into shared memory of a cluster may call a function
        assert report.spills == 0
    if not report.counts:
        return  # the cuobjdump in Triton 3.6 cannot read sm_103a and sm_121a
    counts = report.counts
    assert counts["UTMALDG"] and counts["SYNCS"] and not counts["LDG"] and not counts["LDGSTS"]
    assert (counts["UTMASTG"] > 0) == (op in ("copy", "transpose", "add_shared"))
    assert (counts["UTMAREDG"] > 0) == (op == "accumulate")
    assert (counts["STG"] > 0) == (op == "stencil")
    assert (counts["STS"] > 0) == (op in ("transpose", "add_shared"))


@pytest.mark.parametrize("op, name", EVERY)
def test_only_the_threads_of_three_read_shared_memory(built, op, name):
    counts = built[op, name, "sm_90a"].counts
    assert (counts["LDS"] > 0) == (op in ("stencil", "transpose", "add_shared"))


@pytest.mark.parametrize("op", experiments.OPS)
def test_every_ring_swizzle_and_cluster_compiles(built, op):
    for name in experiments.all_configs(op):
        report = built[op, name, "sm_90a"]
        assert report.launchable and report.spills == 0, f"{name}: {report.reason}"


def test_the_copy_of_other_elements_compiles(built):
    for size in (1, 2, 8):
        assert built["copy", size, "sm_90a"].launchable
        assert built["copy", size, "sm_90a"].smem == 4 * 8 * 256 * size


def test_only_a_cluster_multicasts_and_waits_for_its_neighbours(built):
    for name, config in configs("add_shared").items():
        sass = built["add_shared", name, "sm_90a"].sass
        assert bool(re.search(r"UTMALDG\.2D\.MULTICAST", sass)) == (config.cluster > 1)
        assert ("UCGABAR_ARV" in sass) == (config.cluster > 1)
        assert "UTMALDG.3D" in sass and "UTMASTG.3D" in sass


def test_a_transpose_in_blocks_moves_16_bytes_at_a_time(built):
    for name, config in configs("transpose").items():
        sass = built["transpose", name, "sm_90a"].sass
        assert bool(re.search(r"LDS\.128", sass)) == bool(re.search(r"STS\.128", sass)) == (config.block == 4)


def test_ampere_is_refused_with_a_reason(built):
    report = built["copy", "sm_80"]
    assert report.status == "failed" and re.search("tile_pipeline.cu does not compile for sm_80", report.reason)


# ---- jobs, and what is compared and swept


def test_a_job_compiles_what_the_configuration_says():
    job = tile_pipeline.job(TileConfig("stencil", 16, 64, 128, 3, 4, "warp"), "sm_100a")
    assert job.constants == {"KERNEL": "STENCIL", "ROWS": 16, "COLUMNS": 64, "ITEMSIZE": 4, "THREADS": 128,
                             "STAGES": 3, "TILES_PER_CTA": 4,
                             "PRODUCER": 1, "SWIZZLE": 0, "BLOCK": 1, "RASTER": 1, "CLUSTER": 1}
    assert (job.target, job.num_warps, job.smem_bytes) == ("sm_100a", 5, 3 * 5248)
    assert job.kernel.endswith("tile_pipeline.cu:stencil")
    assert tile_pipeline.job(configs("copy")["single"], "sm_90a", 8).constants["ITEMSIZE"] == 8


@pytest.mark.parametrize("chosen", [experiments.stage_configs, experiments.swizzle_configs, experiments.box_configs])
def test_what_is_compared_can_be_told_apart(chosen):
    assert len(set(map(str, chosen().values()))) == len(chosen())


def test_bank_conflicts():
    def count_turns(swizzle, block, tile=32):
        found = experiments.bank_conflicts(TileConfig("transpose", tile, tile, swizzle=swizzle, block=block))
        return found["read"], found["write"]

    assert count_turns("none", 1) == (32, 1) and count_turns("128B", 1) == (4, 1)
    assert count_turns("none", 4) == count_turns("128B", 4) == count_turns("128B", 4, 64) == (1, 1)


def test_a_space_rejects_what_cannot_run_there():
    config = TileConfig("stencil", 64, 128, 128, stages=4)
    spaces = {target: sweep.TileSpace("stencil", (1024, 1024), target) for target in device.TARGETS}
    assert spaces["sm_80"].reject(config) == "sm_80 has no TMA: tensor maps need sm_90a or newer."
    assert spaces["sm_121a"].reject(config) == ("it needs 144,000 B of shared memory per block; sm_121a has 101,376 B.")
    assert spaces["sm_90a"].reject(config) == ""
    assert spaces["sm_90a"].label(config) == {"name": "stencil", "config": str(config), "kernel": str(config),
                                              "shape": [1024, 1024], "dtype": "stencil"}
    assert spaces["sm_100a"].job(config) == tile_pipeline.job(config, "sm_100a")


@pytest.mark.parametrize("op", experiments.OPS)
def test_what_is_swept_can_be_told_apart_and_launched(op):
    chosen, space = sweep.grid(op), sweep.TileSpace(op, (1024, 1024), "sm_90a")
    assert len(set(map(str, chosen))) == len(chosen) >= 9
    assert [space.reject(config) for config in chosen] == [""] * len(chosen)


def test_the_panel_s_subject():
    subject = sweep.TUNABLE_KERNEL
    for op in subject.dtypes:
        for preset in subject.presets.values():
            assert all(axis(config) for axis in subject.axes.values() for config in preset(op))
    assert subject.space((64, 32), "copy", "sm_100a") == sweep.TileSpace("copy", (64, 32), "sm_100a")
    for shape, op in (((6,), "copy"), ((0, 4), "copy"), ((4, 4), "accumulate"), ((4, 4, 4), "transpose")):
        with pytest.raises(ValueError, match=f"a shape of {op} must be "):
            subject.space(shape, op, None)


def test_records_go_stale_with_the_code_that_makes_them(monkeypatch):
    monkeypatch.setattr(results, "source_hash", lambda *things: set(things))
    every = {tile_pipeline, tile_pipeline.SOURCE.with_name("configs.py"), tile_pipeline.SOURCE}
    for made in (experiments.check_correctness, experiments.measure_speed, experiments.run_sanitizers,
                 sweep.measure_sweep):
        assert every <= made.source()
    for made in (experiments.check_dumps, broken_programs.run_programs):
        assert every | {box_dump} <= made.source()


# ---- what the launcher refuses; the checks come before the GPU, so tensors of the CPU will do

ROOM = torch.zeros(16, 64)
BATCH = torch.zeros(2, 8, 64)


def new(*shape, dtype=torch.float32, **rest):
    return torch.zeros(*shape, dtype=dtype, **rest)


@pytest.mark.parametrize("op, x, y, out, message", [
    ("copy", [1.0], None, new(4, 4), "x must be a torch.Tensor; it is a list"),
    ("copy", new(4), None, new(4), "x must be a matrix; its shape is"),
    ("accumulate", new(4, 4), None, new(4, 4), "x must be a tensor of 3 dimensions"),
    ("transpose", new(4, 8), None, new(4, 8), "out must be 8 x 4; it is 4 x 8"),
    ("copy", new(4, 4, requires_grad=True), None, new(4, 4), "copy has no backward pass and x requires a gradient"),
    ("copy", new(4, 4), None, new(4, 4, dtype=torch.int32), "out must be float32; it is int32"),
    ("add_shared", BATCH, new(8, 60), new(2, 8, 64), "y must be 8 x 64; it is 8 x 60"),
    ("add_shared", BATCH, None, new(2, 8, 64), "y must be a torch.Tensor; it is a NoneType"),
    ("copy", ROOM, ROOM, new(16, 64), "y is for add_shared; copy takes none"),
    ("copy", new(4, 4, dtype=torch.complex128), None, new(4, 4, dtype=torch.complex128),
     "x must have elements of 1, 2, 4, 8 bytes for copy; they have 16"),
    ("transpose", new(8, 8, dtype=torch.half), None, new(8, 8, dtype=torch.half), "elements of 4 bytes for transpose"),
    ("stencil", new(8, 8, dtype=torch.half), None, new(8, 8, dtype=torch.half), "x must be float32; it is float16"),
    ("copy", new(4, 6), None, new(4, 6), "a row of x must take a multiple of 16 bytes; its stride is 24 bytes"),
    ("copy", ROOM[:, :6], None, new(16, 6), "a row of out must take a multiple of 16 bytes"),
    ("copy", ROOM[:, 1:5], None, new(16, 4), "x must start at a multiple of 16 bytes; it starts 4 bytes past one"),
    ("copy", ROOM.T, None, new(64, 16), "x must be stored row by row"),
    ("copy", new(1, 8).expand(4, 8), None, new(4, 8), "the rows of x overlap"),
    ("copy", new(4, 8), None, new(64).as_strided((4, 8), (4, 1)), "the rows of out overlap"),
    ("add_shared", new(3, 16, 16), new(16, 16), new(999).as_strided((3, 16, 16), (16, 16, 1)), "out overlaps itself"),
    ("accumulate", new(999).as_strided((3, 16, 16), (16, 16, 1)), None, new(16, 16), "x overlaps itself"),
    ("copy", ROOM[:8], None, ROOM[4:12], "out lies in the memory of x: give it memory of its own"),
    ("add_shared", new(2, 8, 64), BATCH[0], BATCH, "out lies in the memory of y: give it memory of its own"),
])
def test_bad_tensor_is_one_sentence(op, x, y, out, message):
    with pytest.raises(ValueError, match=message) as caught:
        tile_pipeline.prepare(op, x, y=y, out=out)
    assert sentence(caught)


@pytest.mark.parametrize("op, arguments, message", [
    ("copy", {"config": "fastest"}, "unknown configuration 'fastest'; choose best, single, .*, or pass a TileConfig"),
    ("copy", {"config": configs("stencil")["warp"]}, "config must be for copy; it is for stencil"),
    ("move", {}, "unknown operation 'move'; choose copy, "),
    ("copy", {"fill": "nan"}, "fill is for the stencil, which alone reads outside of x; copy has 'nan'"),
])
def test_bad_choice_is_one_sentence(op, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        tile_pipeline.prepare(op, ROOM, out=new(16, 64), **arguments)
    assert sentence(caught)


@pytest.mark.parametrize("weights", [(1e39, 1.0), (1.0, -1e39), (float("inf"), 1.0), (1.0, "2"), (True, 1.0)])
def test_weights_are_numbers_of_float32(no_gpu, weights):
    with pytest.raises(ValueError, match="(centre|edge) must be a Python number within float32; it is ") as caught:
        tile_pipeline.stencil(ROOM, *weights)
    assert sentence(caught)


@pytest.mark.parametrize("op, x, out", [
    ("copy", ROOM, new(16, 64)), ("copy", ROOM[:, :32], new(16, 32)), ("copy", ROOM[:8], ROOM[8:]),
    ("transpose", ROOM, new(64, 16)), ("stencil", ROOM[:5, 4:20], new(5, 16)), ("accumulate", BATCH, new(8, 64)),
    ("accumulate", BATCH.view(8, 2, 64).transpose(0, 1), new(8, 64)), ("copy", new(0, 7), new(0, 7)),
    ("copy", new(1, 3), new(1, 3)), ("copy", new(4, 16, dtype=torch.bool), new(4, 16, dtype=torch.bool)),
    ("copy", ROOM, None),
])
def test_what_is_right_wants_a_gpu(no_gpu, op, x, out):
    with pytest.raises(device.Unsupported, match=r"a copy by tensor map needs TMA .* here is no GPU .*\.$"):
        tile_pipeline.prepare(op, x, out=out)


@pytest.mark.parametrize("call", [
    lambda x: tile_pipeline.copy(x), lambda x: tile_pipeline.stencil(x, 1.0, 2.0, fill="nan"),
    lambda x: tile_pipeline.transpose(x), lambda x: tile_pipeline.accumulate(x[None]),
    lambda x: tile_pipeline.add_shared(x[None], x), lambda x: box_dump.dump_box(x, -1, -4, (4, 32))])
def test_each_function_wants_a_gpu(no_gpu, call):
    with pytest.raises(device.Unsupported):
        call(tile_pipeline.empty_padded((5, 7), torch.float32, "cpu"))


# ---- meaning


def test_specs():
    x = torch.randn(5, 7)
    assert torch.equal(tile_pipeline.spec("copy", x), x)
    assert torch.equal(tile_pipeline.spec("transpose", x), x.T)
    batch, y = torch.randn(3, 5, 7), torch.randn(5, 7)
    assert torch.equal(tile_pipeline.spec("add_shared", batch, y=y)[2], batch[2].double() + y.double())
    total = batch[0].double() + batch[1].double() + batch[2].double()
    assert torch.equal(tile_pipeline.spec("accumulate", batch), total)


def test_the_stencil_s_spec():
    x = torch.randn(5, 7)
    kernel = torch.tensor([[0, 2, 0], [2, -3, 2], [0, 2, 0]]).double()
    expected = torch.nn.functional.conv2d(x.double()[None, None], kernel[None, None], padding=1)[0, 0]
    torch.testing.assert_close(tile_pipeline.spec("stencil", x, centre=-3.0, edge=2.0), expected)
    border = torch.ones(5, 7, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    assert torch.equal(tile_pipeline.spec("stencil", x, edge=0.5, fill="nan").isnan(), border)


def test_rows_of_new_memory_are_padded():
    x = tile_pipeline.empty_padded((3, 5, 7), torch.float16, "cpu")
    assert x.shape == (3, 5, 7) and x.stride() == (40, 8, 1) and x.data_ptr() % 16 == 0


def test_what_is_moved():
    assert experiments.bytes_moved("copy", (3, 5)) == experiments.bytes_moved("transpose", (3, 5)) == 120
    assert experiments.bytes_moved("add_shared", (2, 3, 5)) == 300
    assert experiments.bytes_moved("accumulate", (2, 3, 5)) == 180


def test_torch_s_own_ways_mean_the_same():
    x, out = torch.randn(6, 9), torch.empty(6, 9)
    experiments.torch_candidates("stencil")["torch slices"](x, out)()
    expected = tile_pipeline.spec("stencil", x, centre=experiments.CENTRE, edge=experiments.EDGE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    turned = torch.empty(9, 6)
    experiments.torch_candidates("transpose")["torch x.T copy_"](x, turned)()
    assert torch.equal(turned, x.T)
    for op in experiments.OPS:
        assert next(iter(experiments.torch_candidates(op))) == experiments.PEER[op]
    padded, target = (tile_pipeline.empty_padded((3, 5), torch.float32, "cpu") for _ in range(2))
    experiments.torch_candidates("copy")["torch copy_"](padded, target)()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("op, name", [(op, name) for op in experiments.OPS for name in experiments.all_configs(op)])
def test_ragged_shapes(op, name):
    config = experiments.all_configs(op)[name]
    cases = [(shape, experiments.verify(op, config, shape))
             for shape in experiments.RAGGED[DIMENSIONS[op]]]
    assert not [(shape, row["reason"]) for shape, row in cases if row["status"] != "ok"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", configs("stencil"))
def test_nan_outside_reaches_exactly_the_border(name):
    x = torch.randn(70, 132, device="cuda")
    border = torch.ones(70, 132, dtype=torch.bool, device="cuda")
    border[1:-1, 1:-1] = False
    assert torch.equal(tile_pipeline.stencil(x, 1.0, 0.5, fill="nan", config=name).isnan(), border)
    assert experiments.verify("stencil", name, (100, 1001), fill="nan")["status"] == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float16, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("name", configs("copy"))
def test_copy_takes_elements_of_other_sizes(name, dtype):
    row = experiments.verify("copy", name, (129, 1003), dtype)
    assert row["status"] == "ok", row["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_copy_takes_any_dtype_of_these_sizes(dtype):
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (5, 64), device="cuda", dtype=torch.uint8)
    out = tile_pipeline.copy(bits.view(dtype))
    assert out.dtype == dtype and torch.equal(out.contiguous().view(torch.uint8), bits)


@pytest.mark.gpu
def test_transpose_of_integers():
    x = experiments.make_random((100, 204), torch.int32)
    assert torch.equal(tile_pipeline.transpose(x), x.T)


@pytest.mark.gpu
@pytest.mark.parametrize("op", experiments.OPS)
def test_a_launch_is_replayed_in_a_graph_and_follows_the_stream(op):
    shape = (1000, 1004) if DIMENSIONS[op] == 2 else (3, 500, 1004)
    x = experiments.make_random(shape)
    arguments = {"y": experiments.make_random(shape[1:])} if op == "add_shared" else {}
    expected = tile_pipeline.spec(op, x, **arguments)
    out = torch.zeros(expected.shape, device="cuda")
    launch = tile_pipeline.prepare(op, x, **arguments, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_nothing_to_do():
    empty = torch.zeros(0, 8, device="cuda")
    assert tile_pipeline.copy(empty).shape == (0, 8) and tile_pipeline.transpose(empty).shape == (8, 0)
    assert tile_pipeline.stencil(empty, 1.0, 1.0).shape == (0, 8)
    assert not tile_pipeline.accumulate(torch.zeros(0, 4, 8, device="cuda")).any()
    assert tile_pipeline.add_shared(torch.zeros(0, 4, 8, device="cuda"), torch.zeros(4, 8, device="cuda")).numel() == 0


@pytest.mark.gpu
def test_too_much_shared_memory_is_unsupported():
    with pytest.raises(device.Unsupported, match="take a smaller tile or fewer stages"):
        tile_pipeline.copy(torch.zeros(512, 512, device="cuda"), config=TileConfig("copy", 256, 256, stages=2))
