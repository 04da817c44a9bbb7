"""LARS: stochastic gradient descent whose rate is scaled per layer by ‖w‖ / ‖gradient‖.

You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, arXiv 1708.03888, Algorithm
1. Every parameter tensor is a layer.

| paper | here |
|---|---|
| γ, global learning rate (its schedule is a learning-rate scheduler's) | `lr` |
| m, β | `momentum`, `weight_decay` |
| η, trust coefficient | `trust_coefficient` |
| λ = η ‖w‖ / (‖g‖ + β ‖w‖), local learning rate | `trust_ratios` |
| v ← m v + γ λ (g + β w);  w ← w - v | `update_each`, `update_together` |

The momentum holds γ λ, as in the paper; implementations that multiply by γ afterwards differ while
the rate changes.

`share_trust_ratios` computes each norm on one rank only (Shi et al., Towards Scalable Distributed
Training of Deep Learning on Public Cloud Clusters, arXiv 2010.10458, parallel tensor operators,
"PTO"). Every rank holds the same parameters and averaged gradients, so all would compute the same
norms. The 2L tensors of L layers are dealt to the ranks, balanced by their numbers of elements. One
all-reduce of 3 x (number of parameters) floats shares the norms, and every rank updates everything
itself: no parameter is sent. This saves 1 - 1/P of the time of the norms on P ranks and costs the
latency of one small all-reduce.

    share_trust_ratios(optimizer, group=group)      # optimizer: a LARS
    ...
    unshare_trust_ratios(optimizer)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.pieces import Share, assign_pieces

# "matrices": parameters of two dims or more; not biases and norms' scales
Adapt = Literal["all", "matrices", "none"]
# The fused kernel takes 1 - rate; below this, rounding of that difference (1e-16) would show in a
# float32.
_SMALLEST_FUSED_RATE = 1e-7
# computing a norm costs about as much as reading this many elements, however small the tensor is
_CALL_ELEMENTS = 4096


def layer_norms(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return ‖w‖ and ‖g‖ of every layer: (2, layers).

    In float32, or in float64 if a parameter is; without waiting for the device. A tensor's norm
    does not depend on the other tensors of the call, bit for bit.
    """
    return tensor_norms([*parameters, *gradients]).view(2, len(parameters))


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms (number of tensors,) on the first one's device; see `layer_norms`."""
    dtype = (
        torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    )
    if not tensors:
        return torch.empty(0)
    norms = torch._foreach_norm(list(tensors), 2.0, dtype=dtype)
    return torch.stack([norm.to(tensors[0].device) for norm in norms])


def trust_ratios(
    norms: Tensor, *, weight_decay: float, trust_coefficient: float, eps: float
) -> Tensor:
    """Return λ (layers,): η ‖w‖ / (‖g‖ + β ‖w‖ + eps), or 1 where either norm is zero.

    `norms` (2, layers) are those of `layer_norms`.
    """
    weights, gradients = norms
    ratios = trust_coefficient * weights / (gradients + weight_decay * weights + eps)
    return torch.where((weights > 0) & (gradients > 0), ratios, 1.0)


def is_adapted(parameter: Tensor, adapt: Adapt) -> bool:
    """Return whether the rate of `parameter` is scaled by a trust ratio."""
    return adapt == "all" or (adapt == "matrices" and parameter.dim() > 1)


def check_options(
    optimizer: Optimizer, group: Mapping[str, object], *, positive: Sequence[str]
) -> None:
    """Raise ValueError for options that are out of range.

    That is a negative option among `positive`, and an unknown `adapt`.
    """
    options = {**optimizer.defaults, **group}
    name = type(optimizer).__name__
    for option in positive:
        if not options[option] >= 0:
            raise ValueError(f"{name} needs {option} >= 0, not {options[option]}")
    if options.get("adapt", "all") not in ("all", "matrices", "none"):
        raise ValueError(
            f'{name} needs adapt "all", "matrices" or "none", not {options["adapt"]!r}'
        )


def refuse_complex(optimizer: Optimizer) -> None:
    """Raise ValueError, and take the newest group off, where it has complex parameters."""
    if any(parameter.is_complex() for parameter in optimizer.param_groups[-1]["params"]):
        optimizer.param_groups.pop()
        raise ValueError(
            f"{type(optimizer).__name__} does not take complex parameters; give it "
            "torch.view_as_real of them"
        )


def with_gradients(optimizer: Optimizer, group: Mapping[str, Any]) -> list[Tensor]:
    """Return the parameters of `group` that have a gradient. ValueError for a sparse one."""
    parameters: list[Tensor] = [
        parameter for parameter in group["params"] if parameter.grad is not None
    ]
    if any(p.grad.is_sparse for p in parameters if p.grad is not None):
        raise ValueError(
            f"{type(optimizer).__name__} needs dense gradients; build the embedding with "
            "sparse=False"
        )
    return parameters


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling; see the module's docstring for the equations.

    `lr` γ, `momentum` m, `weight_decay` β, `trust_coefficient` η; `eps` is added to the denominator
    of the trust ratio (the paper has none). `nesterov`: w ← w - (γ λ (g + β w) + m v). `adapt`:
    which parameters get a trust ratio ("all", as the paper; "matrices": those of two dims or more;
    "none": plain SGD); the others are updated with λ = 1. Every option may be set per parameter
    group, so biases and norms can do without ratio and weight decay::

        LARS([{"params": weights, "weight_decay": 1e-4}, {"params": others, "adapt": "none"}],
        lr=4.0)

    State: `momentum_buffer` per parameter. Gradients are not clipped: that is the Trainer's. Raises
    ValueError for negative options, `nesterov` without momentum, complex parameters and sparse
    gradients.
    """

    # replaced on an instance by `share_trust_ratios`
    layer_norms = staticmethod(layer_norms)

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
        adapt: Adapt = "all",
    ) -> None:
        defaults = dict(
            lr=lr, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient
        )
        super().__init__(params, {**defaults, "eps": eps, "nesterov": nesterov, "adapt": adapt})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as every optimizer does; raises ValueError for bad options."""
        check_options(
            self,
            param_group,
            positive=("lr", "momentum", "weight_decay", "trust_coefficient", "eps"),
        )
        options = {**self.defaults, **param_group}
        if options["nesterov"] and not options["momentum"]:
            raise ValueError("LARS with nesterov needs a momentum above 0")
        super().add_param_group(param_group)
        refuse_complex(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, with_gradients(self, group)) for group in self.param_groups]
        adapted = [
            [p for p in parameters if is_adapted(p, group["adapt"])] for group, parameters in groups
        ]
        layers = [parameter for some in adapted for parameter in some]
        # the norms of all groups at once: (2, layers)
        norms = self.layer_norms(layers, [_gradient(parameter) for parameter in layers])
        parts = torch.split(norms, [len(some) for some in adapted], dim=1)
        for (group, parameters), some, part in zip(groups, adapted, parts, strict=True):
            self._update(group, some, part)
            self._update(group, [p for p in parameters if not is_adapted(p, group["adapt"])], None)
        return loss

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], norms: Tensor | None
    ) -> None:
        """Update `parameters` with trust ratios from `norms` (2, parameters).

        Without `norms`, with the plain rate.
        """
        if not parameters:
            return
        lr, momentum = float(group["lr"]), group["momentum"]
        gradients, buffers = [_gradient(parameter) for parameter in parameters], []
        if momentum:
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        options = {
            "momentum": momentum,
            "weight_decay": group["weight_decay"],
            "nesterov": group["nesterov"],
        }
        rates: Tensor | None = None
        if norms is not None:
            chosen = {name: group[name] for name in ("weight_decay", "trust_coefficient", "eps")}
            rates = lr * trust_ratios(norms, **chosen)
        if all(parameter.device.type == "cpu" for parameter in parameters):
            # one pass per parameter
            numbers = [lr] * len(parameters) if rates is None else rates.tolist()
            update_each(parameters, gradients, buffers, rates=numbers, **options)
        else:
            update_together(
                parameters, gradients, buffers, rates=lr if rates is None else rates, **options
            )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def update_each(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    rates: Sequence[float],
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """Update one parameter after the other, for CPU.

    In one pass over memory where torch's fused SGD can express the update. `rates` are γ λ;
    `buffers` is empty without momentum.
    """
    options: dict[str, Any] = {
        "momentum": momentum,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
    }
    for index, (parameter, gradient, rate) in enumerate(
        zip(parameters, gradients, rates, strict=True)
    ):
        own = list(buffers[index : index + 1])
        if (
            nesterov
            or not _same_memory_order(parameter, gradient, *own)
            or not rate > _SMALLEST_FUSED_RATE
        ):
            update_together([parameter], [gradient], own, rates=rate, **options)
            continue
        # Fused SGD: v ← m v + (1 - dampening) (g + β w); w ← w - lr v. Without momentum: w ← w - lr
        # (g + β w).
        lr, dampening = (1.0, 1.0 - rate) if momentum else (rate, 0.0)
        torch._fused_sgd_(
            *([parameter], [gradient], own),
            **{
                **options,
                "lr": lr,
                "dampening": dampening,
                "maximize": False,
                "is_first_step": False,
            },
        )


def _same_memory_order(*tensors: Tensor) -> bool:
    """Return whether a kernel may walk through the memory of all of them at once.

    Of float32 tensors only.
    """
    return all(tensor.dtype == torch.float32 for tensor in tensors) and (
        all(tensor.is_contiguous() for tensor in tensors)
        or (
            tensors[0].dim() == 4
            and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
        )
    )


def update_together(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    rates: Tensor | float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """Update all parameters with a few calls, without waiting for the device.

    `rates` γ λ is a number or (parameters,).
    """
    # g + β w
    if weight_decay:
        updates = list(torch._foreach_add(list(gradients), list(parameters), alpha=weight_decay))
    else:
        updates = [gradient.clone() for gradient in gradients]
    # γ λ (g + β w)
    if isinstance(rates, Tensor):
        scales = [
            rate.to(update.device) for rate, update in zip(rates.unbind(), updates, strict=True)
        ]
        torch._foreach_mul_(updates, scales)
    else:
        torch._foreach_mul_(updates, rates)
    # v ← m v + γ λ (g + β w); w ← w - v
    if momentum:
        torch._foreach_mul_(list(buffers), momentum)
        torch._foreach_add_(list(buffers), updates)
        if nesterov:
            torch._foreach_add_(updates, list(buffers), alpha=momentum)
    torch._foreach_sub_(list(parameters), updates if nesterov or not momentum else list(buffers))


# ---- Norms that are shared between ranks


def share_trust_ratios(
    optimizer: Optimizer, *, group: dist.ProcessGroup | None = None
) -> TrustRatios:
    """Make the ranks of `group` (default: all) share the norms of `optimizer`, a `LARS`.

    Collective call; `unshare_trust_ratios` undoes it. The parameters after a step are, bit for bit,
    those of the unshared optimizer. An exchange that a rank does not answer fails after the timeout
    of `group`.

    Raises:
        ValueError: for another optimizer, for one that shares already, and, on all ranks, for
            parameters that differ between ranks.
    """
    if not isinstance(optimizer, LARS):
        raise ValueError(
            f"trust ratios of {type(optimizer).__name__} cannot be shared by themselves: only "
            "those of LARS depend on parameters and gradients alone. The ratios of LAMB need the "
            "update itself, so that computing them is the work of a step: split whole parameters "
            "instead (parallel_step)"
        )
    if "layer_norms" in optimizer.__dict__:
        raise ValueError(
            "this optimizer shares its trust ratios already; call unshare_trust_ratios first"
        )
    _check_equal_parameters(optimizer, group)
    shared = TrustRatios(optimizer, group=group)
    optimizer.layer_norms = shared
    return shared


def unshare_trust_ratios(optimizer: Optimizer) -> None:
    """Undo `share_trust_ratios`; nothing to undo is no error."""
    optimizer.__dict__.pop("layer_norms", None)


class TrustRatios:
    """Computes `lars.layer_norms` with the other ranks; installed by `share_trust_ratios`.

    The layers of a step are the parameters that have a gradient, the same on all ranks; they may
    change from step to step.
    """

    def __init__(self, optimizer: Optimizer, *, group: dist.ProcessGroup | None = None) -> None:
        self.optimizer, self.group = optimizer, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # positions of the last step's layers among all parameters
        self.layers: list[int] | None = None
        # Rows: norms of parameters, norms of gradients, the number of ranks that have the gradient.
        self.present = torch.zeros(3, len(parameters_of(optimizer)))
        self.own: list[int] = []

    def __call__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """Return ‖w‖ and ‖g‖ (2, layers) of all layers.

        Raises ValueError where a gradient is missing on some ranks. On CPU that is seen in every
        step; elsewhere (it takes waiting for the device) in the first one and whenever those of
        this rank have changed.
        """
        changed = self._deal(parameters)
        vector = self.present.clone()  # (3, parameters)
        tensors = [*parameters, *gradients]
        if self.own:
            vector.view(-1)[self.places] = tensor_norms([tensors[index] for index in self.own]).to(
                vector
            )
        dist.all_reduce(vector, group=self.group)
        if changed or vector.device.type == "cpu":
            self._check(vector)
        return vector[:2] if self.selected is None else vector[:2, self.selected]

    def _deal(self, parameters: Sequence[Tensor]) -> bool:
        """Choose the tensors whose norms this rank computes.

        Returns whether that is another choice than in the last step.
        """
        everything = parameters_of(self.optimizer)
        if len(everything) < self.present.shape[1]:
            raise ValueError(
                f"the optimizer had {self.present.shape[1]} parameters and steps with "
                f"{len(everything)}: a step that is split by parameters computes each norm once "
                "already; call unshare_trust_ratios"
            )
        number = {parameter: index for index, parameter in enumerate(everything)}
        layers = [number[parameter] for parameter in parameters]
        if layers == self.layers and self.present.shape[1] == len(everything):
            return False
        device = everything[0].device
        # norms of parameters, then of gradients: (2 layers,)
        costs = 2 * [parameter.numel() + _CALL_ELEMENTS for parameter in parameters]
        shares = [
            Share(i, 1, nbytes=cost, cost_seconds=float(cost), splittable=False)
            for i, cost in enumerate(costs)
        ]
        pieces = assign_pieces(shares, world_size=self.world_size)
        self.layers, self.own = (
            layers,
            [piece.index for piece in pieces if piece.owner == self.rank],
        )
        exact = (
            torch.float64
            if any(parameter.dtype == torch.float64 for parameter in everything)
            else torch.float32
        )
        self.present = torch.zeros(3, len(everything), dtype=exact, device=device)
        self.present[2, layers] = 1
        # where own norms lie in the flattened (3, parameters)
        cells = [row * len(everything) + layer for row in range(2) for layer in layers]
        self.places = torch.tensor(
            [cells[index] for index in self.own], dtype=torch.int64, device=device
        )
        self.selected = (
            None
            if len(layers) == len(everything)
            else torch.tensor(layers, dtype=torch.int64, device=device)
        )
        return True

    def _check(self, vector: Tensor) -> None:
        if torch.equal(vector[2], self.present[2] * self.world_size):
            return
        ranks = vector[2].tolist()
        index = next(i for i, count in enumerate(ranks) if count not in (0, self.world_size))
        raise ValueError(
            f"parameter {index} of shape {tuple(parameters_of(self.optimizer)[index].shape)} has a "
            f"gradient on {ranks[index]:.0f} of {self.world_size} ranks; shared trust ratios need "
            "the same gradients on all of them (DistributedDataParallel gives that)"
        )


def _check_equal_parameters(optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError that names the first parameter that differs from rank 0's."""

    def text(described: tuple[Any, ...] | None) -> str:
        if described is None:
            return "missing"
        shape, dtype, adapt = described
        return f"{dtype} {shape} with adapt={adapt!r}"

    own = [
        (tuple(p.shape), str(p.dtype), options["adapt"])
        for options in optimizer.param_groups
        for p in options["params"]
    ]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    for rank, theirs in enumerate(everyone):
        for index in range(max(len(theirs), len(everyone[0]))):
            here, there = (
                some[index] if index < len(some) else None for some in (everyone[0], theirs)
            )
            if here != there:
                raise ValueError(
                    f"parameter {index} of the optimizer is {text(there)} on rank {rank} and "
                    f"{text(here)} on rank 0; build the same optimizer on all ranks"
                )
