"""The fp8 kernel in the emulator, with and without epilogue warps: right on ragged shapes, whatever waits for what."""

import ctypes
import functools
import re

import pytest
import torch
from cases import cases
from planted import rarely

from ch14 import fp8_gemm
from ch14.fp8_gemm import Fp8Config
from ch14.fp8_gemm.lesson.verification import fp8_operands
from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.measure import check
from tilelab.runtime import build

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]


@functools.cache
def find_kernel(config: Fp8Config, change: tuple[str, str], **options):
    source = fp8_gemm.SOURCE.read_text()
    assert change[0] in source
    constants = tuple(f"-D{name}={value}" for name, value in config.constants(**options).items())
    return cuda_magic.find_kernels(source.replace(*change), constants)["fp8_blocks"]


def run(config: Fp8Config, shape, seeds, change=("", ""), activation=None):
    """Return the largest relative error over the seeds, on three CTAs, each of which makes several tiles."""
    (m, n, k), vector = shape, torch.randn(shape[1]).bfloat16()
    a, b, scale_a, scale_b, _ = fp8_operands(*shape, where="cpu")
    scale_a *= torch.exp2(torch.randint(-4, 5, (m, 1)))
    wanted = fp8_gemm.spec(a, b, scale_a, scale_b, vector, activation)
    out, touched = check.make_poisoned((m, n), torch.bfloat16, "cpu")
    rows, room = min(config.block_m, -(-m // 8) * 8), torch.zeros(4)
    maps = (
        cuda_magic.make_tensor_map(a.view(torch.uint8), (rows, 128), swizzle="128B"),
        cuda_magic.make_tensor_map(
            b.T.view(torch.uint8), (config.block_n // config.cluster, 128), swizzle="128B"
        ),
        cuda_magic.make_tensor_map(scale_a.T, (1, rows)),
        cuda_magic.make_tensor_map(
            out,
            (16 if config.epilogue_warps else 64, config.subtile_columns),
            swizzle=f"{2 * config.subtile_columns}B",
        ),
    )
    args = (*maps, scale_b, vector, room, room, room, *map(ctypes.c_int, (m, n, k, 1, rows)))
    launch = emulator.prepare(
        find_kernel(config, change, bias=True, activation=activation),
        config.grid(m, n, 3 if config.cluster == 1 else 2 * config.cluster),
        config.threads,
        args,
        config.smem_bytes,
        cluster=config.cluster,
    )
    error = 0
    for seed in seeds:
        out.fill_(float("nan"))
        launch(seed)
        assert touched() == ""
        error = max(error, check.relative_error(out, wanted))
    return error


def in_pairs(names, configs, shapes, others=()):
    """Try each configuration with one shape, and every shape; other pairs and configurations are for `trouble`."""
    return pytest.mark.parametrize(
        names,
        [
            (pytest.param if i < len(configs) and j == i % len(shapes) else rarely)(config, *shape)
            for i, config in enumerate((*configs, *others))
            for j, shape in enumerate(shapes)
        ],
        ids=str,
    )


@in_pairs(
    "config, shape, activation",
    [
        Fp8Config(num_stages=4),
        Fp8Config(3, 1, 3, 64, epilogue_warps=2),
        Fp8Config(1, 2, 5, 64, epilogue_warps=4),
        Fp8Config(num_stages=4, epilogue_warps=2),
    ],
    [((200, 384, 256), None), ((70, 256, 640), "silu"), ((450, 256, 128), "gelu")],
    [Fp8Config(num_stages=4, epilogue_warps=1), Fp8Config(num_stages=4, epilogue_warps=6)],
)
def test_it_is_right_in_every_order(config, shape, activation):
    assert run(config, shape, (0, 1, 2, 4), activation=activation) < 2**-7


@in_pairs(
    "config, shape",
    [
        Fp8Config(1, 1, 3, 160),
        Fp8Config(2, 2, 3, 96),
        Fp8Config(1, 2, 3, 112, epilogue_warps=2),
        Fp8Config(1, 2, 3, 64, cluster=4),
    ],
    [((70, 64, 256),), ((130, 192, 384),), ((70, 200, 256),), ((20, 2112, 128),)],
    [
        *(Fp8Config(num_stages=4), Fp8Config(num_stages=4, epilogue_warps=2), Fp8Config(3, 1, 3)),
        *(
            Fp8Config(1, 2, 5, 64),
            Fp8Config(1, 2, 5, 64, epilogue_warps=3),
            Fp8Config(1, 2, 3, 96, cluster=2),
        ),
    ],
)
def test_n_may_end_within_a_block(config, shape):
    assert run(config, shape, (0, 3)) < 2**-7


def test_a_last_tile_that_is_left_out_is_found():
    change = "(N + BLOCK_N - 1) / BLOCK_N, K / BLOCK_K", "N / BLOCK_N, K / BLOCK_K"
    assert not run(Fp8Config(1, 2, 5, 64), (20, 200, 256), emulator.SEEDS[:1], change) < 2**-7


@cases(
    "change",
    ("mbarrier_wait(memory.slot_empty + 8 * slot, phase ^ 1);", ""),
    rarely(("id += stride, slot_phase ^= 1) {", "id += stride) {")),
    rarely(("mbarrier_wait(memory.slot_full + 8 * slot, phase);", "")),
    ("        fence_proxy_async();\n        __syncwarp();", "        __syncwarp();"),
    ("if (lane == 0) bulk_wait_read<BUFFERS - 1>();  // TMA has read the buffer's previous rows", ""),
    rarely(("work.row + slot * 16", "work.row + slot * 8")),
    ("bias, row, work.column, N);\n        mbarrier", "bias, row, 0, N);\n        mbarrier"),
)
def test_a_planted_fault_is_found(change):
    config = Fp8Config(num_stages=4, epilogue_warps=2)

    def is_found(shape, seed):
        try:
            return not run(config, shape, [seed], change) < 2**-7
        except emulator.EmulationError:
            return True

    assert any(
        is_found(shape, seed) for shape in ((200, 384, 256), (450, 512, 128)) for seed in emulator.SEEDS
    )


def test_the_hand_over_compiles_for_hopper():
    configs = [Fp8Config(num_stages=4, epilogue_warps=1), Fp8Config(1, 2, 4, 128, epilogue_warps=4)]
    for report in build.disassemble(fp8_gemm.job(config, bias=True, activation="silu") for config in configs):
        assert report.launchable and not report.spills, report.reason
        registers = 128 if report.job.constants["EPILOGUE_WARPS"] > 3 else 56  # for the epilogue warps
        assert re.search(rf"USETMAXREG.DEALLOC\S* {registers:#x}", report.sass)
        assert report.sass.count("ST.E.128") + report.sass.count("STS.128") >= 16


def test_what_has_no_epilogue_warps():
    with pytest.raises(ValueError, match="splits must be 1"):
        Fp8Config(1, 2, 5, 64, splits=2, epilogue_warps=1)
    with pytest.raises(ValueError, match="epilogue_warps is 8; it must be a whole number from 0 to 7"):
        Fp8Config(epilogue_warps=8)
    with pytest.raises(ValueError, match="for an MXFP8 output, epilogue_warps must be 0"):
        Fp8Config(num_stages=4, epilogue_warps=2).constants(mx=True)
    with pytest.raises(ValueError, match="take fewer stages"):
        Fp8Config(num_stages=5, epilogue_warps=1)
