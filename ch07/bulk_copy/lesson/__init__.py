"""What the notebook `ch07_bulk_copy` and the records need. No model imports it."""
