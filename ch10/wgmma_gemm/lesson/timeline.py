"""Recordings of wgmma_gemm.cu for the timeline view: who loads, waits, multiplies and stores, with stage and phase.

A build of the kernel with the macro RECORD writes time stamps, as tilelab/include/recorder.cuh says. Other builds
have not one instruction more.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterable

import torch

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig
from ch10.wgmma_gemm.lesson import experiments, figures
from tilelab.measure import bench, profiler
from tilelab.pictures import plots
from tilelab.records import results, timeline
from tilelab.runtime import build, cuda, device, provenance, tensor_map

SHAPE = (4096, 4096, 1024)  # a tile takes 16 steps along K
TILES_SHOWN = 2  # a record keeps this many tiles of a persistent kernel
ALL_SMS = 0xFFFFFFFF  # every CTA writes stamps
LAST_WATCHED = 7  # a small grid may leave some SMs without a CTA
ALONE = 120 * 1024  # a CTA with this many bytes of shared memory leaves no room for a second one on its SM


class AloneConfig(WgmmaConfig):
    """A configuration whose CTAs ask for so much shared memory that each has an SM for itself."""

    @property
    def smem_bytes(self) -> int:
        return max(super().smem_bytes, ALONE)


def _two_consumers(stages: int) -> WgmmaConfig:
    return dataclasses.replace(STEPS["two_consumers"], num_stages=stages, persistent=True, group_m=4)


# The view shows these kernels. Each has one CTA per SM.
CONFIGS = {
    "1 stage": AloneConfig("one_group", 128, 128, 1),
    "4 stages": STEPS["ring"],
    "producer, 2 stages": _two_consumers(2),
    "producer, 4 stages": _two_consumers(4),
    "128 × 256, persistent": STEPS["raster"],
}
# These kernels are timed with and without stamps, and profiled.
_ONE_CONSUMER = dataclasses.replace(STEPS["warp_specialized"], persistent=True, group_m=4)
MEASURED = (
    {name: CONFIGS[name] for name in ("1 stage", "4 stages")} | {"one consumer": _ONE_CONSUMER} | CONFIGS
)


# The GPU's timer advances in steps of 32 ns or more, so a shorter time says too little about the clock.
SHORTEST_NS = 5000

# ---- the recorder

RECORDER = cuda.INCLUDE_FOLDER / "recorder.cuh"
RECORD = {"RECORD": 1}  # the macro of a build that records
# The events of recorder.cuh, and what ends at each.
STARTED, TIMED, FREE, LOADED, ARRIVED, MULTIPLIED, STORED, ENDED = range(8)
ENDS = {
    FREE: ("wait", "empty"),
    LOADED: ("load", None),
    ARRIVED: ("wait", "full"),
    MULTIPLIED: ("product", None),
    STORED: ("store", None),
}


class Recording(ctypes.Structure):
    """What a kernel that records takes: see recorder.cuh."""

    _fields_ = [("stamps", ctypes.c_uint64), ("capacity", ctypes.c_uint32), ("watched", ctypes.c_uint32)]


def count_stamps(config: WgmmaConfig, m: int, n: int, k: int, sms: int) -> int:
    """Return how many stamps a warp group writes at most."""
    tiles = -(-config.tiles(m, n) // config.grid(m, n, sms))
    return tiles * (3 * config.steps(k) + 1) + 6


def compile_recorders(configs: Iterable[WgmmaConfig]) -> None:
    """Compile the builds of `configs` that record, in parallel."""
    build.compile_ahead([wgmma_gemm.job(config, more=RECORD) for config in configs])


def prepare_recorder(a, b, out, config: WgmmaConfig, watched: int = 0) -> tuple[Callable, torch.Tensor]:
    """Return (launch, stamps): a launch on a, b and out that records, and the tensor that it fills.

    `stamps` is int32 (CTAs, warp groups, stamps, 2). CTAs on the SM `watched` write to it; ALL_SMS stands for every SM.
    """
    (m, k), n = a.shape, b.shape[1]
    sms = device.current().sms
    shape = config.grid(m, n, sms), config.threads // 128, count_stamps(config, m, n, k, sms), 2
    stamps = torch.zeros(shape, dtype=torch.int32, device=a.device)
    recording = Recording(stamps.data_ptr(), shape[2], watched)
    return wgmma_gemm.build_launch(a, b, out, config, more=RECORD, recording=recording), stamps


def record_stamps(
    name: str, config: WgmmaConfig, cold: bool = False, watched: int = 0
) -> list[list[list[tuple[int, int]]]]:
    """Run a kernel that records at SHAPE and return the stamps of one SM: for each of its CTAs, in their order, and
    each warp group the pairs of value and code, as unsigned integers.

    With `cold`, L2 holds nothing of the operands before the launch that is recorded, as under the profiler. The SM is
    `watched`, or the next one that had a CTA.
    """
    launch, stamps = prepare_recorder(*experiments.make_inputs(*SHAPE), config, watched)
    other = torch.ones(4 * device.current().l2_bytes, dtype=torch.uint8, device="cuda") if cold else None
    for _ in range(3):  # the first launch runs with cold caches
        stamps.zero_()
        if cold:
            other.max()  # reads more than L2 holds
        launch()
    torch.cuda.synchronize()
    written = stamps[(stamps[:, 0, 0, 1] != 0).nonzero().flatten()]
    # The place of a stamp that nobody wrote holds the code 0 and the value 0.
    ctas = [
        [[(value, code) for value, code in group if value or code] for group in cta]
        for cta in (written.cpu().to(torch.int64) & 0xFFFFFFFF).tolist()
    ]
    if ctas:
        first = ctas[0][0][1][0]  # a clock; it wraps around
        return sorted(ctas, key=lambda cta: (cta[0][1][0] - first + 2**31) % 2**32)
    if watched == LAST_WATCHED:
        raise device.Unsupported(f"no CTA of {name} ran on the SMs 0 to {watched}: record another shape.")
    return record_stamps(name, config, cold, watched + 1)


def sanitizer_cases(share: int = 0, shares: int = 1) -> None:
    """Run every `shares`-th of MEASURED with stamps, on a ragged shape; AssertionError for a wrong product."""
    configs = [*MEASURED.values()][share::shares]
    compile_recorders(configs)
    for config in configs:
        a, b, out = experiments.make_inputs(300, 520, 264)
        out.fill_(float("nan"))
        launch, _ = prepare_recorder(a, b, out, config, ALL_SMS)
        launch()
        torch.testing.assert_close(out, wgmma_gemm.spec(a, b).to(out.dtype), rtol=0.016, atol=0.01)


def read_stamps(groups: list[list[tuple[int, int]]], one_group: bool) -> tuple[list[dict], int, float | None]:
    """Return (rows, length, ghz) of one CTA from each warp group's pairs of value and code, as unsigned integers.

    timeline.make_recording takes the rows. Cycle 0 is the first stamp of the CTA, and `length` the last.
    """
    lanes = ["loads and multiplies"] if one_group else ["producer", "consumer 0", "consumer 1", "consumer 2"]
    clocks = [value for group in groups for value, code in group if code & 7 != TIMED]
    zero = next(value for value, code in groups[0] if code & 7 == STARTED)
    # A clock of 32 bits wraps around every two seconds. The warp groups start within far less than that.
    zero = min(clocks, key=lambda value: (value - zero + (1 << 31)) % (1 << 32))
    rows, rates, length = [], [], 0
    for lane, group in zip(lanes, groups):
        before, issued, tile = 0, {}, 0
        wall: list[tuple[int, int]] = []  # (nanoseconds, cycle) at the first and at the last stamp
        started = False
        for value, code in group:
            kind, phase, stage, step = code & 7, code >> 3 & 1, code >> 4 & 15, code >> 8
            if kind == TIMED:
                wall.append((value, before))
                continue
            now = (value - zero) % (1 << 32)
            length = max(length, now)
            if kind == STARTED:  # at the beginning of the kernel, and again when the barriers are ready
                wall = wall if started else [(nanoseconds, now) for nanoseconds, _ in wall]
                started = True
            elif kind in ENDS:
                event, barrier = ENDS[kind]
                tile += kind == FREE and step == 0 and bool(rows) and rows[-1]["lane"] == lane
                begin = issued.pop(step) if kind == MULTIPLIED else (before, stage, phase)
                row = {
                    "lane": lane,
                    "kind": event,
                    "begin": begin[0],
                    "end": now,
                    "tile": tile,
                    "step": None if kind == STORED else step,
                    "barrier": barrier,
                }
                if kind == MULTIPLIED:
                    row |= {"stage": begin[1], "phase": begin[2]}
                elif kind != STORED and not (one_group and kind == LOADED):  # its order gives the stage
                    row |= {"stage": stage, "phase": phase ^ (kind == FREE)}
                rows.append(row)
                if kind == ARRIVED:
                    issued[step] = now, stage, phase
                tile += kind == STORED
            before = now
        if len(wall) == 2 and wall[1][1] > wall[0][1]:
            ns = (wall[1][0] - wall[0][0]) % (1 << 32)
            rates += [(wall[1][1] - wall[0][1]) / ns] if ns >= SHORTEST_NS else []
    ghz = round(statistics.median(rates), 3) if rates else None
    return rows, length, ghz


def find_product_cycles(config: WgmmaConfig) -> float:
    """Return the cycles of the tensor core for a step of one consumer: wgmma m64nNk16 takes N / 2 at the full rate."""
    return config.block_m / config.consumers / 64 * config.block_n / 2 * 4 * config.boxes_per_stage


def record_config(name: str, config: WgmmaConfig, cold: bool = False) -> list[dict]:
    """Run the kernel at SHAPE and return a recording of each CTA that ran on one SM, in their order."""
    return [
        timeline.make_recording(
            name,
            rows,
            stages=config.num_stages,
            gpu=device.current().name,
            date=provenance.utc_now()[:10],
            config=str(config),
            ghz=ghz,
            product_cycles=find_product_cycles(config),
            length=length,
        )
        for rows, length, ghz in (
            read_stamps(groups, config.kernel == "one_group") for groups in record_stamps(name, config, cold)
        )
    ]


# ---- the record for the view


def source() -> str:
    """Return the hash of the code that is measured: the kernel, its configurations, and the recorder."""
    kernel = (wgmma_gemm.SOURCE, wgmma_gemm.SOURCE.with_name("configs.py"), tensor_map, AloneConfig)
    recorder = (read_stamps, prepare_recorder, record_stamps, record_config, find_product_cycles)
    return provenance.source_hash(*kernel, *recorder, _two_consumers)


experiment = functools.partial(results.experiment, source=source, can_run=experiments.has_wgmma)


@experiment("ch10_timeline")
def measure_timeline():
    """Record one CTA of each of CONFIGS at 4096 x 4096 x 1024. A row holds a recording, up to its second tile."""
    compile_recorders(CONFIGS.values())
    rows = []
    for each in (record_config(name, config)[0] for name, config in CONFIGS.items()):
        row = {"name": each["name"], "status": "ok", "idle_share": timeline.find_idle_share(each)}
        rows.append(row | {"recording": timeline.keep_tiles(each, TILES_SHOWN)})
    return rows


def load_recordings() -> tuple[list[dict], str]:
    """Return recordings and their label: live on a GPU with wgmma, else of the record `ch10_timeline`. They hold the
    cost of the stamps and the profiler's idle share where these are recorded."""
    found = measure_timeline()
    recordings = [row["recording"] for row in found.rows]
    for experiment, key in (("ch10_timeline_overhead", "overhead"), ("ch10_timeline_idle", "idle_profiler")):
        with contextlib.suppress(FileNotFoundError):
            known = {row["name"]: row.get(key) for row in results.load(experiment)["rows"]}
            recordings = [each | {key: known.get(each["name"])} for each in recordings]
    return recordings, found.label()


# ---- the events of a CTA as rows, for the figures of the notebook

STEP_CONFIGS = {
    "tile": STEPS["tile"],
    "ring": STEPS["ring"],
    "warp_specialized": STEPS["warp_specialized"],
    "persistent": STEPS["raster"],
}


@results.experiment("ch10_gemm_timeline", source, can_run=experiments.has_wgmma)
def measure_events():
    """Record what each warp group of one CTA does and when, at 4096 x 4096 x 1024: a row per event.

    `begin` and `end` are cycles. The loads of a kernel with one warp group are left out, so its waits begin before.
    """
    compile_recorders(STEP_CONFIGS.values())
    rows = []
    for name, config in STEP_CONFIGS.items():
        one_group = config.kernel == "one_group"
        groups = record_stamps(name, config)[0]
        if one_group:
            groups = [[(value, code) for value, code in group if code & 7 != LOADED] for group in groups]
        rows += [
            {"name": name, "config": str(config), "status": "ok", "role": row["lane"], "event": row["kind"]}
            | {key: row[key] for key in ("step", "tile", "begin", "end")}
            for row in read_stamps(groups, one_group)[0]
        ]
    return rows


def measure_handover(rows: list[dict], name: str = "warp_specialized") -> dict:
    """Return median cycles of a step of a kernel with a producer, from rows of `measure_events`: from the end of the
    products to the end of the producer's wait for the same stage, from the issue of its loads to the arrival of their
    data, and from one step to the next (a mean)."""
    stages = STEP_CONFIGS[name].num_stages
    mine = [row for row in rows if row["name"] == name and row["tile"] == 0]

    def ends(role, event):
        return {row["step"]: row["end"] for row in mine if (row["role"], row["event"]) == (role, event)}

    released, multiplied = ends("producer", "wait"), ends("consumer 0", "product")
    ordered, arrived = ends("producer", "load"), ends("consumer 0", "wait")
    later = [step for step in released if step >= stages and step in multiplied and step in arrived]
    return {
        "name": name,
        "handover": statistics.median(released[step] - multiplied[step - stages] for step in later),
        "load": statistics.median(arrived[step] - ordered[step] for step in later),
        "step": (multiplied[later[-1]] - multiplied[later[0]]) / (len(later) - 1),
    }


# ---- a picture for where there is no view


def draw_still(recordings: list[dict], names: list[str], until: int, origin: str) -> plots.Picture:
    """Return a picture of the first `until` cycles of recordings: a row for each of `names`, or for its warp roles."""
    rows = []
    for recording in (each for each in recordings if each["name"] in names):
        for event in timeline.as_rows(recording):
            lane = recording["name"] + (f": {event['lane']}" if len(recording["lanes"]) > 1 else "")
            if event["end"] <= until:
                rows.append({**event, "role": lane, "event": event["kind"]})
    shares = {each["name"]: timeline.find_idle_share(each) for each in recordings if each["name"] in names}
    idle = ", ".join(f"{share:.0%} of the time with {name}" for name, share in shares.items())
    title = f"What one CTA does in its first {until:,} cycles"
    picture = figures.draw_timeline(rows, title=title, source=origin)
    units = "cycles since the first bar began; the number in a bar is its step"
    picture.axes[0].set_xlabel(units, fontsize=8)
    roles, kinds = (", ".join(dict.fromkeys(row[key] for row in rows)) for key in ("role", "event"))
    return picture.describe(
        f"One CTA in its first {until:,} cycles, with a row for each of {roles}; its bars are {kinds}. "
        f"The clock begins with the first bar. Over the whole recording the tensor core is idle for {idle}."
    )


def draw_next_tile(found: results.Record) -> plots.Picture:
    """Return a picture of the rows of `measure_events` around the first store of the persistent kernel."""
    rows = [row for row in found.rows if row["name"] == "persistent"]
    middle = next(row["begin"] for row in rows if row["event"] == "store")
    around = [row for row in rows if row["begin"] >= middle - 5000 and row["end"] <= middle + 7000]
    title = "One SM of an H200: loads of the next tile run ahead of the stores"
    return figures.draw_timeline(around, title=title, source=found.label())


# ---- what recording costs, and whether the timeline agrees with the profiler

OVERHEAD_SHAPE = (4096, 4096, 4096)
TIMING = {"rounds": 16, "warm_s": 0.1, "burst_ms": 3}


@experiment("ch10_timeline_overhead")
def measure_overhead():
    """Time the kernel with stamps beside the plain kernel, interleaved. Every CTA writes stamps, or the CTAs of one SM.

    `overhead` is the share by which the kernel takes longer if every CTA writes stamps. `overhead_one_sm` is this share
    if only the CTAs of one SM do.
    """
    rows = []
    build.compile_ahead(map(wgmma_gemm.job, MEASURED.values()))
    compile_recorders(MEASURED.values())
    for name, config in MEASURED.items():
        candidates = {
            "plain": lambda a, b, out, config=config: wgmma_gemm.build_launch(a, b, out, config),
            "every CTA": _prepare_stamped(config, ALL_SMS),
            "one SM": _prepare_stamped(config, 0),
        }
        found = bench.compare(candidates, lambda: experiments.make_inputs(*OVERHEAD_SHAPE), "plain", **TIMING)
        every, one = found["every CTA"], found["one SM"]
        row = {**every.row(), "name": name, "config": str(config), "shape": list(OVERHEAD_SHAPE)}
        if every.ratio and one.ratio:
            row |= {"overhead": 1 / every.ratio - 1, "overhead_one_sm": 1 / one.ratio - 1}
        rows.append(row)
    return rows


def _launch(launch, stamps) -> None:
    """Launch a kernel that writes `stamps`, which live as long as this function's partial."""
    launch()


def _prepare_stamped(config: WgmmaConfig, watched: int):
    return lambda a, b, out: functools.partial(_launch, *prepare_recorder(a, b, out, config, watched))


METRICS = {
    "busy_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "active_cycles": "sm__cycles_active.avg",
    "ns": "gpu__time_duration.sum",
}


@profiler.experiment("ch10_timeline_idle", source)
def measure_idle():
    """Compare the idle share of the tensor core in the timeline with the profiler's, for each of MEASURED.

    `idle` is the timeline's: of all CTAs that ran on one SM, from the first stamp to the last. `idle_profiler` is 1
    minus sm__pipe_tensor_cycles_active divided by the cycles in which an SM had a CTA. The profiler watches the kernel
    without stamps. `points` is the difference in percentage points.
    """
    build.compile_ahead(map(wgmma_gemm.job, MEASURED.values()))
    command = [sys.executable, "-m", "ch10.wgmma_gemm.lesson.timeline"]
    counted = profiler.profile_launches(command, list(MEASURED), METRICS)
    compile_recorders(MEASURED.values())
    recorded = [record_config(name, config, cold=True) for name, config in MEASURED.items()]
    rows = []
    for (name, config), row, recordings in zip(MEASURED.items(), counted, recorded):
        # The CTAs of one SM follow each other. The profiler does not count the cycles between two CTAs.
        length = sum(recording["length"] for recording in recordings)
        idle = sum(timeline.find_idle_share(each) * each["length"] for each in recordings) / length
        by_profiler = 1 - row["busy_percent"] / 100
        found = {"name": name, "config": str(config), "shape": list(SHAPE), "status": "ok"}
        found |= {"ctas": len(recordings), "idle": idle}
        found |= {"idle_profiler": by_profiler, "points": 100 * (idle - by_profiler), "cycles": length}
        rows.append(found | {"active_cycles": row["active_cycles"], "us": row["ns"] / 1e3})
    return rows


def launch_all() -> None:
    """Launch the kernel of each of MEASURED once for the profiler to watch."""
    for config in MEASURED.values():
        a, b, out = experiments.make_inputs(*SHAPE)
        profiler.launch_watched(functools.partial(wgmma_gemm.build_launch(a, b, out, config)))


if __name__ == "__main__":
    launch_all()
