"""Records of experiments in results/: how they are written, compared, and shown for several GPUs."""
