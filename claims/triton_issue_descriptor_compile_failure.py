"""Claims of the field note "[SM 10.0] TMA descriptor compilation fails with deep pipelines", about Triton 3.5.0.

Builds need no GPU. The records hold 864 builds of Triton 3.5.1 for sm_100a, and twelve loops per Triton and target.
"""

from __future__ import annotations

import collections

from claims.judge import Note, decide, format_range
from claims.tma_config_fix_proposal import fastest
from tilelab import device

NOTE = Note("[SM 10.0] TMA descriptor compilation fails with deep pipelines")
PASS = "TritonGPUAssignLatencies"
RULE = "The note's rule against every build"


def find_failures(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["outcome"] == "fails"]


def expect_builds(rows: list[dict], to_fail: bool = False):
    """Judge a claim that holds if no build fails or, with `to_fail`, if every build fails."""
    failures = find_failures(rows)
    return decide(failures == (rows if to_fail else []), f"{len(failures)} of {len(rows)} such builds fail")


@NOTE.claim("The pass that fails is `tritongpu-assign-latencies`.", "ch14_bug_hunt", RULE)
def the_pass(evidence):
    rows = evidence("ch14_bug_hunt_loop")
    failures = find_failures(rows)
    named = [row for row in failures if row["stage"] == PASS]
    return decide(failures and named == failures,
                  f"{len(named)} of {len(failures)} failures, out of {len(rows)} builds")


@NOTE.claim("It is Blackwell's alone; Hopper is spared.", "ch14_bug_hunt", "Which versions, which GPUs")
def blackwell_only(evidence):
    failing = sorted({row["target"] for row in evidence("ch14_bug_hunt_matrix", stage=PASS)})
    others = sorted({row["target"] for row in evidence("ch14_bug_hunt_matrix")} - set(failing))
    return decide(all(target.startswith("sm_10") for target in failing),
                  f"for {' and '.join(failing)}; not for {', '.join(others)}")


@NOTE.claim("The loop that the note shows fails at BLOCK_K 128, 4 stages, 16 warps.", "ch14_bug_hunt",
            "Ask a Triton that is not installed")
def its_example(evidence):
    row, = evidence("ch14_bug_hunt_loop", LOOP="plain", LOADS="device", BLOCK_K=128, num_stages=4, num_warps=16)
    return decide(row["outcome"] == "fails", f"it {row['outcome']}")


@NOTE.claim("It compiles if BLOCK_K is at most 32.", "ch14_bug_hunt", RULE)
def small_k(evidence):
    return expect_builds(evidence("ch14_bug_hunt_loop", BLOCK_K=32))


@NOTE.claim("It compiles if there is one stage.", "ch14_bug_hunt", RULE)
def one_stage(evidence):
    return expect_builds(evidence("ch14_bug_hunt_loop", num_stages=1))


@NOTE.claim("It compiles with at most four warps.", "ch14_bug_hunt", RULE)
def few_warps(evidence):
    return expect_builds([row for row in evidence("ch14_bug_hunt_loop") if row["num_warps"] <= 4])


@NOTE.claim("It fails where BLOCK_K is at least 64, stages at least 4 and warps at least 8.", "ch14_bug_hunt", RULE)
def threshold(evidence):
    return expect_builds([row for row in evidence("ch14_bug_hunt_loop") if row["BLOCK_K"] >= 64
                          and row["num_stages"] >= 4 and row["num_warps"] >= 8], to_fail=True)


@NOTE.claim("It takes TMA descriptors.", "ch14_bug_hunt", RULE)
def descriptors_needed(evidence):
    counts = collections.Counter(row["LOADS"] for row in find_failures(evidence("ch14_bug_hunt_loop")))
    return decide(not counts["pointers"], f"failures: pointers {counts['pointers']}, descriptors of the device "
                                          f"{counts['device']}, of the host {counts['host']}")


@NOTE.claim("Registers are the cause: larger tiles and deeper pipelines pass a threshold.", "ch14_bug_hunt", RULE)
def registers(evidence):
    rows = find_failures(evidence("ch14_bug_hunt_loop"))
    by_k = collections.Counter(row["BLOCK_K"] for row in rows)
    carrying = sum(row["LOOP"].startswith("carry") for row in rows)
    return decide(len(set(by_k.values())) > 1, "failures at BLOCK_K "
                  + ", ".join(f"{k}: {count}" for k, count in sorted(by_k.items()))
                  + f"; only in loops that carry a tile: {carrying} of {len(rows)}")


@NOTE.claim("A copy without a product takes tiles of 256 × 256, 16 warps, 5 stages.", "ch14_gemm", "And the copy?")
def copies_work(evidence):
    row = evidence("ch14_gemm_copy", config="256,256,16,5")[0]
    return decide(row["status"] == "ok", f"it runs, at {row['ratio']:.3f} × torch's copy" if row["status"] == "ok" else
                  row["reason"])


@NOTE.claim("16 warps saturate Blackwell's tensor core.", "ch14_bug_hunt", "What 16 warps do")
def sixteen_warps(evidence):
    rows = evidence("ch14_bug_hunt_loop", num_warps=16, outcome="builds")
    new, old = (sum(name in row for row in rows) for name in ("tcgen05", "mma_sync"))
    return decide(new == len(rows), f"of {len(rows)} builds {new} use it (tcgen05), {old} Ampere's mma.sync")


@NOTE.claim("The cautious tiles cost a factor of about 2.", "ch14_gemm", "Verdict")
def cost_of_caution(evidence):
    gain = fastest(evidence, "best", "factor")
    return decide(min(gain) >= 1.5, f"{format_range(gain, '.1f')} × on an H200, against the course's tiles"
                                    f"{': more than that' * (min(gain) > 2.5)}")


@NOTE.claim("350 to 400 TFLOP/s is what a B200 can do.", "00_start", "Ask for capabilities, not for names")
def b200_speed(evidence):
    b200 = device.KNOWN["B200"]
    h200_tflops = round(evidence("ceilings")[1]["tflops"], -1)
    return decide(400 >= 0.5 * b200.bf16_tflops, f"{40000 / b200.bf16_tflops:.0f} % of its {b200.bf16_tflops:,g} "
                  f"({b200.source}); an H200 does about {h200_tflops:.0f}")
