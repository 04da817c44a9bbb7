"""What several GPUs can show; `benchmarks/multi_gpu.sh` starts the parts."""
