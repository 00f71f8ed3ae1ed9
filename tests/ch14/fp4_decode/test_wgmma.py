"""The wgmma kernel in the emulator: right on ragged shapes and with every scale, whatever waits for what."""

import ctypes
import functools

import pytest
import torch
from cases import cases
from planted import rarely

from ch14 import fp4_decode
from ch14.fp4_decode import DecodeConfig
from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.measure import check

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]


@functools.cache
def find_kernels(constants: tuple, change: tuple[str, str]):
    source = fp4_decode.SOURCE.read_text()
    assert change[0] in source, change
    return cuda_magic.find_kernels(source.replace(*change), constants)


def run(config: DecodeConfig, shape, seeds, change=("", ""), scales=(118, 128)):
    """Return the largest relative error over the seeds."""
    m, n, k = shape
    x, weight = torch.randn(m, k).bfloat16(), torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(scales[0], scales[1] + 1, (n, k // 32)).to(torch.uint8)
    wanted = fp4_decode.spec(x, weight, scales)
    out, touched = check.make_poisoned((m, n), torch.bfloat16, "cpu")
    tokens, (tiles, splits) = fp4_decode.padded_tokens(m, "wgmma"), config.grid(n, k)
    constants = tuple(f"-D{name}={value}" for name, value in config.constants(tokens).items())
    work = torch.empty(k * tokens // 2 + tiles * splits * config.block_n * tokens)
    arrivals = torch.zeros(tiles * config.block_n // 64, dtype=torch.int32)
    kernels = find_kernels(constants, change)
    arrange = emulator.prepare(
        kernels["arrange_tokens"], k // 128, 4 * tokens, (x, work, *map(ctypes.c_int, (m, k)))
    )
    weight_map = cuda_magic.make_tensor_map(weight, (config.block_n, 64))
    multiply = emulator.prepare(
        kernels["decode_wgmma"],
        tiles * splits,
        config.threads,
        (weight_map, scales, out, work, arrivals, *map(ctypes.c_int, (m, n, k, splits))),
        config.smem_bytes(tokens),
    )
    error = 0
    for seed in seeds:
        out.fill_(float("nan")), work.fill_(float("nan"))
        arrange(seed), multiply(seed)
        assert touched() == "" and not arrivals.any()
        error = max(error, check.relative_error(out, wanted))
    return error


@cases(
    "config, shape, scales",
    rarely(DecodeConfig("wgmma", 64, 512, 4, 3), (5, 70, 512), (118, 128)),
    (DecodeConfig("wgmma", 128, 640, 8, 4), (8, 200, 1280), (120, 131)),
    (DecodeConfig("wgmma", 64, 384, 4, 3), (9, 40, 384), (0, 3)),
    rarely(DecodeConfig("wgmma", 64, 256, 4, 3), (50, 64, 640), (118, 128)),
    (DecodeConfig("wgmma", 128, 1024, 8, 3), (17, 129, 1024), (230, 234)),
    (DecodeConfig("wgmma", 64, 128, 4, 3), (33, 64, 384), (118, 128)),
    ids=str,
)
def test_it_is_right_in_every_order(config, shape, scales):
    assert run(config, shape, (0, 1, 2, 4), scales=scales) < 2**-8


@cases(
    "change",
    ("                mbarrier_wait(empty, state.phase ^ 1);  // a new stage is empty\n", ""),
    rarely(("                copies_arrive(ready);\n", "                mbarrier_arrive(ready);\n")),
    ("wgmma_wait<3>();", "wgmma_wait<4>();"),
    ("early < slab; ++early", "early < slab - 1; ++early"),
    rarely(("state = Ring<STAGES>();", "")),
    ("    named_barrier_sync(1 + consumer, 128);\n    if", "    if"),
    rarely(("= 0;  // for the next launch", "= 1;")),
    ("<false>(word_below, scale_below", "<false>(word_below, scale_above"),
)
def test_a_planted_fault_is_found(change):
    config, shape = DecodeConfig("wgmma", 128, 640, 8, 3), (20, 150, 1280)
    try:
        assert not run(config, shape, emulator.SEEDS, change) < 2**-8
    except (emulator.EmulationError, AssertionError):
        pass
