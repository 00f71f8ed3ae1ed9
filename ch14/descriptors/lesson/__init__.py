"""What the notebook `ch14_descriptors` and the records need. No model imports it."""
