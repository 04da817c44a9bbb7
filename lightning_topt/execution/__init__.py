"""ParallelPlan -> running ranks.

engine                 applies a plan on one rank, steps, saves, loads, undoes it
attached_optimizer     optimizers under a plan
states                 states in full form, stored, and the parts of ranks
sharded_checkpoint     checkpoints as a folder
pipeline/              plans with stages
memory                 the peak of a rank
verify_plan            what a plan will do, before its ranks exist
"""
