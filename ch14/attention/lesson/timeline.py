"""A recording of the attention kernel for the timeline view, made by Proton, the profiler that comes with Triton.

A patched copy of `hopper_kernel` opens and closes Proton's scopes around waits, loads and products. Proton stamps them
with the SM's clock into shared memory, for one warp of each role, and writes a Chrome trace, which `read_trace` turns
into a recording. Source: Triton 3.6 and 3.7, triton/profiler (language.py, hooks/instrumentation.py, mode.py).

`python -m ch14.attention.lesson.timeline` tries it step by step and says what works; `--json FILE` keeps the recording.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import torch
import triton

from ch10.wgmma_gemm.lesson import figures
from ch14 import attention
from ch14.attention import hopper_kernel
from ch14.attention.configs import AttentionConfig, configs
from tilelab import cli
from tilelab.measure.patch import patched_source
from tilelab.pictures import plots
from tilelab.records import results, timeline
from tilelab.runtime import device, provenance, worker_pool

CONFIG = configs(128)["persistent"]
SHAPE = (
    1,
    16,
    2048,
    128,
)  # batch, heads, length, features: 256 tiles of 128 queries, each with 16 blocks of keys
# The role of each warp that is stamped. Triton gives the producer one of the four warps after the consumers'.
ROLES = {0: "consumer 0", 4: "consumer 1", **dict.fromkeys(range(8, 12), "producer")}
# Stamps lie in the shared memory that the kernel leaves free: 512 for each of six warps, with clocks of 32 bits. If all
# 12 warps were stamped, 256 for each would be too few, and Proton would drop the oldest.
MODE = (
    f"default:sampling_strategy=selective:sampling_options={','.join(map(str, ROLES))}:optimizations=clock32"
)
PRODUCT_CYCLES = 512  # 64 x 128 x 128 at 4,096 operations per cycle: Q K^T and P V of a block take the same
LIMIT_S = 90  # of the process that records


# ---- the patched kernel


def scope_patch() -> list[tuple[str, str, int]]:
    """Return the replacements that put Proton's scopes into hopper_kernel.py. A scope is named "KIND TILE BARRIER"."""

    def scope(
        name: str,
        indent: int,
        code: str,
        count: int = 1,
        begins: bool = True,
        ends: bool = True,
        closes_at: int | None = None,
    ):
        space, outer = "\n" + " " * indent, "\n" + " " * (indent if closes_at is None else closes_at)
        first, last = f'{space}pl.enter_scope("{name}")' * begins, f'{outer}pl.exit_scope("{name}")' * ends
        return f"{space}{code}\n", f"{first}{space}{code}{last}\n", count

    begin, end = functools.partial(scope, ends=False), functools.partial(scope, begins=False)
    return [
        (
            "from ch14.attention.kernels import LOWEST",
            "from triton.profiler import language as pl\n\nfrom ch14.attention.kernels import LOWEST",
            1,
        ),
        # The loading warp.
        scope("wait q empty", 16, "mbarrier.wait(queries.empty.index(tile_of_q), q_state.phase)"),
        begin("load q", 16, "mbarrier.expect(queries.full.index(tile_of_q), q_desc.block_type.nbytes)"),
        end("load q", 48, "queries.full.index(tile_of_q), queries.tiles.index(tile_of_q))", closes_at=16),
        scope("wait k empty", 16, "mbarrier.wait(keys.empty.index(stage), state.phase)"),
        begin(
            "load k",
            16,
            "mbarrier.expect(keys.full.index(stage), (2 if JOINT else 1) * k_desc.block_type.nbytes)",
        ),
        end(
            "load k",
            16,
            "tma.async_copy_global_to_shared(k_desc, origin, keys.full.index(stage), "
            "keys.tiles.index(stage))",
        ),
        scope("wait v empty", 20, "mbarrier.wait(values.empty.index(stage), state.phase)"),
        scope(
            "load v",
            16,
            "tma.async_copy_global_to_shared(v_desc, origin, values.full.index(stage), "
            "values.tiles.index(stage))",
        ),
        # The groups that multiply: before the loop over blocks, in it, and after it.
        scope("wait q full", 12, "mbarrier.wait(queries.full.index(tile_of_q), q_state.phase)"),
        scope("wait k full", 12, "mbarrier.wait(keys.full.index(state.stage), state.phase)"),
        begin("product k", 12, "s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)"),
        end("product k", 12, "s = warpgroup_mma_wait(0, [s])"),
        scope("wait k full", 16, "mbarrier.wait(keys.full.index(state.stage), state.phase)"),
        begin("product k", 20, "s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)", 2),
        scope("wait v full", 24, "mbarrier.wait(values.full.index(last.stage), last.phase)", 2),
        begin("product v", 20, "acc = warpgroup_mma(p, v, acc, is_async=True)", 2),
        end(
            "product k",
            16,
            "s = warpgroup_mma_wait(1 if OVERLAP else 0, [s])  # with OVERLAP the product P V is "
            "still running",
        ),
        end("product v", 20, "acc = warpgroup_mma_wait(0, [acc])", 2),
        scope("wait v full", 16, "mbarrier.wait(values.full.index(state.stage), state.phase)"),
        scope(
            "product v",
            12,
            "acc = warpgroup_mma(p, values.tiles.index(state.stage).reshape([BLOCK_N, D]), acc)",
        ),
        begin(
            "store", 12, "acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, o_layout))[:, None]"
        ),
        end("store", 44, "o_tiles.index(GROUP))", closes_at=12),
    ]


def import_copy(path: pathlib.Path):
    """Return the module of a patched copy of hopper_kernel.py."""
    spec = importlib.util.spec_from_file_location("hopper_kernel_with_scopes", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(
        spec
    )  # Triton looks its source up there
    spec.loader.exec_module(module)
    return module


def launch_copy(module, q, k, v, out, config: AttentionConfig = CONFIG) -> None:
    """Launch the kernel of `module` through Triton, without a causal mask, as `attention.prepare` would."""
    batch, heads, length, d = q.shape
    row_blocks = triton.cdiv(length, config.block_m)
    items = row_blocks * batch * heads
    grid = (min(items, device.current().sms) if config.persistent else items,)
    rows = attention._query_rows(config)
    descriptors = [
        attention._describe(tensor, height, True)
        for tensor, height in ((q, rows), (k, config.block_n), (v, config.block_n), (out, rows))
    ]
    constants, options = attention._compile_options(config, False)
    module.attention_hopper_kernel[grid](
        *descriptors,
        d**-0.5 * attention.LOG2_E,
        items,
        k.shape[2],
        row_blocks,
        heads,
        heads // k.shape[1],
        **constants,
        **options,
    )


# ---- Proton


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
    """Run the patched kernel under Proton. Return its Chrome trace, and the share by which the scopes lengthen it.

    `say` is told each step that has worked. The share is None if CUPTI does not time a kernel under Proton.
    Raises RuntimeError if the result is wrong or no trace was written.
    """
    from triton import profiler as proton

    say(f"Triton {triton.__version__} has Proton")
    q, k, v = (torch.randn(SHAPE, device="cuda").bfloat16() for _ in range(3))
    expected = attention.attention(q, k, v, config=CONFIG)  # also fills L2
    plain_us = time_kernel(functools.partial(launch_copy, hopper_kernel, q, k, v, torch.empty_like(q)))
    out = torch.empty_like(q)
    with (
        tempfile.TemporaryDirectory() as folder,
        patched_source(pathlib.Path(hopper_kernel.__file__), *scope_patch()) as patched,
    ):
        module = import_copy(patched)
        say("the patched kernel can be imported")
        session = proton.start(f"{folder}/trace", backend="instrumentation", data="trace", mode=MODE)
        say("Proton has started")
        try:
            launch_copy(module, q, k, v, out)
            torch.cuda.synchronize()
            say("the kernel with scopes has run")
        finally:
            proton.finalize(session)
        session = proton.start(f"{folder}/timed", backend="instrumentation", data="trace", mode=MODE)
        try:
            with_scopes_us = time_kernel(functools.partial(launch_copy, module, q, k, v, out))
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
    """Return the recording of the first CTA in Proton's Chrome trace of the patched kernel.

    The ring has a stage for each tile of K and of V, and one for Q. Proton writes cycles as if the clock were 1 GHz, in
    microseconds. ValueError for a trace without the scopes that the patch opens.
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
        rows += _read_lane(ROLES[warp], sorted(lane, key=lambda event: event["ts"]), zero, stages)
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
        hopper_kernel,
        AttentionConfig,
        configs,
        scope_patch,
        launch_copy,
        time_kernel,
        record_trace,
        read_trace,
        _read_lane,
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
    return [
        {
            **row,
            "status": "ok",
            "idle_share": timeline.find_idle_share(recording),
            "recording": timeline.keep_tiles(recording, 2),
        }
    ]


def load_recording() -> tuple[dict, str]:
    """Return a recording of the kernel and its label: live on a Hopper GPU, else of `ch14_attention_timeline`.

    Where Proton does not work, the recording is that of the record.
    """
    found = measure_timeline()
    if found.rows[0]["status"] != "ok":
        found = results.load_record("ch14_attention_timeline", source())
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


def draw_still(recording: dict, until: int, origin: str) -> plots.Picture:
    """Return a picture of the first `until` cycles, with a row for each role. A product bears its block's number."""
    rows = [
        {**row, "role": row["lane"], "event": row["kind"]}
        for row in timeline.as_rows(recording)
        if row["end"] <= until
    ]
    return figures.draw_timeline(rows, title="What one program does, and when", source=origin).describe(
        f"A row for each warp role of one program, over {until:,} cycles: its loads, waits, products and stores. The "
        f"products of the two consumers overlap. A block takes {find_block_cycles(recording):,.0f} cycles."
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
        print(f"{parser.prog}: the kernel needs a Hopper GPU; here is {here.describe()}.", file=sys.stderr)
        return 2
    try:
        trace, overhead = record_trace(lambda text: print(f"ok: {text}", flush=True))
        if options.trace:
            pathlib.Path(options.trace).write_text(json.dumps(trace))
        print(
            f"ok: the trace has {len(trace['traceEvents']):,} events, the first is {trace['traceEvents'][0]}"
        )
        recording = read_trace(trace, gpu=here.name, date=provenance.utc_now()[:10]) | {"overhead": overhead}
        print(
            f"ok: the recording has {len(recording['events']):,} events over {recording['length']:,} cycles"
        )
        print(timeline.make_table([recording]))
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(recording))
    except Exception as error:
        print(f"failed: {type(error).__name__}: {device.first_line(error)[:300]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
