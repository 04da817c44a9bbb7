"""What one GPU can show in a few minutes: see `benchmarks.gpu_report.__main__`."""
