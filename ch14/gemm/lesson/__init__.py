"""What the notebook `ch14_gemm` and the records need. No model imports it."""
