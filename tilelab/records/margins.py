"""By how much two timings must differ to count as different: what kernels timed against themselves differ by.

The experiment `itself` (`claims.audits.itself`) times kernels against themselves. This module reads its record, per
kind of measurement and per way in which two timings lie apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilelab.records import results

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
# On a GPU without the record, and the least between two recordings: other days and machines differ by more than
# processes on one GPU do. Of 4,910 rows that H200s recorded again with the same code, 99 in 100 lay within both spreads
# and 2.9 % (products), 2.5 % (copies), 9.6 % (graphs) or 4.4 % (quick timings, most of which have a spread).
DEFAULTS = {PRODUCT: 0.03, COPY: 0.03, GRAPH: 0.1, QUICK: 0.1, HOST: 0.1}
GRAPH_BELOW_MS = 0.1  # as bench.GRAPH_BELOW_US


def classify(row: Mapping, experiment: str = "") -> str:
    """Return the kind of measurement that a row of a record holds."""
    if "ms" not in row and "us" in row:
        return HOST
    is_peer = row.get("ratio") == 1  # which is not timed against itself, and so has no spread
    if (row.get("spread") is None and not is_peer) or experiment.endswith(("_sweep", "_layers")):
        return QUICK
    if row.get("ms", 1) < GRAPH_BELOW_MS:
        return GRAPH
    return COPY if "gbps" in row and "tflops" not in row else PRODUCT


def find_margins(gpu: str, ways: Iterable[str] = WAYS) -> dict[str, float]:
    """Return the margin of each kind on a GPU, a folder of results/: the largest difference in one of these ways.

    DEFAULTS hold where there is no record. ValueError for one that lacks a figure.
    """
    try:
        rows = results.load(EXPERIMENT, gpu)["rows"]
    except FileNotFoundError:
        return DEFAULTS
    try:
        return {
            kind: max(row["largest"] for row in rows if row["kind"] == kind and row["way"] in ways)
            for kind in KINDS
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the record {EXPERIMENT} of {gpu} lacks a difference ({error}).") from error


def find_fresh_margins(gpu: str) -> dict[str, float]:
    """Return the margin of each kind between two recordings: of the record, of fresh processes, or more by DEFAULTS."""
    found = find_margins(gpu, [FRESH])
    return {kind: max(found[kind], least) for kind, least in DEFAULTS.items()}


def describe_margins(found: Mapping[str, float]) -> str:
    """Return the margins in words: "product 1.2 %, copy 0.4 %, …"."""
    return ", ".join(f"{kind} {100 * margin:.1f} %" for kind, margin in found.items())
