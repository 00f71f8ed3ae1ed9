"""Compare what torch.compile makes of a product, an MLP and attention with the kernels of the course.

A model may use the layers of `decoder_block`. All else is measured and read for the lesson: begin with
`lesson/workloads.py`, then `lesson/reading.py`. There is no kernel of our own here.
"""
