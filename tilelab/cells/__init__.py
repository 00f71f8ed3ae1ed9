"""Kernels that are typed in notebook cells: CUDA C++, Triton and Gluon, checked and timed as they grow."""
