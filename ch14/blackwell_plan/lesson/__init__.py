"""What the notebook `ch14_blackwell_plan` and the records need. No model imports it."""
