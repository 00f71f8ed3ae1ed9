"""The operators: what they refuse, what they mean, and on a GPU what they compute."""

import pytest
import torch
from cases import cases
from sentences import refused

from ch10 import tile_pipeline
from ch10.tile_pipeline.configs import DIMENSIONS, TileConfig, configs
from ch10.tile_pipeline.lesson import experiments
from tilelab.runtime import device


def test_a_job_compiles_what_the_configuration_says():
    job = tile_pipeline.job(TileConfig("stencil", 16, 64, 128, 3, 4, "warp"), "sm_100a")
    known = {"KERNEL": "STENCIL", "ROWS": 16, "COLUMNS": 64, "ITEMSIZE": 4, "THREADS": 128, "STAGES": 3}
    known |= {"TILES_PER_CTA": 4, "PRODUCER": 1, "SWIZZLE": 0, "BLOCK": 1, "RASTER": 1, "CLUSTER": 1}
    assert job.constants == known
    assert (job.target, job.num_warps, job.smem_bytes) == ("sm_100a", 5, 3 * 5248)
    assert job.kernel.endswith("tile_pipeline.cu:stencil")
    assert tile_pipeline.job(configs("copy")["single"], "sm_90a", 8).constants["ITEMSIZE"] == 8


# ---- what the launcher refuses; the checks come before the GPU, so tensors of the CPU will do

ROOM = torch.zeros(16, 64)
BATCH = torch.zeros(2, 8, 64)


def new(*shape, dtype=torch.float32, **rest):
    return torch.zeros(*shape, dtype=dtype, **rest)


@cases(
    "op, x, y, out, message",
    ("copy", [1.0], None, new(4, 4), "x must be a torch.Tensor; it is a list"),
    ("accumulate", new(4, 4), None, new(4, 4), "x must be a tensor of 3 dimensions"),
    ("transpose", new(4, 8), None, new(4, 8), "out must be 8 x 4; it is 4 x 8"),
    ("copy", new(4, 4, requires_grad=True), None, new(4, 4), "no backward pass and x requires a gradient"),
    ("add_shared", BATCH, new(8, 60), new(2, 8, 64), "y must be 8 x 64; it is 8 x 60"),
    ("copy", ROOM, ROOM, new(16, 64), "y is for add_shared; copy takes none"),
    (
        "copy",
        new(4, 4, dtype=torch.complex128),
        None,
        new(4, 4, dtype=torch.complex128),
        "x must have elements of 1, 2, 4, 8 bytes for copy; they have 16",
    ),
    ("transpose", new(8, 8, dtype=torch.half), None, new(8, 8, dtype=torch.half), "4 bytes for transpose"),
    ("stencil", new(8, 8, dtype=torch.half), None, new(8, 8, dtype=torch.half), "must be float32; it is"),
    ("copy", ROOM[:, :6], None, new(16, 6), "a row of out must take a multiple of 16 bytes"),
    ("copy", ROOM.T, None, new(64, 16), "x must be stored row by row"),
    ("add_shared", new(3, 16, 16), new(16, 16), new(999).as_strided((3, 16, 16), (16, 16, 1)), "overlaps"),
    ("copy", ROOM[:8], None, ROOM[4:12], "out lies in the memory of x: give it memory of its own"),
)
def test_bad_tensor_is_one_sentence(op, x, y, out, message):
    with refused(message):
        tile_pipeline.prepare(op, x, y=y, out=out)


@cases(
    "op, arguments, message",
    ("copy", {"config": configs("stencil")["warp"]}, "config must be for copy; it is for stencil"),
    ("move", {}, "unknown operation 'move'; choose copy, "),
    ("copy", {"fill": "nan"}, "fill is for the stencil, which alone reads outside of x; copy has 'nan'"),
)
def test_bad_choice_is_one_sentence(op, arguments, message):
    with refused(message):
        tile_pipeline.prepare(op, ROOM, out=new(16, 64), **arguments)


@pytest.mark.parametrize("weights", [(1e39, 1.0), (1.0, -1e39), (float("inf"), 1.0), (1.0, "2"), (True, 1.0)])
def test_weights_are_numbers_of_float32(no_gpu, weights):
    with refused("(centre|edge) must be a Python number within float32; it is "):
        tile_pipeline.stencil(ROOM, *weights)


@cases(
    "op, x, out",
    ("copy", ROOM, new(16, 64)),
    ("copy", ROOM[:, :32], new(16, 32)),
    ("copy", ROOM[:8], ROOM[8:]),
    ("transpose", ROOM, new(64, 16)),
    ("stencil", ROOM[:5, 4:20], new(5, 16)),
    ("accumulate", BATCH, new(8, 64)),
    ("accumulate", BATCH.view(8, 2, 64).transpose(0, 1), new(8, 64)),
    ("copy", new(0, 7), new(0, 7)),
    ("copy", new(1, 3), new(1, 3)),
    ("copy", new(4, 16, dtype=torch.bool), new(4, 16, dtype=torch.bool)),
    ("copy", ROOM, None),
)
def test_what_is_right_wants_a_gpu(no_gpu, op, x, out):
    with pytest.raises(device.Unsupported, match=r"a copy by tensor map needs TMA .* here is no GPU .*\.$"):
        tile_pipeline.prepare(op, x, out=out)


@cases(
    "call",
    lambda x: tile_pipeline.copy(x),
    lambda x: tile_pipeline.stencil(x, 1.0, 2.0, fill="nan"),
    lambda x: tile_pipeline.transpose(x),
    lambda x: tile_pipeline.accumulate(x[None]),
    lambda x: tile_pipeline.add_shared(x[None], x),
)
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
    assert torch.allclose(tile_pipeline.spec("stencil", x, centre=-3.0, edge=2.0), expected)
    border = torch.ones(5, 7, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    assert torch.equal(tile_pipeline.spec("stencil", x, edge=0.5, fill="nan").isnan(), border)


def test_rows_of_new_memory_are_padded():
    x = tile_pipeline.empty_padded((3, 5, 7), torch.float16, "cpu")
    assert x.shape == (3, 5, 7) and x.stride() == (40, 8, 1) and x.data_ptr() % 16 == 0


# ---- on a GPU


@pytest.mark.gpu
def test_every_configuration_is_right_at_ragged_shapes():
    assert not [row for row in experiments.check_correctness().rows if row["status"] != "ok"]


@pytest.mark.gpu
def test_nan_outside_reaches_exactly_the_border():
    x = torch.randn(70, 132, device="cuda")
    border = torch.ones(70, 132, dtype=torch.bool, device="cuda")
    border[1:-1, 1:-1] = False
    for name in configs("stencil"):
        assert torch.equal(tile_pipeline.stencil(x, 1.0, 0.5, fill="nan", config=name).isnan(), border), name


@pytest.mark.gpu
@cases("dtype", torch.uint8, torch.int16, torch.float16, torch.int64, torch.float64, ids=str)
def test_copy_takes_elements_of_other_sizes(dtype):
    for name in configs("copy"):
        row = experiments.verify("copy", name, (129, 1003), dtype)
        assert row["status"] == "ok", (name, row["reason"])


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
        assert torch.allclose(out.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_nothing_to_do():
    empty = torch.zeros(0, 8, device="cuda")
    assert tile_pipeline.copy(empty).shape == (0, 8) and tile_pipeline.transpose(empty).shape == (8, 0)
    assert tile_pipeline.stencil(empty, 1.0, 1.0).shape == (0, 8)
    assert not tile_pipeline.accumulate(torch.zeros(0, 4, 8, device="cuda")).any()
    found = tile_pipeline.add_shared(
        torch.zeros(0, 4, 8, device="cuda"), torch.zeros(4, 8, device="cuda")
    ).numel()
    assert found == 0


@pytest.mark.gpu
def test_too_much_shared_memory_is_unsupported():
    with pytest.raises(device.Unsupported, match="take a smaller tile or fewer stages"):
        tile_pipeline.copy(
            torch.zeros(512, 512, device="cuda"), config=TileConfig("copy", 256, 256, stages=2)
        )
