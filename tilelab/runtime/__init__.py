"""What an operator needs when it runs: the device, checked operands, plans, compiled kernels and their launches."""
