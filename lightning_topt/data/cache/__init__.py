"""A cache of samples in shared memory and on disk, and the data sets in front of it."""
