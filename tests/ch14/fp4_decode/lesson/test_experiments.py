"""The kernel that the decode kernels are measured beside."""

import functools
import operator

import pytest
import torch

from ch14.fp4_decode.lesson import experiments
from tilelab.runtime import build, device

WHERE = "cuda" if device.current().capability else "cpu"


def test_stream_reads_every_byte():
    packed, scales = (
        torch.randint(0, 256, (65, columns), dtype=torch.uint8, device=WHERE) for columns in (256, 16)
    )

    def fold(numbers):
        return functools.reduce(operator.xor, numbers)

    def read():
        return fold(experiments.prepare_stream(None, packed, scales, None)().tolist())

    wanted = fold(packed.view(torch.int32).flatten().tolist() + scales.view(torch.int32).flatten().tolist())
    assert read() == wanted
    scales[-1, -1] ^= 1
    assert read() != wanted


@pytest.mark.compile
def test_stream_is_built_wide():
    pointers = {name: "*i32" for name in ("weight_ptr", "scales_ptr", "out_ptr")}
    arguments = pointers | {"words": "i32", "scale_words": "i32"}
    kernel = "ch14.fp4_decode.lesson.experiments:stream_kernel"
    [stream] = build.disassemble(
        [build.Job(kernel, arguments, {"BLOCK": 4096}, "sm_90a", 4, aligned=tuple(arguments))]
    )
    assert stream.launchable and stream.sass.count("LDG.E.128") >= 8 and stream.spills == 0
