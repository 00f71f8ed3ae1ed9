"""What the notebook `ch10_wgmma_schedule` and the records need. No model imports it."""
