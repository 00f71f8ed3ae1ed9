"""Claims of the field note "TMA Optimization Implementation Status": resampling trajectories on an H100, in phases."""

from __future__ import annotations

import torch

from ch07.resample import published_kernel
from claims.judge import Finding, Note, decide, holds, only_if, refuted, span, untested

NOTE = Note("TMA Optimization Implementation Status (trajectory resampling)")


def speeds(of) -> dict[str, dict]:
    """The ladder's rows at D = 128, by step."""
    return {row["name"]: row for row in of("ch07_resample_ladder") if row["shape"][3] == 128}


def counters(of) -> dict[str, dict]:
    """What Nsight Compute read, by step."""
    return {row["kernel"]: row for row in of("ch07_resample_ncu")}


@NOTE.claim("The published kernel is complete.", "ch07_resample", "Check before timing")
def complete(of) -> Finding:
    shares = {name: published_kernel.written(flawed, 3, 20, 33, 64)
              for name, flawed in published_kernel.published().items()}
    strided = 100 * shares["features strided by the block"]
    return decide(min(shares.values()) == 1, f"as published it writes {strided:.0f} % of its outputs; two more errors")


@NOTE.claim("A search by lane 0 alone reads shared memory 32 times less.", "ch07_resample", "The floor")
def fewer_reads(of) -> Finding:
    by = speeds(of)
    gain = by["lane0_search"]["ms"] / by["ballot_search"]["ms"]
    return decide(gain <= 1, "32 lanes at one address are one read; a search in which every lane reads a pivot runs "
                             f"{gain:.2f} × as fast")


@NOTE.claim("One search a warp gains 1.2 to 1.5 times.", "ch07_resample", "The floor")
def warp_search(of) -> Finding:
    by = speeds(of)
    gain = by["search_a_thread"]["ms"] / by["lane0_search"]["ms"]
    return decide(gain >= 1.2, f"{gain:.2f} ×, shared memory for the times included")


@NOTE.claim("32 lanes × 2 bytes × 2 loads make transactions of 128 bytes.", "ch07_resample", "Look inside")
def transactions(of) -> Finding:
    return decide(32 * 2 == 128, f"2 bytes a lane make {32 * 2}, two loads are two; 16 a lane make {32 * 16}")


@NOTE.claim("Coalescing gains 1.5 to 2 times.", "ch07_resample", "The floor")
def coalescing(of) -> Finding:
    by = speeds(of)
    gain = by["shared_search"]["ms"] / by["vectors"]["ms"]
    figure = f"{gain:.2f} × from 2 to 16 bytes a lane; the note's loads of 2 were coalesced before"
    return only_if("lanes load 16 bytes", figure) if gain >= 1.5 else refuted(figure)


@NOTE.claim("A persistent grid is faster.", "ch07_resample", "The floor")
def persistent(of) -> Finding:
    by = speeds(of)
    return decide(by["persistent"]["ratio"] > by["vectors"]["ratio"],
                  f"{by['persistent']['ratio']:.2f} of a copy's bandwidth, without it {by['vectors']['ratio']:.2f}")


@NOTE.claim("The search by warp brings DRAM to 35 to 45 % of its peak.", "ch07_resample", "What the counters say")
def phase_one(of) -> Finding:
    percent = counters(of)["lane0_search"]["dram_percent"]
    return decide(percent >= 35, f"{percent:.0f} %, by Nsight Compute")


@NOTE.claim("60 to 80 % can be reached.", "ch07_resample", "What the counters say")
def target(of) -> Finding:
    by = counters(of)
    plain, tma = (by[name]["dram_percent"] for name in ("vectors", "bulk_rows"))
    return decide(max(plain, tma) >= 60, f"plain loads {plain:.0f} %, rows by TMA {tma:.0f} %, by Nsight Compute")


@NOTE.claim("60 to 80 % may require TMA.", "ch07_resample", "Verdict")
def tma_required(of) -> Finding:
    percent, by = counters(of)["vectors"]["dram_percent"], speeds(of)
    pays = by["bulk_rows"]["ratio"] / by["vectors"]["ratio"]
    return decide(percent < 60, f"without TMA {percent:.0f} %; with it {pays:.2f} × the speed of plain loads")


@NOTE.claim("Resampling is bound by memory, by its nature.", "ch07_resample", "What the counters say")
def memory_bound(of) -> Finding:
    by = counters(of)
    steps = {"search by warp": by["lane0_search"], "search shared, 16-byte loads": by["vectors"]}
    figure = "; ".join(f"{what}: {row['dram_percent']:.0f} % of DRAM, {row['issue_percent']:.0f} % of issue slots"
                       for what, row in steps.items())
    first, last = (row["dram_percent"] > row["issue_percent"] for row in steps.values())
    if first:
        return holds(figure)
    return only_if("searches are shared and loads wide", figure) if last else refuted(figure)


@NOTE.claim("Take TMA if DRAM stays below 50 % and the kernel is bound by memory.", "ch07_resample", "Verdict")
def decision_rule(of) -> Finding:
    one, ratio = counters(of)["lane0_search"], speeds(of)
    says = one["dram_percent"] < 50 and one["dram_percent"] > one["issue_percent"]
    pays = ratio["bulk_rows"]["ratio"] > 1.02 * ratio["vectors"]["ratio"]
    return decide(says == pays, f"{one['dram_percent']:.0f} %, {'' if says else 'not '}bound by memory: it says "
                                f"{'yes' if says else 'no'}, and TMA gains {'something' if pays else 'nothing'}")


@NOTE.claim("It takes about 138 us.", "ch07_resample", "The note's shapes")
def latency(of) -> Finding:
    rows = [row for row in of("ch07_resample_note") if row["name"] == "lane0_search"]
    return untested("the note names no shape", f"{span((row['us'] for row in rows), '.0f')} us by its search, at four "
                    "shapes of its benchmark as published")


@NOTE.claim("1e-5 is the limit of bf16's precision.", "ch07_resample", "Check before timing")
def tolerance(of) -> Finding:
    half = torch.finfo(torch.bfloat16).eps / 2
    return decide(half <= 1e-5, f"rounding alone errs by up to {half:.4f} of a number: {half / 1e-5:.0f} times as much")
