"""What the notebook `13_ch14_attention_gluon` and the records need. No model imports it."""
