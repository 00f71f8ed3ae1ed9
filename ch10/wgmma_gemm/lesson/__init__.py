"""What the notebook `05_ch10_wgmma_gemm` and the records need. No model imports it."""
