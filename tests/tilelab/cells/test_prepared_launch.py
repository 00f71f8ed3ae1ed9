"""What the driver is given by a launch whose tensors move."""

import pretended_gpu
import pytest

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not pretended_gpu.COMPILER, reason="needs a C compiler"),
]

MOVED = """
import threading
import torch
from ch10 import wgmma_gemm
from ch10.wgmma_gemm.choice import candidates
from ch10.wgmma_gemm.configs import STEPS
from tilelab.runtime import cuda

cuda.load_kernel = lambda *_: cuda.load_cubin(bytes(64), "any")  # the driver does not run it
SIZES = [128, 128, 128, 8, 4, 4, 4, 8]


def matrices(m, n, k):
    return (torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16().T, torch.empty(m, n, dtype=torch.bfloat16))


thin = next(config for config in candidates(16, 4096, 4096).values() if config.swap)
split = next(config for config in candidates(16, 4096, 4096).values() if config.kernel == "split")
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
from tilelab.runtime import cuda

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


FORMATS = """
import torch
from ch07 import resample
from ch14 import blockscaled, fp8_gemm, mx_formats
from ch14.fp8_gemm.lesson import verification
from tilelab.runtime import cuda

cuda.load_kernel = lambda *_: cuda.load_cubin(bytes(64), "any")
torch.set_grad_enabled(False)
FP8, TIMES = [*[128] * 4, *[8] * 5, *[4] * 5], [*[8] * 4, *[4] * 3]


def case(k, config, packed, column_by_column=True):
    a, b, scale_a, scale_b, out = verification.fp8_operands(64, 512, k, "cpu")
    scale_a = scale_a if column_by_column else scale_a.contiguous()
    bias, out_scales, packed_as = None, None, None
    if packed:
        room = mx_formats.empty((64, 512), "mxfp8_e4m3")
        bias, out, out_scales, packed_as = torch.randn(512).bfloat16(), room.values, room.scales, (
            room.format.name, False, room.shape)
    return (a, b, scale_a, scale_b, bias, out_scales, out), ("silu" if packed else None, config, packed_as)


for k, config, packed, columns, fresh_lines in (
        (512, "square", False, True, ()), (512, "best", True, True, ()), (16384, "best", False, True, (8, 9)),
        (512, "square", False, False, (3,))):
    first, options = case(k, config, packed, columns)
    plan = fp8_gemm.planner.make(*first, *options)
    for _ in range(2):
        tensors, _ = case(k, config, packed, columns)
        moved, fresh = (pretended_gpu.note_launch(FP8, made.launch, *tensors)
                        for made in (plan, fp8_gemm.planner.make(*tensors, *options)))
        # Work space and the copy of the scales are new at each launch.
        differ = [line for line in range(len(fresh)) if moved[line] != fresh[line]]
        assert len(fresh) == 15 and set(differ) <= set(fresh_lines), (k, config, differ)
    for line, tensor in zip(moved[5:8], tensors[3:6]):  # scale_b, the bias and the scales of out
        address = 0 if tensor is None else tensor.data_ptr()
        assert line.split(": ")[1] == address.to_bytes(8, "little").hex()

for targets in (30, 31):
    def make():
        return torch.randn(2, 64, 32), torch.arange(64.0).expand(2, 64).contiguous(), torch.rand(2, targets)

    first, out = make(), torch.empty(2, targets, 32)
    plan = resample.planner.make(*first, None, "best")
    for tensors in (make(), make()):
        assert pretended_gpu.note_launch(TIMES, plan.launch, *tensors, out) == pretended_gpu.note_launch(
            TIMES, resample.prepare(*tensors, out=out))

planners = fp8_gemm.planner, resample.planner
kept = [planner.make for planner in planners]
planned = []
for planner, make in zip(planners, kept):
    planner.make = lambda *given, make=make: planned.append(make) or make(*given)
for _ in range(3):
    a, b, scale_a, scale_b, out = verification.fp8_operands(64, 512, 512, "cpu")
    assert blockscaled.matmul((a, scale_a), (b, scale_b)).shape == (64, 512)
    assert fp8_gemm.fp8(a, b, scale_a, scale_b, out=out) is out
    room = mx_formats.empty((64, 512), "mxfp8_e4m3")
    assert fp8_gemm.fp8(a, b, scale_a, scale_b, out=room) is room
    features, times = torch.randn(2, 64, 32), torch.arange(64.0).expand(2, 64).contiguous()
    assert resample.resample(features, times, times).shape == (2, 64, 32)
    for call, words in ((lambda: resample.resample(features, times.flip(1).contiguous(), times), "must ascend"),
                        (lambda: resample.resample(features, times * float("nan"), times), "must be numbers"),
                        (lambda: fp8_gemm.fp8(a, b, scale_a, scale_b, out=mx_formats.Packed(
                            "mxfp8_e4m3", (64, 512), room.values, a.view(torch.uint8)[:2].view(64, 16))),
                         "the scales of out lies in the memory of a"),
                        (lambda: fp8_gemm.fp8(a, b, scale_a.clone().requires_grad_(), scale_b), "")):
        try:
            call()
        except ValueError as error:
            assert words in str(error), error
        else:
            assert not words
assert len(planned) == 4, len(planned)
"""


def test_block_scaled_products_and_resampling_move_with_their_tensors():
    pretended_gpu.run(FORMATS)


def test_a_map_of_one_dimension_is_encoded():
    pretended_gpu.run("""
import torch
from tilelab.runtime.tensor_map import make_tensor_map

for shape in ((32,), (1,), (4, 32), (2, 1, 8)):
    make_tensor_map(torch.zeros(shape), [1] * (len(shape) - 1) + [8])
""")
