"""Plan and compile a block-scaled GEMM for Blackwell: the exercises of the notebook `17_ch14_blackwell_plan`.

The planner is `ch14.blockscaled.lesson.smem_planner`, and the field note's two attempts are
`ch14.blockscaled.lesson.note_attempts`.
"""
