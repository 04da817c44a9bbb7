"""Samples cached in memory and on disk, shared by processes, jobs and nodes; and what waiting for data is made of."""
