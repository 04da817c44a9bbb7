"""How sharded parameters travel and arrive: memory formats, and bfloat16 against slow twins."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from lightning_topt.communication.collectives import AllGather
from lightning_topt.costs.sizes import narrow_parameters
from lightning_topt.execution.engine import Engine
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import hybrid_mesh
from lightning_topt.plan.parallel_plan import ParallelPlan, preset_plan, uniform_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.techniques.fsdp_gathers import memory_format_of, narrow_of
from tests.launch import run_on_pool, run_ranks
from tests.models import GPT

CPU, STEPS, BATCH = torch.device("cpu"), 4, 8


class Conv(nn.Module):
    """Rows that do not divide by 2, a 1x1 kernel, a depthwise one, one of 3-D, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(6, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.GELU(), nn.Conv2d(5, 6, 1)
            )
            for _ in range(2)
        )
        self.deep = nn.Conv2d(6, 6, 3, groups=6)
        self.volume = nn.Conv3d(1, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.volume(self.deep(x).unsqueeze(1))
        return x.square().mean((1, 2, 3, 4))


CONV_BLOCKS = ["blocks.0", "blocks.1"]


def conv() -> Conv:
    torch.manual_seed(0)
    model = Conv()
    for parameter in model.parameters():
        if parameter.dim() > 3:
            is_volume = parameter.dim() == 5
            parameter.data = parameter.data.clone(
                memory_format=torch.channels_last_3d if is_volume else torch.channels_last
            )
    return model


def images(is_last: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(STEPS, BATCH, 3, 9, 9, generator=generator)
    order = (0, 1, 3, 4, 2)
    return found.permute(order).contiguous().permute(0, 1, 4, 2, 3) if is_last else found


def conv_losses(model: nn.Module, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def formats_under(rank: int, plan: ParallelPlan, is_last: bool) -> tuple[Any, ...]:
    """Losses, formats of weights and gradients where they are used, and those afterwards."""
    module = conv()
    seen: dict[str, set[Any]] = {}
    hooked: set[int] = set()

    def note(name: str) -> Any:
        def of_gradient(weight: Tensor) -> None:
            assert weight.grad is not None
            seen.setdefault(f"{name}, gradient", set()).add(memory_format_of(weight.grad))

        def hook(each: nn.Module, *_: Any) -> None:
            seen.setdefault(name, set()).add(memory_format_of(each.weight))
            if id(each.weight) not in hooked:
                each.weight.register_post_accumulate_grad_hook(of_gradient)
                hooked.add(id(each.weight))

        return hook

    for name, each in module.named_modules():
        if isinstance(each, nn.Conv2d):
            each.register_forward_pre_hook(note(name))
            each.register_full_backward_pre_hook(note(name))
    engine = Engine(plan, module, device=CPU)
    model = engine.apply()
    module.to(CPU)  # as the strategies do: shards get new local tensors
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    engine.attach_optimizers([optimizer])
    own = [batch.chunk(plan.mesh.size)[rank] for batch in images(is_last)]
    losses = conv_losses(model, optimizer, own[:2])
    if plan.mesh.size == 2:
        state = copy.deepcopy(engine.state_dict())
        objects = [state]
        dist.broadcast_object_list(objects, 0)
        module.to(CPU)
        engine.load(objects[0])
    losses += conv_losses(model, optimizer, own[2:])
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    engine.release()
    after = {name: memory_format_of(p) for name, p in module.named_parameters()}
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    return (mean / plan.mesh.size).tolist(), seen, after, values


CONV_PLANS = {
    f"zero{level}": uniform_plan(level, data_parallel_size=2, blocks=CONV_BLOCKS)
    for level in range(4)
} | {
    "recompute": uniform_plan(3, data_parallel_size=2, blocks=CONV_BLOCKS, recompute=CONV_BLOCKS),
    "narrow": replace(
        uniform_plan(3, data_parallel_size=2, blocks=CONV_BLOCKS), gather_dtype="bfloat16"
    ),
    "hybrid": preset_plan(PRESETS["hybrid"], mesh=hybrid_mesh(2, 2), blocks=CONV_BLOCKS),
}


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("name", CONV_PLANS)
def test_weights_are_channels_last_where_they_are_used_and_afterwards(
    name: str, is_last: bool
) -> None:
    plan, twin = CONV_PLANS[name], conv()
    expected_formats = {name: memory_format_of(p) for name, p in twin.named_parameters()}
    assert torch.channels_last_3d in expected_formats.values(), "the test tests it"
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    called = rounded(twin) if name == "narrow" else twin
    expected = conv_losses(called, optimizer, images(is_last))
    for losses, seen, after, values in run_on_pool(formats_under, plan.mesh.size, plan, is_last):
        assert losses == pytest.approx(expected, rel=1e-4)
        names = {"stem", "deep", *(f"{b}.{n}" for b in CONV_BLOCKS for n in (0, 3))}
        assert set(seen) == names | {f"{name}, gradient" for name in names}
        assert all(found == {torch.channels_last} for found in seen.values()), seen
        assert after == expected_formats
        for each, value in twin.named_parameters():
            torch.testing.assert_close(values[each], value.detach(), rtol=1e-3, atol=1e-4)


def switch(rank: int, plan: ParallelPlan, further: ParallelPlan) -> tuple[Any, ...]:
    """Train by a fused optimizer: plainly, under `plan`, plainly, and under `further`."""
    module, batches = conv(), images(is_last=True)
    own = [batch.chunk(2)[rank] for batch in batches]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    losses = conv_losses(module, optimizer, batches[:1])
    for each, part in ((plan, own[1:2]), (further, own[3:])):
        engine = Engine(each, module, device=CPU)
        model = engine.apply()
        engine.attach_optimizers([optimizer])
        mean = torch.tensor(conv_losses(model, optimizer, part))
        dist.all_reduce(mean)
        losses += (mean / 2).tolist()
        if each is further:  # a full state is contiguous, as files have it
            state = [engine.state_dict()]
            dist.broadcast_object_list(state, 0)
            contiguous = tree_map(
                lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, state[0]
            )
            engine.load(contiguous)
            mean = torch.tensor(conv_losses(model, optimizer, own[:1]))
            dist.all_reduce(mean)
            losses += (mean / 2).tolist()
        engine.release()
        engine.return_optimizer_state(optimizer)
        if each is plan:
            losses += conv_losses(module, optimizer, batches[2:3])
    return losses, {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize(("one", "other"), [("zero3", "zero0"), ("zero1", "zero2")])
def test_states_of_fused_optimizers_follow_the_strides_of_their_parameters(
    one: str, other: str
) -> None:
    twin, batches = conv(), images(is_last=True)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    expected = conv_losses(twin, optimizer, [*batches, batches[0]])
    for losses, values in run_on_pool(switch, 2, CONV_PLANS[one], CONV_PLANS[other]):
        assert losses == pytest.approx(expected, rel=1e-4)
        for name, value in twin.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-3, atol=1e-4)


class Buffered(nn.Module):
    """A frozen parameter and a buffer that are not contiguous, and a transposed one to train."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Parameter(torch.randn(4, 3).t(), requires_grad=False)
        self.register_buffer("table", torch.randn(4, 3).t())
        self.inner = nn.Linear(3, 3)
        self.inner.weight = nn.Parameter(torch.randn(3, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) @ (self.frozen + self.table)).square().mean()


def buffered(rank: int) -> tuple[Any, ...]:
    module = Buffered(seed=rank)
    plan = ParallelPlan.of_blocks(
        [
            *uniform_plan(3, data_parallel_size=2, blocks=["inner"]).blocks[:1],
            *uniform_plan(0, data_parallel_size=2).blocks,
        ],
        mesh=2,
    )
    engine = Engine(plan, module, device=CPU)
    model = engine.apply()
    strides = module.frozen.stride(), module.table.stride()
    loss = model(torch.ones(2, 3)).item()
    engine.release()
    return strides, loss


def test_what_is_broadcast_keeps_its_strides_and_gets_the_values_of_rank_0() -> None:
    expected = Buffered(seed=0)(torch.ones(2, 3)).item()
    for strides, loss in run_on_pool(buffered, 2):
        assert strides == ((1, 3), (1, 3))
        assert loss == pytest.approx(expected)


# ---- bfloat16


class Text(nn.Module):
    """A tied table, norms, matrices with rows that do not divide by 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7), nn.LayerNorm(7))
            for _ in range(2)
        )
        self.middle = nn.Linear(7, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).float()
        logits = self.head(self.middle(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def rounded(model: nn.Module) -> Any:
    """The slow twin: a call with all matrices that are no tables rounded to bfloat16."""
    narrow = narrow_of(model, dict(model.named_parameters()))

    def call(batch: Tensor) -> Tensor:
        values = {
            name: p + (p.bfloat16().float() - p).detach() if p in narrow else p
            for name, p in model.named_parameters()
        }
        return functional_call(model, values, (batch,))  # type: ignore[no-any-return]

    return call


def tokens() -> Tensor:
    return torch.randint(0, 11, (STEPS, BATCH, 5), generator=torch.Generator().manual_seed(3))


def text_losses(called: Any, model: nn.Module, batches: Any, *, half: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = called(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_text(rank: int, plan: ParallelPlan, half: bool) -> tuple[Any, ...]:
    sent: list[int] = []
    gather = AllGather.__call__

    def noted(self: AllGather, output: Tensor, input: Tensor, *args: Any, **more: Any) -> Any:
        sent.append(output.nbytes)
        return gather(self, output, input, *args, **more)

    def named(self: AllGather, output_tensor: Tensor, input_tensor: Tensor, **more: Any) -> Any:
        return noted(self, output_tensor, input_tensor, **more)

    AllGather.__call__ = named  # type: ignore[method-assign]  # in this process alone
    module = Text()
    engine = Engine(plan, module, device=CPU)
    model = engine.apply()
    dtypes = set()
    module.middle.register_forward_pre_hook(lambda m, _: dtypes.add(m.weight.dtype))
    own = [batch.chunk(2)[rank] for batch in tokens()]
    losses = torch.tensor(text_losses(model, module, own, half=half), dtype=torch.float64)
    dist.all_reduce(losses)
    gradients = {p.grad.dtype for p in module.parameters()}
    engine.release()
    return (losses / 2).tolist(), sum(sent), dtypes, gradients, module.state_dict()


TEXT_BLOCKS = ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("level", [2, 3])
def test_gathers_in_bfloat16_change_nothing_under_autocast(level: int) -> None:
    """Bit for bit: autocast rounds the same matrices; norms and tables travel as they are."""
    plan = uniform_plan(level, data_parallel_size=2, blocks=TEXT_BLOCKS)
    plain = run_ranks(train_text, 2, plan, True)
    narrow = run_ranks(train_text, 2, replace(plan, gather_dtype="bfloat16"), True)
    for one, other in zip(plain, narrow, strict=True):
        assert one[0] == other[0]
        assert one[2] == other[2] == {torch.float32}
        assert one[3] == other[3] == {torch.float32}
        assert all(torch.equal(value, other[4][name]) for name, value in one[4].items())
        # padded rows of matrices in half the bytes: of each gather, of each step
        matrices = 2 * (14 * 7 + 8 * 13) + 8 * 7
        assert one[1] - other[1] == 2 * matrices * (level - 1) * STEPS


def test_gathered_matrices_are_rounded_and_nothing_else() -> None:
    plan = replace(
        uniform_plan(3, data_parallel_size=2, blocks=TEXT_BLOCKS), gather_dtype="bfloat16"
    )
    twin = Text()
    expected = text_losses(rounded(twin), twin, tokens(), half=False)
    exact = Text()
    unrounded = text_losses(exact, exact, tokens(), half=False)
    for losses, _, _, _, state in run_ranks(train_text, 2, plan, False):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses != pytest.approx(unrounded, rel=1e-5), "the tolerance sees no rounding"
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)


def test_graph_and_module_agree_on_what_is_narrow() -> None:
    model = GPT(tied=True)
    batch = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    named = dict(model.named_parameters())
    narrow = narrow_of(model, named)
    names = {name for name, parameter in named.items() if parameter in narrow}
    assert names == narrow_parameters(capture(model, batch))
    assert names == {
        f"blocks.{n}.{name}.weight" for n in (0, 1) for name in ("qkv", "project", "up", "down")
    }
