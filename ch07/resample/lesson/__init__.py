"""What the notebook `ch07_resample` and the records need. No model imports it."""
