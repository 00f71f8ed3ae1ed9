"""What the notebook `ch14_attention` and the records need. No model imports it."""
