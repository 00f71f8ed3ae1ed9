"""What the notebook `ch10_tile_pipeline` and the records need. No model imports it."""
