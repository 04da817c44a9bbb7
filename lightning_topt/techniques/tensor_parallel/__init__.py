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
    op_rules          which placements a function admits, and which of these a call takes: one table
                      for the search and the run
    split_mode        calls functions on split tensors, and remembers tensors that it moved
    user_code         what user code may ask of a split tensor beside torch functions
    split_parameters  slices of parameters, and the way back
    random_states     states of random generators

The planner looks at a rank without running it:

    function_trace    the calls that split_mode would see
    split_prices      seconds, collectives and bytes of calls, by the decisions of the run
    split_search      which parameters to split: Pareto sets of blocks and of the model
    split_layouts     layouts along one, two or three tensor axes, as rules of blocks
    split_model       the splits of a model that are tried, and the captured steps of a rank
    split_steps       meshes with a tensor axis, and the step of a rank under every split
"""
