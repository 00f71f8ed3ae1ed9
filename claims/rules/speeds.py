"""Rules about measured speeds: copies, products, torch.compile and attention.

Candidates were timed beside a peer, so ratios to the peer are compared and not the times: the clock moves.
"""

from __future__ import annotations

import collections

from ch14.compiled.lesson import workloads
from ch14.gemm.configs import parse
from claims.judge import (
    ABOUT,
    QUICK_MARGIN,
    Evidence,
    Ruling,
    decide,
    is_at_least,
    is_better,
    is_within,
    leave_open,
    rule,
)
from tilelab.measure import bench
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
def gains_as_claimed(evidence: Evidence, claimed: list[float]) -> Ruling:
    """Judge whether the proposed tiles gain at least the claimed factors in both passes."""
    gains, final = find_gains(evidence, "proposed"), find_final_gains(evidence)
    return decide(
        all(map(is_at_least, gains + final, claimed * 2)), gains=list_gains(gains), final=list_gains(final)
    )


@rule
def gain_grows(evidence: Evidence) -> Ruling:
    """Judge whether the gain of the proposed tiles grows from each size to the next."""
    gains = find_gains(evidence, "proposed")
    return decide(all(map(is_better, gains[1:], gains)), gains=list_gains(gains))


@rule
def closer_to_cublas(evidence: Evidence) -> Ruling:
    """Judge whether the proposed tiles are nearer to cuBLAS's speed than the cautious ones at each size."""
    before, after, best = (
        [get_ratio(row) for row in find_fastest(evidence, name)]
        for name in ("conservative", "proposed", "best")
    )
    return decide(all(map(is_better, after, before)), before=before, after=after, best=best)


@rule
def best_gains_about(evidence: Evidence, low: float, high: float) -> Ruling:
    """Judge whether the best tiles are `low` to about `high` times as fast as the cautious ones."""
    gains = find_gains(evidence, "best")
    return decide(all(is_within(gain, low, high * (1 + ABOUT)) for gain in gains), gains=list_gains(gains))


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
    if not best:
        return leave_open()
    gains = {n: kinds["proposed"] / kinds["conservative"] for n, kinds in sorted(best.items())}
    return decide(
        all(is_at_least(gain, 1) for gain in gains.values()),
        gains=[f"{n}³ {gain:.2f}" for n, gain in gains.items()],
    )


@rule
def uses_bandwidth(evidence: Evidence, cautious: list[float], proposed: list[float]) -> Ruling:
    """Judge whether the fastest tile of either kind uses these shares of the DRAM's peak at each size."""
    copy, product = evidence("ceilings")
    counters = sorted(evidence.find("ch14_gemm_dram"), key=lambda row: -row["ns"])
    if not counters:
        roof = bench.Ceilings(copy["gbps"], product["tflops"])
        floors = [
            (bench.floor_ms(roof, nbytes=6 * n**2), bench.floor_ms(roof, flops=2 * n**3)) for n in SIZES
        ]
        return leave_open(shares=[100 * memory / compute for memory, compute in floors])
    percent = {(row["name"], row["shape"][0]): row["dram_percent"] for row in counters}  # the fastest is last
    before, after = ([percent[name, n] for n in SIZES] for name in ("conservative", "proposed"))
    return decide(
        all(is_within(share, *cautious) for share in before)
        and all(is_within(share, *proposed) for share in after),
        before=before,
        after=after,
    )


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
    faster = sum(is_better(gain, 1, QUICK_MARGIN) for gain in gains)
    return decide(
        faster > len(gains) / 2,
        all(map(is_better, with_many, with_few)),
        faster=faster,
        cases=len(gains),
        slower=sum(is_better(1, gain, QUICK_MARGIN) for gain in gains),
        with_many=with_many,
        with_few=with_few,
    )


@rule
def each_stage_gains(evidence: Evidence, kernel: str) -> Ruling:
    """Judge whether each added stage makes the product faster, or the first one does."""
    speed = {row["stages"]: get_ratio(row) for row in evidence("ch14_gemm_stages", kernel=kernel)}
    gains = [is_better(speed[stages + 1], speed[stages]) for stages in sorted(speed) if stages + 1 in speed]
    listed = [f"{ratio:.2f} with {stages}" for stages, ratio in sorted(speed.items())]
    return decide(all(gains), gains[0], listed=listed)


@rule
def keeps_more_warps(evidence: Evidence) -> Ruling:
    """Judge whether the proposed tiles keep more warps per multiprocessor than the cautious ones."""
    before, after = (
        [row["programs_per_sm"] * row["threads"] // 32 for row in evidence(GEMM, name=name, status="ok")]
        for name in ("conservative", "proposed")
    )
    return decide(min(after) > max(before), before=before, after=after)


@rule
def repeats_to_three_digits(evidence: Evidence) -> Ruling:
    """Judge whether two timings of one kernel agree to three digits after the point."""
    rows = [row for row in evidence(GEMM, status="ok") if row.get("final_ratio")]
    spread = [100 * abs(row["final_ratio"] / get_ratio(row) - 1) for row in rows]
    return decide(max(spread) < 0.05, spread=spread, configs=len(spread))


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
        is_better(large, other["ratio"]),
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
    return decide(is_better(new["ratio"], old["ratio"]), old=old, new=new, which=which)


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
def bandwidth_with_tma(evidence: Evidence, percent: float) -> Ruling:
    """Judge whether copies by TMA reach this share of the peak in every order of their chunks, or in the best order.

    A kernel that is faster than the claim says does not refute it: seven recordings gave 91.3 to 91.9 %.
    """
    fastest = find_bandwidth(evidence, tma=True)
    orders = [
        100 / device.KNOWN["H200"].peak_gbps * row["gbps"]
        for row in evidence("ch07_bulk_fronts", op="copy")
        if row["config"].startswith("bulk")
    ]
    inside = all(is_within(each, percent, 100) for each in fastest)
    in_every_order = all(is_within(each, percent, 100) for each in orders)
    return decide(inside and in_every_order, inside, fastest=fastest, orders=orders)


@rule
def bandwidth_without_tma(evidence: Evidence, band: list[float]) -> Ruling:
    """Judge whether copies without TMA reach a share of the peak in this band."""
    percent = find_bandwidth(evidence, tma=False)
    return decide(all(is_within(each, *band) for each in percent), percent=percent)


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
def product_gains(evidence: Evidence, modes: list[str], factor: float) -> Ruling:
    """Judge whether a product in the fastest of these modes of torch.compile is so many times as fast as eager."""
    speed = [get_ratio(evidence("ch14_compiled_cells", workload="matmul", name=mode)[0]) for mode in modes]
    return decide(is_at_least(max(speed), factor), first=speed[0], last=speed[-1])


@rule
def autotune_adds_tma(evidence: Evidence, gpu: str) -> Ruling:
    """Judge whether max-autotune offers a kernel with descriptors where eager executes no TMA instruction."""
    choices = evidence("ch14_compiled_choices", whose="Triton, persistent TMA")
    offering = sorted({row["name"] for row in choices})
    eager = evidence("ch14_compiled_ncu", workload="matmul", name="eager")[0]["UTMALDG"]
    sms = device.KNOWN[gpu].sms
    return decide(
        "max-autotune" in offering and not eager,
        case="" if workloads.offers_triton_gemm(sms) else "too few SMs",
        offering=offering,
        eager=eager,
        sms=sms,
    )


@rule
def flash_attention_gains(evidence: Evidence, names: list[str], low: float, high: float) -> Ruling:
    """Judge whether a kernel of these names is so much faster than attention in steps, or than FlashAttention-2."""

    def find_measured(rows: list[dict]) -> str | None:
        return next((row["name"] for row in rows if row["name"].startswith(tuple(names))), None)

    rows = evidence("ch14_attention_ladder", causal=False)
    peers = evidence.find("ch14_attention_peers", causal=False, status="ok", shape=rows[0]["shape"])
    rows = peers if find_measured(peers) else rows
    speed, measured = {row["name"]: get_ratio(row) for row in rows}, find_measured(rows)
    if measured is None:
        return leave_open(flash=speed["flash"] / speed["eager"], cudnn=speed["cuDNN"] / speed["eager"])
    over_eager, over_flash = speed[measured] / speed["eager"], speed[measured] / speed["flash"]
    return decide(
        is_within(over_eager, low, high),
        is_within(over_flash, low, high),
        measured=measured,
        over_eager=over_eager,
        over_flash=over_flash,
    )
