"""Claims of the field note "[SM 10.0] TMA descriptor compilation fails with deep pipelines", about Triton 3.5.0.

Builds need no GPU: the record holds 864 of Triton 3.5.1 for sm_100a, and twelve loops a Triton and target.
"""

from __future__ import annotations

import collections

from claims.judge import Finding, Note, decide, span
from claims.tma_config_fix_proposal import fastest
from tilelab import device

NOTE = Note("[SM 10.0] TMA descriptor compilation fails with deep pipelines")
PASS = "TritonGPUAssignLatencies"
RULE = "The note's rule against every build"


def builds(of, **wanted) -> list[dict]:
    return [row for row in of("ch14_bug_hunt_loop") if wanted.items() <= row.items()]


def failing(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["outcome"] == "fails"]


@NOTE.claim("The pass that fails is `tritongpu-assign-latencies`.", "ch14_bug_hunt", RULE)
def the_pass(of) -> Finding:
    found = failing(builds(of))
    named = [row for row in found if row["stage"] == PASS]
    return decide(found and named == found, f"{len(named)} of {len(found)} failures, out of {len(builds(of))} builds")


@NOTE.claim("It is Blackwell's alone; Hopper is spared.", "ch14_bug_hunt", "Which versions, which GPUs")
def blackwell_only(of) -> Finding:
    rows = of("ch14_bug_hunt_matrix")
    where = sorted({row["target"] for row in rows if row.get("stage") == PASS})
    free = sorted({row["target"] for row in rows} - set(where))
    return decide(all(target.startswith("sm_10") for target in where), f"for {' and '.join(where)}; not for "
                                                                       f"{', '.join(free)}")


@NOTE.claim("The loop that the note shows fails at BLOCK_K 128, 4 stages, 16 warps.", "ch14_bug_hunt",
            "Ask a Triton that is not installed")
def its_example(of) -> Finding:
    row, = builds(of, LOOP="plain", LOADS="device", BLOCK_K=128, num_stages=4, num_warps=16)
    return decide(row["outcome"] == "fails", f"it {row['outcome']}")


@NOTE.claim("It compiles if BLOCK_K is at most 32.", "ch14_bug_hunt", RULE)
def small_k(of) -> Finding:
    rows = builds(of, BLOCK_K=32)
    return decide(not failing(rows), f"{len(failing(rows))} of {len(rows)} such builds fail")


@NOTE.claim("It compiles if there is one stage.", "ch14_bug_hunt", RULE)
def one_stage(of) -> Finding:
    rows = builds(of, num_stages=1)
    return decide(not failing(rows), f"{len(failing(rows))} of {len(rows)} such builds fail")


@NOTE.claim("It compiles with at most four warps.", "ch14_bug_hunt", RULE)
def few_warps(of) -> Finding:
    rows = [row for row in builds(of) if row["num_warps"] <= 4]
    return decide(not failing(rows), f"{len(failing(rows))} of {len(rows)} such builds fail")


@NOTE.claim("It fails where BLOCK_K is at least 64, stages at least 4 and warps at least 8.", "ch14_bug_hunt", RULE)
def threshold(of) -> Finding:
    rows = [row for row in builds(of) if row["BLOCK_K"] >= 64 and row["num_stages"] >= 4 and row["num_warps"] >= 8]
    return decide(failing(rows) == rows, f"{len(failing(rows))} of {len(rows)} such builds fail")


@NOTE.claim("It takes TMA descriptors.", "ch14_bug_hunt", RULE)
def descriptors_needed(of) -> Finding:
    fail = collections.Counter(row["LOADS"] for row in failing(builds(of)))
    return decide(not fail["pointers"], f"failures: pointers {fail['pointers']}, descriptors of the device "
                                        f"{fail['device']}, of the host {fail['host']}")


@NOTE.claim("Registers are the cause: larger tiles and deeper pipelines pass a threshold.", "ch14_bug_hunt", RULE)
def registers(of) -> Finding:
    rows = failing(builds(of))
    by_k, by_loop = (collections.Counter(row[axis] for row in rows) for axis in ("BLOCK_K", "LOOP"))
    return decide(len(set(by_k.values())) > 1, "failures at BLOCK_K " + ", ".join(
        f"{k}: {count}" for k, count in sorted(by_k.items())) + "; only in loops that carry a tile: "
        f"{sum(count for loop, count in by_loop.items() if loop.startswith('carry'))} of {len(rows)}")


@NOTE.claim("A copy without a product takes tiles of 256 × 256, 16 warps, 5 stages.", "ch14_gemm", "And the copy?")
def copies_work(of) -> Finding:
    row = next(row for row in of("ch14_gemm_copy") if row["config"] == "256,256,16,5")
    return decide(row["status"] == "ok", f"it runs, at {row['ratio']:.3f} × torch's copy" if row["status"] == "ok" else
                  row["reason"])


@NOTE.claim("16 warps saturate Blackwell's tensor core.", "ch14_bug_hunt", "What 16 warps do")
def sixteen_warps(of) -> Finding:
    rows = [row for row in builds(of, num_warps=16) if row["outcome"] == "builds"]
    new, old = (sum(name in row for row in rows) for name in ("tcgen05", "mma_sync"))
    return decide(new == len(rows), f"of {len(rows)} builds {new} use it (tcgen05), {old} Ampere's mma.sync")


@NOTE.claim("The cautious tiles cost a factor of about 2.", "ch14_gemm", "Verdict")
def cost_of_caution(of) -> Finding:
    gain = fastest(of, "best", "factor")
    return decide(min(gain) >= 1.5, f"{span(gain, '.1f')} × on an H200, against the course's tiles"
                                    f"{': more than that' * (min(gain) > 2.5)}")


@NOTE.claim("350 to 400 TFLOP/s is what a B200 can do.", "00_start", "Ask for capabilities, not for names")
def what_a_b200_does(of) -> Finding:
    peak = device.KNOWN["B200"]
    return decide(400 >= 0.5 * peak.bf16_tflops, f"{40000 / peak.bf16_tflops:.0f} % of its {peak.bf16_tflops:,g} "
                  f"({peak.source}); an H200 does about {round(of('ceilings')[1]['tflops'], -1):.0f}")
