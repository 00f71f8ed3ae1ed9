"""Count what three ways to search ask of shared memory. The figures come from a model and are not measured."""

import itertools

from tilelab.records import results

LANES = 32  # of a warp
BANKS = 32  # of shared memory, each 4 bytes wide


def binary_search_reads(sources: int, target: float) -> list[int]:
    """Return the source times that search_lane0 of resample.cu reads; source time i is i."""
    low, high, reads = 0, sources - 2, []
    while low < high:
        reads.append((low + high + 1) // 2)
        low, high = (reads[-1], high) if reads[-1] <= target else (low, reads[-1] - 1)
    return reads


def ballot_search_reads(sources: int, target: float) -> list[list[int]]:
    """Return the source times that the lanes of search_ballot read, step by step; -1 stands for no read."""
    low, count, reads = 0, sources - 1, []
    while count > 1:
        step = -(-count // LANES)
        reads.append([low + lane * step if lane * step < count else -1 for lane in range(LANES)])
        last = max((lane for lane, word in enumerate(reads[-1]) if 0 <= word <= target), default=0)
        low, count = low + last * step, min(step, count - last * step)
    return reads


def count_wavefronts(words) -> int:
    """Return the number of wavefronts (reads of one word per bank) that one load of a warp takes.

    Lanes that read the same word share a read.
    """
    banks = [word % BANKS for word in set(words) if word >= 0]
    return max(map(banks.count, banks))


def count_search_wavefronts(sources: int = 1024, targets: int = 2048) -> list[dict]:
    """Return, for three ways to search, the steps and the wavefronts per target, by the model of `count_wavefronts`.

    The source times and the targets are spread evenly. A warp-step is one comparison by a warp.
    """
    at = [(target + 0.5) * (sources - 1) / targets for target in range(targets)]
    single = [binary_search_reads(sources, target) for target in at]
    groups = [
        list(itertools.zip_longest(*single[first : first + LANES], fillvalue=-1))
        for first in range(0, targets, LANES)
    ]
    searches = {
        "32 lanes read one word": [[[word] * LANES for word in reads] for reads in single],
        "lane 0 reads alone": [[[word] for word in reads] for reads in single],
        "32 lanes read 32 pivots": [ballot_search_reads(sources, target) for target in at[::16]],
        "32 lanes search 32 targets": groups,
    }
    rows = []
    for name, runs in searches.items():
        found = len(runs) * (LANES if runs is groups else 1)
        steps, wavefronts = sum(map(len, runs)), sum(count_wavefronts(step) for run in runs for step in run)
        row = {"search": name, "steps": steps / len(runs)}
        rows.append(
            row | {"warp-steps per target": steps / found, "wavefronts per target": wavefronts / found}
        )
    return rows


def wavefront_table() -> results.Table:
    """Return the table of `count_search_wavefronts` for the problem of the notebook."""
    rows = [
        {name: value if name == "search" else round(value, 2) for name, value in row.items()}
        for row in count_search_wavefronts()
    ]
    return results.table(rows, "counted, not measured: 1,024 sources, 2,048 targets")
