"""A recording of the attention kernel for the timeline view, made by Proton, the profiler that comes with Triton.

`hopper_kernel` enters and leaves scopes around waits, loads, products and stores. They are instructions only in what
Triton compiles while Proton records. Proton stamps them with the SM's clock into shared memory, for one warp of each
role, and writes a Chrome trace, which `read_trace` turns into a recording. Source: Triton 3.6 and 3.7, triton/profiler
(language.py, hooks/instrumentation.py, mode.py).

`python -m ch14.attention.lesson.timeline` tries it step by step and says what works; `--json FILE` keeps the recording.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import torch

from ch10.wgmma_gemm.lesson import figures
from ch14 import attention
from ch14.attention import hopper_kernel
from ch14.attention.configs import AttentionConfig, configs
from tilelab import cli
from tilelab.pictures import plots
from tilelab.records import results, timeline
from tilelab.runtime import device, provenance, worker_pool

CONFIG = configs(128)["persistent"]
# Batch, heads, length, features: 256 tiles of 128 queries, each with 16 blocks of keys.
SHAPE = (1, 16, 2048, 128)
# The role of each warp that is stamped. Triton gives the producer one of the four warps after the consumers'.
ROLES = {0: "consumer 0", 4: "consumer 1", **dict.fromkeys(range(8, 12), "producer")}
# Stamps lie in the shared memory that the kernel leaves free: 512 for each of six warps, with clocks of 32 bits. If all
# 12 warps were stamped, 256 for each would be too few, and Proton would drop the oldest. Beside a second tile of Q it
# would be 32.
MODE = (
    f"default:sampling_strategy=selective:sampling_options={','.join(map(str, ROLES))}:optimizations=clock32"
)
PRODUCT_CYCLES = 512  # 64 x 128 x 128 at 4,096 operations per cycle: Q K^T and P V of a block take the same
LIMIT_S = 90  # of the process that records


def launch(q, k, v, out, config: AttentionConfig = CONFIG) -> None:
    """Launch the kernel through Triton, without a causal mask: Proton sees no other launches.

    It has one tile of Q instead of two, so there is room for the stamps. It does not start early: Proton clears its
    buffer just before.
    """
    kernel, grid, arguments, options = attention.bind(q, k, v, out, False, None, config)
    kernel[grid](**arguments, **{**options, "Q_STAGES": 1, "launch_pdl": False})


def time_kernel(launch) -> float | None:
    """Return the shortest of five times that the kernel of `launch` takes, in microseconds; None if it is unknown."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            launch()
        torch.cuda.synchronize()
    return min(
        (event.device_time for event in profile.events() if "attention_hopper_kernel" in event.name),
        default=None,
    )


def record_trace(say=lambda text: None) -> tuple[dict, float | None]:
    """Run the kernel under Proton. Return its Chrome trace, and the share by which the scopes lengthen the kernel.

    `say` is told each step that has worked. The share is None if CUPTI does not time a kernel under Proton.
    Raises RuntimeError if the result is wrong or no trace was written.
    """
    import triton.profiler.language  # hopper_kernel.enter_scope looks for it
    from triton import profiler as proton

    say(f"Triton {triton.__version__} has Proton")
    q, k, v = (torch.randn(SHAPE, device="cuda").bfloat16() for _ in range(3))
    expected = attention.attention(q, k, v, config=CONFIG)  # also fills L2
    out = torch.empty_like(q)
    run = functools.partial(launch, q, k, v, out)
    plain_us = time_kernel(run)
    out.zero_()
    with tempfile.TemporaryDirectory() as folder:
        session = proton.start(f"{folder}/trace", backend="instrumentation", data="trace", mode=MODE)
        say("Proton has started")
        try:
            run()
            torch.cuda.synchronize()
            say("the kernel with scopes has run")
        finally:
            proton.finalize(session)
        session = proton.start(f"{folder}/timed", backend="instrumentation", data="trace", mode=MODE)
        try:
            with_scopes_us = time_kernel(run)
        finally:
            proton.finalize(session)
        paths = sorted(pathlib.Path(folder).glob("*"))
        say(f"Proton has written {', '.join(path.name for path in paths) or 'nothing'}")
        if not torch.equal(out, expected):
            raise RuntimeError("the kernel with scopes computes something else than the kernel without them.")
        found = next((path for path in paths if path.name == "trace.chrome_trace"), None)
        if found is None:
            raise RuntimeError("Proton wrote no file trace.chrome_trace.")
        known = plain_us and with_scopes_us
        return json.loads(found.read_text()), with_scopes_us / plain_us - 1 if known else None


def read_trace(trace: dict, stages: int = CONFIG.num_stages, gpu: str = "", date: str = "") -> dict:
    """Return the recording of the first CTA in Proton's Chrome trace.

    The ring has a stage for each tile of K and of V, and one for Q. Proton writes cycles as if the clock were 1 GHz, in
    microseconds. ValueError for a trace without the kernel's scopes, or without the first of them.
    """
    events = [
        event
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event["name"].split()[0] in timeline.KINDS
    ]
    if not events:
        raise ValueError(f"the trace has no event of {', '.join(timeline.KINDS)}.")

    def find_number(event, key, pattern):
        found = re.search(pattern, str(event[key]))
        return int(found[1]) if found else 0

    first = min(find_number(event, "pid", r"CTA\s*(\d+)") for event in events)
    lanes: dict[int, list] = {}
    for event in events:
        if find_number(event, "pid", r"CTA\s*(\d+)") == first:
            lanes.setdefault(find_number(event, "tid", r"warp\s*(\d+)"), []).append(event)
    if not lanes.keys() <= ROLES.keys():
        raise ValueError(
            f"the trace has events of the warps {sorted(lanes)}; the roles are those of {list(ROLES)}."
        )
    zero = min(event["ts"] for lane in lanes.values() for event in lane)
    rows = []
    for warp, lane in lanes.items():
        lane.sort(key=lambda event: event["ts"])
        if lane[0]["name"].split()[1:2] != ["q"]:  # each role begins with a wait for Q
            raise ValueError(f"Proton has dropped the first events of the {ROLES[warp]}.")
        rows += _read_lane(ROLES[warp], lane, zero, stages)
    recording = timeline.make_recording(
        "attention",
        rows,
        stages=2 * stages + 1,
        gpu=gpu,
        date=date,
        config=f"{CONFIG}, length {SHAPE[2]:,}",
        product_cycles=PRODUCT_CYCLES,
    )
    names = [f"{tile} {stage}" for tile in "KV" for stage in range(stages)]
    return {**recording, "stage_names": [*names, "Q"], "step_name": "block"}


def _read_lane(lane: str, events: list[dict], zero: float, stages: int) -> list[dict]:
    """Return the rows of one role. The n-th event of a scope is of the n-th tile of K or V that the role sees."""
    rows, counts, queries, base = [], {}, 0, {}
    for event in events:
        kind, what, barrier = [*event["name"].split(), "", ""][:3]
        begin = round(1000 * (event["ts"] - zero))
        row = {
            "lane": lane,
            "kind": kind,
            "begin": begin,
            "end": begin + round(1000 * event["dur"]),
            "step": None,
        }
        if barrier:
            row["barrier"] = barrier
        count = counts[event["name"]] = counts.get(event["name"], -1) + 1
        if what == "q":  # the producer waits for and loads the rows of both consumers
            queries = count // 2 if lane == "producer" else count
            row |= {"stage": 2 * stages, "phase": (queries + (barrier == "empty")) % 2}
        elif what:
            start = base.setdefault((event["name"], queries), count)
            row |= {
                "stage": count % stages + stages * (what == "v"),
                "step": count - start,
                "phase": (count // stages + (barrier == "empty")) % 2,
            }
        rows.append(row | {"tile": queries})
    return rows


# ---- the experiment


def source() -> str:
    """Return the hash of the code that is measured."""
    return provenance.source_hash(
        hopper_kernel, AttentionConfig, configs, launch, time_kernel, record_trace, read_trace, _read_lane
    )


@results.experiment("ch14_attention_timeline", source, can_run=lambda: device.current().has_wgmma)
def measure_timeline():
    """Record one CTA of the kernel at SHAPE, in a process of its own; a row holds the recording, up to its second tile.

    Where Proton does not work, the row has the status "failed" and a reason.
    """
    row = {"name": "attention", "config": str(CONFIG), "shape": list(SHAPE)}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "recording.json")
        command = [sys.executable, "-m", "ch14.attention.lesson.timeline", "--json", str(path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=worker_pool.ROOT, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return [{**row, "status": "failed", "reason": f"no recording within {LIMIT_S} s"}]
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
            return [{**row, "status": "failed", "reason": said[-1][:300]}]
        recording = json.loads(path.read_text())
    row |= {"status": "ok", "idle_share": timeline.find_idle_share(recording)}
    return [row | {"recording": timeline.keep_tiles(recording, 2)}]


def load_recording() -> tuple[dict, str]:
    """Return a recording of the kernel and its label: live on a Hopper GPU, else of `ch14_attention_timeline`.

    The record's recording also serves where Proton does not work, and with TILES_QUICK.
    """
    found = measure_timeline.load() if os.environ.get("TILES_QUICK") else measure_timeline()
    if found.rows[0]["status"] != "ok":
        found = measure_timeline.load()
    return found.rows[0]["recording"], found.label()


def find_block_cycles(recording: dict) -> float:
    """Return the median time, in cycles, from one product Q K^T of consumer 0 to the next of the same tile."""
    starts = [
        (row["tile"], row["begin"])
        for row in timeline.as_rows(recording)
        if (row["lane"], row["kind"]) == ("consumer 0", "product") and row["stage"] < CONFIG.num_stages
    ]
    return statistics.median(
        later - begin for (tile, begin), (same, later) in zip(starts, starts[1:]) if tile == same
    )


def find_softmax(recording: dict) -> list[dict]:
    """Return a row for each softmax of the consumers with the rescaling after it, which have no scope of their own.

    It begins where the consumer has waited for Q K^T, and ends at the consumer's next wait.
    """
    found, rows = [], timeline.as_rows(recording)
    for row in rows:
        if row["kind"] == "product" and row["stage"] < CONFIG.num_stages:
            waits = (each["begin"] for each in rows if each["lane"] == row["lane"] and each["kind"] == "wait")
            end = min((begin for begin in waits if begin >= row["end"]), default=row["end"])
            found.append({**row, "kind": "softmax", "begin": row["end"], "end": end})
    return found


def draw_still(recording: dict, origin: str) -> plots.Picture:
    """Return a picture of the change to the second tile, with a row for each role. A bar bears its block's number.

    It begins about four blocks before the first product of the second tile.
    """

    def name_event(row: dict) -> str:
        if row["kind"] != "product":
            return row["kind"]
        return "Q Kᵀ" if row["stage"] < CONFIG.num_stages else "P V"

    rows = [
        {**row, "role": row["lane"], "event": name_event(row)}
        for row in timeline.as_rows(recording) + find_softmax(recording)
    ]
    change = min(row["begin"] for row in rows if row["tile"] == 1 and row["kind"] == "product")
    block = find_block_cycles(recording)
    start, stop = 1000 * round((change - 4 * block) / 1000), round(change + 1.5 * block)
    rows = [  # of two bars that are cut at `start`, P V keeps the lower line
        {**row, "begin": max(row["begin"], start + (row["event"] == "P V")), "end": min(row["end"], stop)}
        for row in rows
        if row["begin"] < stop and row["end"] > start
    ]
    title = "A softmax runs under P V, except where the tile changes"
    picture = figures.draw_timeline(rows, title=title, source=origin)
    picture.axes[0].xaxis.set_major_formatter(lambda cycles, _: f"{cycles + start:,.0f}")
    events = [event for event in figures.TONES if any(row["event"] == event for row in rows)]
    stores = [f"{row['begin']:,} to {row['end']:,} ({row['role']})" for row in rows if row["kind"] == "store"]
    loads = [row["begin"] for row in rows if row["tile"] == 1 and row["kind"] == "load"]
    return picture.describe(
        f"A row for each of {', '.join(recording['lanes'])}, from cycle {start:,} to {stop:,} ({', '.join(events)}). "
        f"A block takes {block:,.0f} cycles. Stores of the first tile: {' and '.join(stores)}. The second tile: "
        f"loads from {min(loads):,}, products from {change:,}."
    )


def main(arguments: list[str] | None = None) -> int:
    """Record and say what works. Return 0; 1 with the error in the last line; or 2 for hardware that cannot run it."""
    parser = cli.make_plain_parser(
        "ch14.attention.lesson.timeline",
        "Record what each warp role of the attention kernel "
        "does, and when, with Triton's profiler Proton; needs a Hopper GPU.",
    )
    parser.add_argument("--json", metavar="FILE", help="write the recording here")
    parser.add_argument("--trace", metavar="FILE", help="write Proton's own trace here")
    options = parser.parse_args(arguments)
    here = device.current()
    if not here.has_wgmma:
        print(f"Nothing is recorded here ({here.describe()}): the kernel needs a Hopper GPU.")
        print(timeline.make_table([measure_timeline.load().rows[0]["recording"]]))
        return 0
    try:
        trace, overhead = record_trace(lambda text: print(f"ok: {text}", flush=True))
        if options.trace:
            pathlib.Path(options.trace).write_text(json.dumps(trace))
        print(f"ok: the trace has {len(trace['traceEvents']):,} events; the first: {trace['traceEvents'][0]}")
        recording = read_trace(trace, gpu=here.name, date=provenance.utc_now()[:10]) | {"overhead": overhead}
        print(f"ok: the recording has {len(recording['events']):,} events in {recording['length']:,} cycles")
        print(timeline.make_table([recording]))
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(recording))
    except Exception as error:
        print(f"failed: {type(error).__name__}: {device.first_line(error)[:300]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
