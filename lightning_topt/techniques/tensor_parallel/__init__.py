"""Tensor parallelism: operators are split over the ranks of tensor axes; the user's modules stay as
they are.

Between two steps a rank holds its slice of every split parameter, as a plain parameter. During
forward a torch function mode sees every call of a torch function: tensors that are split carry a
`Layout`, and the call runs on local tensors as one of the rows of its kind says (`kinds`), after
the collectives that bring its arguments there (`moves`). Code that asks a split tensor for its
shape gets the whole one, so a hard-coded ``view(B, T, heads, d)`` works. A function of torch that
is written in Python (`torch.nn.functional.multi_head_attention_forward`) runs under the mode as it
is written; any other function of no kind gets whole tensors. Autograd below sees plain local
tensors and the collectives' own gradients.

    layout            where a tensor is, on every tensor axis
    tensor_axes       this rank's place on these axes, and their process groups
    moves             collectives between placements, with their gradients
    kinds, kinds_*    which placements a function admits: one table for the search and for the run
    signatures        keys under which decisions about calls are kept
    composites        functions of torch that are written in Python
    python_functions  checkpoints and autograd functions of user code
    user_access       hooks of gradients, ``.data``, arrays of NumPy and torch.func on split tensors
    copied_views      views of gathered copies, which must not be changed in place
    kept_tensors      split tensors that modules keep beyond a step
    split_mode        calls functions on split tensors
    split_parameters  slices of parameters, and the way back

The planner looks at a rank without running it:

    function_trace      the calls that split_mode would see
    split_prices        one call's seconds, collectives and bytes, by the decisions of the run
    split_walk          what a step of a block takes under one split, call after call
    split_search        which parameters of a block to split: Pareto sets, exact
    split_capture       the graph of a rank's own step
    split_bounds        a graph that costs no more than that, without a capture
    model_splits        splits of a whole model: the Pareto set out of those of its blocks, and the
                        few to try
    split_candidates    the splits of a model that are tried, and the steps of a rank under them
"""
