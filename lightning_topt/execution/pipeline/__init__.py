"""A plan of several stages on running ranks: passes of stages, tensors between ranks, the schedule
that is walked.
"""
