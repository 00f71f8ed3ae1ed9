"""The wgmma kernel in the emulator: right on ragged shapes and with every scale, whatever waits for what."""

import ctypes
import functools

import pytest
import torch

from ch14 import fp4_decode
from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.measure import check

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
SOURCE = (
    fp4_decode.SOURCE
    if hasattr(fp4_decode, "SOURCE")
    else __import__("pathlib").Path(fp4_decode.__file__).with_name("decode.cu")
)


@functools.cache
def find_kernel(constants: tuple, change: tuple[str, str]):
    source = SOURCE.read_text()
    assert change[0] in source
    return cuda_magic.find_kernels(source.replace(*change), constants)["decode_wgmma"]


def run(tokens, consumers, stages, shape, splits, seeds, change=("", ""), scale_range=(118, 129)):
    (m, n, k) = shape
    x = torch.randn(m, k).bfloat16()
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(*scale_range, (n, k // 32)).to(torch.uint8)
    wanted = fp4_decode.spec(x, weight, scales)
    out, touched = check.make_poisoned((m, n), torch.bfloat16, "cpu")
    constants = tuple(
        f"-D{name}={value}"
        for name, value in dict(TOKENS=tokens, CONSUMERS=consumers, STAGES=stages, CTAS=1).items()
    )
    tiles = -(-n // (64 * consumers))
    parts = torch.full((tiles * splits * 64 * consumers * tokens,), float("nan"))
    arrivals = torch.zeros(tiles * consumers, dtype=torch.int32)
    weight_map = cuda_magic.make_tensor_map(weight, (64 * consumers, 64))
    args = (weight_map, x, scales, out, parts, arrivals, *map(ctypes.c_int, (m, n, k, splits)))
    rows = 64 * consumers
    smem = stages * (rows * 64 + tokens * 256 + rows * 4 + 16) + 4 * consumers
    launch = emulator.prepare(
        find_kernel(constants, change), tiles * splits, 128 * (1 + consumers), args, smem
    )
    error = 0
    for seed in seeds:
        out.fill_(float("nan"))
        launch(seed)
        assert touched() == ""
        assert not arrivals.any()
        error = max(error, check.relative_error(out, wanted))
    return error


@pytest.mark.parametrize(
    "given",
    [
        (8, 1, 3, (5, 70, 512), 1),
        (8, 2, 4, (8, 200, 1280), 2),
        (16, 1, 3, (9, 40, 384), 2),
        (64, 1, 3, (50, 64, 640), 2),
        (32, 2, 2, (17, 129, 256), 1),
        (48, 1, 3, (33, 64, 384), 3),
    ],
    ids=str,
)
def test_it_is_right_in_every_order(given):
    assert run(*given, emulator.SEEDS) < 2**-8
