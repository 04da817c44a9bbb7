"""A plan with stages on running ranks.

p2p                tensors between ranks
step_flows         the user's step, cut into stages, and the program of each rank
stage_pass         one stage's part of the step on a microbatch (split_backward)
stage_layout       where parameters and buffers are
stage_gradients    averages and norms
pipeline_run       pipelines with a flush after each step, evaluation, states
continuous_run     asynchronous pipelines (stage_weights)
"""
