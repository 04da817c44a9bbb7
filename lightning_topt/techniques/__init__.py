"""Ways of training a model on several ranks, one file each: what is legal, what that costs, how it
is applied and undone.
"""
