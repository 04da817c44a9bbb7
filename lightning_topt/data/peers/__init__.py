"""A cache that is spread over nodes: who owns what, the server of a node's part, and those who ask
it.
"""
