"""Rules about measured speeds: copies, products, torch.compile and attention.

Candidates were timed beside a peer, so ratios to the peer are compared and not the times: the clock moves.
"""

from __future__ import annotations

import collections

from ch14.gemm.configs import parse
from claims.judge import Evidence, Ruling, decide, leave_open, rule
from tilelab.records import margins
from tilelab.runtime import device

GEMM, SWEEP, COPIES = "ch14_gemm_claim", "ch14_gemm_sweep", "ch14_gemm_copy"
SIZES = (2048, 4096, 8192)  # of the note's table


def get_ratio(row: dict) -> float:
    """Return a row's speed over its peer's in the pass that timed every configuration at full length.

    Only some rows were timed a second time, so that second pass would compare unlike with like.
    """
    return row["ratio"]


# ---- the cautious, the proposed and the best tiles of a GEMM


def find_fastest(evidence: Evidence, name: str) -> list[dict]:
    """Return the fastest configuration of one kind at each size."""
    rows = evidence(GEMM, name=name, status="ok")
    return [max((row for row in rows if row["shape"] == [n] * 3), key=get_ratio) for n in SIZES]


def find_gains(evidence: Evidence, name: str) -> list[float]:
    """Return the speed of one kind of configuration over the cautious ones, at each size."""
    pairs = zip(find_fastest(evidence, name), find_fastest(evidence, "conservative"))
    return [get_ratio(new) / get_ratio(old) for new, old in pairs]


def find_final_gains(evidence: Evidence) -> list[float]:
    """Return the proposed tiles' speed over the cautious ones' in the second pass, at each size.

    The second pass interleaved the fastest few of each size, some of either kind.
    """

    def find_best(name: str, n: int) -> float:
        rows = evidence(GEMM, name=name, shape=[n] * 3)
        return max(row["final_ratio"] for row in rows if row.get("final_ratio"))

    return [find_best("proposed", n) / find_best("conservative", n) for n in SIZES]


def list_gains(gains: list[float]) -> list[str]:
    """Return the gains as text, in the order of SIZES."""
    return [f"{gain:.2f}" for gain in gains]


@rule
def gains_as_claimed(evidence: Evidence, gains: list[float]) -> Ruling:
    """Judge whether the proposed tiles gain the claimed factors in both passes."""
    first, final = find_gains(evidence, "proposed"), find_final_gains(evidence)
    return decide(
        all(evidence.agrees(found, gain=gain) for found, gain in zip(first + final, gains * 2)),
        first=list_gains(first),
        final=list_gains(final),
    )


@rule
def gain_grows(evidence: Evidence) -> Ruling:
    """Judge whether the gain of the proposed tiles grows from each size to the next."""
    gains = find_gains(evidence, "proposed")
    return decide(all(map(evidence.is_better, gains[1:], gains)), gains=list_gains(gains))


@rule
def closer_to_cublas(evidence: Evidence) -> Ruling:
    """Judge whether the proposed tiles are nearer to cuBLAS's speed than the cautious ones at each size."""
    before, after, best = (
        [get_ratio(row) for row in find_fastest(evidence, name)]
        for name in ("conservative", "proposed", "best")
    )
    return decide(all(map(evidence.is_better, after, before)), before=before, after=after, best=best)


@rule
def best_gains(evidence: Evidence, **said: list[float]) -> Ruling:
    """Judge whether the best tiles gain so much over the cautious ones."""
    gains = find_gains(evidence, "best")
    return decide(all(evidence.agrees(gain, **said) for gain in gains), gains=list_gains(gains))


@rule
def reaches_tflops(evidence: Evidence) -> Ruling:
    """Judge whether a B200 reaches the note's rates. None was measured; an H200's rates are known."""
    before, after = (
        [2 * row["shape"][0] ** 3 / row["ms"] / 1e9 for row in find_fastest(evidence, name)]
        for name in ("conservative", "proposed")
    )
    return leave_open(before=before, after=after)


@rule
def no_small_product_is_slower(evidence: Evidence) -> Ruling:
    """Judge whether the proposed tiles are as fast as the cautious ones at all sizes below the note's table."""
    best: dict[int, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for row in evidence(GEMM, status="ok"):
        if (n := max(row["shape"])) < min(SIZES):
            best[n][row["name"]] = max(best[n][row["name"]], get_ratio(row))
    gains = {n: kinds["proposed"] / kinds["conservative"] for n, kinds in sorted(best.items())}
    return decide(
        all(evidence.agrees(gain, gain=1) for gain in gains.values()),
        gains=[f"{n}³ {gain:.2f}" for n, gain in gains.items()],
    )


@rule
def uses_bandwidth(evidence: Evidence, cautious: list[float], proposed: list[float]) -> Ruling:
    """Judge whether the fastest tile of either kind uses these shares of the DRAM's peak at each size."""
    counters = sorted(evidence("ch14_gemm_dram"), key=lambda row: -row["ns"])
    percent = {(row["name"], row["shape"][0]): row["dram_percent"] for row in counters}  # the fastest is last
    before, after = ([percent[name, n] for n in SIZES] for name in ("conservative", "proposed"))
    holds = all(evidence.agrees(share, state=cautious) for share in before)
    holds = holds and all(evidence.agrees(share, gain=proposed) for share in after)
    return decide(holds, before=before, after=after)


@rule
def more_warps_are_faster(evidence: Evidence, few: int, many: int) -> Ruling:
    """Judge whether the same tile is faster with more warps in most cases, or only larger tiles are."""
    by_tile, best = collections.defaultdict(dict), collections.defaultdict(dict)
    for row in evidence(SWEEP, status="ok"):
        config, n = parse(row["kernel"]), row["shape"][0]
        warps = config.num_warps
        by_tile[config.block_m, config.block_n, config.block_k, config.num_stages, n][warps] = get_ratio(row)
        best[warps][n] = max(best[warps].get(n, 0), get_ratio(row))
    gains = [of[many] / of[few] for of in by_tile.values() if {few, many} <= of.keys()]
    with_few, with_many = ([best[warps][n] for n in SIZES] for warps in (few, many))
    faster = sum(evidence.is_better(gain, 1) for gain in gains)
    return decide(
        faster > len(gains) / 2,
        all(map(evidence.is_better, with_many, with_few)),
        faster=faster,
        cases=len(gains),
        slower=sum(evidence.is_better(1, gain) for gain in gains),
        with_many=with_many,
        with_few=with_few,
    )


@rule
def each_stage_gains(evidence: Evidence, kernel: str, few: int) -> Ruling:
    """Judge whether each added stage makes the product faster, or those up to a few stages do."""
    rows = evidence("ch14_gemm_stages", kernel=kernel)
    speed = {row["stages"]: get_ratio(row) for row in rows}
    gains = {
        stages + 1: evidence.is_better(speed[stages + 1], speed[stages])
        for stages in speed
        if stages + 1 in speed
    }
    listed = [f"{ratio:.2f} with {stages}" for stages, ratio in sorted(speed.items())]
    resident = [str(row["programs_per_sm"]) for row in sorted(rows, key=lambda row: row["stages"])]
    up_to_few = all(gain for stages, gain in gains.items() if stages <= few)
    return decide(all(gains.values()), up_to_few, listed=listed, resident=resident)


@rule
def keeps_more_warps(evidence: Evidence) -> Ruling:
    """Judge whether the proposed tiles keep more warps per multiprocessor than the cautious ones."""
    before, after = (
        [row["programs_per_sm"] * row["threads"] // 32 for row in evidence(GEMM, name=name, status="ok")]
        for name in ("conservative", "proposed")
    )
    return decide(min(after) > max(before), before=before, after=after)


@rule
def repeats_to_three_digits(evidence: Evidence, kinds: list[str]) -> Ruling:
    """Judge whether any two timings of one product give 1.000, or those in the same rounds do."""
    rows = [row for row in evidence("itself") if row["kind"] in kinds and row["way"] in margins.WAYS]
    most = {way: max(row["largest"] for row in rows if row["way"] == way) for way in margins.WAYS}
    right = {way: difference < 0.0005 for way, difference in most.items()}
    return decide(
        all(right.values()),
        right[margins.INTERLEAVED],
        typical=[100 * row["median"] for row in rows],
        interleaved=100 * most[margins.INTERLEAVED],
        after=100 * most[margins.AFTER],
        fresh=100 * most[margins.FRESH],
    )


# ---- copies


@rule
def copy_runs(evidence: Evidence, config: str) -> Ruling:
    """Judge whether a copy with these settings runs and is right."""
    row = evidence(COPIES, config=config)[0]
    return decide(row["status"] == "ok", row=row)


@rule
def large_copies_win(evidence: Evidence, tile: str) -> Ruling:
    """Judge whether the large tile is faster than every other one."""
    rows = sorted(evidence(COPIES, status="ok"), key=get_ratio, reverse=True)
    large = max(get_ratio(row) for row in rows if row["config"].startswith(tile))
    other = next(row for row in rows if not row["config"].startswith(tile))
    ratios = [get_ratio(row) for row in rows]
    return decide(
        evidence.is_better(large, other["ratio"]),
        large=large,
        other_tile=other["config"].partition(" ")[0].split("×"),
        other=other["ratio"],
        least=min(ratios),
        most=max(ratios),
    )


@rule
def new_copies_win(evidence: Evidence) -> Ruling:
    """Judge whether the fastest copy of the new list beats the fastest of the present list."""
    old, new = (
        max(evidence(COPIES, name=name, status="ok"), key=get_ratio) for name in ("conservative", "proposed")
    )
    which = "the same configuration" if old["config"] == new["config"] else "another one"
    return decide(evidence.is_better(new["ratio"], old["ratio"]), old=old, new=new, which=which)


def find_bandwidth(evidence: Evidence, tma: bool) -> list[float]:
    """Return the percentage of an H200's peak that the fastest copy and the fastest a x + y reach."""
    fastest = [
        max(
            row["gbps"] for row in evidence("ch07_bulk_speed", op=op) if row["name"].startswith("bulk") == tma
        )
        for op in ("copy", "axpy")
    ]
    return [100 / device.KNOWN["H200"].peak_gbps * gbps for gbps in fastest]


@rule
def bandwidth_with_tma(evidence: Evidence, **said: list[float]) -> Ruling:
    """Judge whether the fastest copy and the fastest a x + y by TMA reach this share of the peak; show all orders."""
    fastest = find_bandwidth(evidence, tma=True)
    orders = [
        100 / device.KNOWN["H200"].peak_gbps * row["gbps"]
        for row in evidence("ch07_bulk_fronts", op="copy")
        if row["config"].startswith("bulk")
    ]
    return decide(all(evidence.agrees(each, **said) for each in fastest), fastest=fastest, orders=orders)


@rule
def bandwidth_without_tma(evidence: Evidence, **said: list[float]) -> Ruling:
    """Judge whether copies without TMA reach a share of the peak in this band."""
    percent = find_bandwidth(evidence, tma=False)
    return decide(all(evidence.agrees(each, **said) for each in percent), percent=percent)


@rule
def pipelines_are_wrong(evidence: Evidence) -> Ruling:
    """Judge whether the note's program gives wrong results. The note lacks it; the course's pipelines are counted."""
    right, cases = (
        sum(row["cases"] for row in evidence("ch10_tile_check", **wanted))
        for wanted in ({"status": "ok"}, {})
    )
    return leave_open(right=right, all=cases)


# ---- torch.compile and attention


@rule
def product_gains(evidence: Evidence, modes: list[str], **said: float) -> Ruling:
    """Judge whether a product in the fastest of these modes of torch.compile is so many times as fast as eager."""
    speed = [get_ratio(evidence("ch14_compiled_cells", workload="matmul", name=mode)[0]) for mode in modes]
    return decide(evidence.agrees(max(speed), **said), first=speed[0], last=speed[-1])


@rule
def autotune_engages_tma(evidence: Evidence, mode: str) -> Ruling:
    """Judge whether a kernel that this mode of torch.compile makes for a product or an MLP executes TMA.

    A product stays with cuBLAS, whose kernels the profiler saw in eager mode.
    """
    counted = {row["kernel"]: row["UTMALDG"] for row in evidence("ch14_compiled_ncu", name="eager")}
    rows = [evidence("ch14_compiled_cells", workload=name, name=mode)[0] for name in ("matmul", "mlp")]
    products = [kernel["kernel"] for row in rows for kernel in row["kernels"] if "nvjet" in kernel["kernel"]]
    generated = {name: counts["UTMALDG"] for row in rows for name, counts in row["triton"].items()}
    used = sum(counted.get(kernel, 0) > 0 for kernel in products)
    return decide(
        any(generated.values()),
        used=used,
        products=len(products),
        generated=[f"{name} {count}" for name, count in generated.items()],
    )


@rule
def flash_attention_gains(evidence: Evidence, measured: str, successor: str, **said: list[float]) -> Ruling:
    """Judge whether a kernel is so much faster than three others, or than attention in steps; or show its successor."""
    shape = evidence("ch14_attention_ladder", causal=False)[0]["shape"]
    rows = evidence("ch14_attention_peers", causal=False, status="ok", shape=shape)
    speed = {row["name"]: get_ratio(row) for row in rows}
    name = measured if measured in speed else successor
    gains = {f"over_{other.lower()}": speed[name] / speed[other] for other in ("eager", "flash", "cuDNN")}
    if name == successor:
        return leave_open(name=name, **gains)
    reached = [evidence.agrees(gain, **said) for gain in gains.values()]
    return decide(all(reached), reached[0], name=name, **gains)
