"""The ways for replicas to stay together: a module for each kind.

What several methods share is beside this folder. What a new one needs is listed in
`exchange_method`.
"""
