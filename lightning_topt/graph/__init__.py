"""Stage 1: LightningModule and example batch to OpGraph.

How a graph comes about:
    capture         a step on fake tensors -> graph; on real ones, for steps that read values
    recorder        the dispatch mode and hooks that record a step for both
    recording       what a step left behind, and the graph that two recordings give
    repetition      a few of equal layers are captured, the others written into the graph
    second_calls    which modules may run again

What it is:
    op_graph        operators, parameters, blocks; lifetimes of tensors, memory block by block
    blocks          the modules that a plan decides about
    kernels         low-level calls: costs, arguments, replay, those of an accelerator
    op_config       placements on a mesh
    mesh_axes       meshes of ranks

For pipelines:
    step_flow       a step as a chain of calls
    flow_trace      how it is found

Around user code:
    module_copy     copies on fake tensors
    structures      tensors of a batch
    errors          why a capture failed, and where
"""
