"""OpGraph and Cluster to CostTable: what every configuration of every block costs, in seconds and
bytes.
"""
