"""What the notebook `ch14_compiled` and the records need. No model imports it."""
