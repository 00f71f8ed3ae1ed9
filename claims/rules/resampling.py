"""Rules about the kernels that resample trajectories, and about TMA in kernels that are bound by memory."""

from __future__ import annotations

from claims.audits import resample as audit
from claims.judge import Evidence, Ruling, decide, leave_open, rule


def get_steps(evidence: Evidence) -> dict[str, float]:
    """Return the speed of the module's kernels over torch's copy at D = 128, by name."""
    rows = evidence("ch07_resample_ladder")
    return {row["name"]: row["ratio"] for row in rows if row["shape"][3] == 128}


def compare_rows_by_tma(evidence: Evidence) -> list[float]:
    """Return the speed of rows by TMA over plain loads of 16 bytes, for each length of a row."""
    speed = {(row["name"], *row["shape"]): row["ratio"] for row in evidence("ch07_resample_ladder")}
    return [
        ratio / speed["vectors", *shape] for (name, *shape), ratio in speed.items() if name == "bulk_rows"
    ]


def get_versions(evidence: Evidence) -> dict[str, float]:
    """Return the speed of the lesson's versions and of the note's over torch's copy, by name."""
    return {row["name"]: row["ratio"] for row in evidence("ch07_resample_searches", status="ok")}


def get_counters(evidence: Evidence) -> dict[str, dict]:
    """Return the counters of Nsight Compute, by kernel."""
    return {row["kernel"]: row for row in evidence("ch07_resample_ncu")}


@rule
def reads_less(evidence: Evidence, **said: float) -> Ruling:
    """Judge whether the kernel takes so many times the wavefronts of shared memory where all lanes search."""
    counted = {row["name"]: row["shared_load_wavefronts"] / 1e6 for row in evidence("ch07_resample_reads")}
    all_lanes, lane_0 = (
        counted[f"{who} searches, times in shared memory"] for who in (audit.EVERY_LANE, audit.LANE_0)
    )
    ratio = all_lanes / lane_0
    return decide(evidence.agrees(ratio, **said), all_lanes=all_lanes, lane_0=lane_0, ratio=ratio)


@rule
def search_gains(evidence: Evidence, **said: list[float]) -> Ruling:
    """Judge whether lane 0's search is so much faster than a search by all lanes, or by every thread."""
    variants = {
        (row["searches"], row["times"]): row["ratio"]
        for row in evidence("ch07_resample_searches", order=audit.NEIGHBOURS, status="ok")
        if " searches, " in row["name"]  # these variants differ in their search alone
    }
    over_lanes, over_threads, over_lanes_in_global = (
        variants[audit.LANE_0, where] / variants[who, where]
        for who, where in (
            (audit.EVERY_LANE, audit.SHARED),
            (audit.EVERY_THREAD, audit.SHARED),
            (audit.EVERY_LANE, audit.GLOBAL),
        )
    )
    return decide(
        evidence.agrees(over_lanes, **said),
        evidence.agrees(over_threads, **said),
        over_lanes=over_lanes,
        over_threads=over_threads,
        over_lanes_in_global=over_lanes_in_global,
    )


@rule
def phase_gains(evidence: Evidence) -> Ruling:
    """Judge whether Phase 1 gains so much. The note lacks the kernel before it; a search by every thread is known."""
    speed, counters = get_versions(evidence), get_counters(evidence)
    (first,) = evidence("ch07_resample_reads", name="search_per_thread")
    whole, chunks = (
        speed[name] / speed["search_per_thread"] for name in ("note_v2", "note_v2, a block per chunk")
    )
    before, after = counters["search_a_thread"], counters["lane0_search"]
    return leave_open(whole=whole, chunks=chunks, first=first, before=before, after=after)


@rule
def persistent_grid_is_faster(evidence: Evidence) -> Ruling:
    """Judge whether the note's grid is faster. The note names no size of a block; a block of 256 threads is known."""
    speed, steps = get_versions(evidence), get_steps(evidence)
    gain = speed["note_v2"] / speed["note_v2, a block per chunk"]
    return leave_open(gain=gain, best=steps["persistent"] / steps["vectors"])


@rule
def coalescing_gains(evidence: Evidence) -> Ruling:
    """Judge whether reads of neighbours by neighbours gain so much. The note names no other order; two are known."""
    rows = evidence("ch07_resample_searches", searches="one thread", status="ok")
    speed = {row["order"]: row["ratio"] for row in rows}
    others = {"every fourth element": audit.EVERY_FOURTH, "a row each": audit.A_ROW_PER_LANE}
    gains = {what: speed[audit.NEIGHBOURS] / speed[order] for what, order in others.items()}
    return leave_open(gains=[f"{gain:.2f} × over lanes that read {what}" for what, gain in gains.items()])


@rule
def reaches_bandwidth(evidence: Evidence, **said: list[float]) -> Ruling:
    """Judge whether a kernel of the course reaches this share of the DRAM's peak."""
    counters = get_counters(evidence)
    plain, tma = (counters[name]["dram_percent"] for name in ("vectors", "bulk_rows"))
    return decide(evidence.agrees(max(plain, tma), **said), plain=plain, tma=tma)


@rule
def tma_is_needed(evidence: Evidence, **said: list[float]) -> Ruling:
    """Judge whether no kernel without TMA reaches this share of the DRAM's peak."""
    reached = get_counters(evidence)["vectors"]["dram_percent"]
    needed = not evidence.agrees(reached, **said)  # before a timing is read, for the margin of counters
    return decide(needed, reached=reached, gains=compare_rows_by_tma(evidence))


@rule
def is_memory_bound(evidence: Evidence) -> Ruling:
    """Judge whether DRAM is nearer to its peak than the issue slots, with the note's search or with a shared one."""
    counters = get_counters(evidence)
    note, shared = counters["lane0_search"], counters["vectors"]
    first, last = (evidence.is_better(row["dram_percent"], row["issue_percent"]) for row in (note, shared))
    return decide(first, last, note=note, shared=shared)


@rule
def tma_pays_below(evidence: Evidence) -> Ruling:
    """Judge whether TMA gains below a share of DRAM's peak. No profiler showed which of these kernels memory binds.

    A function counts if torch.compile built it with and without TMA, and if it moves 64 MiB or more.
    """
    by_row = compare_rows_by_tma(evidence)
    gains = [
        row["ratio"]
        for row in evidence("ch14_compiled_pointwise", status="ok")
        if row["tma_loads"] + row["tma_stores"] and row["mib"] >= 64
    ]
    faster = sum(evidence.is_better(gain, 1) for gain in gains)
    return leave_open(by_row=by_row, gains=gains, faster=faster, functions=len(gains))


@rule
def takes_as_long(evidence: Evidence) -> Ruling:
    """Judge whether the note's kernel takes the note's time. Its shape is not known; those of its benchmark are."""
    return leave_open(us=[row["us"] for row in evidence("ch07_resample_note", name="lane0_search")])
