"""What the notebook `ch14_blockscaled` and the records need. No model imports it."""
