"""Bytes that every rank of a plan holds between steps: parameters, gradients, optimizer state.

They follow block by block from the placements of the plan alone, for any number of ranks:

    a tensor of R rows sharded over N ranks   rank i has rows [i c, min((i + 1) c, R)),
                                              c = ceil(R / N): torch.chunk
    optimizer state at ZeRO level 1           rows of the pieces that the rank updates
                                              (`optim.pieces`)

Shards are numbered along their axes, the last axis fastest. FSDP2 allocates c rows on every rank:
those of them that are no rows of the tensor are `padding`. Parameters that are split along tensor
axes are given as the slices that one rank has; all slices are of equal size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.pieces import Piece
from lightning_topt.optim.update_rule import pieces_of, updates_whole
from lightning_topt.techniques.optimizer_sharding import is_shared
from lightning_topt.techniques.technique import shard_axes

KINDS = ("parameters", "gradients", "optimizer_state", "padding")
_PARAMETERS, _GRADIENTS, _STATE, _PADDING = range(len(KINDS))
Integers = NDArray[np.int64]
# parameters by block and name, under all names of a tied one
Blocks = Mapping[str, Mapping[str, nn.Parameter]]


def held_bytes(
    blocks: Blocks,
    configs: Mapping[str, OpConfig],
    mesh: Mesh,
    *,
    optimizers: Sequence[Optimizer] = (),
    profile: OptimizerProfile | None = None,
) -> dict[str, Integers]:
    """Return the bytes that each rank of `mesh` holds of each block, (rank, kind) as in `KINDS`.

    `optimizers` are built over the parameters of `blocks`, and `profile` says what they keep;
    without them there is no state.
    """
    held = {block: np.zeros((mesh.size, len(KINDS)), np.int64) for block in blocks}
    number, count = numbers_along(mesh, mesh.data_axes)
    shared = [
        (parameters_of(optimizer)[piece.index], piece)
        for optimizer in optimizers
        for piece in shared_pieces(optimizer, blocks, configs, ranks=count)
    ]
    owned = {tensor for tensor, _ in shared}
    for block, parameters in blocks.items():
        for name, parameter in once(parameters):
            _add_tensors(held[block], parameter, configs[block], mesh)
            if profile is not None and parameter not in owned:
                # A parameter's optimizer state on each rank, (rank,).
                axes = shard_axes(configs[block], is_trained=parameter.requires_grad)
                index, shards = numbers_along(mesh, axes)
                # Shards of equally many rows have equal states: ask once for each number of rows.
                rows, which = np.unique(
                    chunk_rows(parameter, index, count=shards), return_inverse=True
                )
                sizes = [
                    profile.state_bytes_of(name, _with_rows(parameter, int(each))) for each in rows
                ]
                held[block][:, _STATE] += np.array(sizes, np.int64)[which]
    # A shared step: each rank has the state of the pieces which it updates.
    if profile is not None:
        # Optimizers count parameters over all blocks: find the block of each.
        home = {
            parameter: (block, name) for block in blocks for name, parameter in once(blocks[block])
        }
        for tensor, piece in shared:
            block, name = home[tensor]  # type: ignore[index]
            shape = _with_rows(tensor, piece.stop - piece.start)
            held[block][number == piece.owner, _STATE] += profile.state_bytes_of(name, shape)
    return held


def once(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with the first of its names."""
    seen: set[nn.Parameter] = set()
    for name, parameter in parameters.items():
        if parameter not in seen:
            seen.add(parameter)
            yield name, parameter


def shares_updates(config: OpConfig) -> bool:
    """Return whether ranks share the update of parameters with full gradients (ZeRO level 1)."""
    return bool(config.storage.sharded_axes("optimizer_state")) and not config.storage.sharded_axes(
        "gradients"
    )


def shared_pieces(
    optimizer: Optimizer, blocks: Blocks, configs: Mapping[str, OpConfig], *, ranks: int
) -> list[Piece]:
    """Return the pieces in which ranks share the update of one optimizer.

    None where every rank updates all that it holds. Shards of updates that read whole parameters
    have owners too.
    """
    in_shards = any(config.storage.sharded_axes("gradients") for config in configs.values())
    whole = in_shards and updates_whole(optimizer)
    shared: Collection[Tensor] = {
        parameter
        for block, parameters in blocks.items()
        if shares_updates(configs[block])
        or (whole and configs[block].storage.sharded_axes("gradients"))
        for parameter in parameters.values()
        if is_shared(parameter)
    }
    return pieces_of(optimizer, shared, ranks=ranks)


def numbers_along(mesh: Mesh, axes: Sequence[int]) -> tuple[Integers, int]:
    """Return each rank's position along `axes` together, (rank,), and the number of positions."""
    # The last axis fastest, as shards are numbered.
    ranks, number, count = np.arange(mesh.size), np.zeros(mesh.size, np.int64), 1
    for axis in axes:
        size = mesh.shape[axis]
        number, count = number * size + ranks // mesh.stride([axis]) % size, count * size
    return number, count


def chunk_rows(parameter: Tensor, index: Integers, *, count: int) -> Integers:
    """Return the rows of the shards `index` of a parameter that is cut into `count`.

    A scalar has one row.
    """
    rows = parameter.shape[0] if parameter.dim() else 1
    # torch.chunk: all shards but the last ones have this many rows.
    chunk = -(-rows // count)
    return np.clip(rows - index * chunk, 0, chunk)


def _add_tensors(held: Integers, parameter: nn.Parameter, config: OpConfig, mesh: Mesh) -> None:
    # Add a parameter, its gradient and their padding to `held`, (rank, kind)
    row_bytes = (
        parameter.nbytes // max(parameter.shape[0], 1) if parameter.dim() else parameter.nbytes
    )
    axes = shard_axes(config, is_trained=parameter.requires_grad)
    index, count = numbers_along(mesh, axes)
    rows = chunk_rows(parameter, index, count=count)
    for kind in (_PARAMETERS, _GRADIENTS) if parameter.requires_grad else (_PARAMETERS,):
        held[:, kind] += rows * row_bytes
        held[:, _PADDING] += (rows.max() - rows) * row_bytes


def _with_rows(parameter: Tensor, rows: int) -> tuple[int, ...]:
    return (rows, *parameter.shape[1:]) if parameter.dim() else ()
