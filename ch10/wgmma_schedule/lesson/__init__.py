"""What the notebook `06_ch10_wgmma_schedule` and the records need. No model imports it."""
