"""What the notebook `ch10_tile_sharing` and the records need. No model imports it."""
