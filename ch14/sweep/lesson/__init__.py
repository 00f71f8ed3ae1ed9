"""What the notebook `ch14_sweep` and the records need. No model imports it."""
