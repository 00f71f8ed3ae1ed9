"""What the notebook `15_ch14_blockscaled` and the records need. No model imports it."""
