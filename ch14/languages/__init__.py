"""One GEMM in seven languages: C (M, N) = A (M, K) B (K, N) in bf16 with sums in float32, B stored as weight.T.

Each language has a file in `kernels`, NAME_gemm.py or cuda_gemm.cu: read `triton_gemm.py` first, the shortest to name
its loads. The files NAME_host.py hold what three of them need from the host. That folder is no package, because most of
its files need a language that may not be installed. `configs.py` holds the 24 configurations that each may try.
`lesson/worker.py` runs a language in a process of its own, because their packages cannot all live in one. `lesson` also
holds what the notebook `19_ch14_languages` and the records need.
"""

import torch

TITLES = {
    "cuda": "CUDA C++",
    "gluon": "Gluon",
    "cute": "CuTe DSL",
    "triton": "Triton",
    "tilelang": "TileLang",
    "cutile": "cuTile",
    "helion": "Helion",
}


def spec(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a (M, K) times b (K, N) in float64."""
    return a.double() @ b.double()
