"""Sums and gathers inside one node: by collectives, or through memory where CPU ranks share a
machine.
"""
