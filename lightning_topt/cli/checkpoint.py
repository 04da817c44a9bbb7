"""`topt checkpoint`: the weights of a sharded checkpoint as safetensors, tensor by tensor.

No tensors but one are in memory, so that a model that no rank can hold gets files, too.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser
from collections.abc import Sequence

from lightning_topt.basics.units import parse_bytes
from lightning_topt.communication.started_ranks import leave_to_rank_0
from lightning_topt.execution.sharded_checkpoint import write_module


def run(arguments: Sequence[str]) -> None:
    """Write the files that `arguments` ask for, and print their names.

    Raises ValueError for what is no sharded checkpoint, and for wrong names and sizes.
    """
    leave_to_rank_0()
    parser = ArgumentParser(
        "topt checkpoint",
        description="Write the weights of a sharded checkpoint to a safetensors file, one tensor "
        "after the other.",
    )
    parser.add_argument("folder", help='of checkpoint="sharded", on a disk or in an object store')
    parser.add_argument("file", help="to write, such as model.safetensors")
    parser.add_argument(
        "--module", default="", help="a submodule (net): its weights alone, by their names in it"
    )
    parser.add_argument(
        "--shard-size",
        default=math.inf,
        help="most bytes of a file (5GB): of more there are several, and an index",
    )
    given = parser.parse_args(arguments)
    most = given.shard_size
    if isinstance(most, str):
        most = parse_bytes(most, name="--shard-size")
    for file in write_module(given.folder, given.file, module=given.module, most_bytes=most):
        print(file)
