"""A plan with stages on running ranks.

p2p                tensors between ranks
stage_layout       the user's step, cut into stages; where parameters and buffers are
stage_pass         one stage's part of the step on a microbatch (split_backward)
pipeline_run       pipelines with a flush after each step, evaluation, states (step_program);
                   averages and norms of gradients
continuous_run     asynchronous pipelines (stage_weights)
"""
