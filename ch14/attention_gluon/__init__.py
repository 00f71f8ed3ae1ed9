"""Give each warp of an attention kernel a role: the checks and records of the notebook `13_ch14_attention_gluon`.

The module's kernel with roles is `ch14.attention.hopper_kernel`.
"""
