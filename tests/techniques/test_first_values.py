"""Values of modules that begin on the meta device are those of their twins, made whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_topt.execution.engine import Engine
from lightning_topt.graph.mesh_axes import hybrid_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, uniform_plan
from lightning_topt.plan.plan_values import PRESETS
from tests.models import GPT
from tests.plugins.trainer_ranks import on_ranks

CPU = torch.device("cpu")


class Residual(nn.Module):
    """Draws the weights of its own layers anew, as blocks of GPT-2 do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(5))
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.register_buffer("steps", torch.empty((), dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.steps.zero_()
        self.down.weight.data.normal_(std=0.01)


class Conventional(nn.Module):
    """Applies a rule to all modules once they are made, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.norm = nn.Embedding(9, 5), Residual(), nn.LayerNorm(5)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Residual):
            nn.init.normal_(module.down.weight, std=0.02 / 3)


class Registering(nn.Module):
    """Puts another buffer in the place of the one that it had."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.register_buffer("angles", torch.arange(3.0), persistent=False)
        self.weight = nn.Parameter(torch.randn(3, 3))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 10)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="no transformers")
    config = transformers.LlamaConfig(
        **dict(vocab_size=33, hidden_size=8, intermediate_size=14, num_hidden_layers=2),
        **dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16),
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="no transformers")
    config = transformers.GPT2Config(
        **dict(vocab_size=33, n_positions=16, n_embd=8, n_layer=2, n_head=2),
        **dict(bos_token_id=1, eos_token_id=1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def tied() -> nn.Module:
    return GPT(layers=1, width=6, vocab=33, tied=True)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.LSTM(3, 5))


MADE = (Residual, Conventional, Registering, attention, llama, gpt2, tied, batch_norm)
LEVELS = (3, 2, 1)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in own.items()
    }


def plan_of(level: int, world_size: int) -> ParallelPlan:
    if world_size == 2:
        return uniform_plan(level, data_parallel_size=2)
    mesh = hybrid_mesh(2, 2)
    preset = {3: "hybrid", 2: "hybrid_zero2", 1: "zero1"}[level]
    return ParallelPlan.of_blocks(
        [BlockPlan("", OpConfig(PRESETS[preset].storage(mesh)))], mesh=mesh
    )


def compare(rank: int, made: tuple[Callable[[], nn.Module], ...], world_size: int) -> None:
    for make in made:
        for level in LEVELS:
            torch.manual_seed(5)
            whole = tensors(make())
            after = torch.rand(3)
            # other ranks draw other numbers: rank 0's count
            torch.manual_seed(5 + rank)
            with torch.device("meta"):
                module = make()
            engine = Engine(plan_of(level, world_size), module, device=CPU)
            engine.apply()
            found = tensors(module)
            assert {*found} == {*whole}
            for name, value in whole.items():
                assert torch.equal(found[name], value), (make, level, name)
            if rank == 0:
                assert torch.equal(torch.rand(3), after)
            assert engine.keeps_shards == (level > 1)
            if engine.keeps_shards:  # each rank has its rows alone
                parameter = next(iter(module.parameters()))
                assert isinstance(parameter, DTensor)
                assert parameter.to_local().untyped_storage().nbytes() < parameter.nbytes
            engine.release()  # which leaves shards
            assert engine.keeps_shards == (level > 1)
            engine.close()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_values_are_those_of_a_whole_module(world_size: int) -> None:
    on_ranks(compare, MADE, world_size, world_size=world_size)


class NoWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


class Halves(NoWay):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight[:2])


class Scales(NoWay):
    def reset_parameters(self) -> None:
        self.weight.data.mul_(2)


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril())


REFUSED: dict[Any, str] = {
    NoWay: "'0.weight' is on the meta device, and nothing gives all of it values",
    Masked: "'0.mask' is on the meta device, and nothing gives all of it values",
    Halves: "'0.weight' is on the meta device, and nothing gives all of it values",
    Scales: "'0.weight' is on the meta device, and nothing gives all of it values",
}


def refuse(rank: int) -> None:
    for make, words in REFUSED.items():
        with torch.device("meta"):
            module = nn.Sequential(make())
        engine = Engine(uniform_plan(3, data_parallel_size=2), module, device=CPU)
        with pytest.raises(PlanError, match=words):
            engine.apply()


def test_what_nothing_gives_values_is_named() -> None:
    on_ranks(refuse)
