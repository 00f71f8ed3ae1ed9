"""What the notebook `10_ch14_bug_hunt` and the records need. No model imports it."""
