"""What the notebook `00_start` and the records need. No model imports it."""
