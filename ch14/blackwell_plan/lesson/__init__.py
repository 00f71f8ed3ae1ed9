"""What the notebook `17_ch14_blackwell_plan` and the records need. No model imports it."""
