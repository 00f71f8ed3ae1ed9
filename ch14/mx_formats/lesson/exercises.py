"""Inputs, ladders and checks for the kernels that a reader writes in `notebooks/14_ch14_mx_formats.ipynb`.

The kernels of its cells take a contiguous bfloat16 matrix whose rows consist of whole blocks, without NaN or infinity.
A prepare of a cell takes (x, values, scales), for NVFP4 also the scale of the tensor, and returns a launch.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable

import torch

from ch14 import mx_formats
from ch14.mx_formats import number_formats, packing
from ch14.mx_formats.lesson import experiments
from ch14.mx_formats.number_formats import E2M1, E4M3
from tilelab.cells import lesson
from tilelab.measure.check import make_checker
from tilelab.runtime import device

# Rows and columns: rows across tiles of scales, blocks that fill no whole program or tile, and a single block.
SMALL, LARGER = ((6, 160), (130, 32), (1, 32)), ((333, 4128), (1000, 4096))
EXAMPLE = (
    128,
    512,
)  # for the compiler. Triton compiles multiples of 16, as in experiments.LARGE, to code of their own
POISON = 0xA5  # the bytes of an output before a kernel writes them

LADDERS = {
    "mxfp8": ("mxfp8_e4m3", ("block_per_program", "many_blocks", "converted", "tiled_scales")),
    "mxfp4": ("mxfp4", ("mxfp4_split", "mxfp4_integer")),
    "nvfp4": ("nvfp4", ("nvfp4", "nvfp4_own_scale")),
}
FIRST_LAUNCH = {"nvfp4_own_scale": "find_amax"}  # of a version with several kernels

for _name, (_, _versions) in LADDERS.items():
    lesson.register(
        f"ch14_mx_formats_{_name}_versions",
        "14_ch14_mx_formats",
        *(f"{FIRST_LAUNCH.get(version, version)}:prepare_{version}" for version in _versions),
    )


def make_matrix(rows: int, columns: int, where: str = "cpu") -> torch.Tensor:
    """Return a bfloat16 matrix with rows of very different size, zeros of both signs, and midpoints of e2m1."""
    x = torch.randn(rows, columns, device=where) * torch.exp2(
        torch.randint(-20, 20, (rows, 1), device=where).float()
    )
    x = (x * (torch.rand(rows, columns, device=where) >= 0.05)).bfloat16()
    x[0, :8] = torch.tensor(
        [0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 7.0]
    ).bfloat16()  # scale 1 under rule floor
    x[0, 8:32] = x[0, :8].repeat(3)
    if columns > 32:
        x[0, 32:64] = torch.linspace(-6, 6, 32).bfloat16()  # 6 is the largest number of e2m1
    x[-1, -16:] = 0
    if rows > 1:
        # NVFP4 rounds the scale of this block, 1.45 * 2^-9, down to 2^-9, the smallest number of e4m3 above 0. Divided
        # by it, the elements are 8.7. The largest number of e2m1 is 6, so a quantiser must let them saturate.
        x[rows // 2, -32:-16] = x.abs().max() / 448 * 1.45 * 2**-9
    return x


def make_inputs(
    format: str = "mxfp8_e4m3", shape: tuple[int, int] | None = None, tiled: bool = False
) -> list[torch.Tensor]:
    """Return x, poisoned values and scales, and for NVFP4 the scale of the tensor. Tiled scales begin as zero.

    Without a shape, x is Gaussian and has the size that is timed, or EXAMPLE where there is no GPU.
    """
    where = "cuda" if device.current().capability else "cpu"
    if shape:
        x = make_matrix(*shape, where)
        if shape[0] > 3 and format != "nvfp4":  # beside such blocks, NVFP4 would have no scale for the others
            x[1, -32:] *= (
                2.0**100 / x[1, -32:].abs().max()
            )  # divided by 2^126, its multiplier is zero in float32
            x[2, :32] = 0
            x[3, :32] = (
                torch.tensor([1.0, -1.75]).repeat(16) * 2.0**-126
            )  # less emax, its exponent is below zero
    else:
        shape = experiments.LARGE if where == "cuda" else EXAMPLE
        x = torch.randn(shape, dtype=torch.bfloat16, device=where)
    packed = mx_formats.empty(shape, format, where, tiled)
    packed.values.fill_(POISON)
    if not tiled:
        packed.scales.fill_(POISON)
    scale = [number_formats.tensor_scale(x)] if packed.format.scale == "e4m3" else []
    return [x, packed.values, packed.scales, *scale]


def make_ladder(name: str) -> lesson.Ladder:
    """Return the ladder of a format, "mxfp8", "mxfp4" or "nvfp4", beside torch's copy of as many bytes."""
    format, _ = LADDERS[name]
    nbytes = experiments.bytes_moved(format)
    return lesson.Ladder(
        f"ch14_mx_formats_{name}_versions",
        "torch copy",
        lambda *_: lesson.prepare_copy(nbytes),
        functools.partial(make_inputs, format),
        functools.partial(check_quantiser, format),
        nbytes=nbytes,
    )


def check_quantiser(format: str, prepare: Callable, rule: str = "floor", tiled: bool | None = None) -> str:
    """Run a quantiser on small matrices; return "" or which bits differ from `number_formats.quantise`.

    `tiled` says whether the scales lie in tiles of 128 x 4; the default is True for a prepare whose name says so.
    """
    tiled = "tiled" in getattr(prepare, "__name__", "") if tiled is None else tiled
    live = device.current().capability is not None
    for shape in SMALL + (LARGER if live else ()):
        x, values, scales, *tensor_scale = make_inputs(format, shape, tiled)
        expected = number_formats.quantise(x, number_formats.lookup(format), rule)
        codes = packing.pack(expected.codes, expected.format.element.bits)
        wanted = codes, packing.tile_scales(expected.scales) if tiled else expected.scales
        memory = lesson.LaunchMemory([x, *tensor_scale, values, scales], outputs=2)
        values, scales = memory.tensors[-2:]
        if fault := lesson.run_launch(memory, lambda x, *rest: prepare(x, *rest[-2:], *rest[:-2])()):
            return f"{shape[0]} x {shape[1]}: {fault}"
        # Wrong scales make wrong codes, so scales come first.
        for name, out, right in (("scales", scales, wanted[1]), ("codes", values, wanted[0])):
            if fault := memory.find_fault(out != right):
                return f"{shape[0]} x {shape[1]}, {name}: {fault}"
    return ""


# ---- exercises


def _launch(kernel, blocks: int, memory: lesson.LaunchMemory, *numbers: int) -> str:
    """Launch a kernel for blocks, 16 per program, on tensors and numbers; return "" or why that failed."""
    return lesson.run_launch(
        memory, lambda *tensors: kernel[(-(-blocks // 16),)](*tensors, *numbers, blocks, BLOCKS=16)
    )


def check_blocks(kernel, format: str = "mxfp4", rule: str = "floor") -> None:
    """Raise AssertionError unless `kernel(x, codes, scales, blocks, BLOCKS)` quantises to a format by this rule."""
    lesson.require_written(kernel)

    def prepare(x, codes, scales):
        blocks = scales.numel()
        return lambda: kernel[(-(-blocks // 16),)](x, codes, scales, blocks, BLOCKS=16)

    if fault := check_quantiser(format, prepare, rule):
        raise AssertionError(fault)


def check_tiles(kernel) -> None:
    """Raise AssertionError unless `kernel(scales, tiled, groups, blocks, BLOCKS)` lays scales out in tiles of 128 x 4.

    scales is uint8 (rows, groups), and blocks is rows * groups.
    """
    where = "cuda" if device.current().capability else "cpu"
    for rows, groups in ((128, 4), (130, 8), (32, 5), (300, 9)):
        scales = torch.randint(1, 255, (rows, groups), dtype=torch.uint8, device=where)
        wanted = packing.tile_scales(scales)
        wanted[packing.tile_scales(torch.ones_like(scales)) == 0] = (
            POISON  # what fills the tiles up stays as it is
        )
        memory = lesson.LaunchMemory([scales, torch.full_like(wanted, POISON)])
        fault = _launch(kernel, scales.numel(), memory, groups)
        if fault := fault or memory.find_fault(memory.tensors[-1] != wanted):
            raise AssertionError(f"{rows} rows of {groups} scales: {fault}")


def check_six_bits(kernel) -> None:
    """Raise AssertionError unless `kernel(codes, packed, blocks, BLOCKS)` packs four codes of six bits to three bytes.

    A block is 32 codes of one byte each, or 24 bytes of packed codes.
    """
    lesson.require_written(kernel)
    where = "cuda" if device.current().capability else "cpu"
    for blocks in (1, 16, 37):
        codes = torch.randint(0, 64, (blocks, 32), dtype=torch.uint8, device=where)
        codes[0, :4] = torch.tensor([1, 2, 3, 4])
        wanted = packing.pack(codes, 6).flatten()
        memory = lesson.LaunchMemory([codes, torch.full_like(wanted, POISON)])
        fault = _launch(kernel, blocks, memory)
        if fault := fault or memory.find_fault(memory.tensors[-1] != wanted):
            raise AssertionError(f"{blocks} blocks: {fault}")


def check_way_back(kernel) -> None:
    """Raise AssertionError unless `kernel(packed, scales, out, blocks, BLOCKS)` turns MXFP4 into float32."""
    lesson.require_written(kernel)
    where = "cuda" if device.current().capability else "cpu"
    for blocks in (8, 37):
        codes = torch.arange(256, device=where).repeat(blocks)[: blocks * 32].view(blocks, 32) % 16
        scales = (torch.arange(blocks, device=where) * 6 + 1).to(torch.uint8)[:, None]
        wanted = number_formats.decode(codes, E2M1) * number_formats.decode_e8m0(scales)
        nan = torch.full((blocks * 32,), float("nan"), device=where)
        memory = lesson.LaunchMemory([packing.pack(codes.to(torch.uint8), 4), scales, nan])
        fault = _launch(kernel, blocks, memory)
        wrong = experiments.bits_differ(memory.tensors[-1], wanted.flatten())
        if fault := fault or memory.find_fault(wrong):
            raise AssertionError(f"{blocks} blocks: {fault}")


CHECKS = {
    "Exercise 1": functools.partial(check_blocks, rule="ceil"),
    "Exercise 2": check_blocks,
    "Exercise 3": check_tiles,
    "Exercise 4": check_six_bits,
    "Exercise 5": check_way_back,
    "Exercise 6": functools.partial(check_blocks, format="mxfp8_e4m3"),
}
check = make_checker(CHECKS)


# ---- checks of the functions in between


def list_midpoints(element: number_formats.Element) -> torch.Tensor:
    """Return each magnitude of an element format, each midpoint of two, and the float32 numbers beside a midpoint."""
    numbers = number_formats.magnitudes(element)
    middle = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middle, torch.tensor(end)) for end in (0.0, float("inf"))]
    return torch.cat([numbers, middle, *beside])


def check_rounding_everywhere(round_to: Callable) -> str:
    """Return for how many numbers `round_to(numbers, mantissa_bits, emin)` agrees with a search, as text."""
    said = []
    for element in (E2M1, E4M3, number_formats.E5M2):
        given = list_midpoints(element)
        wanted = number_formats.decode(number_formats.encode(given, element), element)
        right = int((round_to(given, element.mantissa_bits, element.emin) == wanted).sum())
        said.append(f"{element.name}: {right} of {len(given)} right")
    return "; ".join(said)


def count_tile_bytes(byte_of: Callable, rows: int = 128, groups: int = 4) -> int:
    """Return how many different bytes `byte_of(row, group)` gives for a tile of scales."""
    return len({int(byte_of(row, group)) for row, group in itertools.product(range(rows), range(groups))})


def count_instructions(versions: dict[str, tuple[Callable, int]], gbps: float) -> list[dict]:
    """Return rows that compare the time of issuing with the time of memory at `gbps`, at experiments.LARGE.

    versions: {name: (prepare, elements per program)}. They are compiled for sm_90a and counted up to the last EXIT.
    """
    rows, elements = [], experiments.LARGE[0] * experiments.LARGE[1]
    for name, (prepare, per_program) in versions.items():
        format = next(format for format, names in LADDERS.values() if name in names)
        report = lesson.compile_launch(prepare, make_inputs(format, EXAMPLE), "sm_90a")
        opcodes = re.findall(
            r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", report.sass, re.MULTILINE
        )
        count = (len(opcodes) - opcodes[::-1].index("EXIT")) * report.threads / per_program
        issue, memory = experiments.issue_us(count, elements), experiments.bytes_moved(format) / gbps / 1e3
        rows.append(
            {
                "version": name,
                "instructions per element": round(count, 1),
                "issuing, µs": round(issue, 1),
                "memory, µs": round(memory, 1),
                "issuing / memory": round(issue / memory, 2),
            }
        )
    return rows
