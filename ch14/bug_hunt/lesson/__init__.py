"""What the notebook `ch14_bug_hunt` and the records need. No model imports it."""
