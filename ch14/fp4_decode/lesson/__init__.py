"""What the notebook `ch14_blockscaled` and the records of the decode kernels need. No model imports it."""
