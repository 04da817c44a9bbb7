"""Plugins are what a Trainer takes; they are the only stage (with the CLI) that knows Lightning.

A fit under ``"topt"``, from Lightning's hooks down:

    auto_parallel          the strategy: each hook hands on to one of the parts below
    pipeline_strategy      the same with stages (``"topt_pipeline"``)
    shared_updates         nothing is asked: ddp, with updates shared where a clock says so
      plan_request         what the user asked for
        plan_options       the forms in which plans, meshes and limits are given
      planning             a given plan, or one made of a step that is traced at setup
      searched_plan        searches on a given mesh, in stages, and of all plans
    plan_run               the plan of a fit: decided, applied before optimizers are made, undone;
                           how steps run under it, and the plain way
      pipeline_steps       ... through stages, in microbatches
      continuous_steps     ... through stages without flush
      group_steps          ... on a tensor group or a pipeline whose ranks bring a batch each
    plan_checkpoints       full and sharded checkpoints, whatever the plan
    training_data          where in an epoch a checkpoint was made; signals by preemption
    equal_batches          ranks end an epoch together
    lost_ranks             names the rank that is lost
    elastic                lets a fit go on without it, under torchrun

What these use:

    why a plan cannot run  requirements
    a step's result        stage_steps, microbatches
    Lightning              data_parallel_hooks (with the exchange of gradients), register

Other plugins:

    compressed_ddp         the strategy ``"topt_compressed"``
    local_steps_strategy   local steps and an outer step
    parallel_optimizer     a callback that shares the optimizer step under ddp
    monitors               callbacks that measure steps, exchanges and waits for data
    cached_data, coordinated_data
                           DataModules around another one, by wrapped_data
"""

from typing import TYPE_CHECKING

from lightning_topt.basics import lazy_names

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from lightning_topt.plugins.continuous_steps import ContinuousRunner
    from lightning_topt.plugins.elastic import ElasticRun, check_elastic
    from lightning_topt.plugins.group_steps import GroupRunner
    from lightning_topt.plugins.pipeline_steps import PipelineRunner
    from lightning_topt.plugins.plan_checkpoints import load_whole, save_file
    from lightning_topt.plugins.stage_steps import StageSteps

# What only some fits need, and the module that it is imported from at its first use.
_HOMES = {
    "ContinuousRunner": "continuous_steps",
    "ElasticRun": "elastic",
    "check_elastic": "elastic",
    "GroupRunner": "group_steps",
    "PipelineRunner": "pipeline_steps",
    "StageSteps": "stage_steps",
    "load_whole": "plan_checkpoints",
    "save_file": "plan_checkpoints",
}

__all__ = [
    "ContinuousRunner",
    "ElasticRun",
    "GroupRunner",
    "PipelineRunner",
    "StageSteps",
    "check_elastic",
    "load_whole",
    "save_file",
]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
