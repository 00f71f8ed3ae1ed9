"""What the notebook `09_ch14_sweep` and the records need. No model imports it."""
