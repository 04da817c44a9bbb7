"""Pipeline schedules as data: which pass of which microbatch each rank runs when, complete before
the first tensor moves.
"""
