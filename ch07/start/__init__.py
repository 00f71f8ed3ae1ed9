"""The topic of the notebook `00_start`: a first copy, and what limits a kernel. It has a lesson and no product."""
