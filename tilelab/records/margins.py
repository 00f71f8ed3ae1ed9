"""By how much two timings must differ to count as different: what kernels timed against themselves differ by.

The experiment `itself` (`claims.audits.itself`) times kernels against themselves. This module reads its record, per
kind of measurement and per way in which two timings lie apart.
"""

from __future__ import annotations

from collections.abc import Mapping

EXPERIMENT = "itself"
PRODUCT, COPY, GRAPH, QUICK, HOST = "product", "copy", "graph", "quick", "host"
KINDS = {  # what each kind is, in words
    PRODUCT: "a product or another kernel that computes, 0.1 ms or longer",
    COPY: "a kernel that moves bytes, 0.1 ms or longer",
    GRAPH: "a kernel below 0.1 ms, timed in a CUDA graph",
    QUICK: "a quick timing: layers and sweeps, in short rounds",
    HOST: "the CPU's time of a call",
}
INTERLEAVED, AFTER, FRESH = "interleaved", "after each other", "fresh processes"
WAYS = (INTERLEAVED, AFTER, FRESH)
DEFAULT = {INTERLEAVED: 0.02, AFTER: 0.02, FRESH: 0.03}  # for a GPU that has no record
DEFAULT_QUICK = {INTERLEAVED: 0.05, AFTER: 0.05, FRESH: 0.10}  # of QUICK and HOST
GRAPH_BELOW_MS = 0.1  # as bench.GRAPH_BELOW_US


def classify(row: Mapping, experiment: str = "") -> str:
    """Return the kind of measurement that a row of a record holds."""
    if "ms" not in row and "us" in row:
        return HOST
    if row.get("spread") is None or experiment.endswith(("_sweep", "_layers")):
        return QUICK
    if row.get("ms", 1) < GRAPH_BELOW_MS:
        return GRAPH
    return COPY if "gbps" in row and "tflops" not in row else PRODUCT
