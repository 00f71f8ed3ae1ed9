"""The grouped CUDA kernels in the emulator: ragged, empty and single groups, in poisoned memory, against float64."""

import functools
import itertools

import pytest
import torch
from cases import cases

from ch14 import fp8_gemm
from ch14.fp8_gemm import Fp8Config
from ch14.fp8_gemm.lesson.verification import fp8_operands
from ch14.moe import native
from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.measure import check

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]


@functools.cache
def find_kernel(config, change):
    # The emulator rewrites shared arrays in a cell, and not in a file that it includes.
    source = native.SOURCE.read_text().replace('#include "../fp8_gemm/fp8.cu"', fp8_gemm.SOURCE.read_text())
    assert change[0] in source
    options = [f"-D{name}={value}" for name, value in config.constants().items()]
    found = cuda_magic.find_kernels(source.replace(*change), (*options, f"-I{native.SOURCE.parent}"))
    return found["grouped_fp8"]


def run(config, sizes, n, k, seeds, capacity=0, change=("", "")):
    """Return the largest relative error of a row over the seeds, on three CTAs, each of which makes several tiles."""
    rows = capacity * len(sizes) or sum(sizes) + 3  # the last three rows belong to nobody
    begins = [capacity * i for i in range(len(sizes))] if capacity else [0, *itertools.accumulate(sizes)][:-1]
    a, _, scale_a, _, _ = fp8_operands(rows, 128, k, where="cpu")
    weights = [fp8_operands(1, n, k, where="cpu") for _ in sizes]
    b = torch.stack([each[1].T for each in weights]).mT
    scale_b = torch.stack([each[3].T for each in weights]).mT
    scale_a *= torch.exp2(torch.randint(-4, 5, (rows, 1)))
    ends = torch.tensor(sizes if capacity else list(itertools.accumulate(sizes)), dtype=torch.int32)
    wanted, left = (
        torch.zeros(rows, n, dtype=torch.float64),
        a.double() * scale_a.double().repeat_interleave(128, 1),
    )
    is_stored = torch.zeros(rows, dtype=torch.bool)
    for i, (begin, size) in enumerate(zip(begins, sizes)):
        scale = scale_b[i].double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
        wanted[begin : begin + size] = left[begin : begin + size] @ (b[i].double() * scale)
        is_stored[begin : begin + size] = True
    out, touched = check.make_poisoned((rows, n), torch.bfloat16, "cpu")
    given, c = (a.view(len(sizes), capacity, k), out.view(len(sizes), capacity, n)) if capacity else (a, out)
    arguments = native.bind_arguments(config, given, b, ends, c, scale_a, scale_b, cuda_magic.make_tensor_map)
    launch = emulator.prepare(
        find_kernel(config, change),
        3 if config.cluster == 1 else 2 * config.cluster,
        config.threads,
        list(arguments.values()),
        native.smem_bytes(config, len(sizes)),
        cluster=config.cluster,
    )
    error = 0
    for seed in seeds:
        out.fill_(float("nan"))
        launch(seed)
        assert touched() == "" and out[~is_stored].isnan().all()
        error = max(error, check.relative_error(out[is_stored], wanted[is_stored]))
    return error


RAGGED = (70, 0, 1, 131, 0, 64, 7)


@cases(
    "config, sizes, n, k, capacity",
    (Fp8Config(num_stages=4), RAGGED, 200, 256, 0),
    (Fp8Config(num_stages=4, epilogue_warps=3), RAGGED, 200, 256, 0),
    (Fp8Config(num_stages=4, cluster=2), RAGGED, 256, 384, 0),
    (Fp8Config(2, 2, 3, 64, epilogue_warps=2, cluster=2), (0, 5, 100, 0), 128, 128, 150),
    (Fp8Config(1, 2, 3, 96), (0, 0, 150, 0), 192, 640, 0),
    (Fp8Config(3, 1, 3, 64), (300,), 64, 128, 0),
    (Fp8Config(1, 2, 3, 64), (0, 0), 64, 128, 0),
)
def test_groups_of_any_size(config, sizes, n, k, capacity):
    if not sum(sizes):
        sizes = (*sizes, 1)
    assert run(config, sizes, n, k, (0, 1, 3), capacity) < 2**-7
