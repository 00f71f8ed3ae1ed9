"""Provide what the notebook `19_ch14_languages` and the records need. No model imports it."""
