"""The ways for replicas to stay together: one folder each, whose package exports the method's
class.

`method_registry` finds them here by themselves. What several methods share is beside this folder.
"""
