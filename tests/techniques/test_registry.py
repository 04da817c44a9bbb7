"""What the registry says that can be run: one technique for a placement, or a refusal."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lightning_topt.communication import BF16, GradientMethod
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig, Replicate, Shard, Storage
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.techniques.registry import (
    TECHNIQUES,
    check_runs,
    check_tied,
    parameters_by_block,
    technique_of,
)

FLAT, HYBRID = data_mesh(4), hybrid_mesh(2, 2)
MESHES = {"flat": FLAT, "hybrid": HYBRID}


def test_no_placement_has_two_techniques_and_what_has_none_is_refused() -> None:
    placements = [*itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2)]
    run = set()
    for storage in itertools.product(placements, repeat=3):
        try:
            config = OpConfig(Storage(*storage))
        except ValueError:
            continue
        claims = [
            technique for technique in TECHNIQUES if "storage" in technique.claims(config, HYBRID)
        ]
        assert len(claims) <= 1
        if claims:
            run.add(config.storage)
        else:
            with pytest.raises(ValueError, match="no technique of this release keeps parameters="):
                technique_of(config, HYBRID)
    assert run == {preset.storage(HYBRID) for preset in PRESETS.values()}


PLAIN = OpConfig.zero(0)
TENSOR = Mesh((Axis("data", 2), Axis("tensor", 2)))
STAGES = Mesh((Axis("pipeline", 2), Axis("data", 2)))
ZERO1, ZERO2, ZERO3 = (OpConfig(PRESETS[f"zero{n}"].storage(STAGES)) for n in (1, 2, 3))
INNER = OpConfig.zero(1, axes=2, over=[1])


@pytest.mark.parametrize(
    ("mesh", "configs", "exchange", "reason"),
    [
        (FLAT, {"": OpConfig.zero(0, recompute=True)}, None, "cannot be recomputed"),
        (HYBRID, {"": OpConfig.zero(0, axes=2), "a": INNER}, None, "block 'a': no technique"),
        (TENSOR, {"": OpConfig.zero(3, axes=2)}, None, "on the mesh data 2 x tensor 2"),
        (FLAT, {"": OpConfig.zero(3), "a": OpConfig.zero(2)}, BF16(), "needs whole gradients"),
        (data_mesh(1), {"": PLAIN}, BF16(), "a single rank along the data axes exchanges nothing"),
        (STAGES, {"": ZERO3}, None, "level 3, which does not go together with st"),
        (STAGES, {"": ZERO1, "a": ZERO2}, None, "block 'a' has ZeRO level 2"),
    ],
)
def test_what_nothing_runs_is_refused(
    mesh: Mesh, configs: dict[str, OpConfig], exchange: GradientMethod | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_runs(mesh, configs, exchange)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mix_of_presets_runs(mesh: str) -> None:
    every = {
        name: OpConfig(preset.storage(MESHES[mesh]), recompute=True)
        for name, preset in PRESETS.items()
    }
    for preset in PRESETS.values():
        check_runs(MESHES[mesh], {**every, "": OpConfig(preset.storage(MESHES[mesh]))})
    check_runs(MESHES[mesh], {**every, "": every["ddp"].__class__(every["zero3"].storage)}, BF16())


def test_stages_with_whole_gradients_run() -> None:
    check_runs(STAGES, {"": ZERO1, "a": OpConfig.zero(0, recompute=True, axes=2)})
    check_runs(Mesh((Axis("pipeline", 2),)), {"": PLAIN})
    for config in (OpConfig.zero(0, axes=2), ZERO1):
        check_runs(STAGES, {"": config}, BF16())
    with pytest.raises(ValueError, match="slices exchange gradients as they are"):
        cut = Mesh((Axis("pipeline", 2), Axis("data", 2), Axis("tensor", 2)))
        check_runs(cut, {"": OpConfig.zero(0, axes=3)}, BF16())
    cube = Mesh((Axis("pipeline", 2), Axis("data", 2), Axis("tensor", 2)))
    split = (("weight", (Replicate(), Replicate(), Shard(0))),)
    check_runs(cube, {"": OpConfig(PRESETS["zero1"].storage(cube), parameters=split)})


# ---- blocks of a module --------------------------------------------------------------------------


def tied() -> nn.Module:
    module = nn.ModuleDict(
        {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3), "loose": nn.Linear(3, 3, bias=False)}
    )
    module["second"].weight = module["first"].weight
    return module


def test_parameters_belong_to_the_block_of_their_first_name() -> None:
    module = tied()
    found = parameters_by_block(module, ["first", ""])
    assert list(found["first"]) == ["first.weight", "first.bias", "second.weight"]
    assert list(found[""]) == ["second.bias", "loose.weight"]
    assert found["first"]["second.weight"] is module["first"].weight
    assert (
        block_of("first.deep.weight", ["first", ""]) == "first"
        and block_of("firstly.weight", ["first", ""]) == ""
    )


@pytest.mark.parametrize("level", range(4))
def test_tied_parameters_of_two_blocks(level: int) -> None:
    for other in (level, 0):
        configs = {
            "first": OpConfig.zero(level),
            "second": OpConfig.zero(other),
            "": OpConfig.zero(0),
        }
        parameters = parameters_by_block(tied(), configs)
        if level < 2:
            check_tied(parameters, configs)
        else:
            with pytest.raises(
                ValueError,
                match=r"'second.weight' of block 'second' is tied to one of block 'first'",
            ):
                check_tied(parameters, configs)
    inside = {"first": OpConfig.zero(0), "": OpConfig.zero(3)}
    with pytest.raises(ValueError, match=r"'second.weight' of block ''"):
        check_tied(parameters_by_block(tied(), inside), inside)
    alone = torch.nn.Sequential(nn.Linear(2, 2))
    check_tied(parameters_by_block(alone, ["0", ""]), {"0": OpConfig.zero(3), "": OpConfig.zero(3)})
