"""What the driver is given by a launch whose tensors move."""

import pretended_gpu
import pytest

pytestmark = [pytest.mark.compile,
              pytest.mark.skipif(not pretended_gpu.COMPILER, reason="needs a C compiler")]

MOVED = """
import threading
import torch
from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import STEPS, candidates
from tilelab import cuda

cuda.load_kernel = lambda *_: cuda.load_cubin(bytes(64), "any")  # the driver does not run it
SIZES = [128, 128, 128, 8, 4, 4, 4, 8]


def matrices(m, n, k):
    return (torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16().T, torch.empty(m, n, dtype=torch.bfloat16))


thin = next(config for config in candidates() if config.swap)
split = next(config for config in candidates() if config.kernel == "split")
for config in (STEPS["tile"], STEPS["cluster"], STEPS["raster"], thin, split):
    square = torch.randn(512, 512).bfloat16()
    first = square, square.T, torch.empty(512, 512, dtype=torch.bfloat16)  # a and b share an address
    plan = wgmma_gemm._plan(*first, config)
    for tensors in (matrices(512, 512, 512), first, matrices(512, 512, 512)):
        fresh = wgmma_gemm.build_launch(*tensors, config)
        found = pretended_gpu.note_launch(SIZES, plan.launch, *tensors)
        assert found == pretended_gpu.note_launch(SIZES, fresh), config
    assert found == pretended_gpu.note_launch(SIZES, plan.launch)  # without tensors: those of the last call
    assert ("attribute 4: 2" in found[0]) == (config.cluster == 2) and ("attribute 6: 1" in found[0]) == config.pdl
    assert "stream 0x77" in found[0]
streams = iter((0, 0x123))
torch._C._cuda_getCurrentRawStream = lambda index: next(streams)
launch = wgmma_gemm.build_launch(*matrices(512, 512, 512), config)
assert ["stream (nil)" in pretended_gpu.note_launch(SIZES, launch)[0],
        "stream 0x123" in pretended_gpu.note_launch(SIZES, launch)[0]] == [True, True]
"""

OUT = """
import torch
from ch10 import wgmma_gemm
from tilelab import cuda

cuda.load_kernel = lambda *_: cuda.load_cubin(bytes(64), "any")
planned, plan = [], wgmma_gemm.planner.make
wgmma_gemm.planner.make = lambda *given: planned.append(given[2] is not None) or plan(*given)
with torch.no_grad():
    for _ in range(3):
        a, w = torch.randn(64, 256).bfloat16(), torch.randn(128, 256).bfloat16()
        assert wgmma_gemm.gemm(a, w.T).shape == (64, 128)
        wide = torch.empty(64, 256, dtype=torch.bfloat16)
        assert wgmma_gemm.gemm(a, w.T, out=wide[:, 128:]).data_ptr() == wide[:, 128:].data_ptr()
        try:
            wgmma_gemm.gemm(wide, w.T, out=wide[:, 128:])
        except ValueError as error:
            assert "out lies in the memory of a" in str(error)
        else:
            raise AssertionError("no error")
assert planned == [False, True]
assert not wgmma_gemm.gemm(a[:0], w.T).numel() and not wgmma_gemm.gemm(a[:, :0], w.T[:0]).any()
"""


def test_parameters_move_with_the_tensors_of_a_call():
    pretended_gpu.run(MOVED)


def test_a_plan_serves_every_out_of_its_kind():
    pretended_gpu.run(OUT)
