"""Time attention on shapes that its choice of a configuration has never seen, beside cuDNN and FlashAttention-4.

A figure on the shapes that a choice was fitted to says little about a user's shape. So there are two disjoint lists:
`configs.best_config` may learn from TUNED, and HELD_OUT only measures. A case is (batch, heads, key heads, queries,
keys, head dimension, causal).
"""

from __future__ import annotations

from ch14.attention.lesson import audit, experiments
from tilelab.measure import bench, peers
from tilelab.records import results
from tilelab.runtime import provenance

TUNED_FEW_QUERIES = [
    (1, 32, 8, 1, 4096, 128, False),
    (1, 32, 32, 1, 4096, 128, False),
    (8, 32, 8, 1, 4096, 128, False),
    (1, 32, 8, 1, 32768, 128, False),
    (64, 32, 8, 1, 2048, 128, False),
    (1, 64, 8, 1, 8192, 128, False),
    (16, 32, 8, 1, 8192, 128, False),
    (1, 32, 8, 16, 4096, 128, False),
    (2, 32, 8, 8, 16384, 128, False),
    (1, 64, 8, 64, 8192, 128, False),
    (4, 32, 8, 64, 4096, 128, False),
    (1, 32, 32, 1, 4096, 64, False),
    (4, 64, 8, 4, 8192, 64, False),
    (1, 32, 8, 32, 65536, 128, False),
    (1, 16, 16, 64, 4096, 128, False),
    (1, 8, 1, 1, 16384, 128, False),
]
TUNED_OTHERS = [
    (64, 8, 8, 256, 256, 128, False),
    (64, 8, 8, 256, 256, 128, True),
    (4, 32, 32, 4096, 4096, 64, False),
    (4, 32, 32, 4096, 4096, 64, True),
    (8, 16, 16, 577, 577, 64, True),
    (4, 16, 16, 4096, 4096, 128, False),
    (4, 16, 16, 4096, 4096, 128, True),
    (2, 32, 32, 2048, 2048, 64, False),
    (32, 12, 12, 384, 384, 64, False),
    (1, 16, 16, 1024, 1024, 64, False),
    (2, 16, 16, 512, 512, 128, False),
    (2, 32, 8, 1024, 1024, 128, True),
    (16, 16, 16, 200, 200, 128, True),
]
HELD_OUT_FEW_QUERIES = [
    (1, 32, 8, 1, 2048, 128, False),
    (2, 32, 8, 1, 6000, 128, False),
    (4, 28, 4, 1, 10000, 128, False),
    (32, 32, 8, 1, 3000, 128, False),
    (6, 16, 16, 1, 2500, 128, False),
    (1, 16, 1, 1, 40000, 128, False),
    (1, 40, 8, 1, 65536, 128, False),
    (1, 64, 8, 2, 12288, 128, False),
    (8, 24, 8, 4, 5000, 128, False),
    (1, 48, 4, 8, 20000, 128, False),
    (3, 32, 4, 16, 7000, 128, False),
    (16, 40, 8, 24, 4500, 128, False),
    (2, 64, 8, 32, 30000, 128, False),
    (1, 12, 12, 48, 9000, 128, False),
    (1, 32, 8, 64, 2048, 128, False),
    (4, 14, 2, 1, 5000, 64, False),
    (1, 24, 24, 1, 3000, 64, False),
    (1, 32, 8, 1, 8000, 64, False),
    (2, 64, 8, 16, 10000, 64, False),
    (1, 32, 4, 64, 32768, 64, False),
]
HELD_OUT_OTHERS = [
    (96, 8, 8, 192, 192, 128, False),
    (20, 16, 16, 448, 448, 128, True),
    (5, 32, 32, 210, 210, 128, True),
    (1, 10, 10, 1200, 1200, 128, False),
    (2, 40, 8, 1800, 1800, 128, False),
    (1, 28, 4, 3000, 3000, 128, True),
    (2, 8, 8, 700, 5000, 128, False),
    (128, 16, 16, 128, 128, 64, False),
    (48, 12, 12, 320, 320, 64, False),
    (32, 6, 6, 600, 600, 64, True),
    (10, 12, 12, 900, 900, 64, True),
    (6, 20, 20, 1500, 1500, 64, False),
    (3, 24, 8, 2500, 2500, 64, False),
    (1, 24, 24, 4096, 77, 64, False),
    (1, 16, 16, 6000, 6000, 64, False),
]
TUNED = TUNED_FEW_QUERIES + TUNED_OTHERS
HELD_OUT = HELD_OUT_FEW_QUERIES + HELD_OUT_OTHERS


def measure_case(case, flash_4: peers.Peer, **timing) -> dict:
    """Check and time `attention` with config="best", interleaved with cuDNN and FlashAttention-4.

    Return a row with `us`, its ratio to each peer (`to_cudnn`, `to_fa4`) and to the faster one (`ratio`, whose `spread`
    is half of the distance between its quartiles), and the configuration.
    """
    names = {experiments.choose_peer(case): "to_cudnn", flash_4.name: "to_fa4"}
    cudnn, causal = next(iter(names)), case[6]
    prepared = experiments.prepare_attention("best", causal)
    checked = audit.verify(prepared, case, cudnn)
    launch = prepared(*experiments.make_inputs(case))
    row = experiments.label(case, "course", launch.config) | checked | {"chosen": launch.chosen}
    if checked["status"] != "ok":
        return row
    candidates = {"course": prepared, cudnn: experiments.prepare_sdpa(cudnn, causal)}
    if not flash_4.reason and audit.verify(flash_4.prepare_attention(causal), case, cudnn)["status"] == "ok":
        candidates[flash_4.name] = flash_4.prepare_attention(causal)
    flops = experiments.count_flops(case)
    found = bench.compare(candidates, lambda: experiments.make_inputs(case), "course", flops=flops, **timing)
    rows = {
        name: peers.relate(found["course"], found[name], peers.Peer(name)) for name in names if name in found
    }
    best = min((each for each in rows.values() if "ratio" in each), key=lambda each: each["ratio"])
    ratios = {names[name]: each["ratio"] for name, each in rows.items() if "ratio" in each}
    return row | best | {"us": 1e3 * found["course"].ms} | ratios


def source() -> str:
    """Return the hash of what is measured: the kernels, the choice, and how the peers are called."""
    return provenance.source_hash(*experiments.MEASURED, measure_case, peers.FlashAttention4)


@results.experiment("ch14_attention_held_out", source)
def measure_held_out():
    """Check and time config="best" on TUNED and on HELD_OUT; `held_out` says in which list a case is."""
    rows, flash_4 = [], peers.find("flash_attention_4")
    experiments.compile_choices(TUNED + HELD_OUT)
    for case in TUNED + HELD_OUT:
        row = measure_case(case, flash_4, rounds=12, warm_s=0.1)
        rows.append(row | {"held_out": case in HELD_OUT, "few_queries": case[3] <= 64})
    return rows
