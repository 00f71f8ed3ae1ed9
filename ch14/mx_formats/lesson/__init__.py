"""What the notebook `ch14_mx_formats` and the records need. No model imports it."""
