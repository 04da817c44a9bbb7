"""Samples kept in shared memory and on disk: the tiers, what lies in them, and the data set in
front of them.
"""
