"""Claims of the field note "TMA Configuration Fix Proposal": six bold tiles for three cautious ones."""

from __future__ import annotations

from ch10.wgmma_gemm.configs import WgmmaConfig, count_resident_ctas, rename_old_steps
from claims.judge import UNTESTED, Finding, Note, decide, format_range
from tilelab import bench, build

NOTE = Note("TMA Configuration Fix Proposal")
CLAIMED = {2048: 1.52, 4096: 1.84, 8192: 1.92}  # the bold tiles' speed over the cautious ones', by size


def fastest(evidence, name: str, field: str) -> list[float]:
    """Return the highest value of `field` among the configurations of one kind, size by size."""
    rows = evidence("ch14_gemm_claim", name=name, status="ok")
    return [max(row[field] for row in rows if row["shape"][0] == n) for n in CLAIMED]


def floors_us(evidence, n: int) -> tuple[float, float]:
    """Return the least time of an n x n x n product in bf16 by the tensor core, and by memory."""
    copy, product = evidence("ceilings")
    roof = bench.Ceilings(copy["gbps"], product["tflops"])
    return 1e3 * bench.floor_ms(roof, flops=2 * n**3), 1e3 * bench.floor_ms(roof, nbytes=6 * n**2)


@NOTE.claim("The six proposed tile configurations are tested and work.", "ch14_gemm",
            "Build all nine, for five GPU generations")
def tested_and_working(evidence):
    proposed = {row["config"] for row in evidence("ch14_gemm_claim", name="proposed")}
    ran = {row["config"] for row in evidence("ch14_gemm_claim", name="proposed", status="ok")}
    return decide(ran == proposed, f"{len(ran)} of {len(proposed)} can be launched")


@NOTE.claim("They are 1.52, 1.84 and 1.92 times as fast as the cautious ones (2048³, 4096³, 8192³).", "ch14_gemm",
            "Measure the claim")
def speedup(evidence):
    factors = fastest(evidence, "proposed", "factor")
    return decide(all(factor >= claimed for factor, claimed in zip(factors, CLAIMED.values())),
                  f"{', '.join(f'{factor:.2f}' for factor in factors)} ×, by those of them that start")


@NOTE.claim("Larger matrices gain more.", "ch14_gemm", "Measure the claim")
def larger_gain_more(evidence):
    factors = fastest(evidence, "proposed", "factor")
    return decide(factors == sorted(factors), f"{', '.join(f'{factor:.2f}' for factor in factors)} × with growing size")


@NOTE.claim("They bring Triton closer to cuBLAS.", "ch14_gemm", "Measure the claim")
def closer_to_cublas(evidence):
    before, after, best = (fastest(evidence, name, "ratio") for name in ("conservative", "proposed", "best"))
    return decide(all(new > old for new, old in zip(after, before)), f"{format_range(before)} × cuBLAS before, "
                  f"{format_range(after)} with them; {format_range(best)} by the course's tiles")


@NOTE.claim("A B200 does 175 to 209 TFLOP/s with the cautious tiles, 265 to 402 with the bold ones.", "ch14_gemm",
            "Measure the claim")
def figures_of_a_b200(evidence):
    before, after = (format_range(fastest(evidence, name, "tflops"), ".0f") for name in ("conservative", "proposed"))
    return Finding(UNTESTED, f"an H200 does {before} and {after}", "there was no B200")


@NOTE.claim("A bandwidth utilisation that doubles (2.5 to 4.7 %) measures what better tiles gain.", "ch14_gemm",
            "Measure the claim")
def utilisation_is_the_measure(evidence):
    compute, memory = floors_us(evidence, 4096)
    return decide(memory > compute,
                  f"at 4096³ the tensor core needs {compute:.0f} us and memory {memory:.0f}: the wrong ceiling")


@NOTE.claim("Memory bandwidth will be used to 70 to 90 %.", "ch14_gemm", "Measure the claim")
def bandwidth_used(evidence):
    shares = [100 * memory / compute for compute, memory in (floors_us(evidence, n) for n in CLAIMED)]
    return Finding(UNTESTED, f"bytes that must move take {format_range(shares, '.0f')} % of a copy's bandwidth, at "
                   "cuBLAS's speed; the note measured 4.7 %", "DRAM's traffic was not counted")


@NOTE.claim("More warps saturate the tensor core better.", "ch10_wgmma_gemm", "The ladder")
def more_warps(evidence):
    rows = rename_old_steps(evidence("ch10_gemm_ladder"))
    ratio = {row["name"]: row["ratio"] for row in rows if row["shape"][0] == 4096}
    return decide(max(ratio["warp_specialized"], ratio["two_consumers"]) > ratio["ring"],
                  f"128 × 128: {ratio['ring']:.2f} × cuBLAS with 4 warps, {ratio['two_consumers']:.2f} with 12; "
                  f"128 × 256: {ratio['tile_128x256']:.2f} with 12",
                  "the tile grows with them", ratio["tile_128x256"] > ratio["ring"])


@NOTE.claim("Deeper pipelines overlap better.", "ch10_wgmma_gemm", "Verdict")
def deeper_pipelines(evidence):
    rows = evidence("ch10_gemm_sweep", status="ok")
    best = {columns: {stages: max(row["ratio"] for row in rows if f"128 × {columns}, {stages} stages" in row["kernel"])
                      for stages in counts} for columns, counts in ((128, (2, 3, 4, 6)), (256, (2, 3, 4)))}
    figure = "; ".join(f"128 × {columns}: " + ", ".join(f"{stages} stages {ratio:.2f}" for stages, ratio in by.items())
                       for columns, by in best.items()) + " × cuBLAS, by quick timings"
    # A sweep's quick timing differs by up to 4 % from the timing that is repeated at its end, so less is no gain.
    gains = [[after > 1.05 * before for before, after in zip(list(by.values()), list(by.values())[1:])]
             for by in best.values()]
    return decide(all(map(all, gains)), figure, "a load's latency is not yet covered", all(gain[0] for gain in gains))


@NOTE.claim("Larger tiles improve the occupancy of the multiprocessors.", "ch10_wgmma_gemm", "Verdict")
def occupancy(evidence):
    tiles = ((64, 64), (64, 128), (128, 128), (128, 192))
    counts = [count_resident_ctas(WgmmaConfig("one_group", *tile, 1)) for tile in tiles]
    return decide(counts == sorted(counts), "programs an SM, one stage: "
                  + ", ".join(f"{m} × {n} {count}" for (m, n), count in zip(tiles, counts)))


@NOTE.claim("If a configuration fails, Triton's autotuner falls back to another: a safety net.", "ch14_sweep",
            "The same faults and triton.autotune")
def autotune_fallback(evidence):
    faults = evidence("sweep_autotune_faults")
    survived = sum("the right one" in row["autotune"] for row in faults)
    return decide(survived == len(faults), f"of {len(faults)} planted faults it survives {survived}; the three "
                  "kinds of errors that it does catch are not among them")


@NOTE.claim("The latency assignment bug is fixed in Triton 3.5.", "ch14_bug_hunt", "Which versions, which GPUs")
def fixed_in_3_5(evidence):
    failed = {row["triton"] for row in evidence("ch14_bug_hunt_matrix", stage="TritonGPUAssignLatencies")}
    rows = evidence("ch14_bug_hunt_loop")
    count = sum(row["outcome"] == "fails" for row in rows)
    return decide(not any(version.startswith("3.5") for version in failed),
                  f"it is in {' and '.join(sorted(failed))}; {rows[0]['triton']} fails {count} of {len(rows)} builds")


@NOTE.claim("Tiles of 256 × 256 are the best for a copy.", "ch14_gemm", "And the copy?")
def large_copies(evidence):
    rows = sorted(evidence("ch14_gemm_copy", status="ok"), key=lambda row: -row["ratio"])
    large = next(row for row in rows if row["config"].startswith("256,256"))
    tile = " × ".join(rows[0]["config"].split(",")[:2])
    return decide(large is rows[0],
                  f"{large['ratio']:.3f} × torch's copy; the best tile, {tile}, {rows[0]['ratio']:.3f}")


@NOTE.claim("The copy gains from five stages.", "ch14_gemm", "And the copy?")
def copy_stages(evidence):
    tile = "tensordesc<bf16[128, 128]>"
    jobs = [build.Job("ch14.descriptors.tile_copy:copy_tma_kernel", {"source": tile, "destination": tile},
                      {"BLOCK_M": 128, "BLOCK_N": 128}, "sm_90a", num_stages=stages) for stages in (1, 5)]
    one, five = (report.ptx for report in build.build(jobs))
    return decide(one != five, "1 and 5 stages compile to the same PTX: the kernel has no loop" if one == five else
                  "1 and 5 stages compile to different PTX")
