"""Sums and gathers inside one node.

By collectives, or through memory where CPU ranks share a machine.
"""
