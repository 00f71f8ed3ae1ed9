"""Charts and drawings in the course's style."""
