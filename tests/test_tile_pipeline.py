import dataclasses
import importlib
import re

import pytest
import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline import box_dump, broken_programs, checks, experiments, reference, sweep
from ch10.tile_pipeline.configs import TileConfig, configs
from tilelab import build, device, results

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")
EVERY = [(op, name) for op in experiments.OPS for name in configs(op)]


@pytest.fixture(scope="module")
def built():
    """Reports by (op, variant, target); those of `every` stand under (op, str(config), "sm_90a")."""
    jobs = {(op, name, target): tile_pipeline.job(configs(op)[name], target) for op, name in EVERY
            for target in device.TARGETS[1:]}
    jobs |= {(op, name, "sm_90a"): tile_pipeline.job(config, "sm_90a") for op in experiments.OPS
             for name, config in experiments.every(op).items()}
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
    for name in experiments.every(op):
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
                             "STAGES": 3, "SPAN": 4,
                             "PRODUCER": 1, "SWIZZLE": 0, "BLOCK": 1, "RASTER": 1, "CLUSTER": 1}
    assert (job.target, job.num_warps, job.smem_bytes) == ("sm_100a", 5, 3 * 5248)
    assert job.kernel.endswith("tile_pipeline.cu:stencil")
    assert tile_pipeline.job(configs("copy")["single"], "sm_90a", 8).constants["ITEMSIZE"] == 8


@pytest.mark.parametrize("chosen", [experiments.stage_configs, experiments.swizzle_configs, experiments.box_configs])
def test_what_is_compared_can_be_told_apart(chosen):
    assert len(set(map(str, chosen().values()))) == len(chosen())


def test_bank_conflicts():
    def turns(swizzle, block, tile=32):
        found = experiments.bank_conflicts(TileConfig("transpose", tile, tile, swizzle=swizzle, block=block))
        return found["read"], found["write"]

    assert turns("none", 1) == (32, 1) and turns("128B", 1) == (4, 1)
    assert turns("none", 4) == turns("128B", 4) == turns("128B", 4, 64) == (1, 1)


def test_a_space_rejects_what_cannot_run_there():
    config = TileConfig("stencil", 64, 128, 128, stages=4)
    spaces = {target: sweep.TileSpace("stencil", (1024, 1024), target) for target in device.TARGETS}
    assert spaces["sm_80"].reject(config) == "sm_80 has no TMA: tensor maps need sm_90a or newer."
    assert spaces["sm_121a"].reject(config) == ("it needs 144,000 B of shared memory a block; sm_121a has 101,376 B.")
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
        with pytest.raises(ValueError, match=f"a shape of {op} is "):
            subject.space(shape, op, None)


def test_records_go_stale_with_the_code_that_makes_them(monkeypatch):
    monkeypatch.setattr(results, "source_hash", lambda *things: set(things))
    every = {tile_pipeline, importlib.import_module("ch10.tile_pipeline.configs"), checks, reference, tile_pipeline.SOURCE}
    for made in (experiments.checked, experiments.speed, experiments.sanitized, sweep.swept):
        assert every <= made.source()
    for made in (experiments.dumped, broken_programs.broken):
        assert every | {box_dump} <= made.source()


# ---- what the launcher refuses; the checks come before the GPU, so tensors of the CPU will do

ROOM = torch.zeros(16, 64)
BATCH = torch.zeros(2, 8, 64)


def new(*shape, dtype=torch.float32, **rest):
    return torch.zeros(*shape, dtype=dtype, **rest)


@pytest.mark.parametrize("op, x, y, out, message", [
    ("copy", [1.0], None, new(4, 4), "x must be a torch.Tensor; it is a list"),
    ("copy", new(4, 4), None, None, "out must be a torch.Tensor; it is a NoneType"),
    ("copy", new(4), None, new(4), r"x has the shape \(R, C\); here it is \(4,\)"),
    ("accumulate", new(4, 4), None, new(4, 4), r"x has the shape \(B, R, C\); here it is \(4, 4\)"),
    ("transpose", new(4, 8), None, new(8, 4, 1), r"out has the shape \(C, R\); here it is \(8, 4, 1\)"),
    ("copy", new(4, 4).to_sparse(), None, new(4, 4), "x must be dense and of plain numbers; it is sparse_coo"),
    ("copy", new(4, 4, dtype=torch.complex64).conj(), None, new(4, 4, dtype=torch.complex64),
     "x is a view that conjugates or negates"),
    ("copy", new(4, 4, requires_grad=True), None, new(4, 4), "x requires a gradient"),
    ("copy", torch.empty(1 << 31, 4, device="meta"), None, new(4, 4),
     r"x's extents are at most 2,147,450,880; here they are \(2147483648, 4\)"),
    ("copy", new(4, 4), None, new(4, 8), r"out must be \(4, 4\) of float32 on cpu, as x is \(4, 4\); it is \(4, 8\)"),
    ("copy", new(4, 4), None, new(4, 4, dtype=torch.int32), r"it is \(4, 4\) of int32 on cpu"),
    ("copy", new(4, 4), None, new(4, 4, device="meta"), "of float32 on meta"),
    ("transpose", new(4, 8), None, new(4, 8), r"out must be \(8, 4\) of float32"),
    ("add_shared", BATCH, new(8, 60), new(2, 8, 64), r"y must be \(8, 64\) of float32.* it is \(8, 60\)"),
    ("add_shared", BATCH, None, new(2, 8, 64), "y must be a torch.Tensor; it is a NoneType"),
    ("copy", ROOM, ROOM, new(16, 64), "only add_shared takes y; here copy is given one"),
    ("accumulate", BATCH, None, new(2, 64), r"out must be \(8, 64\) of float32"),
    ("copy", new(4, 4, dtype=torch.complex128), None, new(4, 4, dtype=torch.complex128),
     "copy takes elements of 1, 2, 4 or 8 bytes; those of complex128 have 16"),
    ("transpose", new(8, 8, dtype=torch.half), None, new(8, 8, dtype=torch.half),
     "transpose takes elements of 4 bytes; those of float16 have 2"),
    ("stencil", new(8, 8, dtype=torch.half), None, new(8, 8, dtype=torch.half), "stencil takes float32; here it is"),
    ("copy", new(4, 6), None, new(4, 6), r"x: outer strides are positive multiples of 16 bytes .* 24 bytes: make it"),
    ("copy", ROOM[:, :6], None, new(16, 6), r"out: outer strides are positive multiples of 16 bytes"),
    ("copy", ROOM[:, 1:5], None, new(16, 4), "x: a tensor map starts at a multiple of 16 bytes; .* starts 4 past one"),
    ("copy", ROOM.T, None, new(64, 16), r"x: the last dimension must be contiguous"),
    ("copy", new(1, 8).expand(4, 8), None, new(4, 8), "x: outer strides are positive .* one is 0 bytes"),
    ("copy", new(4, 8), None, new(64).as_strided((4, 8), (4, 1)), "the rows of out lie in each other"),
    ("copy", ROOM[:8], None, ROOM[4:12], "out lies in the memory that x spans: give it memory of its own"),
    ("add_shared", new(2, 8, 64), BATCH[0], BATCH, "out lies in the memory that y spans: give it memory of its own"),
])
def test_bad_tensor_is_one_sentence(op, x, y, out, message):
    with pytest.raises(ValueError, match=message) as caught:
        tile_pipeline.prepare(op, x, out, y=y)
    assert sentence(caught)


@pytest.mark.parametrize("weight", ["a", None, 1j, True, 1e39])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(ValueError, match="edge is a number within float32; here it is"):
        tile_pipeline.prepare("stencil", ROOM, new(16, 64), edge=weight)


@pytest.mark.parametrize("op", [[], "move", None])
def test_an_operation_that_is_none_is_refused(op):
    with pytest.raises(ValueError, match="the operations are copy, stencil"):
        tile_pipeline.prepare(op, ROOM, new(16, 64))


@pytest.mark.parametrize("op, rest, message", [
    ("copy", {"config": "fastest"}, "the variants of copy are best, single, .*, or a TileConfig; here it is 'fastest'"),
    ("copy", {"config": None}, "here it is None"),
    ("copy", {"config": configs("stencil")["warp"]}, "a TileConfig of copy is wanted; here is one of stencil"),
    ("move", {}, "the operations are copy, .*; here it is 'move'"),
    ("stencil", {"fill": "one"}, "unknown fill 'one'; choose one of zero, nan"),
    ("copy", {"fill": "nan"}, "only the stencil reads what lies outside; here copy is to fill it with nan"),
    ("copy", {"config": TileConfig("copy", 4, 6)}, "x: the innermost extent of a box takes a multiple of 16 bytes"),
])
def test_bad_choice_is_one_sentence(op, rest, message):
    with pytest.raises(ValueError, match=message) as caught:
        tile_pipeline.prepare(op, ROOM, new(16, 64), **rest)
    assert sentence(caught)


def test_too_many_blocks_are_one_sentence():
    x, out = (torch.empty(1 << 30, 4 * 256, device="meta") for _ in range(2))
    with pytest.raises(ValueError, match=r"fewer than 2\^31 blocks; here are 1,099,511,627,776: take larger") as caught:
        tile_pipeline.prepare("copy", x, out, config=TileConfig("copy", 1, 1))
    assert sentence(caught)


@pytest.mark.parametrize("op, x, out", [
    ("copy", ROOM, new(16, 64)), ("copy", ROOM[:, :32], new(16, 32)), ("copy", ROOM[:8], ROOM[8:]),
    ("transpose", ROOM, new(64, 16)), ("stencil", ROOM[:5, 4:20], new(5, 16)), ("accumulate", BATCH, new(8, 64)),
    ("accumulate", BATCH.view(8, 2, 64).transpose(0, 1), new(8, 64)), ("copy", new(0, 7), new(0, 7)),
    ("copy", new(1, 3), new(1, 3)), ("copy", new(4, 16, dtype=torch.bool), new(4, 16, dtype=torch.bool)),
])
def test_what_is_right_wants_a_gpu(no_gpu, op, x, out):
    with pytest.raises(device.Unsupported, match=r"a copy by tensor map needs TMA .* here is no GPU .*\.$"):
        tile_pipeline.prepare(op, x, out)


@pytest.mark.parametrize("call", [
    lambda x: tile_pipeline.copy(x), lambda x: tile_pipeline.stencil(x, 1.0, 2.0, fill="nan"),
    lambda x: tile_pipeline.transpose(x), lambda x: tile_pipeline.accumulate(x[None]),
    lambda x: tile_pipeline.add_shared(x[None], x), lambda x: box_dump.dump_box(x, -1, -4, (4, 32))])
def test_each_function_checks_and_then_wants_a_gpu(no_gpu, call):
    with pytest.raises(device.Unsupported):
        call(tile_pipeline.empty((5, 7), torch.float32, "cpu"))
    with pytest.raises(ValueError, match="x must be a torch.Tensor; it is a _Text"):
        call(_Text("text"))


class _Text(str):
    def __getitem__(self, _):
        return self


def test_tensors_of_the_cpu_are_refused_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: H200)
    for call in (tile_pipeline.copy, lambda x: box_dump.dump_box(x, 0, 0, (4, 32))):
        with pytest.raises(ValueError, match="x must be on the GPU; it is on cpu"):
            call(ROOM)


# ---- meaning


def test_specs():
    x = torch.randn(5, 7)
    assert torch.equal(tile_pipeline.copy_spec(x), x) and tile_pipeline.copy_spec(x).data_ptr() != x.data_ptr()
    assert torch.equal(tile_pipeline.transpose_spec(x), x.T)
    batch, y = torch.randn(3, 5, 7), torch.randn(5, 7)
    assert torch.equal(tile_pipeline.add_shared_spec(batch, y)[2], batch[2].double() + y.double())
    assert torch.equal(tile_pipeline.accumulate_spec(batch), batch[0].double() + batch[1].double() + batch[2].double())


def test_the_stencil_s_spec():
    x = torch.randn(5, 7)
    kernel = torch.tensor([[0, 2, 0], [2, -3, 2], [0, 2, 0]]).double()
    expected = torch.nn.functional.conv2d(x.double()[None, None], kernel[None, None], padding=1)[0, 0]
    torch.testing.assert_close(tile_pipeline.stencil_spec(x, -3.0, 2.0), expected)
    border = torch.ones(5, 7, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    assert torch.equal(tile_pipeline.stencil_spec(x, 1.0, 0.5, "nan").isnan(), border)


def test_rows_of_new_memory_are_padded():
    x = tile_pipeline.empty((3, 5, 7), torch.float16, "cpu")
    assert x.shape == (3, 5, 7) and x.stride() == (40, 8, 1) and x.data_ptr() % 16 == 0


def test_what_is_moved():
    assert experiments.moved("copy", (3, 5)) == experiments.moved("transpose", (3, 5)) == 120
    assert experiments.moved("add_shared", (2, 3, 5)) == 300 and experiments.moved("accumulate", (2, 3, 5)) == 180


def test_torch_s_own_ways_mean_the_same():
    x, out = torch.randn(6, 9), torch.empty(6, 9)
    experiments.torch_s("stencil")["torch slices"](x, out)()
    expected = tile_pipeline.stencil_spec(x, experiments.CENTRE, experiments.EDGE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    turned = torch.empty(9, 6)
    experiments.torch_s("transpose")["torch x.T copy_"](x, turned)()
    assert torch.equal(turned, x.T)
    for op in experiments.OPS:
        assert next(iter(experiments.torch_s(op))) == experiments.PEER[op]
    padded, target = (tile_pipeline.empty((3, 5), torch.float32, "cpu") for _ in range(2))
    experiments.torch_s("copy")["torch copy_"](padded, target)()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("op, name", [(op, name) for op in experiments.OPS for name in experiments.every(op)])
def test_ragged_shapes(op, name):
    config = experiments.every(op)[name]
    cases = [(shape, experiments.verify(op, config, shape))
             for shape in experiments.RAGGED[experiments.dimensions(op)]]
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
    x = experiments.random((100, 204), torch.int32)
    assert torch.equal(tile_pipeline.transpose(x), x.T)


@pytest.mark.gpu
@pytest.mark.parametrize("op", experiments.OPS)
def test_a_launch_is_replayed_in_a_graph_and_follows_the_stream(op):
    shape = (1000, 1004) if experiments.dimensions(op) == 2 else (3, 500, 1004)
    x = experiments.random(shape)
    y = experiments.random(shape[1:]) if op == "add_shared" else None
    expected = experiments._expected(op, x, y, "zero")
    out = torch.zeros(expected.shape, device="cuda")
    launched = tile_pipeline.prepare(op, x, out, y=y, centre=experiments.CENTRE, edge=experiments.EDGE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched()
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
