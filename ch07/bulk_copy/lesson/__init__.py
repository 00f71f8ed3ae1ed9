"""What the notebook `01_ch07_bulk_copy` and the records need. No model imports it."""
