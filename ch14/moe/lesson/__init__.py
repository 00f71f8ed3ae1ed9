"""Provide what the notebook `18_ch14_moe` and the records need. No model imports it."""
