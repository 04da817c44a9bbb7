"""Plugins are what a Trainer takes; they are the only stage (with the CLI) that knows Lightning."""
