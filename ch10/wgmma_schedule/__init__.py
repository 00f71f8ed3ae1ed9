"""Schedule the tiles of a GEMM: the ladder and the exercises of the notebook `06_ch10_wgmma_schedule`.

The module's kernels that do so are those of `ch10.wgmma_gemm`, and `ch10/wgmma_gemm/choice.py` chooses a tile.
"""
