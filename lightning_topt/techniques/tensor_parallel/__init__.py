"""Tensor parallelism: operators are split over ranks; the user's modules stay as they are.

Between two steps a rank holds its slice of every split parameter, as a plain parameter. During
forward a torch function mode sees every call of a torch function. Tensors that are split carry a
`Layout`. The call runs on local tensors as a row of its rule says (`op_rules`), after the
collectives that bring its arguments there (`moves`).

Code that asks a split tensor for its shape gets the full one, so a hard-coded ``view(B, T, heads,
d)`` works. A function of torch that is written in Python
(`torch.nn.functional.multi_head_attention_forward`) runs under the mode as it is written. Any other
function without a rule gets unsharded tensors. Autograd below sees plain local tensors, and the
collectives' own gradients.

    layout            where a tensor is on every tensor axis, and this rank's place there
    moves             collectives between placements, with their gradients
    op_rules          which placements a function admits: one table for the search and the run
    decisions         which of these a call takes; whether samples meet in it
    block_rules       where tensors of a block are, beside its parameters
    split_mode        calls functions on split tensors
    tensor_mover      moves tensors for it, and remembers what others may want
    user_code         what user code may ask of a split tensor beside torch functions
    split_parameters  slices of parameters, and the way back
    random_states     states of random generators

The planner looks at a rank without running it:

    function_trace    the calls that split_mode would see
    split_prices      seconds, collectives and bytes of calls, by the decisions of the run
    split_search      which parameters to split: Pareto sets of blocks and of the model
    split_layouts     layouts along one, two or three tensor axes
    split_capture     the graph of a rank's own step
    split_bounds      a graph that costs no more than that, without a capture
    split_model       the splits of a model that are tried, and the steps of a rank under them
    split_steps       meshes with a tensor axis, and the step of a rank under every split
"""
