"""The parallel optimizer step: work that is the same on all ranks is split, results are gathered.

    may it be split?     update_rule
    who updates what?    pieces
    does it pay?         adaptive_step, which drives all of this over a fit
    the step             parallel_step, with full_state (checkpoints as before)
    sharded parameters   shard_step, clipping

Each of them runs in plain PyTorch, without a plan.
"""
