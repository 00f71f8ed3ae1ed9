"""The specialised kernel in the emulator: three consumers, clusters of two and four, and swapped operands."""

import ctypes
import functools

import pytest
import torch
from cases import cases
from planted import rarely

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import WgmmaConfig, fits
from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.measure import check

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
THREE = WgmmaConfig("specialised", 192, 32, 3, consumers=3, persistent=True, group_m=2)
CLUSTER = WgmmaConfig("specialised", 64, 32, 3, cluster=4, persistent=True, group_m=2)
WIDE = WgmmaConfig("specialised", 64, 40, 3, cluster=2, cluster_n=2, swap=True)  # takes turns in loading B
SHAPES = ((400, 72, 136), (200, 104, 264), (130, 40, 24))


@functools.cache
def find_kernel(config: WgmmaConfig, change: tuple[str, str]):
    source = wgmma_gemm.SOURCE.read_text()
    assert change[0] in source
    constants = tuple(f"-D{name}={value}" for name, value in config.constants().items())
    return cuda_magic.find_kernels(source.replace(*change), constants)[config.kernel]


def run(config: WgmmaConfig, shape, seeds, change=("", ""), clusters: int = 1):
    """Return the largest relative error over the seeds, on `clusters` clusters, which take one tile after another."""
    m, n, k = shape
    a, weight = (torch.randn(rows, k).bfloat16() for rows in (m, n))
    out, touched = check.make_poisoned((m, n), torch.bfloat16, "cpu")
    first, second, rows, columns = (weight, a, n, m) if config.swap else (a, weight, m, n)
    swizzles = "128B", "128B", f"{2 * config.box}B"
    maps = (
        cuda_magic.make_tensor_map(matrix, box, swizzle=swizzle)
        for matrix, box, swizzle in zip((first, second, out), config.boxes, swizzles)
    )
    arguments = (*maps, out, *map(ctypes.c_int, (rows, columns, k)))
    arguments += (ctypes.c_uint64(out.stride(0)), wgmma_gemm.NOTHING)
    grid = config.grid(m, n, 1) if config.kernel == "split" else clusters * config.cluster_size
    given = (arguments, config.smem_bytes, config.cluster_size)
    launch = emulator.prepare(find_kernel(config, change), grid, config.threads, *given)
    error = 0
    for seed in seeds:
        out.fill_(float("nan"))
        launch(seed)
        assert touched() == ""
        error = max(error, check.relative_error(out, wgmma_gemm.spec(a, weight.T)))
    return error


@cases(
    "config",
    THREE,
    WgmmaConfig(
        "specialised", 192, 48, 3, consumers=3, cluster=2, persistent=True, epilogue_subtile=3, group_m=4
    ),
    CLUSTER,
    WgmmaConfig("specialised", 64, 16, 3, cluster=2, persistent=True, swap=True, boxes_per_stage=2),
    WIDE,
    rarely(
        WgmmaConfig(
            "specialised", 128, 48, 3, consumers=2, cluster=4, cluster_n=2, epilogue_subtile=2, swap=True
        )
    ),
    WgmmaConfig("split", 64, 24, 2, cluster=2, swap=True),
    ids=str,
)
def test_it_is_right_in_every_order(config):
    for shape, seeds in zip(SHAPES, ((0, 1, 2, 3), (4,), (5,))):
        if fits(config, shape[2]):  # a split needs a step for each CTA
            assert run(config, shape, seeds) < 2**-7


@cases(
    "config, change",
    (THREE, ("4 * CONSUMERS * ctas", "8 * ctas")),  # a stage is free after two of three consumers
    rarely(THREE, ("consumer * ROWS * 128", "consumer % 2 * ROWS * 128")),
    (THREE, ("consumer * BUFFERS * SUBTILE_BYTES", "0")),
    (CLUSTER, ("4 * CONSUMERS * ctas", "8 * CONSUMERS")),  # a stage is free after two of four CTAs
    rarely(CLUSTER, ("box + part * 128", "box + part * 64")),
    rarely(WIDE, ("CLUSTER + CLUSTER_N - 1)", "CLUSTER)")),
    (WIDE, ("lane % CLUSTER == rank % CLUSTER ||", "")),
    (WIDE, ("k / BOX_K % SHARERS == sharer", "sharer == 0 || k == 0")),
)
def test_a_planted_fault_is_found(config, change):
    def is_found(seed):
        try:
            return not run(config, SHAPES[0], [seed], change) < 2**-7
        except emulator.EmulationError:
            return True

    assert any(map(is_found, emulator.SEEDS))
