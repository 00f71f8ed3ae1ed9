"""What the notebook `08_ch14_gemm` and the records need. No model imports it."""
