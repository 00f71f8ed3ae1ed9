"""The same three mistakes in every language: a wrong index, too much shared memory, and a forgotten remainder.

A mistake is a text of the kernel's file and what it becomes, or a change of the configuration.
"""

from __future__ import annotations

from ch14.languages.configs import CONFIGS

# B is loaded at the row of the tile instead of its column.
INDEX = {
    "cuda": ("b_map, step * 64, tile.n * BLOCK_N", "b_map, step * 64, tile.m * BLOCK_N"),
    "triton": ("b_desc.load([n, k])", "b_desc.load([m, k])"),
    "gluon": ("(b_desc, [n, k]", "(b_desc, [m, k]"),
    "cute": ("(tile_n, None)", "(tile_m, None)"),
    "cutile": ("B, index=(n, k)", "B, index=(m, k)"),
    "tilelang": ("B[tile_n * block_n", "B[tile_m * block_n"),
    "helion": ("b[tile_k, tile_n]", "b[tile_k, tile_m]"),
}
# The last step of K is left out where the tile does not divide K: the place of a missing mask.
REMAINDER = {
    "cuda": ("steps = (K + 63) / 64", "steps = K / 64"),
    "triton": ("range(0, K, BLOCK_K)", "range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)"),
    "gluon": ("range(0, K, a.shape[2])", "range(0, K // a.shape[2] * a.shape[2], a.shape[2])"),
    "cute": ("cute.size(a_tiles, mode=[2])", "A.shape[1] // tile[2]"),
    "cutile": ("range(ct.num_tiles(A, axis=1, shape=(BLOCK_M, BLOCK_K)))", "range(A.shape[1] // BLOCK_K)"),
    "tilelang": ("T.Pipelined(T.ceildiv(K, block_k)", "T.Pipelined(K // block_k"),
    "helion": ("hl.tile(k)", "hl.tile(k // 64 * 64)"),
}
# Eight stages of a tile of 128 x 256 x 64 need 384 KiB, and a block may have 227. cuTile chooses its own stages, so
# there the tile grows.
SHARED_MEMORY = {
    "cuda": {"BLOCK_M": 128, "BLOCK_N": 256, "STAGES": 8},
    "triton": {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 8},
    "gluon": {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "STAGES": 8},
    "cute": {"tile": (128, 256, 64), "stages": 8},
    "cutile": {"BLOCK_M": 256, "BLOCK_N": 256, "BLOCK_K": 256},
    "tilelang": {"block_m": 128, "block_n": 256, "threads": 256, "stages": 8},
    "helion": {"block_sizes": [128, 256, 64], "num_stages": 8, "indexing": "tensor_descriptor"},
}
MISTAKES = ("wrong index", "too much shared memory", "forgotten remainder")


def plant(mistake: str, name: str, text: str) -> tuple[str, dict]:
    """Return the text of a kernel with a mistake, and the configuration to run it with."""
    config = CONFIGS[name][0]
    if mistake == "too much shared memory":
        return text, config | SHARED_MEMORY[name]
    before, after = (INDEX if mistake == "wrong index" else REMAINDER)[name]
    return text.replace(before, after), config
