"""How to search a space of configurations honestly: the trial of the sweep engine that the notebook `ch14_sweep` tells.

The engine itself is `tilelab.sweep`, and the configurations that it races over are those of `ch14.gemm.sweep`.
"""
