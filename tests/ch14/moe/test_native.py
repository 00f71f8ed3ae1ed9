"""The grouped CUDA kernels in the emulator: ragged, empty and single groups, in poisoned memory, against float64."""

import functools
import itertools
import re

import pytest
import torch
from cases import cases
from planted import rarely

from ch14.fp8_gemm.lesson.verification import fp8_operands
from ch14.moe import native
from ch14.moe.native import SwappedConfig, TiledConfig
from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.measure import check
from tilelab.runtime import build

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]


@functools.cache
def find_kernel(config, fp8, change):
    source, name, constants = native.kernel(config, fp8)
    text = source.read_text()
    assert change[0] in text
    options = [f"-D{name}={value}" for name, value in constants.items()]
    return cuda_magic.find_kernels(text.replace(*change), (*options, f"-I{native.FOLDER}"))[name]


def run(config, sizes, n, k, seeds, capacity=0, fp8=True, change=("", "")):
    """Return the largest relative error over the seeds, on three CTAs, each of which makes several tiles."""
    rows = capacity * len(sizes) or sum(sizes) + 3  # the last three rows belong to nobody
    begins = [capacity * i for i in range(len(sizes))] if capacity else [0, *itertools.accumulate(sizes)][:-1]
    ends = torch.tensor(sizes if capacity else list(itertools.accumulate(sizes)), dtype=torch.int32)
    if fp8:
        a, _, scale_a, _, _ = fp8_operands(rows, 128, k, where="cpu")
        weights = [fp8_operands(1, n, k, where="cpu") for _ in sizes]
        b = torch.stack([each[1].T for each in weights]).mT
        scale_b = torch.stack([each[3].T for each in weights]).mT
        scale_a *= torch.exp2(torch.randint(-4, 5, (rows, 1)))
        left = a.double() * scale_a.double().repeat_interleave(128, 1)
        right = b.double() * scale_b.double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :, :n]
    else:
        a, b, scale_a, scale_b = (
            torch.randn(rows, k).bfloat16(),
            torch.randn(len(sizes), n, k).bfloat16().mT,
            None,
            None,
        )
        left, right = a.double(), b.double()
    wanted, is_stored = torch.zeros(rows, n, dtype=torch.float64), torch.zeros(rows, dtype=torch.bool)
    for matrix, begin, size in zip(right, begins, sizes):
        wanted[begin : begin + size] = left[begin : begin + size] @ matrix
        is_stored[begin : begin + size] = True
    if fp8 and capacity:
        scale_a = native.arrange_scales(scale_a.view(len(sizes), capacity, -1))
    swiglu = getattr(config, "swiglu", False)
    n //= 1 + swiglu
    out_scale = None
    if swiglu:
        gate, value = wanted.chunk(2, 1)
        wanted = torch.nn.functional.silu(gate) * value
        if fp8:
            out_scale = torch.empty(n // 128, rows + 1).T[:rows]
    out, touched = check.make_poisoned(
        (rows, n), torch.float8_e4m3fn if swiglu and fp8 else torch.bfloat16, "cpu"
    )
    given, c = (a.view(len(sizes), capacity, k), out.view(len(sizes), capacity, n)) if capacity else (a, out)
    arguments = native.bind_arguments(
        config, given, b, ends, c, scale_a, scale_b, cuda_magic.make_tensor_map, out_scale
    )
    arguments = {name: torch.zeros(1) if value is None else value for name, value in arguments.items()}
    launch = emulator.prepare(
        find_kernel(config, fp8, change),
        3,
        config.threads,
        list(arguments.values()),
        native.smem_bytes(config, len(sizes), fp8),
    )
    error = 0
    for seed in seeds:
        poison = out.view(torch.uint8).fill_(0xFF)[~is_stored].clone()  # NaN in both formats
        launch(seed)
        assert touched() == "" and torch.equal(out.view(torch.uint8)[~is_stored], poison)
        found = out
        if out_scale is not None:
            found = out.float() * out_scale.repeat_interleave(128, 1)
        error = max(error, check.relative_error(found[is_stored], wanted[is_stored]))
    return error


RAGGED = (70, 0, 1, 131, 0, 64, 7)


@cases(
    "config, sizes, n, k, capacity",
    rarely(TiledConfig(2, 128), RAGGED, 200, 256, 0),
    (TiledConfig(2, 192), RAGGED, 584, 256, 0),
    (TiledConfig(2, 64, 3), (0, 5, 100, 0), 128, 128, 151),
    (TiledConfig(1, 96, 3), (0, 0, 150, 0), 192, 640, 0),
    (TiledConfig(1, 64, 3), (40, 30), 64, 4352, 0),
    (TiledConfig(3, 64, 3), (300,), 64, 128, 0),
    rarely(TiledConfig(2, 144, 3), RAGGED, 328, 256, 0),
    (TiledConfig(1, 64, 3), (0, 3, 1, 0, 4) * 7 + (1,), 64, 128, 0),
)
def test_groups_of_any_size(config, sizes, n, k, capacity):
    assert run(config, sizes, n, k, (3,), capacity) < 2**-7


@cases(
    "config, sizes, n, k, capacity, fp8",
    (SwappedConfig(8, 1, 1, 3), RAGGED, 72, 256, 0, True),
    (SwappedConfig(16, 2, 1, 3), RAGGED, 256, 128, 0, True),
    (SwappedConfig(48, 1, 2, 3, 2), RAGGED, 200, 128, 0, True),
    (SwappedConfig(64, 2, 1, 3, 2), (0, 5, 63, 0), 128, 128, 71, True),
    (SwappedConfig(24, 1, 1, 3), RAGGED, 72, 136, 0, False),
    (SwappedConfig(128, 2, 2, 3, 4), RAGGED, 512, 64, 0, False),
    (SwappedConfig(256, 2, 1, 3, 8), (300, 0, 100), 200, 192, 0, False),
    (SwappedConfig(128, 2, 2, 2, 8), RAGGED, 512, 192, 0, False),
    (SwappedConfig(144, 1, 1, 3, 9), (257, 0, 140, 300, 17), 72, 128, 0, False),
)
def test_swapped_operands(config, sizes, n, k, capacity, fp8):
    assert run(config, sizes, n, k, (3,), capacity, fp8) < 2**-7


@cases(
    "config, sizes, n, k, fp8",
    (SwappedConfig(16, 2, 2, 3, swiglu=True), RAGGED, 256, 128, True),
    rarely(SwappedConfig(96, 2, 2, 3, swiglu=True), RAGGED, 512, 128, True),
    (SwappedConfig(32, 1, 2, 3, 2, swiglu=True), RAGGED, 272, 128, False),
)
def test_swiglu(config, sizes, n, k, fp8):
    assert run(config, sizes, n, k, (3,), fp8=fp8) < (0.06 if fp8 else 2**-7)


@cases(
    "config, fp8, change",
    (SwappedConfig(16, 1, 1, 3), True, ("tile.scale_row % 4 +", "")),
    rarely(SwappedConfig(16, 1, 1, 3), False, ("if (step > 0) release(memory, previous_stage);", "")),
    rarely(SwappedConfig(16, 1, 1, 3), False, ("row + PART <= tile.end", "true")),
    rarely(SwappedConfig(16, 1, 1, 3), False, ("        fence_proxy_async();\n", "")),
    (TiledConfig(1, 64, 3), True, ("own >= tile.begin && ", "")),
    rarely(TiledConfig(1, 64, 3), True, ("        if (thread == 0) bulk_commit();\n", "")),
    rarely(TiledConfig(2, 64, 3), True, ("else pass_over(memory, state, steps);", "")),
)
def test_a_planted_fault_is_found(config, fp8, change):
    def is_found(seed):
        try:
            return not run(config, RAGGED, 128, 256, [seed], fp8=fp8, change=change) < 2**-7
        except (emulator.EmulationError, AssertionError):
            return True

    assert any(is_found(seed) for seed in (0, 1, 3))


def test_the_sass_has_no_spills_and_no_serialised_products():
    tiles = [(native.tile(192), True), (native.swap(16, True), True)]
    tiles += [(native.swap(96, True, 2, 2, True), True), (native.swap(256, False), False)]
    for report, (_, fp8) in zip(
        build.disassemble(native.job(config, fp8=fp8) for config, fp8 in tiles), tiles
    ):
        assert report.launchable and not report.spills, report.reason
        product = "QGMMA" if fp8 else "HGMMA"
        assert report.sass.count("UTMALDG.3D") and report.sass.count(product) % 4 == 0
        for after in re.findall(rf"{product}(.*?){product}", report.sass, re.S):
            assert after.count("DEPBAR") <= 1


def test_what_cannot_run_is_refused():
    assert "of shared memory" in native.rejection(SwappedConfig(256, num_stages=8), 8)
    assert not native.rejection(native.choose_config(4096, 8, 384, 512), 8)


def test_the_choice_suits_the_groups():
    assert native.choose_config(128, 128, 1536, 2048).block_m == 64
    assert native.choose_config(8192, 8, 4096, 7168).block_n == 192
    assert native.choose_config(2048, 8, 4096, 14336).block_n == 160  # four waves, and the last one full
    assert native.choose_config(256 * 128, 256, 4096, 7168).block_m == 192
    assert native.choose_config(128 * 256, 128, 1536, 2048, fp8=False).block_m == 144
    assert native.choose_config(8192, 8, 4096, 7168, fp8=False).block_m == 256
    assert native.choose_config(256 * 128, 256, 4096, 7168, masked=True).block_m == 64


@pytest.mark.parametrize("fp8", [True, False])
def test_very_many_groups_take_stages_away(fp8):
    for rows, kind in itertools.product((1, 8, 64, 150, 1000), ({}, {"swiglu": True}, {"masked": True})):
        config = native.choose_config(4096 * rows, 4096, 1536, 2048, fp8, **kind)
        assert not native.rejection(config, 4096, fp8) and config.num_stages >= 2, config
        assert getattr(config, "swiglu", False) == bool(kind.get("swiglu"))
    assert native.choose_config(64 * 698, 698, 768, 2048, False, True).num_stages == 5
    assert native.choose_config(64 * 699, 699, 768, 2048, False, True).num_stages == 4
