"""What the notebook `ch14_attention_gluon` and the records need. No model imports it."""
