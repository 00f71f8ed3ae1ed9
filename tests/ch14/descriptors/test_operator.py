import dataclasses

import pytest
import torch
import triton
from builds import build_in_order
from cases import cases
from sentences import refused

from ch14 import descriptors
from ch14.descriptors.configs import OPS, TileConfig, choose_variant, configs
from ch14.descriptors.lesson import experiments
from ch14.descriptors.lesson.tile_copy import copy_tma_kernel
from tilelab.runtime import build, device

WHERE = "cuda" if device.current().capability else "cpu"
LIVE = device.current().has_tma
EVERY = [(op, name) for op in OPS for name in experiments.runnable_configs(op)]
# Small tiles, so that several programs, several tiles per program and ragged ends occur in the interpreter too.
TILES = [("host", 4, 32, 1, 3, 2), ("device", 8, 16, 1, 0, 3, 2), ("host", 0, 64, 1)]
TILES += [("device", 0, 128, 1, 0, 2), ("pointers", 4, 32, 1, 2), ("pointers", 0, 64)]
ROWS = [("host", 1, 32, 1, 4, 3), ("device", 1, 64, 1, 0, 2), ("pointers", 4, 32, 1, 3)]
SMALL = {op: [TileConfig(*each) for each in (ROWS if op == "gather" else TILES)] for op in OPS}
if not LIVE or device.current().has_tcgen05:
    SMALL["gather"].append(TileConfig("gather4", 8, 16, 4, 2, 2))


# ---- right results


@pytest.mark.parametrize("op, name", EVERY)
def test_every_variant_on_ragged_shapes(op, name):
    cases = [
        experiments.verify(op, name, *shape, torch.float16, 11 if op == "gather" else None)
        for shape in ((1, 8), (37, 200), (5, 1032))
    ]
    assert not [case for case in cases if case["status"] != "ok"]


@pytest.mark.parametrize("op, config", [(op, config) for op in OPS for config in SMALL[op]], ids=str)
def test_small_tiles_loops_and_padded_rows(op, config):
    for shape in ((1, 8), (33, 136)):
        for dtype in descriptors.FLOATS if op == "add" else (torch.float16,):
            row = experiments.verify(op, config, *shape, dtype, 13 if op == "gather" else None)
            assert row["status"] == "ok", (shape, dtype, row["reason"])


@pytest.mark.parametrize("name", ["tile_host", "flat_device", "tile_pointers"])
def test_copy_takes_any_dtype(name):
    small = (torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16)
    for dtype in (*small, torch.int32, torch.int64, torch.complex64):
        x = torch.randint(0, 2 if dtype == torch.bool else 256, (7, 64), dtype=torch.uint8, device=WHERE)
        x = x.view(dtype) if dtype != torch.bool else x.bool()
        out = descriptors.copy(x, config=name)
        assert out.dtype == dtype and torch.equal(out.view(torch.uint8), x.view(torch.uint8)), dtype


def test_pointers_take_what_descriptors_do_not():
    room = torch.randn(9, 103, device=WHERE)
    x = room[1:, 1:68]
    for op, config in (
        ("copy", "tile_pointers"),
        ("add", "tile_pointers"),
        ("copy", TileConfig("pointers", 4, 16)),
    ):
        out = torch.full((8, 71), float("nan"), device=WHERE)[:, 2:69]
        descriptors.prepare(op, x, out=out, y=x if op == "add" else None, config=config)()
        assert torch.equal(out, 2 * x if op == "add" else x)
    index = torch.tensor([7, 0, 0, -1, 8], dtype=torch.int32, device=WHERE)
    assert torch.equal(
        descriptors.gather(x, index, config="rows_pointers"), descriptors.spec("gather", x, index=index)
    )
    flat = torch.randn(1001, device=WHERE)
    assert torch.equal(descriptors.copy(flat, config="flat_pointers"), flat)


def test_a_ragged_source_is_fine_where_the_result_is_whole():
    """A load past the end of a row gives zeros; it is the store that knows only whole units."""
    x = torch.randn(8, 72, device=WHERE)[:, :66]
    says = "a row of out must end at a multiple of 16 bytes.* behind its 264 bytes"
    with pytest.raises(ValueError, match=says):
        descriptors.copy(x, out=torch.empty(8, 68, device=WHERE)[:, :66], config="tile_host")


def test_empty_and_tiny():
    for config in ("tile_host", "tile_device", "tile_pointers"):
        assert descriptors.copy(torch.zeros(0, 8, device=WHERE), config=config).shape == (0, 8)
    assert descriptors.copy(torch.zeros(0, device=WHERE), config="flat_host").shape == (0,)
    assert torch.equal(
        descriptors.copy(torch.ones(4, device=WHERE), config="flat_host"), torch.ones(4, device=WHERE)
    )


def test_specs():
    x = torch.randn(3, 4)
    assert descriptors.spec("copy", x).data_ptr() != x.data_ptr()
    assert descriptors.spec("add", x, x).dtype == torch.float64
    index = torch.tensor([2, -1, 3, 0], dtype=torch.int32)
    assert torch.equal(
        descriptors.spec("gather", x, index=index), torch.stack([x[2], x[0] * 0, x[0] * 0, x[0]])
    )


# ---- what the compiler makes of it


@pytest.mark.compile
def test_ptx_and_sass_hold_what_a_variant_teaches():
    cases = [
        (config, descriptors.job(config, target, op))
        for op, target in (("copy", "sm_90a"), ("gather", "sm_90a"), ("gather", "sm_100a"))
        for config in configs(op).values()
    ]
    cases += [(cases[-3][0], descriptors.job(cases[-3][0], "sm_120a", "gather"))]  # gather4
    for (config, _), report in zip(cases, build_in_order(job for _, job in cases)):
        row, uses_descriptors = report.row(), config.way != "pointers"
        if config.rejection(row["target"]):
            assert row["status"] == "failed" and "tile::gather4" in row["reason"], row
            assert "sm_100 or higher" in row["reason"]
            continue
        assert row["status"] == "ok", row["reason"]
        # the ptxas in Triton 3.6 keeps a stack for sm_120a
        assert row["spills"] == 0 or row["target"] != "sm_90a"
        assert (row["tma_load"] > 0, row["tma_store"] > 0) == (uses_descriptors, uses_descriptors), row
        assert ("tile::gather4" in report.ptx) == (config.way == "gather4"), row
        assert (row["tensormap_replace"] > 0) == (config.way == "device"), row
        # gather4 reads its indices 16 bytes at a time.
        assert ("ld.global.v4" in report.ptx) == (config.way == "pointers") or config.way == "gather4", row
        if row["target"] == "sm_90a":  # cuobjdump may be older than the others
            counts = build.sass_counts(report.cubin)
            assert (counts["UTMALDG"] > 0, counts["UTMASTG"] > 0) == (uses_descriptors,) * 2, row
            assert (counts["STG"] > 0) == (config.way == "pointers"), row


@pytest.fixture(scope="module")
def reports():
    """Return the reports of copies for sm_90a by tile, and of an addition."""
    tiles = [(4, 256), (4, 2048), (8, 1024), (64, 64), (0, 4096)]
    jobs = {tile: descriptors.job(TileConfig("host", *tile, 1), "sm_90a") for tile in tiles}
    jobs["add"] = descriptors.job(TileConfig("host", 4, 256, 1), "sm_90a", "add")
    reports = {id(report.job): report for report in build.build(jobs.values())}
    return {key: reports[id(job)] for key, job in jobs.items()}


@pytest.mark.compile
def test_a_block_is_split_into_boxes(reports):
    """A box has at most 256 elements per side. Blocks of 8 or more rows are swizzled: 128 bytes of a row per box."""
    boxes = {tile: report.counts["tma_load"] for tile, report in reports.items() if tile != "add"}
    assert boxes == {(4, 256): 1, (4, 2048): 8, (8, 1024): 16, (64, 64): 1, (0, 4096): 16}


@pytest.mark.compile
def test_a_copied_tile_stays_in_shared_memory(reports):
    """A tile is loaded and stored from one buffer: its bytes and a barrier, and no thread reads them."""
    report = reports[4, 256]
    assert report.smem < 2 * 2048 and "ld.shared" not in report.ptx and "st.shared" not in report.ptx
    ptx = reports["add"].ptx
    one, other = (ptx.index(f"[%rd{number}, {{") for number in (1, 2))
    assert "ld.shared" in ptx[one:other], "x is waited for and read before y is asked for"


# ---- what is refused


@cases(
    "change, message",
    ({"way": "tma"}, "unknown way 'tma'; choose host, device, pointers, gather4"),
    ({"block_m": 3}, "block_m must be a power of two; it is 3"),
    ({"block_n": 0}, "block_n must be a power of two; it is 0"),
    ({"num_warps": 64}, "num_warps must be at most 32 .*; it is 64"),
    ({"tiles_per_cta": -1}, "tiles_per_cta must be at least 0; it is -1"),
    ({"block_m": 2048, "block_n": 1024}, "at most 1,048,576 elements in Triton; it has 2,097,152"),
    ({"way": "gather4"}, "block_m must be at least 8 for gather4; it is 4"),
    ({"block_n": 256.0}, "block_n of a TileConfig must be a whole number; it is 256.0"),
)
def test_bad_configuration_is_one_sentence(change, message):
    with refused(message):
        TileConfig(**{"way": "host", "block_m": 4, "block_n": 256, **change})


@cases(
    "op, config, message",
    ("scale", "best", "unknown op 'scale'; choose copy, add, gather"),
    ("copy", "fastest", "unknown configuration 'fastest'; choose best, tile_host, .*, or pass a TileConfig"),
    ("copy", TileConfig("gather4", 8, 64), "gather4 only gathers; it cannot copy"),
    ("gather", TileConfig("host", 4, 64), "block_m must be 1 to gather by descriptors .*; it is 4"),
    ("gather", TileConfig("pointers", 0, 64), "at least 1 by pointers; it is 0"),
)
def test_bad_variant_is_one_sentence(op, config, message):
    with pytest.raises(ValueError, match=message):
        choose_variant(op, config)


zeros = torch.zeros
ROOM = zeros(16, 64)
INDEX = zeros(4, dtype=torch.int)


@cases(
    "op, given, config, message",
    ("copy", {"x": [1.0]}, "tile_host", "x must be a torch.Tensor; it is a list"),
    ("copy", {"x": ROOM.clone().requires_grad_()}, "best", "copy has no backward pass and x requires"),
    ("copy", {"x": zeros(8, 64, dtype=torch.cdouble)}, "best", "must have 1, 2, 4 or 8 bytes; it has 16"),
    ("add", {"x": ROOM.int(), "y": ROOM.int()}, "best", "must be float32, bfloat16 or float16; it is int32"),
    ("add", {}, "best", "add needs y"),
    ("copy", {"y": ROOM}, "best", "copy takes no y"),
    ("gather", {}, "best", "gather needs index"),
    ("gather", {"index": INDEX.long()}, "best", "index must be int32; it is int64"),
    ("gather", {"index": INDEX}, "best", "out must be 4 x 64; it is 16 x 64"),
    ("add", {"y": ROOM[:8]}, "best", "y must be 16 x 64; it is 8 x 64"),
    ("copy", {"x": zeros(64, 16).T}, "flat_host", "x must be contiguous; its strides are"),
    ("copy", {"x": zeros(64, 16).T}, "tile_host", r"x must be stored row by row .*\(1, 16\)"),
    ("copy", {"x": zeros(16, 65)[:, :64]}, "tile_device", "must take .* 16 bytes; its stride is 260 bytes"),
    ("copy", {}, TileConfig("host", 4, 2), "a tile of x must be at least 16 bytes wide .*; 2 elements are 8"),
    ("copy", {"x": zeros(1, 66), "out": zeros(1, 66)}, "flat_host", "a row of out must end at a multiple"),
    ("copy", {"x": ROOM, "out": ROOM}, "tile_pointers", "out lies in the memory of x"),
)
def test_bad_argument_is_one_sentence(op, given, config, message):
    given = {"x": ROOM, "out": zeros(16, 64), **given}
    with refused(message):
        descriptors.prepare(op, config=config, **given)


def test_a_target_that_cannot_is_said():
    four = configs("gather")["gather4"]
    expected = "sm_90a has no tile::gather4 (sm_100a and newer have): take rows_host, a load for each row."
    assert four.rejection("sm_90a") == expected
    assert four.rejection("sm_121a") == "" and configs("copy")["tile_pointers"].rejection("sm_80") == ""
    assert (
        configs("copy")["tile_host"]
        .rejection("sm_80")
        .startswith("sm_80 has no TMA: descriptors need sm_90a")
    )


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("op, name", EVERY)
def test_large(op, name):
    for dtype in descriptors.FLOATS:
        row = experiments.verify(op, name, 4099, 4104, dtype, 5001 if op == "gather" else None)
        assert row["status"] == "ok", row["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", configs("copy"))
def test_a_launch_in_a_thread_and_in_a_graph(name):
    """Allocator and CUDA context belong to a thread: the launch brings its own."""
    import threading

    x = torch.randn(64, 512, device="cuda")
    out = descriptors.copy(x, config=name)
    thread = threading.Thread(target=descriptors.prepare("copy", x.normal_(), out=out, config=name))
    thread.start()
    thread.join()
    assert torch.equal(x, out)
    launch, graph = descriptors.prepare("copy", x, out=out, config=name), torch.cuda.CUDAGraph()
    launch()
    with torch.cuda.graph(graph):
        launch()
    x.normal_()
    graph.replay()
    assert torch.equal(x, out)


@pytest.mark.gpu
def test_what_does_not_fit_is_said_before_a_launch():
    x = torch.zeros(1024, 1024, device="cuda")
    says = "host · 256×256 · .* cannot run on sm_.*: OutOfResources: .*shared"
    with pytest.raises(device.Unsupported, match=says):
        descriptors.prepare("copy", x, config=TileConfig("host", 256, 256))
    with pytest.raises(device.Unsupported, match="a descriptor needs its tensors on a GPU; they are on cpu"):
        descriptors.copy(torch.zeros(8, 8))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    x = torch.randint(0, 256, (40000, 65536), dtype=torch.uint8, device="cuda")
    for name in ("tile_host", "tile_pointers"):
        out = torch.zeros_like(x)
        descriptors.copy(x, out=out, config=dataclasses.replace(configs("copy")[name]))
        assert torch.equal(x[-3:], out[-3:]) and torch.equal(x, out)


def test_the_interpreter_runs_only_without_a_gpu():
    assert isinstance(copy_tma_kernel, triton.JITFunction) == bool(device.current().capability)
