"""Loaders that go on where they were, look ahead, and choose their own workers."""
