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


def read(table: str) -> list[tuple]:
    """Return the cases of a table with a line for each: six numbers and, under a mask, the word causal."""
    lines = (line.split() for line in table.splitlines())
    return [(*map(int, fields[:6]), fields[6:] == ["causal"]) for fields in lines]


TUNED_FEW_QUERIES = read("""\
1 32 8 1 4096 128
1 32 32 1 4096 128
8 32 8 1 4096 128
1 32 8 1 32768 128
64 32 8 1 2048 128
1 64 8 1 8192 128
16 32 8 1 8192 128
1 32 8 16 4096 128
2 32 8 8 16384 128
1 64 8 64 8192 128
4 32 8 64 4096 128
1 32 32 1 4096 64
4 64 8 4 8192 64
1 32 8 32 65536 128
1 16 16 64 4096 128
1 8 1 1 16384 128
3 32 8 1 5000 128
2 28 4 1 9000 128
5 40 8 1 3500 128
24 32 8 1 2500 128
1 48 8 2 20000 128
12 64 8 1 4000 128
1 24 8 4 6000 128
2 40 8 16 5000 128
6 32 8 32 3000 128
8 16 16 16 2048 128
3 20 4 48 7000 128
1 71 1 1 8000 64
8 32 4 8 10000 64
2 16 2 64 6000 64
32 16 16 1 2048 64
10 32 8 64 3000 128
4 40 8 24 2100 128
16 32 8 64 4096 128
16 40 8 24 4096 128
1 64 8 1 50000 128
""")
TUNED_OTHERS = read("""\
64 8 8 256 256 128
64 8 8 256 256 128 causal
4 32 32 4096 4096 64
4 32 32 4096 4096 64 causal
8 16 16 577 577 64 causal
4 16 16 4096 4096 128
4 16 16 4096 4096 128 causal
2 32 32 2048 2048 64
32 12 12 384 384 64
1 16 16 1024 1024 64
2 16 16 512 512 128
2 32 8 1024 1024 128 causal
16 16 16 200 200 128 causal
4 8 8 700 700 128
1 32 32 600 600 128 causal
1 16 16 1024 1024 128
3 16 16 300 300 128
1 32 32 512 512 64
4 16 16 500 500 64 causal
1 8 8 1100 1100 64
2 12 12 800 800 64 causal
1 24 8 300 5000 128
16 12 12 256 256 64
24 16 16 400 400 64 causal
4 24 24 1000 1000 64
2 16 16 3000 3000 64
64 12 12 197 197 64
1 12 12 2000 2000 64 causal
8 8 8 777 777 64 causal
3 32 8 1700 1700 64 causal
100 8 8 100 100 64
1 20 20 4000 4000 64
40 6 6 512 512 64
2 10 10 1500 77 64
32 8 8 320 320 128
10 16 16 384 384 128 causal
1 14 14 1600 1600 128
3 32 8 1400 1400 128
1 40 8 2500 2500 128 causal
128 8 8 128 128 128
2 16 16 900 4000 128
4 32 32 230 230 128 causal
""")
HELD_OUT_FEW_QUERIES = read("""\
1 32 8 1 2048 128
2 32 8 1 6000 128
4 28 4 1 10000 128
32 32 8 1 3000 128
6 16 16 1 2500 128
1 16 1 1 40000 128
1 40 8 1 65536 128
1 64 8 2 12288 128
8 24 8 4 5000 128
1 48 4 8 20000 128
3 32 4 16 7000 128
16 40 8 24 4500 128
2 64 8 32 30000 128
1 12 12 48 9000 128
1 32 8 64 2048 128
4 14 2 1 5000 64
1 24 24 1 3000 64
1 32 8 1 8000 64
2 64 8 16 10000 64
1 32 4 64 32768 64
""")
HELD_OUT_OTHERS = read("""\
96 8 8 192 192 128
20 16 16 448 448 128 causal
5 32 32 210 210 128 causal
1 10 10 1200 1200 128
2 40 8 1800 1800 128
1 28 4 3000 3000 128 causal
2 8 8 700 5000 128
128 16 16 128 128 64
48 12 12 320 320 64
32 6 6 600 600 64 causal
10 12 12 900 900 64 causal
6 20 20 1500 1500 64
3 24 8 2500 2500 64
1 24 24 4096 77 64
1 16 16 6000 6000 64
""")
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
    experiments.compile_choices(HELD_OUT + TUNED)
    for case in HELD_OUT + TUNED:
        row = measure_case(case, flash_4, rounds=12, warm_s=0.1)
        rows.append(row | {"held_out": case in HELD_OUT, "few_queries": case[3] <= 64})
    return rows
