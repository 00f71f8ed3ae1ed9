"""Record what each warp role of a CTA does and when, and show it as a table.

A recording is a dict that JSON can hold:

    name, config      the kernel and its configuration.
    gpu, date, ghz    the GPU, the day, and the SM's clock during the recording. An unknown clock is None.
    stages            the number of stages of the ring.
    barriers          ["full", "empty"], or ["full"] where the warps that multiply also load.
    lanes             the warp roles in the order of their rows, such as ["producer", "consumer 0", "consumer 1"].
    length            the cycles from the beginning of the recording, cycle 0, to its end.
    events            lists with the values of FIELDS, sorted by the cycle in which they begin.
    fills             lists with the values of FILL_FIELDS. A fill is a load of one stage, and its use.
    tensor            [begin, end] of each time in which the tensor core works (`find_busy`).

Four entries are optional: `stage_names`, where a ring holds more than one kind of tile; `step_name`, another word for a
step; `overhead`, the share by which the stamps lengthen the kernel; `idle_profiler`, the idle share of the tensor core
that the profiler counts.

An event is of one of four KINDS. "load" is the time in which a thread issues loads by TMA. "wait" is a wait for a
barrier; its `stage` and `phase` are what the wait asks for, and `barrier` is "full" or "empty". "product" lasts from
the issue of products to the moment at which the warps know that they have finished. "store" is the epilogue. `step`
counts steps along K within a tile, and `tile` counts the tiles of the CTA. An unknown value is None.

The time at which a load has landed is not stamped: only a wait that returns shows it. `landed` is therefore an
estimate, the time of the issue plus the shortest latency of the recording, and never later than `seen`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tilelab.records import results

KINDS = {"load": "TMA issue", "wait": "barrier wait", "product": "product", "store": "epilogue"}
FIELDS = ("lane", "kind", "begin", "end", "step", "tile", "stage", "phase", "barrier")
# A stage is filled with this step of this tile. It is full in this phase of its barrier, from `landed` to `freed`.
FILL_FIELDS = ("stage", "phase", "step", "tile", "issued", "landed", "seen", "freed")
LANE, KIND, BEGIN, END, STEP, TILE, STAGE, PHASE, BARRIER = range(len(FIELDS))


def make_recording(
    name: str,
    rows: Iterable[dict],
    *,
    stages: int,
    gpu: str,
    date: str,
    config: str = "",
    ghz: float | None = None,
    product_cycles: float | None = None,
    length: int | None = None,
) -> dict:
    """Return a recording of `rows`, dicts with lane, kind, step, tile, and begin and end in cycles.

    A row may lack its stage and phase. They then follow from the order of the steps in a ring of `stages`. `length` is
    the cycle in which the recording ends, by default the end of the last row. `product_cycles` are the cycles that the
    tensor core needs for the products of one row at its full rate; without it, it counts as busy while products are in
    flight. ValueError for an unknown kind or an event that ends before it begins.
    """
    rows = [dict.fromkeys(FIELDS) | row for row in rows]
    for row in rows:
        if row["kind"] not in KINDS:
            raise ValueError(f"unknown kind {row['kind']!r} in {name}; choose one of {', '.join(KINDS)}.")
        if row["end"] < row["begin"]:
            raise ValueError(f"an event of {name} ends at {row['end']}, before it begins at {row['begin']}.")
    lanes = sorted({row["lane"] for row in rows}, key=lambda lane: (lane != "producer", lane))
    has_producer = "producer" in lanes
    for lane in lanes:
        for kind in ("load", "wait", "product"):
            mine = sorted(
                (row for row in rows if row["lane"] == lane and row["kind"] == kind),
                key=lambda row: (row["tile"] or 0, row["step"] or 0),
            )
            for count, row in enumerate(mine):
                if kind == "wait" and row["barrier"] is None:
                    row["barrier"] = "empty" if lane == "producer" else "full"
                empty = kind == "wait" and row["barrier"] == "empty"
                if row["stage"] is None:  # a wait for an empty stage asks for the phase before
                    row["stage"], row["phase"] = count % stages, (count // stages + empty) % 2
    rows.sort(key=lambda row: (row["begin"], row["end"]))
    last = max((row["end"] for row in rows), default=0)
    events = [[lanes.index(row["lane"]), *(row[field] for field in FIELDS[1:])] for row in rows]
    return {
        "name": name,
        "config": config,
        "gpu": gpu,
        "date": date,
        "ghz": ghz,
        "stages": stages,
        "barriers": ["full", "empty"] if has_producer else ["full"],
        "lanes": lanes,
        "length": max(last, length or 0),
        "fields": list(FIELDS),
        "events": events,
        "fills": find_fills(events),
        "tensor": find_busy(events, product_cycles),
    }


def as_rows(recording: dict) -> list[dict]:
    """Return the events as dicts, each with the name of its lane."""
    lanes = recording["lanes"]
    return [dict(zip(FIELDS, event)) | {"lane": lanes[event[LANE]]} for event in recording["events"]]


def find_fills(events: Sequence[Sequence]) -> list[list]:
    """Return the fills of the stages, in the order of the loads, from events with the values of FIELDS.

    Without events of kind "load", a stage is filled again as soon as its products have finished, as a warp group does
    that both loads and multiplies.
    """
    issued, seen, freed, phases = {}, {}, {}, {}  # by tile, step and stage
    for event in events:
        key = event[TILE], event[STEP], event[STAGE]
        if event[KIND] == "load":
            issued[key] = max(event[END], issued.get(key, 0))
        elif event[KIND] == "wait" and event[BARRIER] == "full":
            seen[key] = min(event[END], seen.get(key, math.inf))
        elif event[KIND] == "product":
            freed[key] = max(event[END], freed.get(key, 0))
            seen.setdefault(key, event[BEGIN])
        if event[KIND] in ("load", "product"):
            phases[key] = event[PHASE]
    order = sorted(phases, key=lambda key: tuple(value or 0 for value in key))
    stamped, last, known_latencies = set(issued), {}, []
    for key in order:
        # The first loads of a ring without stamps of loads were issued before cycle 0.
        known = key in stamped or key[2] in last
        issued.setdefault(key, last.get(key[2], 0))
        last[key[2]] = freed.get(key, issued[key])
        if known and seen.get(key, 0) > issued[key]:
            known_latencies.append(seen[key] - issued[key])
    latency, fills = min(known_latencies, default=0), []
    for key in order:
        tile, step, stage = key
        landed = min(issued[key] + latency, seen.get(key, math.inf))
        fills.append([stage, phases[key], step, tile, issued[key], landed, seen.get(key), freed.get(key)])
    return fills


def find_busy(events: Sequence[Sequence], product_cycles: float | None = None) -> list[list]:
    """Return [begin, end] of each time in which the tensor core works, in cycles.

    The tensor core takes products in the order of their issue. The products of an event begin when they are issued and
    the products before them have ended. They take `product_cycles`, but end no later than the event. Without
    `product_cycles`, the tensor core works while products are in flight.
    """
    busy, done = [], 0
    for event in events:
        if event[KIND] != "product":
            continue
        begin = event[BEGIN] if product_cycles is None else min(max(event[BEGIN], done), event[END])
        end = event[END] if product_cycles is None else min(begin + product_cycles, event[END])
        if busy and begin <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], round(end))
        elif end > begin:
            busy.append([round(begin), round(end)])
        done = max(done, end)
    return busy


def _find_covered_share(recording: dict, pairs: Iterable[Sequence]) -> float:
    """Return the share of the recording that intervals [begin, end] cover together, up to the recording's end."""
    length, covered, last = max(recording["length"], 1), 0, 0
    for begin, end in sorted(pairs):
        end = min(end, length)
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered / length


def find_idle_share(recording: dict) -> float:
    """Return the share of the recording in which the tensor core does not work, from 0 to 1."""
    return 1 - _find_covered_share(recording, recording["tensor"])


def summarise(recording: dict, others: Sequence[dict] = ()) -> list[dict]:
    """Return a row for each lane: the share of the recording, in percent, that each kind of event covers.

    `others` are rows with lane, begin, end and a kind of their own, which get a column too.

    The last row is of the tensor core, with the share in which it is idle. Events of one lane may overlap: products
    are in flight while the warps wait.
    """
    kinds = [*KINDS, *dict.fromkeys(row["kind"] for row in others)]
    unknown = {f"{kind} %": None for kind in kinds} | {"idle, this CTA %": None}
    events = [*as_rows(recording), *others]
    rows = []
    for lane in recording["lanes"]:
        row = {"recording": recording["name"], "lane": lane, **unknown}
        for kind in kinds:
            mine = (event for event in events if (event["lane"], event["kind"]) == (lane, kind))
            share = 100 * _find_covered_share(recording, ((event["begin"], event["end"]) for event in mine))
            row[f"{kind} %"] = round(share, 1) if share else None
        rows.append(row)
    idle = {"recording": recording["name"], "lane": "tensor core", **unknown}
    idle["idle, this CTA %"] = round(100 * find_idle_share(recording), 1)
    return [*rows, idle]


def make_table(recordings: Sequence[dict], others: Sequence[dict] = ()) -> results.Table:
    """Return a Table of `summarise` of each recording and `others`, with a caption that says where they come from.

    The caption has the cost of each recording and the profiler's idle share where they are known, and the rows of a
    single recording do without its name.
    """
    caption = "; ".join(dict.fromkeys(f"{each['gpu']}, {each['date']}" for each in recordings))
    rows = [row for each in recordings for row in summarise(each, others)]
    if len(recordings) == 1:
        rows = [{key: value for key, value in row.items() if key != "recording"} for row in rows]
    for key, words in (
        ("overhead", "recording costs"),
        ("idle_profiler", "idle over all CTAs, by the profiler,"),
    ):
        known = [f"{100 * each[key]:.1f} %" for each in recordings if each.get(key) is not None]
        caption += f"; {words} {', '.join(known)}" if known else ""
    return results.table(rows, f"share of the recorded time; {caption}")


def keep_tiles(recording: dict, tiles: int) -> dict:
    """Return the recording up to the end of its first `tiles` tiles, which keeps a notebook small.

    The recording then ends with the last event of these tiles. Events of later tiles stay if they begin before,
    and may end after it: shares count them up to the end of the recording.
    """
    end = max((event[END] for event in recording["events"] if (event[TILE] or 0) < tiles), default=0)
    if end >= max((event[END] for event in recording["events"]), default=0):
        return recording
    events = [event for event in recording["events"] if event[BEGIN] < end]
    kept = {(event[TILE], event[STEP]) for event in events}
    return {
        **recording,
        "length": end,
        "events": events,
        "fills": [fill for fill in recording["fills"] if (fill[3], fill[2]) in kept],
        "tensor": [[begin, min(last, end)] for begin, last in recording["tensor"] if begin < end],
    }
