"""Share loads and sums between blocks: the ladders and exercises of the notebook `04_ch10_tile_sharing`.

The module's kernels that do so, `add_shared` and `accumulate`, are those of `ch10.tile_pipeline`.
"""
