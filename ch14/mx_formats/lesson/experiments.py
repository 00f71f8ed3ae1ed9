"""The measurements behind the notebook `14_ch14_mx_formats`: bits against the spec, speed, and compiled instructions.

Functions with `@_experiment` return a `results.Record`: measured here on a GPU, otherwise the recorded one.
"""

from __future__ import annotations

import collections
import functools
import pathlib
import re
from collections.abc import Callable, Iterable

import numpy
import torch

from ch14 import mx_formats
from ch14.mx_formats import FUSED, MxConfig, Packed, configs, kernels, number_formats
from tilelab.measure import bench
from tilelab.records import results
from tilelab.runtime import build, device, provenance

LARGE = (8192, 16384)  # bf16: 256 MiB are read
SHAPES = ((3, 256), (5, 100), (1, 1), (130, 160), (1000, 4096), (333, 4099), (4097, 136))
SMALL_SHAPES = SHAPES[:3]  # for Triton's interpreter
TILED = ("mxfp8_e4m3", "mxfp4", "nvfp4")
SWEPT = ("mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_1x128")
GUARD, POISON = 64, 0xA5  # bytes on each side of an output, and their value
LANES_PER_CLOCK = 128  # four schedulers per SM each issue one instruction of a warp per clock


def make_matrix(rows: int, columns: int, where: str = "cpu") -> torch.Tensor:
    """Return a bfloat16 matrix with rows of very different size, zeros of both signs, and every special value."""
    x = torch.randn(rows, columns, device=where)
    x *= torch.exp2(torch.randint(-20, 20, (rows, 1), device=where).float())
    x = (x * (torch.rand(rows, columns, device=where) >= 0.05)).bfloat16()
    any_bits = torch.randint(-(2**15), 2**15, (rows, columns), dtype=torch.int16, device=where)
    chosen = torch.rand(rows, columns, device=where) < 0.003
    x.view(torch.int16)[chosen] = any_bits[chosen]  # subnormals, infinities, NaN
    return x


def _make_guarded(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return poisoned memory of the same shape, and the larger buffer that it lies in."""
    buffer = torch.full((like.nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=like.device)
    return buffer[GUARD:-GUARD].view(like.dtype).view(like.shape), buffer


def bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where the bits differ. The sign of zero counts; the sign and payload of NaN do not."""
    return ((a != b) | (a.signbit() != b.signbit())) & ~(a.isnan() & b.isnan())


def find_difference(ours: number_formats.Quantised, spec: number_formats.Quantised) -> str:
    """Return "" if codes and scales are the same bits, else a sentence about the first difference."""
    for field in ("codes", "scales", "tensor_scale"):
        a, b = (getattr(each, field) for each in (ours, spec))
        what = field if field[-1] == "s" else "tensor scales"
        if a is None and b is None:
            continue
        wrong = bits_differ(a, b)
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            return f"{int(wrong.sum())} of {a.numel()} {what} differ, first at {at}: {a[at]} for {b[at]}"
    return ""


def verify(
    format: str,
    shape: tuple[int, int],
    rule: str = "floor",
    tiled: bool = False,
    config: str | MxConfig = "best",
) -> dict:
    """Quantise into poisoned memory, compare with the spec bit for bit, dequantise, and return {status, reason}."""
    where = "cuda" if device.current().capability else "cpu"
    x, room = make_matrix(*shape, where), mx_formats.empty(shape, format, where, tiled)
    (values, around_values), (scales, around_scales) = _make_guarded(room.values), _make_guarded(room.scales)
    if tiled:
        scales.copy_(room.scales)  # the padding is zero
    out = Packed(room.format, room.shape, values, scales, room.pair, tiled)
    expected = number_formats.quantise(x, room.format, rule)
    with numpy.errstate(all="ignore"):  # the interpreter warns of infinities that are intended
        mx_formats.prepare_quantise(x, format, rule=rule, tiled=tiled, out=out, config=config)()
        reason = find_difference(out.unpack(), expected)
        back, expected_back = mx_formats.dequantise(out), number_formats.dequantise(expected).bfloat16()
    wrong = bits_differ(back, expected_back)
    if not reason and bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        reason = f"{int(wrong.sum())} dequantised elements differ, first at {at}"
    sides = (slice(GUARD), slice(-GUARD, None))
    edges = [buffer[side] for buffer in (around_values, around_scales) for side in sides]
    if any(bool((edge != POISON).any()) for edge in edges):
        reason = reason or "memory around the output was overwritten"
    return {"status": "wrong" if reason else "ok", "reason": reason}


def list_cases(names=FUSED, shapes=SHAPES) -> list[tuple]:
    """Return what is checked: (format, shape, rule, tiled, name of the configuration)."""
    cases = []
    for name in names:
        format, variants = number_formats.lookup(name), list(configs(name))
        ceil, tiled = ("ceil" if format.scale == "e8m0" else "floor"), format.scale != "fp32"
        every = [("floor", False, variants[0]), (ceil, tiled, variants[0]), ("floor", tiled, variants[1])]
        cases += [(name, shape, *options) for shape in shapes for options in every]
    return cases


def compile_ahead(launches: Iterable[mx_formats.KernelLaunch]) -> None:
    """Compile the kernels of launches in parallel, if this GPU is one of the targets; each would wait for its own."""
    target = device.current().target
    if target in device.TARGETS:
        build.compile_ahead({str(job): job for launch in launches for job in launch.jobs(target)}.values())


def check_correctness(names=FUSED) -> list[dict]:
    """Check formats, rules, configurations and layouts of scales on ragged shapes; on a GPU on larger ones, too."""
    live = device.current().capability is not None
    rows, cases = [], list_cases(names, SHAPES if live else SMALL_SHAPES)
    if live:
        quantised = []
        for name, shape, rule, tiled, variant in cases:
            x, how = torch.empty(shape, dtype=torch.bfloat16, device="cuda"), {"rule": rule, "tiled": tiled}
            quantised.append(mx_formats.prepare_quantise(x, name, config=variant, **how))
        compile_ahead(quantised + [mx_formats.prepare_dequantise(launch.out) for launch in quantised])
    for name, shape, rule, tiled, variant in cases:
        config = configs(name)[variant]
        if not live:  # a small program is interpreted faster
            config = MxConfig(512, config.num_warps, config.convert)
        row = {"name": name, "variant": variant, "shape": list(shape), "rule": rule, "tiled": tiled}
        rows.append(row | verify(name, shape, rule, tiled, config))
    return rows


def source() -> str:
    """Return the hash of the code that is measured."""
    configurations = pathlib.Path(mx_formats.__file__).with_name("configs.py")
    return provenance.source_hash(kernels, mx_formats, configurations)


_experiment = functools.partial(
    results.experiment, source=source, can_run=lambda: (device.current().capability or (0, 0)) >= (8, 0)
)


def bytes_moved(format: str, shape: tuple[int, int] = LARGE) -> int:
    """Return the bytes that quantising reads and writes: bf16 in, codes and scales out."""
    return shape[0] * shape[1] * 2 + mx_formats.empty(shape, format, "meta").nbytes


def compare_with_copy(
    candidates: dict[str, Callable], shape: tuple[int, int], nbytes: dict[str, int], **timing
) -> list[dict]:
    """Time candidates, interleaved with torch's copy of x. `ratio` is a candidate's bandwidth / the copy's."""

    def make_inputs():
        x = torch.randn(shape, device="cuda").bfloat16()
        return x, torch.empty_like(x)

    tensors = make_inputs()
    launches = [candidate(*tensors) for candidate in candidates.values()]
    compile_ahead(each for each in launches if isinstance(each, mx_formats.KernelLaunch))
    every = {"torch copy": lambda x, y: lambda: y.copy_(x), **candidates}
    timings = bench.compare(every, make_inputs, "torch copy", **timing)
    rows = []
    for name in candidates:
        row = timings[name].row() | {"shape": list(shape)}
        if "ms" in row:
            share = nbytes[name] / (4 * shape[0] * shape[1])  # of the bytes that the copy moves
            row |= {"gbps": nbytes[name] / row["ms"] / 1e6, "ratio": share * row["peer_ms"] / row["ms"]}
            row |= {"spread": share * row["spread"]} if "spread" in row else {}
        rows.append(row)
    return rows


def quantise_candidate(format: str, config: str | MxConfig = "best", **options) -> Callable:
    """Return a candidate for `compare_with_copy`: quantise x, by default with a given tensor scale."""
    if number_formats.lookup(format).scale == "e4m3":
        options = {"tensor_scale": 1 / 448} | options
    return lambda x, _: mx_formats.prepare_quantise(x, format, config=config, **options)


def dequantise_candidate(format: str) -> Callable:
    """Return a candidate for `compare_with_copy`: dequantise into y."""
    return lambda x, y: mx_formats.prepare_dequantise(mx_formats.quantise(x, format), out=y)


@_experiment("ch14_mx_formats_speed")
def measure_speed():
    """Time at LARGE: every format and configuration, dequantising, tiled scales, NVFP4's own tensor scale, the spec."""
    candidates = {}
    for format in FUSED:
        candidates |= {(format, variant): quantise_candidate(format, variant) for variant in configs(format)}
        candidates[format, "back"] = dequantise_candidate(format)
    candidates |= {(format, "tiled scales"): quantise_candidate(format, tiled=True) for format in TILED}
    candidates["nvfp4", "own scale"] = quantise_candidate("nvfp4", tensor_scale=None)
    mxfp8 = number_formats.lookup("mxfp8_e4m3")
    spec = {("mxfp8_e4m3", "spec"): lambda x, _: lambda: number_formats.quantise(x, mxfp8)}
    nbytes = {key: bytes_moved(key[0]) for key in candidates | spec}
    nbytes["nvfp4", "own scale"] += 2 * LARGE[0] * LARGE[1]  # x is read twice
    rows = compare_with_copy(candidates, LARGE, nbytes)
    rows += compare_with_copy(spec, LARGE, nbytes, rounds=4, warm_s=0)
    names = [{"format": row["name"][0], "what": row["name"][1]} for row in rows]
    return [name | row | {"name": " ".join(row["name"])} for name, row in zip(names, rows)]


def grid(format: str) -> list[MxConfig]:
    """Return the configurations of the sweep: small and large programs, those of fp4 with and without saturation."""
    ways = (False,) if number_formats.lookup(format).element.bits == 8 else (True, False)
    return [
        MxConfig(elements, warps, saturate=saturate)
        for elements in (1024, 2048, 4096, 8192)
        for warps in (4, 8)
        for saturate in ways
        if elements >= 256 * warps
    ]


@_experiment("ch14_mx_formats_sweep")
def measure_sweep():
    """Time the configurations of `grid` at LARGE: elements per program, warps, and how fp4 saturates."""
    rows = []
    for format in SWEPT:
        named = {str(config): config for config in grid(format)}
        candidates = {name: quantise_candidate(format, config) for name, config in named.items()}
        nbytes = dict.fromkeys(named, bytes_moved(format))
        for row in compare_with_copy(candidates, LARGE, nbytes, rounds=8, warm_s=0.1):
            rows.append({"format": format, "config": row.pop("name")} | row | {"name": format})
    return rows


def count_instructions(report: build.Report) -> dict:
    """Return figures of a kernel's SASS: instructions per element (`issued`), the widest load and store in bits, and
    the count of some opcodes per element.

    The rare path behind the last EXIT is not counted. The dict is empty if the kernel was not built, or if Triton's
    cuobjdump is older than the target.
    """
    try:
        sass = report.sass if report.status == "ok" else ""
    except RuntimeError:
        sass = ""
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass, re.MULTILINE)
    if not opcodes:
        return {}
    opcodes = opcodes[: len(opcodes) - opcodes[::-1].index("EXIT")]
    elements = report.job.constants["BLOCK"] * report.job.constants["GROUP"] / report.threads  # per thread
    counts = collections.Counter(opcode.split(".")[0] for opcode in opcodes)

    def find_width(kind: str) -> int:
        words = [part for opcode in opcodes if opcode.startswith(f"{kind}.") for part in opcode.split(".")]
        return max((int(word) for word in words if word in ("64", "128")), default=32)

    # From sm_100a on they come in pairs.
    per_element = {name: counts[name] + 2 * counts[f"{name}2"] for name in ("FFMA", "FMUL")}
    per_element["cvt"] = sum("F2FP.SATFINITE" in opcode for opcode in opcodes)
    row = {"issued": round(len(opcodes) / elements, 2)}
    row |= {"load_bits": find_width("LDG"), "store_bits": find_width("STG")}
    return row | {name: round(count / elements, 2) for name, count in per_element.items()}


def issue_us(issued: float, elements: int, sms: int = 132, ghz: float = 1.7) -> float:
    """Return the microseconds that issuing takes if no slot stays empty, on an H200 at its clock under load."""
    return issued * elements / (sms * LANES_PER_CLOCK * ghz * 1e3)
