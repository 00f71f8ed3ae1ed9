"""What the notebook `14_ch14_mx_formats` and the records need. No model imports it."""
