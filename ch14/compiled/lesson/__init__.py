"""What the notebook `11_ch14_compiled` and the records need. No model imports it."""
