"""What the notebook `15_ch14_blockscaled` and the records of the fp8 kernel need. No model imports it."""
