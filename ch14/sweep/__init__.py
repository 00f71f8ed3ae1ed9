"""Put the sweep engine on trial: the experiments and exercises of the notebook `09_ch14_sweep`.

The engine itself is `tilelab.sweeps.sweep`, and the configurations that it races over are those of
`ch14.gemm.lesson.sweep`.
"""
