"""What the notebook `04_ch10_tile_sharing` and the records need. No model imports it."""
