"""What the notebook `ch10_wgmma_gemm` and the records need. No model imports it."""
