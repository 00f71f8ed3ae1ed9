"""Measure the times from which a GEMM's choice learns (tilelab.runtime.choice), at shapes that it may learn from.

    python -m tilelab.sweeps.measure --gpu 0 --of 4 --limit 225 --out FOLDER

takes one of four shares of the token counts, on the first GPU, for 225 seconds; start the other three shares beside it.
At each shape it measures the configurations of both bf16 GEMMs that the choice so far ranks first, and a few others,
while the next ones are compiled. FOLDER/measured0.jsonl gets a line for each shape, as tilelab.sweeps.learn reads it.
Run again, it goes on after the last shape, also if that one broke the GPU's context.

    python -m tilelab.sweeps.measure --dry      lists some shapes and their candidates; needs no GPU
    python -m tilelab.sweeps.measure --rates    prints what a GPU without a table has to enter in choice.SHARES
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import json
import os
import pathlib
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from tilelab import cli
from tilelab.measure import bench, layer_shapes
from tilelab.records import results
from tilelab.runtime import build, choice, device
from tilelab.sweeps import learn

SPACES = {
    "wgmma_gemm": ("ch10.wgmma_gemm.lesson.sweep", "WgmmaSpace"),
    "gemm": ("ch14.gemm.lesson.sweep", "GemmSpace"),
}
BEST, OTHERS = 14, 2  # candidates of a shape: those that the choice ranks first, and others at random
FINALISTS = 4  # the fastest, which are timed again on a warm chip, interleaved with cuBLAS
BATCH = 8  # shapes that are compiled together

# About half of the token counts lie between 65 and 512, where a tile's width decides most.
FEW = (2, 5, 8, 12, 16, 20, 28, 32, 36, 48, 56, 64)
MANY = (560, 600, 640, 720, 768, 840, 900, 1000, 1024, 1200, 1280, 1400, 1664, 1800, 2048, 2304, 2700, 3000)
ODD = (77, 99, 123, 150, 190, 225, 300, 375)
TOKENS = tuple(
    tokens
    for tokens in (*FEW, *range(72, 289, 8), *range(304, 513, 16), *ODD, *MANY, 3300, 4096, 5000, 8192)
    if tokens not in layer_shapes.HELD_OUT_TOKENS
)
LEAST, LARGEST = 2**20, 2**28.8  # weights
MOST_FLOPS = 6e11


def list_shapes(share: int, shares: int) -> Iterator[choice.Shape]:
    """Yield shapes without end, none twice and none that only measures: layers, random extents, and squares."""
    draw = random.Random(4400 + share)
    layers = sorted({size for model in layer_shapes.LAYERS.values() for size in model.values()})
    tokens = list(TOKENS)
    random.Random(44).shuffle(tokens)
    seen = set()
    while True:
        for m in draw.sample(mine := tokens[share::shares], len(mine)):
            kind, step = draw.random(), draw.choice((64, 128, 256, 512, 1024))
            if kind < 0.25:
                n, k = draw.choice(layers)
            elif kind < 0.85:
                n, k = (max(step, step * round(2 ** draw.uniform(10, most) / step)) for most in (15.6, 14.8))
            elif kind < 0.95:  # rows that are not aligned
                n, k = (8 * round(2 ** draw.uniform(9.5, 13.3) / 8) for _ in range(2))
            else:
                n, k = (max(8, 64 * round(m * 2 ** draw.uniform(-1, 1) / 64)) for _ in range(2))
            fits = LEAST <= n * k <= LARGEST and 2 * m * n * k <= MOST_FLOPS
            if fits and (m, n, k) not in seen and not learn.is_held_out((m, n, k)):
                seen.add((m, n, k))
                yield m, n, k


def list_candidates(kernel: str, shape: choice.Shape, gpu: str, sms: int) -> dict[str, Any]:
    """Return {family: configuration} of the most promising families at a shape, and of OTHERS at random."""
    model = importlib.import_module(learn.MODULES[kernel])
    known = model.candidates(*shape) if kernel == "wgmma_gemm" else model.candidates(*shape, sms)
    us, traits = model.predict(*shape, sms, gpu)
    places, _ = choice.order(kernel, gpu, model.NAMES, us, shape, traits, model.predict)
    names = [name for place in places if (name := model.NAMES[place]) in known]
    rest = names[BEST:]
    others = random.Random(str(shape)).sample(rest, min(OTHERS, len(rest)))
    return {name: known[name] for name in (*names[:BEST], *others)}


def make_space(kernel: str, shape: choice.Shape, **options):
    """Return the kernel at a shape, as the tuner measures it."""
    module, name = SPACES[kernel]
    return getattr(importlib.import_module(module), name)(shape, **options)


def compile_ahead(work: Iterator[tuple[str, choice.Shape]], ready: queue.Queue, gpu: str, sms: int) -> None:
    """Build the candidates of (kernel, shape), BATCH of them at a time, and put (kernel, shape, candidates)."""
    built: set[str] = set()
    try:
        while batch := list(itertools.islice(work, BATCH)):
            found = [(kernel, shape, list_candidates(kernel, shape, gpu, sms)) for kernel, shape in batch]
            jobs = {}
            for kernel, shape, families in found:
                space = make_space(kernel, shape)
                for job in map(space.job, families.values()):
                    jobs[repr(dataclasses.replace(job, name=""))] = job
            for report in build.build([job for key, job in jobs.items() if key not in built]):
                if report.status != "ok":
                    print(f"{report.job.name} was not built: {report.reason}", file=sys.stderr)
            built |= jobs.keys()
            for each in found:
                ready.put(each)
    finally:
        ready.put(None)  # the end


def measure_shape(kernel: str, shape: choice.Shape, families: dict[str, Any]) -> dict:
    """Return the line of a shape. Raises torch.AcceleratorError where the context is lost.

    A burst on a cool chip flatters what draws much power. So the fastest are timed again, and their ratio to cuBLAS
    counts.
    """
    space, us, configs = make_space(kernel, shape), {}, list(dict.fromkeys(families.values()))
    for config in configs:
        try:
            row = space.measure_quickly(config)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            row = {"status": "failed", "reason": device.first_line(error)}
        if row["status"] == "ok":
            us[str(config)] = round(1e3 * row["ms"], 3)
            peer_us = round(1e3 * row["ms"] * row["ratio"], 3)
        else:
            print(f"{kernel}, {shape}, {config}: {row['reason']}", file=sys.stderr)
    finalists = sorted((each for each in configs if str(each) in us), key=lambda each: us[str(each)])[
        :FINALISTS
    ]
    for config, row in zip(finalists, space.measure_finalists_quickly(finalists) if finalists else ()):
        if row["ratio"]:
            us[str(config)] = round(peer_us / row["ratio"], 3)
    return {
        "kernel": kernel,
        "shape": shape,
        "cublas": peer_us if us else None,
        "us": us,
        "families": {name: str(config) for name, config in families.items()},
    }


def measure(share: int, shares: int, limit_s: float, folder: pathlib.Path) -> int:
    """Measure shapes of a share until `limit_s` seconds are over; return how many got times."""
    device.require("has_wgmma", "measuring", "list what it would measure with --dry")
    end, here = time.monotonic() + limit_s, device.current()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"measured{share}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    begun = {
        (kernel, *shape) for line in lines for kernel, shape in [json.loads(line).get("begun", ("", ()))]
    }
    work = (
        (kernel, shape)
        for shape in list_shapes(share, shares)
        for kernel in SPACES
        if (kernel, *shape) not in begun
    )
    ready: queue.Queue = queue.Queue(4 * BATCH)
    threading.Thread(
        target=compile_ahead, args=(work, ready, here.name or "", here.sms or choice.SMS), daemon=True
    ).start()
    count = 0
    gc.collect()
    gc.freeze()  # a capture collects garbage
    with path.open("a", buffering=1, encoding="utf-8") as out:
        while (left := end - time.monotonic()) > 0:
            try:
                found = ready.get(timeout=left)
            except queue.Empty:
                break
            if found is None:
                break
            kernel, shape, families = found
            out.write(json.dumps({"begun": (kernel, shape)}) + "\n")
            line = measure_shape(kernel, shape, families)
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += bool(line["us"])
    print(f"{path} has the times of {count} more shapes.")
    return count


def describe_shares() -> str:
    """Return the line of the GPU here for choice.SHARES, from its ceilings and the record of an H200's."""
    here, roof = device.current(), bench.ceilings()
    copy, product = results.load("ceilings", device.Device(choice.H200).slug)["rows"]
    dram = roof.copy_gbps / copy["gbps"]
    flops = roof.bf16_tflops / (here.sms or choice.SMS) / (product["tflops"] / choice.SMS)
    return f'"{here.name}": ({dram:.2f}, {flops:.2f}),'


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = cli.make_plain_parser(
        "tilelab.sweeps.measure", "Measure the times from which a GEMM's choice learns."
    )
    parser.add_argument("--gpu", type=int, default=0, help="the GPU, and its share of the token counts")
    parser.add_argument("--of", type=int, default=1, help="shares, which is the number of GPUs")
    parser.add_argument("--limit", type=float, default=225, metavar="SECONDS")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("measured"), metavar="FOLDER")
    parser.add_argument("--dry", action="store_true", help="only list some shapes and their candidates")
    parser.add_argument("--rates", action="store_true", help="only print the GPU's line of choice.SHARES")
    options = parser.parse_args(argv)
    if not 0 <= options.gpu < options.of:
        parser.error(f"--gpu is {options.gpu}; it must be less than --of, which is {options.of}.")
    if options.dry:
        for shape in itertools.islice(list_shapes(options.gpu, options.of), 4):
            for kernel in SPACES:
                print(*shape, kernel, *list_candidates(kernel, shape, choice.H200, choice.SMS), sep="; ")
        return 0
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(options.gpu))
    try:
        if options.rates:
            device.require("has_wgmma", "measuring rates", "run it on a Hopper GPU")
            print(describe_shares())
            return 0
        return 0 if measure(options.gpu, options.of, options.limit, options.out) else 1
    except device.Unsupported as error:
        parser.error(str(error))
    except torch.AcceleratorError as error:
        print(f"The context of the GPU is lost ({device.first_line(error)}); run it again.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    cli.run_main(main)
