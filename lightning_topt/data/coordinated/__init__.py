"""Batches that several jobs of one machine prepare together, each once."""
