"""What the notebook `03_ch10_tile_pipeline` and the records need. No model imports it."""
