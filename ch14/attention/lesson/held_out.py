"""Time attention on shapes that its choice of a configuration has never seen, beside cuDNN and FlashAttention-4.

A figure on the shapes that a choice was fitted to says little about a user's shape. So shapes.csv has two disjoint
lists: `configs.best_config` may learn from TUNED, and HELD_OUT only measures. A case is (batch, heads, key heads,
queries, keys, head dimension, causal).
"""

from __future__ import annotations

import csv
import pathlib

from ch14.attention.lesson import audit, experiments
from tilelab.measure import bench, peers
from tilelab.records import results
from tilelab.runtime import provenance


def read_cases(which: str) -> list[tuple]:
    """Return the cases of shapes.csv in the list "tuned" or "held out"."""
    with pathlib.Path(__file__).with_name("shapes.csv").open() as file:
        rows = [row for row in csv.reader(file) if row[0] == which]
    return [(*map(int, sizes), causal == "yes") for _, *sizes, causal in rows]


TUNED, HELD_OUT = read_cases("tuned"), read_cases("held out")


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
