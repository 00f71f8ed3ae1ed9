"""Time kernels against themselves: how far do two timings of one kernel differ?

Every other comparison of the course finds a difference between two kernels. Here both are the same kernel, so whatever
differs is the measurement. A pass times every subject beside its peer, twice in the same rounds. Fresh processes, each
`python -m claims.audits.itself`, make several passes one after the other. `tilelab.records.margins` reads the record.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from ch07 import bulk_copy
from ch07.bulk_copy.lesson import experiments as copies
from ch10 import wgmma_gemm
from ch10.wgmma_gemm.lesson import experiments as wgmma
from ch14 import gemm
from ch14.descriptors.lesson.launch_cost import measure_enqueue_us
from ch14.gemm.lesson import experiments as products
from tilelab import ROOT
from tilelab.cells import lesson
from tilelab.measure import bench
from tilelab.records import margins, results
from tilelab.runtime import device, provenance

PROCESSES, PASSES = 4, 2
LIMIT_S = 240  # for a process, which may have to compile every kernel
FIRST, AGAIN = "first", "again"  # the same kernel, prepared twice


@dataclass(frozen=True)
class Subject:
    """A kernel that is timed against itself: `prepare` and `prepare_peer` are candidates of `bench.compare`."""

    kind: str  # one of margins.KINDS
    name: str
    shape: tuple[int, ...]
    peer: str
    prepare: Callable
    prepare_peer: Callable
    make_inputs: Callable[[], Sequence]
    timing: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """The speed over the peer's of a kernel and of the same kernel beside it, the spread, and the time per call."""

    ratio: float
    again: float
    spread: float
    us: float


def make_subjects() -> list[Subject]:
    """Return the operators of the course that are timed, of each kind."""

    def multiply(kind: str, module, n: int, **timing) -> Subject:
        def prepare(a, b, out, *_):
            if kind == margins.HOST:
                return lambda: module.gemm(a, b, out=out)
            return module.prepare(a, b, out=out, config="best")

        lesson_of = products if module is gemm else wgmma
        name = "ch14.gemm" if module is gemm else "ch10.wgmma_gemm"
        make = functools.partial(lesson_of.make_inputs, n, n, n)
        return Subject(kind, name, (n, n, n), "cuBLAS", prepare, lesson_of.prepare_cublas, make, timing)

    def copy(kind: str, name: str, nbytes: int, **timing) -> Subject:
        def prepare(x, out):
            return bulk_copy.prepare(x, out=out, config=name)

        def prepare_torch(x, out):
            return lambda: out.copy_(x)

        def make():
            return [copies.make_random(nbytes, copies.DTYPE["copy"]) for _ in range(2)]

        return Subject(kind, name, (nbytes,), copies.PEER["copy"], prepare, prepare_torch, make, timing)

    return [
        multiply(margins.PRODUCT, wgmma_gemm, 8192),
        multiply(margins.PRODUCT, gemm, 4096),
        *(copy(margins.COPY, name, copies.LARGE) for name in ("bulk_ring", "loads")),
        multiply(margins.GRAPH, gemm, 512),
        multiply(margins.GRAPH, wgmma_gemm, 512),
        copy(margins.GRAPH, "bulk_single", 1 << 23),
        multiply(margins.QUICK, gemm, 4096, **products.LAYER_TIMING),
        multiply(margins.QUICK, wgmma_gemm, 4096, **wgmma.QUICK),
        copy(margins.QUICK, "bulk_single", 1 << 28, **copies.QUICK),
        multiply(margins.HOST, gemm, 256),
        multiply(margins.HOST, wgmma_gemm, 256),
    ]


def time_beside_itself(subject: Subject) -> Sample:
    """Time a kernel twice beside its peer, interleaved, as the course's experiments time two kernels."""
    candidates = {"peer": subject.prepare_peer, FIRST: subject.prepare, AGAIN: subject.prepare}
    if subject.kind != margins.HOST:
        timed = bench.compare(candidates, subject.make_inputs, "peer", **subject.timing)
        if failed := timed[FIRST].reason or timed[AGAIN].reason:
            raise RuntimeError(f"{subject.name} at {subject.shape} was not timed: {failed}.")
        return Sample(timed[FIRST].ratio, timed[AGAIN].ratio, timed[FIRST].spread, timed[FIRST].ms * 1e3)
    tensors = subject.make_inputs()
    calls = {name: prepare(*tensors) for name, prepare in candidates.items()}
    rounds = [measure_enqueue_us(calls, 200, 5) for _ in range(5)]
    medians = {name: statistics.median(each[name] for each in rounds) for name in calls}
    spread = bench.find_spread([each["peer"] / each[FIRST] for each in rounds])
    return Sample(medians["peer"] / medians[FIRST], medians["peer"] / medians[AGAIN], spread, medians[FIRST])


def time_in_fresh_processes() -> list[list[list[Sample]]]:
    """Return the passes of each process, each with a sample per subject.

    All processes start at once, to import what they need. Each waits for its turn before it uses the GPU.
    """
    command = [sys.executable, "-m", "claims.audits.itself"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(PROCESSES)]
    try:
        found = []
        for process in processes:
            out, errors = process.communicate("your turn\n", timeout=LIMIT_S)
            if process.returncode:
                raise RuntimeError(f"a process failed: {(errors.strip() or 'no error').splitlines()[-1]}")
            passes = json.loads(out.splitlines()[-1])
            found.append([[Sample(**sample) for sample in samples] for samples in passes])
        return found
    finally:
        for process in processes:
            process.kill()
            process.wait()


def pair_samples(processes: Sequence[Sequence[Sample]], way: str) -> Iterator[tuple[float, float, float]]:
    """Yield (speed, the same kernel's speed another time, both spreads) of the samples of one subject.

    `processes` holds the samples of each process, one per pass.
    """
    if way == margins.INTERLEAVED:
        for sample in itertools.chain(*processes):
            yield sample.ratio, sample.again, 2 * sample.spread
        return
    if way == margins.AFTER:
        pairs = itertools.chain(*(zip(samples, samples[1:]) for samples in processes))
    else:
        pairs = itertools.chain(*(zip(*pair) for pair in itertools.combinations(processes, 2)))
    for old, new in pairs:
        yield old.ratio, new.ratio, old.spread + new.spread


def summarise(pairs: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Return the distribution of |ratio - 1| of pairs, and what it is relative to the spread.

    `shift` is the median of ratio - 1: a kernel may run slower where it follows itself than where it follows its peer.
    `spread` is the median of the spreads of one timing, relative to its figure. `beyond` is how far a figure lay at
    most below the other one, beyond both spreads; `within` is the share of the pairs that both spreads cover.
    """
    differences = [abs(new / old - 1) for old, new, _ in pairs]
    beyond = [difference - spreads / old for difference, (old, _, spreads) in zip(differences, pairs)]
    return {
        "pairs": len(pairs),
        "median": statistics.median(differences),
        "shift": statistics.median(new / old - 1 for old, new, _ in pairs),
        "percentile_95": statistics.quantiles(differences, n=20, method="inclusive")[-1],
        "largest": max(differences),
        "spread": statistics.median(spreads / 2 / old for old, _, spreads in pairs),
        "beyond": max(0.0, *beyond),
        "within": statistics.mean(each <= 0 for each in beyond),
    }


def source() -> str:
    """Return the hash of the kernels, and of what is done with them."""
    ours = provenance.source_hash(make_subjects, time_beside_itself, pair_samples, summarise)
    return lesson.ladder_hash([ours, products.source(), wgmma.source(), copies.source()])


@results.experiment("itself", source, can_run=lambda: device.current().has_wgmma)
def time_against_themselves() -> list[dict]:
    """Time every subject against itself: interleaved, in passes after each other, and in fresh processes."""
    subjects, found = make_subjects(), time_in_fresh_processes()
    samples = [[[one_pass[i] for one_pass in passes] for passes in found] for i in range(len(subjects))]
    rows = []
    for kind, way in itertools.product(margins.KINDS, margins.WAYS):
        pairs = [
            pair
            for subject, each in zip(subjects, samples)
            if subject.kind == kind
            for pair in pair_samples(each, way)
        ]
        rows.append({"kind": kind, "way": way, "status": "ok", **summarise(pairs)})
    for subject, each in zip(subjects, samples):
        named = {key: getattr(subject, key) for key in ("kind", "name", "peer")}
        of_processes = [[asdict(sample) for sample in samples] for samples in each]
        rows.append(
            named | {"shape": list(subject.shape), "way": "samples", "status": "ok", "samples": of_processes}
        )
    return rows


def main() -> None:
    """Wait for a line of input, then print the samples of PASSES passes."""
    input()
    passes = [[asdict(time_beside_itself(subject)) for subject in make_subjects()] for _ in range(PASSES)]
    print(json.dumps(passes))


if __name__ == "__main__":
    main()
