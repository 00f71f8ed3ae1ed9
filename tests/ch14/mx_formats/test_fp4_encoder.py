"""The PTX that encodes fp4 by saturation, interpreted on numpy arrays, against the arithmetic of the format."""

import re

import numpy as np
import pytest

from ch14.mx_formats import MxConfig, job, kernels
from tilelab.runtime import build


def run_ptx(text: str, inputs: list[np.ndarray]) -> np.ndarray:
    """Run PTX of one result, $0, on arrays of 32-bit words. A product with a sum is rounded once, from float64."""
    registers = {f"${i + 1}": value.view(np.uint32) for i, value in enumerate(inputs)}

    def read(name, as_float):
        if name.startswith("0f"):
            word = np.uint32(int(name[2:], 16))
        elif name in registers:
            word = registers[name]
        else:
            word = np.uint32(int(name, 0))
        return np.asarray(word).view(np.float32).astype(np.float64) if as_float else word

    def permute(a, b, selector):
        bytes_ = [(word >> np.uint32(8 * i)) & np.uint32(255) for word in (a, b) for i in range(4)]
        return sum(bytes_[(int(selector) >> (4 * i)) & 7] << np.uint32(8 * i) for i in range(4))

    steps = {"and": np.bitwise_and, "or": np.bitwise_or, "shl": np.left_shift, "shr": np.right_shift}
    steps |= {"mov": lambda a: a, "prmt": permute, "abs": np.abs, "mul": lambda a, b: a * b}
    steps |= {"add": lambda a, b: a + b, "fma": lambda a, b, c: a * b + c}
    for opcode, operands in re.findall(r"^([a-z]\S*) (.*);$", text, re.MULTILINE):
        target, *names = operands.split(", ")
        as_float = opcode.endswith("f32") and not opcode.startswith("mov")
        with np.errstate(all="ignore"):
            value = steps[opcode.split(".")[0]](*(read(name, as_float) for name in names))
            if as_float:
                if ".sat" in opcode:
                    value = np.nan_to_num(np.clip(value, 0, 1), nan=0.0)
                value = np.asarray(value.astype(np.float32)).view(np.uint32)
        registers[target] = np.broadcast_to(value, inputs[0].shape).astype(np.uint32)
    return registers["$0"]


def encode(values: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """Return the codes that FP4_ENCODER makes of bf16 values (rows of 8), as rows of 8."""
    bits = values.astype(np.float32).view(np.uint32) >> 16
    pairs = [bits[:, 2 * i] | bits[:, 2 * i + 1] << 16 for i in range(4)]
    words = run_ptx(kernels.FP4_ENCODER.value, [*pairs, multipliers])
    return np.stack([words >> (4 * i) & 15 for i in range(8)], 1)


def expect(values: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """Round the float32 products to the nearest number of e2m1, ties to the even code; larger ones to 6."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    with np.errstate(all="ignore"):
        magnitude = np.abs((values * multipliers[:, None]).astype(np.float32)).astype(np.float64)
    middle = (grid[1:] + grid[:-1]) / 2
    code = (magnitude[..., None] > middle).sum(-1)
    tie = (magnitude[..., None] == middle).any(-1)
    code += tie & (code % 2 == 1)
    return np.where(np.signbit(values), 8, 0) | code


def test_products_of_every_size_are_rounded_as_the_format_says():
    rng = np.random.default_rng(1)
    values = rng.integers(0, 2**16, (40_000, 8)).astype(np.uint32) << 16
    values = values.view(np.float32)
    values[np.isnan(values) | np.isinf(values)] = -0.0
    amax = np.abs(values).max(1)
    multipliers = (6 / np.maximum(amax, 1e-37) * rng.uniform(0.8, 1.5, len(amax))).astype(np.float32)
    multipliers[::3] = np.exp2(rng.integers(-126, 127, len(multipliers[::3]))).astype(np.float32)
    # ties and numbers of the format
    near = rng.integers(1, 15, (40_000, 8)) / 2 * rng.choice([-1, 1], (40_000, 8))
    near = (near.astype(np.float32) * rng.choice([0.5, 1, 1.0078125], near.shape)).astype(np.float32)
    near = (near.view(np.uint32) & 0xFFFF0000).view(np.float32)
    for each, by in (
        (values, multipliers),
        (near, np.ones(40_000, np.float32)),
        (near, np.full(40_000, 1 - 2**-24, np.float32)),
    ):
        assert np.array_equal(encode(each, by.astype(np.float32)), expect(each, by.astype(np.float32)))


@pytest.mark.compile
def test_saturation_takes_fewer_of_the_slow_instructions():
    slow = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?:FMNMX|LOP3|SHF|LEA|PRMT|VIMNMX|ISETP|SEL|IADD3)\b"
    portable, saturated = build.disassemble(
        [job(MxConfig(2048, saturate=saturate), "sm_90a", "nvfp4") for saturate in (False, True)]
    )
    counts = [len(re.findall(slow, report.sass, re.MULTILINE)) for report in (portable, saturated)]
    assert saturated.launchable and not saturated.spills and counts[1] < 0.8 * counts[0]
