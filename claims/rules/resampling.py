"""Rules about the kernels that resample trajectories, and about TMA in kernels that are bound by memory."""

from __future__ import annotations

from ch07.resample.lesson import figures
from claims.audits import resample as audit
from claims.judge import Evidence, Ruling, decide, is_at_least, is_better, is_within, leave_open, rule
from tilelab.runtime import device


def get_steps(evidence: Evidence) -> dict[str, float]:
    """Return the speed of the module's kernels over torch's copy at D = 128, by name."""
    rows = evidence("ch07_resample_ladder")
    return {row["name"]: row["ratio"] for row in rows if row["shape"][3] == 128}


def get_versions(evidence: Evidence) -> dict[str, float]:
    """Return the speed of the lesson's versions and of the note's over torch's copy, by name."""
    return {row["name"]: row["ratio"] for row in evidence("ch07_resample_searches", status="ok")}


def get_counters(evidence: Evidence) -> dict[str, dict]:
    """Return the counters of Nsight Compute, by kernel."""
    return {row["kernel"]: row for row in evidence("ch07_resample_ncu")}


@rule
def reads_less(evidence: Evidence, times: float) -> Ruling:
    """Judge whether the kernel takes so many times the wavefronts of shared memory where all lanes search."""
    counted = {row["name"]: row["shared_load_wavefronts"] for row in evidence.find("ch07_resample_reads")}
    if counted:
        all_lanes, lane_0 = counted["warp_search"], counted["note_v2, a block per chunk"]
    else:
        all_lanes, lane_0 = (figures.count_wavefronts([511] + [rest] * 31) for rest in (511, -1))
    return decide(
        is_at_least(all_lanes, times * lane_0),
        case="" if counted else "not counted",
        all_lanes=all_lanes,
        lane_0=lane_0,
        all_millions=all_lanes / 1e6,
        lane_0_millions=lane_0 / 1e6,
        ratio=all_lanes / lane_0,
    )


@rule
def search_gains(evidence: Evidence, low: float, high: float) -> Ruling:
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
        is_within(over_lanes, low, high),
        is_within(over_threads, low, high),
        over_lanes=over_lanes,
        over_threads=over_threads,
        over_lanes_in_global=over_lanes_in_global,
    )


@rule
def phase_gains(evidence: Evidence, low: float, high: float, worst: list[float]) -> Ruling:
    """Judge whether the note's version 2 gains so much over a search by every thread, on its grid or a larger one."""
    speed = get_versions(evidence)
    whole, chunks = (
        speed[name] / speed["search_per_thread"] for name in ("note_v2", "note_v2, a block per chunk")
    )
    return decide(
        is_within(whole, low, high),
        is_within(chunks, low, high),
        case="worst case" if is_within(whole, *worst) else "",
        whole=whole,
        chunks=chunks,
    )


@rule
def persistent_grid_is_faster(evidence: Evidence) -> Ruling:
    """Judge whether the note's kernel is faster on the note's grid than with a block per chunk."""
    speed, steps = get_versions(evidence), get_steps(evidence)
    gain = speed["note_v2"] / speed["note_v2, a block per chunk"]
    return decide(is_better(gain, 1), gain=gain, best=steps["persistent"] / steps["vectors"])


@rule
def coalescing_gains(evidence: Evidence, low: float, high: float) -> Ruling:
    """Judge whether reads of neighbours by neighbours are so much faster than both other orders, or than one."""
    steps = get_steps(evidence)
    rows = evidence.find("ch07_resample_searches", searches="one thread", status="ok")
    speed = {row["order"]: row["ratio"] for row in rows}
    if not speed:
        return leave_open(gain=steps["vectors"] / steps["shared_search"])
    others = {"every fourth element": audit.EVERY_FOURTH, "a row each": audit.A_ROW_PER_LANE}
    gains = {what: speed[audit.NEIGHBOURS] / speed[order] for what, order in others.items()}
    inside = [what for what, gain in gains.items() if is_within(gain, low, high)]
    return decide(
        len(inside) == len(gains),
        inside,
        gains=[f"{gain:.2f} × over lanes that read {what}" for what, gain in gains.items()],
        inside=inside,
    )


@rule
def counters_lie_within(evidence: Evidence, kernel: str, bands: dict[str, list[float]]) -> Ruling:
    """Judge whether the profiler's counters of a kernel lie in these bands."""
    row = get_counters(evidence)[kernel]
    return decide(all(is_within(row[name], *band) for name, band in bands.items()), row=row)


@rule
def reaches_bandwidth(evidence: Evidence, percent: float) -> Ruling:
    """Judge whether a kernel of the course reaches this share of the DRAM's peak."""
    counters = get_counters(evidence)
    plain, tma = (counters[name]["dram_percent"] for name in ("vectors", "bulk_rows"))
    return decide(is_at_least(max(plain, tma), percent), plain=plain, tma=tma)


@rule
def tma_is_needed(evidence: Evidence, percent: float) -> Ruling:
    """Judge whether no kernel without TMA reaches this share of the DRAM's peak."""
    reached, steps = get_counters(evidence)["vectors"]["dram_percent"], get_steps(evidence)
    return decide(
        not is_at_least(reached, percent), reached=reached, gain=steps["bulk_rows"] / steps["vectors"]
    )


@rule
def is_memory_bound(evidence: Evidence) -> Ruling:
    """Judge whether DRAM is nearer to its peak than the issue slots, with the note's search or with a shared one."""
    counters = get_counters(evidence)
    note, shared = counters["lane0_search"], counters["vectors"]
    first, last = (row["dram_percent"] > row["issue_percent"] for row in (note, shared))
    return decide(first, last, note=note, shared=shared)


def compare_pointwise(evidence: Evidence) -> list[tuple[float, float]]:
    """Return (% of DRAM's peak without TMA, gain of TMA) of the functions that torch.compile built twice.

    Each function does a few operations per element, so bytes are its limit. A function without TMA in either kernel is
    left out, and so is one that moves less than 64 MiB, where a launch takes as long as the bytes.
    """
    peak_gbps = device.KNOWN["H200"].peak_gbps
    return [
        (100 * row["gbps"] / row["ratio"] / peak_gbps, row["ratio"])
        for row in evidence.find("ch14_compiled_pointwise", status="ok")
        if row["tma_loads"] + row["tma_stores"] and row["mib"] >= 64
    ]


@rule
def tma_pays_below(evidence: Evidence, percent: float) -> Ruling:
    """Judge whether TMA gains in each kernel that memory binds below this share of DRAM's peak, and in no other."""
    counters, steps = get_counters(evidence), get_steps(evidence)
    gain = steps["bulk_rows"] / steps["vectors"]
    cases = [
        (row["dram_percent"], steps["bulk_rows"] / steps[name])
        for name, row in counters.items()
        if name != "bulk_rows"
        and row["issue_percent"] < row["dram_percent"]
        and (name == "vectors" or row["dram_percent"] < percent)  # only vectors differs in TMA alone
    ]
    cases += compare_pointwise(evidence)
    advised = [gain for share, gain in cases if share < percent]
    others = [gain for share, gain in cases if share >= percent]
    if not advised:
        return leave_open(gain=gain)
    faster, not_faster = (
        sum(is_better(gain, 1) for gain in advised),
        sum(not is_better(gain, 1) for gain in others),
    )
    below, above = (f"{count} kernel{'s' * (count != 1)}" for count in map(len, (advised, others)))
    return decide(
        faster == len(advised) and not_faster == len(others),
        case="" if others else "below alone",
        below=below,
        faster=faster,
        advised=advised,
        above=above,
        not_faster=not_faster,
        do="does" if not_faster == 1 else "do",
        others=others,
    )


@rule
def takes_as_long(evidence: Evidence) -> Ruling:
    """Judge whether the note's kernel takes the note's time. Its shape is not known; those of its benchmark are."""
    return leave_open(us=[row["us"] for row in evidence("ch07_resample_note", name="lane0_search")])
