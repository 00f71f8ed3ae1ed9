"""What the notebook `16_ch14_fp4_decode` and the records of the decode kernels need. No model imports it."""
