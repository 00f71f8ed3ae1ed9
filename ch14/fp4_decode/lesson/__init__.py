"""What the notebook `ch14_fp4_decode` and the records of the decode kernels need. No model imports it."""
