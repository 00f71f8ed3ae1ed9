"""Recordings of wgmma_gemm.cu for the timeline view: who loads, waits, multiplies and stores, with stage and phase.

A patched copy of the kernel writes time stamps. Thread 0 of each warp group writes 8 bytes per stamp, the SM's clock
and a code, to a part of global memory that no other thread writes: one store, which nothing waits for. `read_record`
turns the older record `ch10_gemm_timeline` into the same recordings.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import pathlib
import statistics
import sys
from collections.abc import Iterator

import torch

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig
from ch10.wgmma_gemm.lesson import experiments, figures
from tilelab.measure import bench, profiler
from tilelab.measure.patch import patched_source
from tilelab.pictures import plots
from tilelab.records import results, timeline
from tilelab.runtime import build, device, provenance, tensor_map

SHAPE = (4096, 4096, 1024)  # a tile takes 16 steps along K
TILES_SHOWN = 2  # tiles that a record keeps of a persistent kernel
ALL_SMS = 0xFFFFFFFF  # every CTA writes stamps
LAST_WATCHED = 7  # a small grid may leave some SMs without a CTA
ALONE = 120 * 1024  # bytes of shared memory with which one CTA fills an SM


class AloneConfig(WgmmaConfig):
    """A configuration whose CTAs ask for so much shared memory that each has an SM for itself."""

    @property
    def smem_bytes(self) -> int:
        return max(super().smem_bytes, ALONE)


def _two_consumers(stages: int) -> WgmmaConfig:
    return dataclasses.replace(STEPS["two_consumers"], stages=stages, persistent=True, group=4)


# The view shows these kernels. Each has one CTA per SM.
CONFIGS = {
    "1 stage": AloneConfig("one_group", 128, 128, 1),
    "4 stages": STEPS["ring"],
    "producer, 2 stages": _two_consumers(2),
    "producer, 4 stages": _two_consumers(4),
    "128 × 256, persistent": STEPS["raster"],
}
# These kernels are timed with and without stamps, and profiled.
MEASURED = {
    "1 stage": CONFIGS["1 stage"],
    "4 stages": CONFIGS["4 stages"],
    "one consumer": dataclasses.replace(STEPS["warp_specialized"], persistent=True, group=4),
    "producer, 2 stages": CONFIGS["producer, 2 stages"],
    "producer, 4 stages": CONFIGS["producer, 4 stages"],
    "128 × 256, persistent": CONFIGS["128 × 256, persistent"],
}


SHORTEST_NS = (
    5000  # the GPU's timer advances in steps of 32 ns or more: a shorter time says too little about the clock
)

# ---- the recorder

# Codes of stamps, and the kind of event that ends there.
STARTED, TIMED, FREE, LOADED, ARRIVED, MULTIPLIED, STORED, ENDED = range(8)
ENDS = {
    FREE: ("wait", "empty"),
    LOADED: ("load", None),
    ARRIVED: ("wait", "full"),
    MULTIPLIED: ("product", None),
    STORED: ("store", None),
}


def stamp_patch() -> list[tuple[str, str, int]]:
    """Return the replacements that make wgmma_gemm.cu take `uint2* stamps, u32 capacity, u32 watched` and write stamps.

    `capacity` is the number of stamps that a warp group has room for. CTAs on the SM `watched` record, with ALL_SMS
    every CTA.
    """
    recorder = f"""enum Stamp {{ STARTED, TIMED, FREE, LOADED, ARRIVED, MULTIPLIED, STORED, ENDED }};

__device__ __forceinline__ u32 read_clock() {{
    u32 clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
    return clock;
}}

// A position in the ring that also records. A stamp is the low half of the SM's clock and a code: the kind of stamp in
// bits 0-2, the phase of the ring in bit 3, the stage in bits 4-7, and the step above.
struct Recorder : Ring<STAGES> {{
    uint2* next;
    bool records;  // the same value in all lanes of a warp
    u32 writes;    // 1 in the lane that writes
    __device__ __forceinline__ Recorder(uint2* stamps, u32 capacity, u32 watched) {{
        u32 sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        const bool first_warp = threadIdx.x % 128 < 32;
        records = __any_sync(0xFFFFFFFFu, first_warp && (watched == {ALL_SMS}u || sm == watched));
        writes = threadIdx.x % 32 == 0;
        next = stamps + (blockIdx.x * (blockDim.x / 128) + threadIdx.x / 128) * capacity;
        write_timer();
        record(STARTED, 0, 0);
    }}
    // All lanes of a warp take the same branch. The store has a predicate, which does not split the warp either.
    __device__ __forceinline__ void write(u32 value, u32 code) {{
        if (!records) return;
        asm volatile("{{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.v2.u32 [%0], {{%1, %2}}; }}"
                     ::"l"(next), "r"(value), "r"(code), "r"(writes) : "memory");
        ++next;
    }}
    __device__ __forceinline__ void write_timer() {{
        u32 nanoseconds;
        asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(nanoseconds));
        write(nanoseconds, TIMED);
    }}
    __device__ __forceinline__ void record(Stamp stamp, u32 step, u32 at, u32 clock) {{
        write(clock, stamp | phase << 3 | at << 4 | step << 8);
    }}
    __device__ __forceinline__ void record(Stamp stamp, u32 step, u32 at) {{ record(stamp, step, at, read_clock()); }}
    __device__ __forceinline__ void finish() {{
        record(ENDED, 0, 0);
        write_timer();
    }}
}};

"""
    here, begin = "Recorder position(stamps, capacity, watched);", "position.record(STARTED, 0, 0);"
    ring = "    const u32 ring = shared_address(shared),"
    loop = "for (int tile_id = blockIdx.x / CLUSTER; tile_id < tiles_m * tiles_n; tile_id += clusters)"
    # Each line of the kernel, and the code that is added after it. Where another warp or the tensor core waits for the
    # next lines of the kernel, the clock is read before them and the stamp is written after them.
    added = {
        "mbarrier_wait(full + 8 * position.stage, position.phase);": "position.record(ARRIVED, step, position.stage);",
        "mbarrier_wait(barriers.full + 8 * position.stage, position.phase);": "const u32 arrived = read_clock();",
        "multiply(acc, a + consumer * ROWS * 128, a + A_BYTES, step > first);": "position.record(ARRIVED, step, position.stage, arrived);",
        "mbarrier_wait(barriers.empty + 8 * position.stage, position.phase ^ 1);": "const u32 freed = read_clock();",
        "b_map, k, column, barrier);\n            }\n        }\n": "position.record(FREE, step, position.stage, freed); position.record(LOADED, step, position.stage);",
        "wgmma_wait<LAG>();": "if (step >= LAG) position.record(MULTIPLIED, step - LAG, 0);",
        "wgmma_wait<1>();": "const u32 multiplied = read_clock();",
        "if (step > first) release<MULTICAST>(barriers.empty + 8 * previous_stage);": "if (step > first) position.record(MULTIPLIED, step - 1, 0, multiplied);",
        "wgmma_wait<0>();\n    release<MULTICAST>(barriers.empty + 8 * previous_stage);": "position.record(MULTIPLIED, last - 1, previous_stage);",
        "epilogue(acc, c_map, ring + RING_BYTES, stored, row, column, 1);": "position.record(STORED, 0, 0);",
        "epilogue(acc, c_map, staged, stored, row, tile.n * BLOCK_N, warpgroup);": "position.record(STORED, tile_id, 0);",
    }
    return [
        ("// All three kernels take", f"{recorder}// All three kernels take", 1),
        ("u64 stride_c)", "u64 stride_c, uint2* stamps, u32 capacity, u32 watched)", 3),
        ("Ring<STAGES>& position", "Recorder& position", 2),
        ("Ring<STAGES> position;", "", 3),
        (ring, f"    {here}\n{ring}", 3),
        (loop, f"{begin} {loop}", 2),
        (
            "    const Tile tile = tile_coordinates(blockIdx.x, (M",
            f"    {begin}\n    const Tile tile = tile_coordinates(blockIdx.x, (M",
            1,
        ),
        *((line, f"{line} {code}", 1) for line, code in added.items()),
        ("++step) load(step, step);", "++step) load(step, step), position.record(LOADED, step, step);", 1),
        (
            "load(step - LAG + STAGES, LAG ? previous_stage : position.stage);",
            "load(step - LAG + STAGES, LAG ? previous_stage : position.stage), "
            "position.record(LOADED, step - LAG + STAGES, LAG ? previous_stage : position.stage);",
            1,
        ),
        (
            "    u32 stored = 0;\n    epilogue",
            "    if (LAG) position.record(MULTIPLIED, steps - 1, 0);\n    u32 stored = 0;\n    epilogue",
            1,
        ),
        (
            "    if (leader) bulk_wait_read<0>();  // shared memory must outlive the stores that read it\n",
            "    if (leader) bulk_wait_read<0>();\n    position.finish();\n",
            1,
        ),
        (
            "    // The other CTAs of the cluster still signal barriers in this CTA's shared memory",
            "    position.finish();\n    // The other CTAs of the cluster still signal",
            1,
        ),
    ]


def count_stamps(config: WgmmaConfig, m: int, n: int, k: int, sms: int) -> int:
    """Return how many stamps a warp group writes at most."""
    tiles = -(-config.tiles(m, n) // config.grid(m, n, sms))
    return tiles * (3 * config.steps(k) + 1) + 6


@contextlib.contextmanager
def patched_kernel(*configs: WgmmaConfig) -> Iterator[pathlib.Path]:
    """Yield the path of a copy of the kernel that writes stamps, compiled for `configs` in parallel."""
    with patched_source(wgmma_gemm.SOURCE, *stamp_patch()) as patched:
        build.compile_ahead([wgmma_gemm.job(config, source=patched) for config in configs])
        yield patched


def prepare_recorder(patched: pathlib.Path, a, b, out, config: WgmmaConfig, watched: int = 0):
    """Return (launch, stamps): a launch of the patched kernel on a, b and out, and the tensor that it fills.

    `stamps` is int32 (CTAs, warp groups, stamps, 2). CTAs on the SM `watched` write to it; ALL_SMS stands for every SM.
    """
    (m, k), n = a.shape, b.shape[1]
    sms = device.current().sms
    capacity = count_stamps(config, m, n, k, sms)
    stamps = torch.zeros(
        config.grid(m, n, sms), config.threads // 128, capacity, 2, dtype=torch.int32, device=a.device
    )
    more = stamps, ctypes.c_uint32(capacity), ctypes.c_uint32(watched)
    return wgmma_gemm.build_launch(a, b, out, config, patched, more), stamps


def sanitizer_cases(share: int = 0, shares: int = 1) -> None:
    """Run every `shares`-th of MEASURED with stamps, on a ragged shape; AssertionError for a wrong product."""
    configs = [*MEASURED.values()][share::shares]
    with patched_kernel(*configs) as patched:
        for config in configs:
            a, b, out = experiments.make_inputs(300, 520, 264)
            out.fill_(float("nan"))
            launch, _ = prepare_recorder(patched, a, b, out, config, ALL_SMS)
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
                elif kind != STORED and not (
                    one_group and kind == LOADED
                ):  # the order of the steps gives its stage
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


def record_config(
    patched: pathlib.Path, name: str, config: WgmmaConfig, watched: int = 0, cold: bool = False
) -> list[dict]:
    """Run the patched kernel at SHAPE and return a recording of each CTA that ran on the SM `watched`, in their order.

    With `cold`, L2 holds nothing of the operands before the launch that is recorded, as under the profiler.
    """
    inputs = experiments.make_inputs(*SHAPE)
    launch, stamps = prepare_recorder(patched, *inputs, config, watched)
    other = torch.ones(4 * device.current().l2_bytes, dtype=torch.uint8, device="cuda") if cold else None
    for _ in range(3):
        stamps.zero_()
        if cold:
            other.max()  # reads more than L2 holds
        launch()
    torch.cuda.synchronize()
    written = stamps[(stamps[:, 0, 0, 1] != 0).nonzero().flatten()]
    values = (written.cpu().to(torch.int64) & 0xFFFFFFFF).tolist()
    if not values and watched < LAST_WATCHED:
        return record_config(patched, name, config, watched + 1, cold)
    if not values:
        raise device.Unsupported(f"no CTA of {name} ran on the SMs 0 to {watched}: record another shape.")
    here, recordings = device.current(), []
    for groups in values:
        # The position of a stamp that nobody wrote holds the code 0 and the value 0.
        stamped = [[(value, code) for value, code in group if (value, code) != (0, 0)] for group in groups]
        rows, length, ghz = read_stamps(stamped, config.kernel == "one_group")
        recordings.append(
            (
                stamped[0][1][0],
                timeline.make_recording(
                    name,
                    rows,
                    stages=config.stages,
                    gpu=here.name,
                    date=provenance.utc_now()[:10],
                    config=str(config),
                    ghz=ghz,
                    product_cycles=find_product_cycles(config),
                    length=length,
                ),
            )
        )
    first = recordings[0][0]
    return [
        recording for _, recording in sorted(recordings, key=lambda pair: (pair[0] - first + 2**31) % 2**32)
    ]


# ---- the record for the view


def source() -> str:
    """Return the hash of the code that is measured: the kernel, its configurations, and the recorder."""
    return provenance.source_hash(
        wgmma_gemm.SOURCE,
        wgmma_gemm.SOURCE.with_name("configs.py"),
        tensor_map,
        stamp_patch,
        read_stamps,
        prepare_recorder,
        record_config,
        find_product_cycles,
        _two_consumers,
        AloneConfig,
    )


experiment = functools.partial(results.experiment, source=source, can_run=experiments.has_wgmma)


@experiment("ch10_timeline")
def measure_timeline():
    """Record one CTA of each of CONFIGS at 4096 x 4096 x 1024. A row holds a recording, up to its second tile."""
    with patched_kernel(*CONFIGS.values()) as patched:
        recordings = [record_config(patched, name, config)[0] for name, config in CONFIGS.items()]
    return [
        {
            "name": each["name"],
            "status": "ok",
            "idle_share": timeline.find_idle_share(each),
            "recording": timeline.keep_tiles(each, TILES_SHOWN),
        }
        for each in recordings
    ]


def load_recordings() -> tuple[list[dict], str]:
    """Return recordings and their label: live on a GPU with wgmma, else of the record `ch10_timeline`, else of
    `ch10_gemm_timeline`. They hold the cost of the stamps and the profiler's idle share where these are recorded."""
    try:
        found = measure_timeline()
    except FileNotFoundError:
        return read_record(experiments.measure_timeline())
    recordings = [row["recording"] for row in found.rows]
    for experiment, key in (("ch10_timeline_overhead", "overhead"), ("ch10_timeline_idle", "idle_profiler")):
        with contextlib.suppress(FileNotFoundError):
            known = {row["name"]: row.get(key) for row in results.load(experiment)["rows"]}
            recordings = [each | {key: known.get(each["name"])} for each in recordings]
    return recordings, found.label()


def read_record(record: results.Record) -> tuple[list[dict], str]:
    """Return recordings, and their label, from the record `ch10_gemm_timeline`, which has a row per event."""
    titles = {
        "tile": "1 stage",
        "ring": "4 stages",
        "warp_specialized": "a producer",
        "persistent": "persistent",
    }
    recordings = []
    for name, config in experiments.TIMELINE_CONFIGS.items():
        rows = [
            {
                "lane": row["role"],
                "kind": row["event"],
                "begin": row["begin"],
                "end": row["end"],
                "tile": row["tile"],
                "step": None if row["event"] == "store" else row["step"],
            }
            for row in record.rows
            if row["name"] == name
        ]
        if rows:
            recordings.append(
                timeline.make_recording(
                    titles[name],
                    rows,
                    stages=config.stages,
                    gpu=record.device["name"],
                    date=record.data["recorded"][:10],
                    config=str(config),
                    product_cycles=find_product_cycles(config),
                )
            )
    return recordings, record.label()


def draw_still(recordings: list[dict], names: list[str], until: int, origin: str) -> plots.Picture:
    """Return a picture of the first `until` cycles of the recordings in `names`, a row for each warp role."""
    rows = []
    for recording in (each for each in recordings if each["name"] in names):
        for event in timeline.as_rows(recording):
            lane = (
                recording["name"] if len(recording["lanes"]) == 1 else f"{recording['name']}: {event['lane']}"
            )
            if event["end"] <= until:
                rows.append({**event, "role": lane, "event": event["kind"]})
    idle = ", ".join(
        f"{timeline.find_idle_share(each):.0%} of the time with {each['name']}"
        for each in recordings
        if each["name"] in names
    )
    picture = figures.draw_timeline(
        rows, title=f"What one CTA does in its first {until:,} cycles", source=origin
    )
    picture.axes[0].set_xlabel(
        "cycles since the first bar began; the number in a bar is its step", fontsize=8
    )
    return picture.describe(
        f"A row for each warp role of one CTA in its first {until:,} cycles: its loads, waits, products and stores. "
        f"The clock begins with the first bar. Over the whole recording the tensor core is idle for {idle}."
    )


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
    with patched_kernel(*MEASURED.values()) as patched:
        for name, config in MEASURED.items():
            candidates = {
                "plain": lambda a, b, out, config=config: wgmma_gemm.build_launch(a, b, out, config),
                "every CTA": _prepare_stamped(patched, config, ALL_SMS),
                "one SM": _prepare_stamped(patched, config, 0),
            }
            found = bench.compare(
                candidates, lambda: experiments.make_inputs(*OVERHEAD_SHAPE), "plain", **TIMING
            )
            every, one = found["every CTA"], found["one SM"]
            row = {**every.row(), "name": name, "config": str(config), "shape": list(OVERHEAD_SHAPE)}
            if every.ratio and one.ratio:
                row |= {"overhead": 1 / every.ratio - 1, "overhead_one_sm": 1 / one.ratio - 1}
            rows.append(row)
    return rows


def _launch(launch, stamps) -> None:
    """Launch a kernel that writes `stamps`, which live as long as this function's partial."""
    launch()


def _prepare_stamped(patched: pathlib.Path, config: WgmmaConfig, watched: int):
    return lambda a, b, out: functools.partial(
        _launch, *prepare_recorder(patched, a, b, out, config, watched)
    )


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
    without stamps. `points` is the difference in percentage points. `without_products` is the share of the time in
    which no products were in flight.
    """
    build.compile_ahead(map(wgmma_gemm.job, MEASURED.values()))
    command = [sys.executable, "-m", "ch10.wgmma_gemm.lesson.timeline"]
    counted = profiler.profile_launches(command, list(MEASURED), METRICS)
    with patched_kernel(*MEASURED.values()) as patched:
        recorded = [record_config(patched, name, config, cold=True) for name, config in MEASURED.items()]
    rows = []
    for (name, config), row, recordings in zip(MEASURED.items(), counted, recorded):
        # The CTAs of one SM follow each other. The profiler does not count the cycles between two CTAs.
        length = sum(recording["length"] for recording in recordings)
        idle = sum(timeline.find_idle_share(each) * each["length"] for each in recordings) / length
        alone = (
            sum(timeline.find_share_without_products(each) * each["length"] for each in recordings) / length
        )
        by_profiler = 1 - row["busy_percent"] / 100
        rows.append(
            {
                "name": name,
                "config": str(config),
                "shape": list(SHAPE),
                "status": "ok",
                "ctas": len(recordings),
                "idle": idle,
                "without_products": alone,
                "idle_profiler": by_profiler,
                "points": 100 * (idle - by_profiler),
                "cycles": length,
                "active_cycles": row["active_cycles"],
                "us": row["ns"] / 1e3,
            }
        )
    return rows


def launch_all() -> None:
    """Launch the kernel of each of MEASURED once for the profiler to watch."""
    for config in MEASURED.values():
        a, b, out = experiments.make_inputs(*SHAPE)
        profiler.launch_watched(functools.partial(wgmma_gemm.build_launch(a, b, out, config)))


if __name__ == "__main__":
    launch_all()
