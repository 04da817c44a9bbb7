"""What a Trainer takes; the only stage (with the CLI) that knows Lightning."""
