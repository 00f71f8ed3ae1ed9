"""Count the wavefronts in which shared memory serves a warp.

Shared memory has 32 banks of 4-byte words. It serves as many lanes at a time as 128 bytes hold: 32 lanes of 4 bytes, 16
of 8 or 8 of 16. Different words of one bank take one wavefront each; a word that several lanes read is delivered once.
Source: CUDA C++ Programming Guide, "Shared Memory".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

BANKS, WORD = 32, 4


def words_read(addresses: Sequence[int], itemsize: int) -> list[set[int]]:
    """Return the words that each group of lanes reads, if each lane reads `itemsize` bytes at its address."""
    words = [
        {(int(address) + byte) // WORD for byte in range(0, itemsize, min(WORD, itemsize))}
        for address in addresses
    ]
    together = BANKS * WORD // max(WORD, itemsize)
    return [set.union(*words[first : first + together]) for first in range(0, len(words), together)]


def count_wavefronts(addresses: Sequence[int], itemsize: int) -> int:
    """Return how many wavefronts a group of lanes takes at most: 1 without a conflict, n for an n-way conflict."""
    return max(
        (max(Counter(word % BANKS for word in words).values()) for words in words_read(addresses, itemsize)),
        default=0,
    )


def total_wavefronts(addresses: Sequence[int], itemsize: int) -> int:
    """Return how many wavefronts all groups of lanes take together, which is what the profiler counts for one read."""
    return sum(
        max(Counter(word % BANKS for word in words).values()) for words in words_read(addresses, itemsize)
    )
