"""Gradient exchange and collectives, usable without the rest of the package."""
