"""The ways for replicas to stay together: one module or folder each, with the method's class.

`method_registry` finds them here by itself. What several methods share is beside this folder. What
a new one needs is listed in `exchange_method`.
"""
