"""What the notebook `12_ch14_attention` and the records need. No model imports it."""
