"""What does each word of a configuration's name mean? The panel says it beside the fastest configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tilelab.runtime import spoken

# By a regular expression of the word. A Space may have meanings of its own, which go first.
MEANINGS = {
    r"\d+×\d+×\d+": "the tile of C, and the step along K",
    r"\d+×\d+": "rows and columns of a tile",
    r"\d+ warps?": "groups of 32 threads",
    r"\d+ threads": "in each block (CTA)",
    r"\d+ stages?": "buffers in shared memory, used in turn",
    "plain": "each program computes one tile",
    "persistent": "each program takes tile after tile",
    r"C in \d+ parts": "stored piece by piece, through less shared memory",
    r"\d+ per SM": "programs that share a multiprocessor (SM)",
    r"\d+ CTAs per SM": "blocks that share a multiprocessor (SM)",
    "early": "may start before the kernel ahead of it ends",
    r"(groups|bands) of \d+": "tiles run in bands of so many rows of tiles",
    "swapped": "computes C transposed",
    "split": "several programs share the sum of a tile",
    r"\d+ (ways|splits)": "programs that share the sum of a tile",
    r"cluster of \d+": "blocks (CTAs) that share what they load",
    r"\d+ wide": "columns of blocks in a cluster",
    r"\d+ consumers?": "groups of 4 warps that multiply",
    "one_group": "the same warps load and multiply",
    "specialised": "one group of warps loads, the others multiply",
    "hopper": "some warps load, the others compute",
    "overlap": "the softmax runs beside the next product",
    "ping-pong": "two groups of warps take turns at the tensor core",
    "loads": "threads move 16 bytes each",
    "cp_async": "threads start copies of 16 bytes",
    "bulk": "one thread starts copies that TMA makes",
    r"\d+ B per chunk": "bytes that a block moves at a time",
    r"\d+ chunks? per CTA": "chunks that a block moves before it ends",
    r"\d+ tiles? per CTA": "tiles that a block moves before it ends",
    "copy|accumulate|stencil|transpose": "the operation",
    "a thread loads": "a thread that also computes starts the loads",
    "a warp loads": "a warp that does nothing else starts the loads",
    r"L2 fetches \d+B": "bytes of a row that come into the L2 cache together",
    "swizzle none": "a tile lies row by row in shared memory",
    r"swizzle \d+B": "a tile lies in shared memory without bank conflicts",
    r"blocks of \d+": "a thread turns so many rows and columns at a time",
}
PEERS = {"cuBLAS": "NVIDIA's library", "cuDNN": "NVIDIA's library", "torch": "PyTorch's own kernel"}


def explain_words(names: Iterable[str], peer: str, own: dict[str, str]) -> dict[str, str]:
    """Return the meaning of each word of these spoken names and of "× peer", by the word; "" for an unknown word.

    `own` are a Space's own meanings.
    """
    meanings = [*own.items(), *MEANINGS.items()]
    words = dict.fromkeys(word for name in names for word in name.split(spoken.SEPARATOR))
    found = {word: next((text for form, text in meanings if re.fullmatch(form, word)), "") for word in words}
    return found | {f"× {peer}": f"times as fast as {PEERS.get(peer, peer)}"}
