"""The 24 configurations that each language may try: the same budget for all, in each language's own terms."""

from __future__ import annotations

import itertools


def combine(names: str, tiles: list[tuple], *others: dict) -> list[dict]:
    """Return a dict for each tile, with the values under `names`, and each of `others`."""
    return [
        dict(zip(names.split(), tile)) | other for tile, other in itertools.product(tiles, others or [{}])
    ]


GROUPS = [{"GROUP_M": rows} for rows in (2, 8, 16)]  # rows of tiles that sweep the columns together
CUDA = [
    (128, 256, 3),
    (128, 192, 4),
    (128, 128, 4),
    (128, 128, 5),
    (256, 128, 3),
    (192, 128, 4),
    (64, 128, 6),
    (64, 64, 8),
]
TRITON = [
    (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (128, 128, 64, 4, 3),
    (128, 128, 128, 8, 3), (64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (64, 128, 128, 4, 4), (64, 64, 64, 4, 6),
    (64, 64, 128, 4, 5), (128, 64, 64, 4, 5),
]  # fmt: skip
GLUON = [
    (128, 256, 64, 3), (256, 128, 64, 3), (128, 128, 64, 4), (128, 128, 64, 5), (128, 64, 64, 6), (128, 64, 64, 8),
    (128, 32, 64, 8), (128, 128, 128, 2),
]  # fmt: skip
CUTE = [
    (128, 256, 3), (128, 256, 2), (128, 224, 3), (128, 192, 3), (128, 192, 4), (128, 160, 4), (128, 128, 3),
    (128, 128, 4), (128, 128, 5), (128, 96, 5), (128, 64, 4), (128, 64, 6), (64, 256, 3), (64, 256, 4), (64, 192, 5),
    (64, 128, 4), (64, 128, 6), (64, 64, 4), (64, 64, 8), (64, 32, 8), (192, 128, 3), (192, 128, 4), (192, 160, 3),
    (256, 128, 3),
]  # fmt: skip
CUTILE = [
    (128, 256, 64),
    (256, 128, 64),
    (128, 128, 64),
    (128, 128, 128),
    (64, 256, 64),
    (128, 64, 64),
    (64, 128, 64),
    (64, 64, 64),
]
TILELANG = [
    (128, 256, 64, 256), (256, 128, 64, 256), (128, 128, 64, 128), (128, 128, 64, 256), (128, 128, 128, 256),
    (64, 256, 64, 128), (64, 128, 64, 128), (64, 64, 128, 128),
]  # fmt: skip
HELION = [
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 3),
    (64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 128, 4, 4),
]  # fmt: skip

CONFIGS = {
    "cuda": combine("BLOCK_M BLOCK_N STAGES", CUDA, *GROUPS),
    "triton": combine(
        "BLOCK_M BLOCK_N BLOCK_K num_warps num_stages", TRITON, {"GROUP_M": 4}, {"GROUP_M": 16}
    ),
    "gluon": combine("BLOCK_M BLOCK_N BLOCK_K STAGES", GLUON, *GROUPS),
    "cute": [{"tile": (m, n, 64), "stages": stages} for m, n, stages in CUTE],
    "cutile": combine(
        "BLOCK_M BLOCK_N BLOCK_K",
        CUTILE,
        *({"num_worker_warps": 4}, {"num_worker_warps": 8}, {"num_worker_warps": 8, "num_ctas": 2}),
    ),
    "tilelang": combine(
        "block_m block_n block_k threads", TILELANG, *({"stages": stages} for stages in (2, 3, 4))
    ),
    "helion": [
        {"block_sizes": [m, n, k], "num_warps": warps, "num_stages": stages, "l2_groupings": [8], **how}
        for (m, n, k, warps, stages), how in itertools.product(
            HELION,
            (
                {"pid_type": "flat", "indexing": "pointer"},
                {"pid_type": "flat", "indexing": "tensor_descriptor"},
                {"pid_type": "persistent_interleaved", "indexing": "tensor_descriptor"},
            ),
        )
    ],
}
