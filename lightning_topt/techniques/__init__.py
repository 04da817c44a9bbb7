"""Ways of training a model on several ranks: what is legal, what it costs, how it is applied.

`technique.Technique` is the interface, `registry.TECHNIQUES` the list. `plan_costs` adds up what a
plan costs, and takes that sum apart.
"""
