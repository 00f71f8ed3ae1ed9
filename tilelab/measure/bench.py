"""Time implementations against a peer: interleaved medians, random data, operands that come from DRAM.

The GPU's clock moves by 10 to 15 % with load and temperature, so the published figure is a ratio of interleaved runs,
never a time alone. A candidate that takes less than GRAPH_BELOW_US is captured in a CUDA graph, because events would
also time the gaps between launches. A slower one is launched plainly: in a graph, torch's copy (a memcpy node) runs at
two thirds of its speed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilelab.records import results
from tilelab.runtime import device, provenance

WARM_S = 0.3  # seconds that are not counted, because a cool chip runs faster at first
ROUNDS = 22  # an even number, because every second round runs in the opposite order
BURST_MS = 4  # long enough to hide the cost of events and of the chip's power control
GRAPH_BELOW_US = 100
QUICK = {"rounds": 4, "warm_s": 0.0, "burst_ms": 1.0}  # at most this much with TILES_QUICK, which tests set


@dataclass(frozen=True)
class Timing:
    """The median time of a candidate's call, the peer's time in the same rounds, and the candidate's rates."""

    name: str
    ms: float | None
    peer: str
    peer_ms: float
    tflops: float | None = None
    gbps: float | None = None
    reason: str = ""
    ratios: tuple[float, ...] = ()  # peer_ms / ms of each round; none for the peer itself

    @property
    def spread(self) -> float | None:
        """Half of the distance between the quartiles of the ratio, over the rounds; None with fewer than two."""
        return find_spread(self.ratios) if len(self.ratios) > 1 else None

    @property
    def ratio(self) -> float | None:
        """peer_ms / ms; above 1 the candidate is faster."""
        return self.peer_ms / self.ms if self.ms else None

    def row(self) -> dict:
        """Return the fields that results/ keeps."""
        fields = "name ms peer peer_ms ratio spread tflops gbps".split()
        found = {field: getattr(self, field) for field in fields}
        found |= {"status": "failed" if self.reason else "ok", "reason": self.reason}
        return {key: value for key, value in found.items() if value is not None}


def compare(
    candidates: dict[str, Callable],
    make_inputs: Callable[[], Sequence],
    peer: str,
    *,
    flops: float | None = None,
    nbytes: float | None = None,
    rounds: int = ROUNDS,
    warm_s: float = WARM_S,
    burst_ms: float = BURST_MS,
) -> dict[str, Timing]:
    """Time every candidate against `peer`, the name of one candidate, and return {name: Timing}.

    A candidate takes the tensors of `make_inputs()` and returns a function that launches on them, so that descriptors
    and work space are made once. `make_inputs` is called until its tensors fill three times the L2 cache, but at most
    32 times: inputs below 1/32 of L2 stay there, for all candidates alike. Launches rotate through these sets. `flops`
    and `nbytes` of one call give the rates. `rounds` rounds of bursts of `burst_ms` are kept after `warm_s` seconds;
    with the environment variable TILES_QUICK, QUICK limits all three. A candidate that raises gets a `reason`; an error
    of the peer is raised, and so is tilelab.runtime.device.Unsupported without a GPU.
    """
    if peer not in candidates:
        raise ValueError(f"unknown peer {peer!r}; choose one of {', '.join(candidates)}.")
    if device.current().capability is None:
        raise device.Unsupported(f"timing needs a GPU; here is {device.current().describe()}: read results/.")
    if os.environ.get("TILES_QUICK"):
        rounds, warm_s, burst_ms = map(min, (rounds, warm_s, burst_ms), QUICK.values())
    inputs = make_input_sets(make_inputs)
    # A graph holds addresses, not tensors. The launches own the work space, so they must live until the last replay.
    launches = {peer: [candidates[peer](*tensors) for tensors in inputs]}
    call_ms = estimate_ms(launches[peer])
    make_burst = capture_burst if call_ms * 1e3 < GRAPH_BELOW_US else _make_plain_burst
    calls = {peer: _calls_per_burst(call_ms, burst_ms)}
    bursts, failed = {peer: make_burst(launches[peer], calls[peer])}, {}
    for name, candidate in candidates.items():
        if name == peer:
            continue
        try:
            launches[name] = [candidate(*tensors) for tensors in inputs]
            calls[name] = min(calls[peer], _calls_per_burst(estimate_ms(launches[name]), burst_ms))
            bursts[name] = make_burst(launches[name], calls[name])
        except torch.AcceleratorError:
            raise  # the CUDA context is lost, and with it everything that follows
        except Exception as error:
            failed[name] = _first_reason(error)
    times, ratios = _interleave(bursts, peer, calls, failed, rounds, warm_s)
    timings = {}
    for name in candidates:
        ms = times.get(name)
        tflops = flops / ms / 1e9 if flops and ms else None
        gbps = nbytes / ms / 1e6 if nbytes and ms else None
        rates = (tflops, gbps, failed.get(name, ""), ratios.get(name, ()))
        timings[name] = Timing(name, ms, peer, times[peer], *rates)
    return timings


def _first_reason(error: BaseException) -> str:
    """Return the first line of the first error; an error during a graph capture makes the capture fail as well."""
    while error.__context__ is not None:
        error = error.__context__
    return device.first_line(error)[:300]


def make_input_sets(make_inputs: Callable[[], Sequence]) -> list[Sequence]:
    """Return enough sets of inputs, at most 32, that the first has left L2 before it is used again."""
    sets = [make_inputs()]
    size = sum(tensor.nbytes for tensor in sets[0] if isinstance(tensor, torch.Tensor))
    wanted = min(32, math.ceil(3 * device.current().l2_bytes / size) + 1)
    return sets + [make_inputs() for _ in range(wanted - 1)]


def _calls_per_burst(call_ms: float, burst_ms: float) -> int:
    return max(2, min(400, math.ceil(burst_ms / call_ms)))


def estimate_ms(launches: Sequence[Callable[[], object]]) -> float:
    for launch in launches:
        launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for launch in launches:
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / len(launches)


def _make_plain_burst(launches, calls: int) -> Callable[[], None]:
    for launch in launches:
        launch()

    def burst():
        for call in range(calls):
            launches[call % len(launches)]()

    return burst


@contextlib.contextmanager
def _forbid_waiting():
    """Let a launch that waits for the GPU raise; in a graph capture it would break torch's random state for good."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture_burst(launches: Sequence[Callable[[], object]], calls: int) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launches[0]()  # compiles and loads the kernel, which a capture forbids
        with _forbid_waiting():
            launches[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            launches[call % len(launches)]()
    return graph.replay


def _interleave(
    bursts, peer: str, calls: dict[str, int], failed: dict[str, str], wanted: int, warm_s: float
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Return the median milliseconds per call of each candidate, and the peer's time over its own in each round.

    The peer runs again after every second candidate, so that both see the same clocks. A candidate that raises is timed
    no further; `failed` gets its reason.
    """
    others = [name for name in bursts if name != peer]
    order = (
        [peer]
        if not others
        else [name for i, other in enumerate(others) for name in ([peer, other] if i % 2 == 0 else [other])]
    )
    times, ratios = {name: [] for name in bursts}, {name: [] for name in others}
    start, rounds = time.perf_counter(), 0
    while rounds < wanted:
        events = []
        for name in order if rounds % 2 else order[::-1]:
            if name in failed:
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            try:
                bursts[name]()
            except torch.AcceleratorError:
                raise
            except Exception as error:
                if name == peer:
                    raise
                failed[name] = _first_reason(error)
            end.record()
            events.append((name, begin, end))
        torch.cuda.synchronize()
        if time.perf_counter() - start > warm_s:
            rounds += 1
            of_peer = [begin.elapsed_time(end) / calls[peer] for name, begin, end in events if name == peer]
            for name, begin, end in events:
                times[name].append(begin.elapsed_time(end) / calls[name])
                if name != peer:
                    ratios[name].append(statistics.mean(of_peer) / times[name][-1])
    medians = {name: statistics.median(values) for name, values in times.items() if name not in failed}
    return medians, {name: tuple(values) for name, values in ratios.items() if name not in failed}


def find_spread(values: Sequence[float]) -> float:
    """Return half of the distance between the quartiles of at least two values."""
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def measure_call_us(launch: Callable[[], object], calls: int = 200) -> float:
    """Return the median microseconds from a call to its completion, as seen by a program that waits for each result."""
    for _ in range(5):
        launch()
    torch.cuda.synchronize()
    values = []
    for _ in range(calls):
        begin = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        values.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(values)


@dataclass(frozen=True)
class Ceilings:
    """The best rates that a GPU has reached. Notebooks state a figure as a share of these rates."""

    copy_gbps: float  # bytes read plus bytes written
    bf16_tflops: float


@functools.cache
def ceilings() -> Ceilings:
    """Return the rates of `measured_roofs`, read once per process."""
    copy, product = measured_roofs().rows
    return Ceilings(copy["gbps"], product["tflops"])


def _fastest_ms(launch: Callable[[], object]) -> float:
    """Return the fastest of ten short bursts, each after a rest that lets the chip cool: a roof is the best case."""
    launch()
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        time.sleep(0.1)
        times.append(estimate_ms([launch] * 4))
    return min(times)


def _roofs_source() -> str:
    return provenance.source_hash(measured_roofs.__wrapped__, _fastest_ms)


# Reused within the hour, so that all notebooks of one recording refer to the same roof.
@results.experiment("ceilings", _roofs_source, reuse_for_s=3600)
def measured_roofs() -> list[dict]:
    """Measure torch's copy of 512 MiB, and cuBLAS bf16 at the better of 4096 and 8192 cubed."""

    def random(n):
        return torch.randn(n, n, device="cuda").bfloat16()

    source, destination = random(16384), random(16384)
    copy_ms = _fastest_ms(lambda: destination.copy_(source))
    rates = []
    for n in (4096, 8192):
        a, b, c = (random(n) for _ in range(3))
        rates.append(2 * n**3 / _fastest_ms(functools.partial(torch.mm, a, b, out=c)) / 1e9)
    return [
        {"name": "copy", "gbps": 2 * source.nbytes / copy_ms / 1e6, "status": "ok"},
        {"name": "cuBLAS bf16", "tflops": max(rates), "status": "ok"},
    ]


def floor_ms(roof: Ceilings, flops: float = 0, nbytes: float = 0) -> float:
    """Return the shortest time, in milliseconds, in which `flops` and `nbytes` fit under `roof`."""
    return max(flops / roof.bf16_tflops / 1e9, nbytes / roof.copy_gbps / 1e6)
