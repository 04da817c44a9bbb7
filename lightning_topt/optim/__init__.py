"""The parallel optimizer step: work that is the same on all ranks is split, and its results are gathered."""
