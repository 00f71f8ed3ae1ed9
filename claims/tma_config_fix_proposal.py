"""Claims of the field note "TMA Configuration Fix Proposal": six bold tiles for three cautious ones."""

from __future__ import annotations

from ch10.wgmma_gemm.configs import WgmmaConfig, count_resident_ctas, rename_old_steps
from claims.judge import Finding, Note, decide, holds, only_if, refuted, span, untested
from tilelab import bench, build

NOTE = Note("TMA Configuration Fix Proposal")
SAID = {2048: 1.52, 4096: 1.84, 8192: 1.92}  # the bold tiles' speed over the cautious ones', by size


def fastest(of, name: str, value: str) -> list[float]:
    """The most that configurations of one kind reach, size by size."""
    rows = [row for row in of("ch14_gemm_claim") if row["name"] == name and row["status"] == "ok"]
    return [max(row[value] for row in rows if row["shape"][0] == n) for n in SAID]


def floors_us(of, n: int) -> tuple[float, float]:
    """The least time of an n x n x n product in bf16 by the tensor core, and by memory."""
    copy, product = of("ceilings")
    roof = bench.Ceilings(copy["gbps"], product["tflops"])
    return 1e3 * bench.floor_ms(roof, flops=2 * n**3), 1e3 * bench.floor_ms(roof, nbytes=6 * n**2)


@NOTE.claim("The six proposed tile configurations are tested and work.", "ch14_gemm",
            "Build all nine, for five GPU generations")
def tested_and_working(of) -> Finding:
    proposed = [row for row in of("ch14_gemm_claim") if row["name"] == "proposed"]
    every, ran = {row["config"] for row in proposed}, {row["config"] for row in proposed if row["status"] == "ok"}
    return decide(ran == every, f"{len(ran)} of {len(every)} can be launched")


@NOTE.claim("They are 1.52, 1.84 and 1.92 times as fast as the cautious ones (2048³, 4096³, 8192³).", "ch14_gemm",
            "Measure the claim")
def speedup(of) -> Finding:
    found = fastest(of, "proposed", "factor")
    return decide(all(here >= said for here, said in zip(found, SAID.values())),
                  f"{', '.join(f'{here:.2f}' for here in found)} ×, by those of them that start")


@NOTE.claim("Larger matrices gain more.", "ch14_gemm", "Measure the claim")
def larger_gain_more(of) -> Finding:
    found = fastest(of, "proposed", "factor")
    return decide(found == sorted(found), f"{', '.join(f'{here:.2f}' for here in found)} × with growing size")


@NOTE.claim("They bring Triton closer to cuBLAS.", "ch14_gemm", "Measure the claim")
def closer_to_cublas(of) -> Finding:
    before, after, best = (fastest(of, name, "ratio") for name in ("conservative", "proposed", "best"))
    return decide(all(new > old for new, old in zip(after, before)), f"{span(before)} × cuBLAS before, {span(after)} "
                  f"with them; {span(best)} by the course's tiles")


@NOTE.claim("A B200 does 175 to 209 TFLOP/s with the cautious tiles, 265 to 402 with the bold ones.", "ch14_gemm",
            "Measure the claim")
def figures_of_a_b200(of) -> Finding:
    before, after = (fastest(of, name, "tflops") for name in ("conservative", "proposed"))
    return untested("there was no B200", f"an H200 does {span(before, '.0f')} and {span(after, '.0f')}")


@NOTE.claim("A bandwidth utilisation that doubles (2.5 to 4.7 %) measures what better tiles gain.", "ch14_gemm",
            "Measure the claim")
def utilisation_is_the_measure(of) -> Finding:
    compute, memory = floors_us(of, 4096)
    return decide(memory > compute,
                  f"at 4096³ the tensor core needs {compute:.0f} us and memory {memory:.0f}: the wrong ceiling")


@NOTE.claim("Memory bandwidth will be used to 70 to 90 %.", "ch14_gemm", "Measure the claim")
def bandwidth_used(of) -> Finding:
    shares = [100 * memory / compute for compute, memory in (floors_us(of, n) for n in SAID)]
    return untested("DRAM's traffic was not counted", f"bytes that must move take {span(shares, '.0f')} % of a copy's "
                    "bandwidth, at cuBLAS's speed; the note measured 4.7 %")


@NOTE.claim("More warps saturate the tensor core better.", "ch10_wgmma_gemm", "The ladder")
def more_warps(of) -> Finding:
    rows = rename_old_steps(of("ch10_gemm_ladder"))
    ratio = {row["name"]: row["ratio"] for row in rows if row["shape"][0] == 4096}
    figure = (f"128 × 128: {ratio['ring']:.2f} × cuBLAS with 4 warps, {ratio['two_consumers']:.2f} with 12; "
              f"128 × 256: {ratio['tile_128x256']:.2f} with 12")
    if max(ratio["warp_specialized"], ratio["two_consumers"]) > ratio["ring"]:
        return holds(figure)
    return only_if("the tile grows with them", figure) if ratio["tile_128x256"] > ratio["ring"] else refuted(figure)


@NOTE.claim("Deeper pipelines overlap better.", "ch10_wgmma_gemm", "Verdict")
def deeper_pipelines(of) -> Finding:
    rows = [row for row in of("ch10_gemm_sweep") if row["status"] == "ok"]
    best = {columns: {count: max(row["ratio"] for row in rows if f"128 × {columns}, {count} stages" in row["kernel"])
                      for count in counts} for columns, counts in ((128, (2, 3, 4, 6)), (256, (2, 3, 4)))}
    figure = "; ".join(f"128 × {columns}: " + ", ".join(f"{count} stages {ratio:.2f}" for count, ratio in found.items())
                       for columns, found in best.items()) + " × cuBLAS, by quick timings"
    gains = []
    for found in best.values():
        ratios = list(found.values())
        # A sweep's quick timing stands up to 4 % from the one that is repeated at its end: less is no gain.
        gains.append([after > 1.05 * before for before, after in zip(ratios, ratios[1:])])
    if all(map(all, gains)):
        return holds(figure)
    return only_if("a load's latency is not yet covered", figure) if all(gain[0] for gain in gains) else refuted(figure)


@NOTE.claim("Larger tiles improve the occupancy of the multiprocessors.", "ch10_wgmma_gemm", "Verdict")
def occupancy(of) -> Finding:
    tiles = ((64, 64), (64, 128), (128, 128), (128, 192))
    found = [count_resident_ctas(WgmmaConfig("one_group", *tile, 1)) for tile in tiles]
    return decide(found == sorted(found), "programs an SM, one stage: "
                  + ", ".join(f"{m} × {n} {count}" for (m, n), count in zip(tiles, found)))


@NOTE.claim("If a configuration fails, Triton's autotuner falls back to another: a safety net.", "01_sweep",
            "Four of them before triton.autotune")
def autotune_fallback(of) -> Finding:
    faults = of("sweep_autotune_faults")
    survived = sum("the right one" in row["autotune"] for row in faults)
    return decide(survived == len(faults), f"of {len(faults)} planted faults it survives {survived}; the three "
                  "kinds of errors that it does catch are not among them")


@NOTE.claim("The latency assignment bug is fixed in Triton 3.5.", "ch14_bug_hunt", "Which versions, which GPUs")
def fixed_in_3_5(of) -> Finding:
    failed = {row["triton"] for row in of("ch14_bug_hunt_matrix") if row.get("stage") == "TritonGPUAssignLatencies"}
    rows = of("ch14_bug_hunt_loop")
    fail = sum(row["outcome"] == "fails" for row in rows)
    return decide(not any(version.startswith("3.5") for version in failed),
                  f"it is in {' and '.join(sorted(failed))}; {rows[0]['triton']} fails {fail} of {len(rows)} builds")


@NOTE.claim("Tiles of 256 × 256 are the best for a copy.", "ch14_gemm", "And the copy?")
def large_copies(of) -> Finding:
    rows = [row for row in of("ch14_gemm_copy") if row["status"] == "ok"]
    large = max((row for row in rows if row["config"].startswith("256,256")), key=lambda row: row["ratio"])
    best = max(rows, key=lambda row: row["ratio"])
    tile = " × ".join(best["config"].split(",")[:2])
    return decide(large is best, f"{large['ratio']:.3f} × torch's copy; the best tile, {tile}, {best['ratio']:.3f}")


@NOTE.claim("The copy gains from five stages.", "ch14_gemm", "And the copy?")
def copy_stages(of) -> Finding:
    tile = "tensordesc<bf16[128, 128]>"
    jobs = [build.Job("ch14.descriptors.tile_copy:copy_tma_kernel", {"source": tile, "destination": tile},
                      {"BLOCK_M": 128, "BLOCK_N": 128}, "sm_90a", num_stages=stages) for stages in (1, 5)]
    one, five = (report.ptx for report in build.build(jobs))
    return decide(one != five, "1 and 5 stages compile to the same PTX: the kernel has no loop" if one == five else
                  "1 and 5 stages compile to different PTX")
