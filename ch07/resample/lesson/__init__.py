"""What the notebook `02_ch07_resample` and the records need. No model imports it."""
