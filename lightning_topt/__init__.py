"""PyTorch Lightning plugins that make distributed training fast."""
