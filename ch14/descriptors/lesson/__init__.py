"""What the notebook `07_ch14_descriptors` and the records need. No model imports it."""
