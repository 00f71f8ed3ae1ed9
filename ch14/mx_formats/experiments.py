"""The measurements behind the notebook `ch14_mx_formats`: check against the spec, speed, and what was compiled.

Each experiment is a function that returns a tilelab.results.Record: measured here on a GPU, else the recorded one.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Iterator

import numpy
import torch

from ch14 import mx_formats
from ch14.mx_formats import FUSED, MxConfig, Packed, configs, dequantise_kernels, number_formats, quantise_kernels
from tilelab import bench, build, device, results

LARGE = (8192, 16384)  # bf16: 256 MiB read
SHAPES = ((3, 256), (5, 100), (1, 1), (130, 160), (1000, 4096), (333, 4099), (4097, 136))  # the first three anywhere
GUARD, POISON = 64, 0xA5
SLOTS = 128  # instructions of lanes an SM issues a clock: four schedulers, a warp each


def data(rows: int, columns: int, where: str = "cpu") -> torch.Tensor:
    """A bfloat16 matrix with rows of very different size, zeros of both signs, and every kind of special value."""
    x = torch.randn(rows, columns, device=where) * torch.exp2(torch.randint(-20, 20, (rows, 1), device=where).float())
    x = (x * (torch.rand(rows, columns, device=where) >= 0.05)).bfloat16()
    strange = torch.randint(-2**15, 2**15, (rows, columns), dtype=torch.int16, device=where)
    chosen = torch.rand(rows, columns, device=where) < 0.003
    x.view(torch.int16)[chosen] = strange[chosen]  # any bits at all: subnormals, infinities, NaN
    return x


def _guarded(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory of that shape, and the buffer around it."""
    buffer = torch.full((like.nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=like.device)
    return buffer[GUARD:-GUARD].view(like.dtype).view(like.shape), buffer


def unlike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where the bits differ: the sign of zero counts, that and the payload of NaN do not."""
    return ((a != b) | (a.signbit() != b.signbit())) & ~(a.isnan() & b.isnan())


def same(ours: number_formats.Quantised, theirs: number_formats.Quantised) -> str:
    """Empty when codes and scales are the same bits (any NaN for a float32 scale), else what differs first."""
    for what, a, b in (("codes", ours.codes, theirs.codes), ("scales", ours.scales, theirs.scales),
                       ("tensor scales", ours.tensor_scale, theirs.tensor_scale)):
        if a is None and b is None:
            continue
        wrong = unlike(a, b)
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            return f"{int(wrong.sum())} of {a.numel()} {what} differ, first at {at}: {a[at]} for {b[at]}"
    return ""


def verify(form: str, shape: tuple[int, int], rule: str = "floor", tiled: bool = False,
           config: MxConfig | None = None, x: torch.Tensor | None = None) -> dict:
    """{status, reason}: quantised into poisoned memory and compared bit for bit with the spec, then brought back."""
    where = "cuda" if device.current().capability else "cpu"
    x = data(*shape, where) if x is None else x
    room = mx_formats.empty(shape, form, where, tiled)
    (values, around), (scales, beside) = _guarded(room.values), _guarded(room.scales)
    if tiled:
        scales.copy_(room.scales)  # padding is zero
    out = Packed(room.format, room.shape, values, scales, room.pair, tiled)
    wanted = number_formats.quantise(x, room.format, rule)
    with numpy.errstate(all="ignore"):  # the interpreter's arithmetic warns of infinities that are meant
        mx_formats.prepare_quantise(x, out, rule, config, own_scale=room.pair is not None)()
        reason = same(out.unpacked(), wanted)
        back, matrix = mx_formats.dequantise(out), number_formats.dequantise(wanted).bfloat16()
    wrong = unlike(back, matrix)
    if not reason and bool(wrong.any()):
        reason = f"{int(wrong.sum())} elements differ on the way back, first at {tuple(wrong.nonzero()[0].tolist())}"
    edges = [buffer[side] for buffer in (around, beside) for side in (slice(GUARD), slice(-GUARD, None))]
    if any(bool((edge != POISON).any()) for edge in edges):
        reason = reason or "memory around the output was overwritten"
    return {"status": "wrong" if reason else "ok", "reason": reason}


def cases(names=FUSED, shapes=SHAPES) -> list[tuple]:
    """What is checked: (name, shape, rule, tiled, variant)."""
    found = []
    for name in names:
        form, variants = number_formats.lookup(name), list(configs(name))
        ceil, tiled = ("ceil" if form.scale == "e8m0" else "floor"), form.scale != "fp32"
        found += [(name, shape, *way) for shape in shapes for way in (
            ("floor", False, variants[0]), (ceil, tiled, variants[0]), ("floor", tiled, variants[1]))]
    return found


def case_jobs(name: str, shape: tuple[int, int], rule: str, tiled: bool, variant: str, target: str) -> list[build.Job]:
    """What `verify` launches for a case."""
    there = mx_formats.job(name, configs(name)[variant], target, rule, tiled=tiled, shape=shape)
    back = mx_formats.job(name, None, target, back=True, tiled=tiled, shape=shape)
    return [there, back, *(mx_formats.scale_jobs(target, shape) if number_formats.lookup(name).scale == "e4m3" else ())]


def warm(jobs: Iterable[build.Job]) -> None:
    """`build.compile_ahead` of each once, where the GPU is one that is built for."""
    if device.current().target in device.TARGETS:
        build.compile_ahead({str(job): job for job in jobs}.values())


def checked(names=FUSED) -> list[dict]:
    """Formats, rules, variants and layouts of scales on ragged shapes, here and now; on a GPU larger ones too."""
    live, target = device.current().capability is not None, device.current().target
    rows, chosen = [], cases(names, SHAPES if live else SHAPES[:3])
    warm(job for case in chosen for job in case_jobs(*case, target))
    for name, shape, rule, tiled, variant in chosen:
        config = configs(name)[variant]
        if not live:  # a small program has less to interpret
            config = MxConfig(512, config.num_warps, config.lanes, config.convert)
        rows.append({"name": name, "variant": variant, "shape": list(shape), "rule": rule, "tiled": tiled}
                    | verify(name, shape, rule, tiled, config))
    return rows


def source() -> str:
    """Hash of what is measured."""
    return results.source_hash(quantise_kernels, dequantise_kernels, mx_formats)


_experiment = functools.partial(results.experiment, source=source,
                                can_run=lambda: (device.current().capability or (0, 0)) >= (8, 0))


def moved(form: str, shape: tuple[int, int] = LARGE) -> int:
    """Bytes that quantising reads and writes: bf16 in, codes and scales out."""
    return shape[0] * shape[1] * 2 + mx_formats.empty(shape, form, "meta").nbytes


def against_copy(candidates: dict, shape: tuple[int, int], nbytes: dict[str, int], **timing) -> list[dict]:
    """Rows of `candidates`, interleaved with torch's copy of x: `gbps`, and `ratio`, that over the copy's."""
    def inputs():
        return torch.randn(shape, device="cuda").bfloat16(), torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    every = {"torch copy": lambda x, y: lambda: y.copy_(x), **candidates}
    found = bench.compare(every, inputs, "torch copy", **timing)
    rows = []
    for name in candidates:
        timed = found[name]
        row = {"name": name, "shape": list(shape), "ms": timed.ms, "peer": "torch copy", "peer_ms": timed.peer_ms,
               "status": "failed" if timed.reason else "ok", "reason": timed.reason}
        if timed.ms:
            row["gbps"] = nbytes[name] / timed.ms / 1e6
            row["ratio"] = row["gbps"] / (4 * shape[0] * shape[1] / timed.peer_ms / 1e6)
        rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def quantiser(form: str, config: MxConfig | None = None, tiled: bool = False, own_scale: bool = False,
              rule: str = "floor"):
    """A candidate for `against_copy`."""
    def prepare(x, _):
        scale = 1 / 448 if number_formats.lookup(form).scale == "e4m3" and not own_scale else None
        out = mx_formats.empty(tuple(x.shape), form, x.device, tiled, scale)
        return mx_formats.prepare_quantise(x, out, rule, config, own_scale)
    return prepare


def dequantiser(form: str, config: MxConfig | None = None):
    """The way back, into y."""
    def prepare(x, y):
        return mx_formats.prepare_dequantise(mx_formats.quantise(x, form), y, config)
    return prepare


TILED = ("mxfp8_e4m3", "mxfp4", "nvfp4")


def speed_jobs(target: str) -> Iterator[build.Job]:
    """What `speed` launches."""
    for form in FUSED:
        yield from (mx_formats.job(form, config, target) for config in configs(form).values())
        yield mx_formats.job(form, None, target, back=True)
    yield from (mx_formats.job(form, None, target, tiled=True) for form in TILED)
    yield from mx_formats.scale_jobs(target)


@_experiment("ch14_mx_formats_speed")
def speed():
    """Every format and variant at LARGE, the way back, the tiled scales, NVFP4 with its own scale, and the spec."""
    warm(speed_jobs(device.current().target))
    candidates, nbytes, about = {}, {}, {}

    def add(form, what, launch, extra=0):
        name = f"{form} {what}"
        candidates[name], nbytes[name], about[name] = launch, moved(form) + extra, {"format": form, "what": what}

    for form in FUSED:
        for variant, config in configs(form).items():
            add(form, variant, quantiser(form, config))
        add(form, "back", dequantiser(form))
    for form in TILED:
        add(form, "tiled scales", quantiser(form, tiled=True))
    add("nvfp4", "own scale", quantiser("nvfp4", own_scale=True), 2 * LARGE[0] * LARGE[1])  # x is read twice
    rows = against_copy(candidates, LARGE, nbytes)
    spec = number_formats.lookup("mxfp8_e4m3")
    slow = against_copy({"mxfp8_e4m3 spec": lambda x, _: lambda: number_formats.quantise(x, spec)}, LARGE,
                        {"mxfp8_e4m3 spec": moved("mxfp8_e4m3")}, rounds=4, warm_s=0)
    about["mxfp8_e4m3 spec"] = {"format": "mxfp8_e4m3", "what": "spec"}
    return [about[row["name"]] | row for row in rows + slow]


def grid(form: str) -> list[MxConfig]:
    """Programs small and large."""
    lanes = (1,) if number_formats.lookup(form).element.bits == 8 else (1, 0)  # of fp8 Triton decides
    return [MxConfig(elements, warps, lane) for elements in (1024, 2048, 4096, 8192) for warps in (4, 8)
            for lane in lanes if elements >= 256 * warps]


SWEPT = ("mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_1x128")


@_experiment("ch14_mx_formats_sweep")
def swept():
    """Elements a program, warps, and how a group lies in lanes, at LARGE."""
    warm(mx_formats.job(form, config, device.current().target) for form in SWEPT for config in grid(form))
    rows = []
    for form in SWEPT:
        named = {str(config): config for config in grid(form)}
        candidates = {name: quantiser(form, config) for name, config in named.items()}
        for row in against_copy(candidates, LARGE, dict.fromkeys(named, moved(form)), rounds=8, warm_s=0.1):
            rows.append({"format": form, "config": row.pop("name")} | row | {"name": form})
    return rows


def instructions(report: build.Report) -> dict:
    """Of a kernel's SASS: instructions an element (`issued`; the rare path behind the end of the kernel is left out),
    the widest load and store, and counts of some opcodes an element. Empty where this Triton's cuobjdump is older than
    the target, and for what was not built."""
    try:
        sass = report.sass if report.status == "ok" else ""
    except RuntimeError:
        sass = ""
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass, re.MULTILINE)
    if not lines:
        return {}
    lines = lines[:len(lines) - lines[::-1].index("EXIT")]
    elements = report.job.constants["BLOCK"] * report.job.constants["GROUP"] / report.threads
    counts = collections.Counter(line.split(".")[0] for line in lines)
    widths = {kind: max((int(part) for line in lines if line.startswith(f"{kind}.") for part in line.split(".")
                         if part in ("64", "128")), default=32) for kind in ("LDG", "STG")}
    fused = {name: counts[name] + 2 * counts[f"{name}2"] for name in ("FFMA", "FMUL")}  # from sm_100a on in pairs
    return {"issued": round(len(lines) / elements, 2), "load_bits": widths["LDG"], "store_bits": widths["STG"],
            **{name: round(count / elements, 2) for name, count in fused.items()},
            "cvt": round(sum("F2FP.SATFINITE" in line for line in lines) / elements, 2)}


def built(targets=device.TARGETS[1:], back: bool = False) -> list[dict]:
    """Every format and variant compiled for those targets, with `instructions`: runs anywhere."""
    jobs = [(form, variant, mx_formats.job(form, config, target, back=back)) for target in targets
            for form in FUSED for variant, config in configs(form).items() if not back or config.convert]
    reports = build.disassemble([made for *_, made in jobs])
    rows = []
    for (form, variant, _), report in zip(jobs, reports):
        rows.append({**report.row(), "name": form, "variant": variant} | instructions(report))
    return rows


def issue_us(issued: float, elements: int, sms: int = 132, ghz: float = 1.7) -> float:
    """Microseconds that issuing takes when every slot is used: of a H200, at a clock that it keeps under load."""
    return issued * elements / (sms * SLOTS * ghz * 1e3)
