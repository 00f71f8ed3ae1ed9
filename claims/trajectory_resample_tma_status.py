"""Claims of the field note "TMA Optimization Implementation Status": resampling trajectories on an H100, in phases."""

from __future__ import annotations

import torch

from ch07.resample import published_kernel
from claims.judge import UNTESTED, Finding, Note, decide, format_range

NOTE = Note("TMA Optimization Implementation Status (trajectory resampling)")


def get_steps(evidence) -> dict[str, dict]:
    """Return the ladder's rows at D = 128, by step."""
    return {row["name"]: row for row in evidence("ch07_resample_ladder") if row["shape"][3] == 128}


def get_gain(evidence, slow: str, fast: str) -> float:
    steps = get_steps(evidence)
    return steps[slow]["ms"] / steps[fast]["ms"]


def get_counters(evidence) -> dict[str, dict]:
    """Return the counters of Nsight Compute, by step."""
    return {row["kernel"]: row for row in evidence("ch07_resample_ncu")}


@NOTE.claim("The published kernel is complete.", "ch07_resample", "Check before timing")
def complete(evidence):
    shares = {name: published_kernel.written_share(flawed, 3, 20, 33, 64)
              for name, flawed in published_kernel.FLAWED_KERNELS.items()}
    strided = 100 * shares["features strided by the block"]
    return decide(min(shares.values()) == 1, f"as published it writes {strided:.0f} % of its outputs; two more errors")


@NOTE.claim("A search by lane 0 alone reads shared memory 32 times less.", "ch07_resample", "The floor")
def fewer_reads(evidence):
    gain = get_gain(evidence, "lane0_search", "ballot_search")
    return decide(gain <= 1, "32 lanes at one address are one read; a search in which every lane reads a pivot runs "
                             f"{gain:.2f} × as fast")


@NOTE.claim("One search a warp gains 1.2 to 1.5 times.", "ch07_resample", "The floor")
def warp_search(evidence):
    gain = get_gain(evidence, "search_a_thread", "lane0_search")
    return decide(gain >= 1.2, f"{gain:.2f} ×, shared memory for the times included")


@NOTE.claim("32 lanes × 2 bytes × 2 loads make transactions of 128 bytes.", "ch07_resample", "Step 5: 16-byte vectors")
def transactions(evidence):
    return decide(32 * 2 == 128, f"2 bytes a lane make {32 * 2}, two loads are two; 16 a lane make {32 * 16}")


@NOTE.claim("Coalescing gains 1.5 to 2 times.", "ch07_resample", "The floor")
def coalescing(evidence):
    gain = get_gain(evidence, "shared_search", "vectors")
    figure = f"{gain:.2f} × from 2 to 16 bytes a lane; the note's loads of 2 were coalesced before"
    return decide(False, figure, "lanes load 16 bytes", gain >= 1.5)


@NOTE.claim("A persistent grid is faster.", "ch07_resample", "The floor")
def persistent(evidence):
    with_it, without = (get_steps(evidence)[name]["ratio"] for name in ("persistent", "vectors"))
    return decide(with_it > without, f"{with_it:.2f} of a copy's bandwidth, without it {without:.2f}")


@NOTE.claim("The search by warp brings DRAM to 35 to 45 % of its peak.", "ch07_resample", "What the counters say")
def phase_one(evidence):
    percent = get_counters(evidence)["lane0_search"]["dram_percent"]
    return decide(percent >= 35, f"{percent:.0f} %, by Nsight Compute")


@NOTE.claim("60 to 80 % can be reached.", "ch07_resample", "What the counters say")
def target(evidence):
    plain, tma = (get_counters(evidence)[name]["dram_percent"] for name in ("vectors", "bulk_rows"))
    return decide(max(plain, tma) >= 60, f"plain loads {plain:.0f} %, rows by TMA {tma:.0f} %, by Nsight Compute")


@NOTE.claim("60 to 80 % may require TMA.", "ch07_resample", "Verdict")
def tma_required(evidence):
    percent, steps = get_counters(evidence)["vectors"]["dram_percent"], get_steps(evidence)
    gain = steps["bulk_rows"]["ratio"] / steps["vectors"]["ratio"]
    return decide(percent < 60, f"without TMA {percent:.0f} %; with it {gain:.2f} × the speed of plain loads")


@NOTE.claim("Resampling is bound by memory, by its nature.", "ch07_resample", "What the counters say")
def memory_bound(evidence):
    counters = get_counters(evidence)
    steps = {"search by warp": counters["lane0_search"], "search shared, 16-byte loads": counters["vectors"]}
    figure = "; ".join(f"{what}: {row['dram_percent']:.0f} % of DRAM, {row['issue_percent']:.0f} % of issue slots"
                       for what, row in steps.items())
    first, last = (row["dram_percent"] > row["issue_percent"] for row in steps.values())
    return decide(first, figure, "searches are shared and loads wide", last)


@NOTE.claim("Take TMA if DRAM stays below 50 % and the kernel is bound by memory.", "ch07_resample", "Verdict")
def decision_rule(evidence):
    counters, steps = get_counters(evidence)["lane0_search"], get_steps(evidence)
    is_bound = counters["dram_percent"] > counters["issue_percent"]
    advises = counters["dram_percent"] < 50 and is_bound
    pays = steps["bulk_rows"]["ratio"] > 1.02 * steps["vectors"]["ratio"]
    return decide(advises == pays, f"{counters['dram_percent']:.0f} %, {'' if advises else 'not '}bound by memory: it "
                  f"says {'yes' if advises else 'no'}, and TMA gains {'something' if pays else 'nothing'}")


@NOTE.claim("It takes about 138 us.", "ch07_resample", "The note's shapes")
def latency(evidence):
    times = format_range((row["us"] for row in evidence("ch07_resample_note", name="lane0_search")), ".0f")
    return Finding(UNTESTED, f"{times} us by its search, at four shapes of its benchmark as published",
                   "the note names no shape")


@NOTE.claim("1e-5 is the limit of bf16's precision.", "ch07_resample", "Check before timing")
def tolerance(evidence):
    half = torch.finfo(torch.bfloat16).eps / 2
    return decide(half <= 1e-5, f"rounding alone errs by up to {half:.4f} of a number: {half / 1e-5:.0f} times as much")
