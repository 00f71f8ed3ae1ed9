"""A model of when each unit of an SM is busy with attention."""

from __future__ import annotations

from ch14.attention.configs import estimate_clocks


def schedule(step: str, d: int, blocks: int = 4) -> tuple[list[tuple[str, int, float, float]], float]:
    """Model one SM with two warp groups of 64 queries and blocks of 128 keys; `step` is lockstep, roles or overlap.

    Return the spans (unit, group, begin, end) in clocks, and the share of the time, from the first product to the last,
    in which the tensor core is busy. The model counts throughput alone: loads and latencies are free.
    """
    cost = {name: 64 * 128 * each for name, each in estimate_clocks(d).items()}
    product, softmax = cost["products"] / 2, cost["exponential"] + cost["float32"]
    free, ready, spans = {"tensor core": 0.0, "softmax": 0.0}, [0.0, 0.0], []

    def run(unit, group, duration, after):
        begin = max(free[unit], after)
        free[unit] = begin + duration
        spans.append((unit, group, begin, free[unit]))
        return free[unit]

    for block in range(blocks + 1):
        scored = []
        for group in range(2):  # the product with V of the last block, and the scores of this block
            ends = [
                run("tensor core", group, product, ready[group])
                for _ in range((block > 0) + (block < blocks))
            ]
            scored.append(ends[0 if step == "overlap" else -1])  # overlap computes the scores first
            if step != "lockstep" and block < blocks:
                ready[group] = run("softmax", group, softmax, scored[group])
        if step == "lockstep" and block < blocks:
            ready = [max(run("softmax", group, softmax, max(scored)) for group in range(2))] * 2
    busy = sum(end - begin for unit, _, begin, end in spans if unit == "tensor core")
    return spans, busy / max(end for unit, _, _, end in spans if unit == "tensor core")
