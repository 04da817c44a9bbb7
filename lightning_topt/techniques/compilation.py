"""Compiled blocks: the forward of a module through `torch.compile`, where that was measured to pay.

    noted = CallRecording(module, names)       of one block of each group of `candidates`
    ...                                     a training step
    trials = compare(module, groups, noted.take())     in a copy of this process
    compile_blocks(module, forms)           `uncompile` undoes it

A compiled block stays the module that it was: `forward` is replaced on the instance. Names, state
dicts and hooks stay as they are, and recomputation and shards are around it. It runs compiled code
for calls of the form that it was compiled for, in training. Others, evaluations among them, run as
they are written: no new shape compiles anything. What the compiler refuses runs so as well, from
then on. Random numbers are those of eager mode; results differ as orders of additions do.

[Note: compiled by the user] Hooks that gather shards, and recomputation, must be around compiled
code. Where a module that the user has compiled has blocks with these at or inside of it, it runs
eagerly, and each of the blocks in it is compiled with the user's options. What else the user has
compiled stays as it is. All is put back when the plan ends. A copy of the module runs eagerly.
"""

from __future__ import annotations

import inspect
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_topt.communication.collectives import synchronize
from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.training_step import EAGER, TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block
from lightning_topt.graph.recording import list_modules
from lightning_topt.graph.structures import map_tensors, tensors_in
from lightning_topt.optim.update_rule import NoCollectives
from lightning_topt.techniques.recomputation import RecomputedForward
from lightning_topt.techniques.technique import (
    Applied,
    BlockSeconds,
    ParallelModel,
    Technique,
    restore_forward,
)

LEAST_GAIN = 1.03  # eager seconds over compiled ones, from which a block is compiled
# of a process that has taken compiled code from the cache, and of each kind of blocks (CPUs, 2.13)
COMPILER_BYTES, CODE_BYTES = 5e7, 7e6
TOLERANCE = 1e-4  # of results and gradients, relative to their largest number, in float32
_ROUNDS, _PAIR_SECONDS = 7, 1.0
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Compilation(Technique):
    """Blocks whose configuration says `compile`, and what the user has compiled.

    What is unknown of their costs is that of eager mode. Of the user's see [Note: compiled by the
    user].
    """

    name = "compilation"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        has_parts = mesh.tensor_axes or mesh.pipeline_axes
        return frozenset({"compile"}) if config.compile and not has_parts else frozenset()

    @override
    def check(
        self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: GradientMethod | None
    ) -> None:
        if "" in configs and configs[""].compile:
            raise ValueError(
                'the block "" (everything outside the named blocks) cannot be compiled'
            )

    # ---- what is legal: what a trial has found to pay (`known_trials`)

    @override
    def configs(
        self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]
    ) -> list[OpConfig]:
        if block.name not in step.compiled or step.mesh.tensor_axes:
            return []
        return [replace(config, compile=True) for config in so_far]

    # ---- what it costs

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        if not step.cluster.device.caching_allocator:  # the device is the process itself
            kinds = {step.compiled.get(block) for block in blocks}
            yield step.phases.always("compiler", COMPILER_BYTES + CODE_BYTES * len(kinds))

    @override
    def add_seconds(
        self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig
    ) -> None:
        cost = step.compiled.get(block, EAGER)
        seconds.kernels = cost.forward, cost.backward
        seconds.update += cost.seconds

    # ---- how it is applied

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        undo = ExitStack()
        if not (model.mesh.tensor_axes or model.mesh.pipeline_axes):
            _compile_inside(model, undo)
        compile_blocks(model.module, dict.fromkeys(model.blocks_of(self)))
        undo.callback(uncompile, model.module, ReplacedForward)
        return Applied(undo=undo.close)


# ---- how a block runs ----------------------------------------------------------------------------


class ReplacedForward:
    """A module's `forward` on the instance: `run` in the place of `forward`."""

    def __init__(self, forward: Callable[..., Any], run: Callable[..., Any]) -> None:
        self.forward, self._run = forward, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._run(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # of a module that is copied or pickled within the fit, which outlives it
        return partial, (self.forward,)


class CompiledForward(ReplacedForward):
    """A module's `forward`, compiled for calls of one form: that of `form`, else of its first call.

    `failure` says why it no longer is, as a clause.
    """

    def __init__(self, forward: Callable[..., Any], form: object = None) -> None:
        self.forward, self.form = forward, form
        self.failure: str | None = None
        self._compiled: Callable[..., Any] | None = None

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.failure is not None or not _is_training():
            return self.forward(*args, **kwargs)
        form = form_of((args, kwargs))
        if self.form is None:
            self.form = form
        if form != self.form:
            return self.forward(*args, **kwargs)
        try:
            if self._compiled is not None:
                return self._compiled(*args, **kwargs)
            compiled = _compiled(self.forward)
            with _as_written(), _as_under_ddp(self.forward):
                made = compiled(*args, **kwargs)
            self._compiled = _without_compiler(self.forward)
            return made
        except _refusals() as error:
            self.failure = refusal_of(error)
            warnings.warn(
                f"topt: a compiled block runs as it is written from now on: {self.failure}",
                stacklevel=2,
            )
        # nothing has run yet: what does not compile is refused before
        return self.forward(*args, **kwargs)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    # a whole graph or none; draws of eager mode
    found: Callable[..., Any] = torch.compile(
        forward, fullgraph=True, dynamic=False, options={"fallback_random": True}
    )
    return found


def _is_training() -> bool:
    # With gradients, and in no transform of torch.func
    return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


def _without_compiler(forward: Callable[..., Any]) -> Callable[..., Any]:
    # Runs compiled code where it is valid, else as it is written: where a parameter was frozen,
    # a hook was added or a number in the module changed. Compiles nothing.
    from torch._dynamo import run  # noqa: PLC0415  (a second to import)

    found: Callable[..., Any] = run(forward)
    return found


@contextmanager
def _as_written() -> Iterator[None]:
    # A block is one graph under DDP too, which else makes one of each bucket. Hooks on its parts
    # are seen, also those that come later. Its backward pass is compiled at once, what fails fails
    # here; it overwrites nothing that a second one needs (`retain_graph`), and code in the cache
    # that does is not taken. Blocks of one class, or of torch's containers, share a function and
    # so its limit of code, which is none here: each is compiled once. Compilers of C++ need no
    # processes beside this one.
    from torch._dynamo import config  # noqa: PLC0415  (a second to import)
    from torch._functorch import config as functorch  # noqa: PLC0415
    from torch._functorch._aot_autograd import graph_compile  # noqa: PLC0415
    from torch._inductor import config as inductor  # noqa: PLC0415

    threads = inductor.compile_threads if torch.cuda.is_available() else 1
    with (
        config.patch(optimize_ddp=False, skip_nnmodule_hook_guards=False),
        config.patch(recompile_limit=1 << 30, accumulated_recompile_limit=1 << 30),
        functorch.patch(force_non_lazy_backward_lowering=True),
        mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *args: []),
        torch.compiler.config.patch(cache_key_tag="topt"),  # type: ignore[attr-defined]
        inductor.patch(compile_threads=threads),
    ):
        yield


@contextmanager
def _as_under_ddp(forward: Callable[..., Any]) -> Iterator[None]:
    # Modules in shards are other sources of guards, so what a trial has compiled would be no use
    block, mark = getattr(forward, "__self__", None), "_is_fsdp_managed_module"
    marked = [vars(part) for part in block.modules()] if isinstance(block, nn.Module) else []
    had = [(own, own.pop(mark)) for own in marked if mark in own]
    try:
        yield
    finally:
        for own, value in had:
            own[mark] = value


def _refusals() -> tuple[type[BaseException], ...]:
    from torch._dynamo import exc  # noqa: PLC0415  (a second to import)

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def refusal_of(error: BaseException) -> str:
    """Return why something does not compile, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def form_of(value: Any) -> Any:
    """Return what compiled code depends on: shapes, strides and dtypes; other values as such."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, list | tuple):
        return tuple([form_of(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, form_of(item)) for key, item in value.items()])
    return value if isinstance(value, bool | int | float | str) else type(value)


def compile_blocks(module: nn.Module, forms: Mapping[str, object]) -> None:
    """Compile the named submodules for calls of these forms; None: of their first call.

    What recomputes a block stays around it.
    """
    for name, form in forms.items():
        holder = _holder(module.get_submodule(name))
        holder.forward = CompiledForward(holder.forward, form)


def uncompile(module: nn.Module, kind: type[ReplacedForward] = CompiledForward) -> None:
    """Undo `compile_blocks` on all submodules; `ReplacedForward`: what the plan has moved, too."""
    for part in module.modules():
        restore_forward(_holder(part), kind)


def _holder(block: nn.Module) -> Any:
    # What has the forward as it is written: the block, or what recomputes it
    own = vars(block).get("forward")
    return own if isinstance(own, RecomputedForward) else block


# ---- what the user has compiled ------------------------------------------------------------------

_ORIGINAL = "_torchdynamo_orig_callable"  # of a compiled function
_NOTES = ("_compiled_call_impl", "_compiler_ctx")  # of torch; of Lightning, for a LightningModule


def compiler_of(part: Any) -> Any:
    """Return what compiles a function as the user has compiled `part`; None: nobody has.

    It is torch.compile itself where the user's options are not known.
    """
    if "dynamo_ctx" in vars(part):  # what torch.compile returns for a module
        return part.dynamo_ctx
    if whole := getattr(part, "_compiler_ctx", None):
        return whole["dynamo_ctx"]
    own = part._compiled_call_impl
    if own in (None, part._call_impl):  # the latter with disable=True
        return None
    around = inspect.getclosurevars(own).nonlocals if hasattr(own, _ORIGINAL) else {}
    return around.get("self", torch.compile)


def _compile_inside(model: ParallelModel, undo: ExitStack) -> None:
    # See [Note: compiled by the user]; `undo` gets the way back
    configs = model.configs
    around = {name for name, c in configs.items() if c.recompute or c.storage.level > 1}
    left = {*configs} - {""}
    for path, part in reversed([*model.module.named_modules()]):  # the innermost decides
        if not (compiler := compiler_of(part)):
            continue
        inside = {name for name in configs if not path or f"{name}.".startswith(f"{path}.")}
        blocks, left = left & inside, left - inside
        # hooks on what torch.compile returns are around compiled code
        if around.isdisjoint(inside - {path} if "dynamo_ctx" in vars(part) else inside):
            continue
        from torch._dynamo import config  # noqa: PLC0415  (a second to import)

        for name, value in [*vars(part).items()]:
            if name in _NOTES or (hasattr(type(part), name) and hasattr(value, _ORIGINAL)):
                undo.callback(setattr, part, name, value)
                setattr(part, name, getattr(value, _ORIGINAL, None))
        if inside == {""}:  # no block was seen
            blocks = {name for group in candidates(part).values() for name in group}
        for name in blocks:
            block = model.module.get_submodule(name)
            block.forward = ReplacedForward(block.forward, compiler(block.forward))
        # they may share a function, and so its limit of code
        undo.enter_context(
            config.patch(recompile_limit=config.recompile_limit * (len(blocks) or 1))
        )
        options = "your options"
        if compiler is torch.compile:
            options = "torch's defaults (your options are not known)"
        elif blocks == {path}:
            continue
        if dist.get_rank() == 0:
            warnings.warn(
                f"topt: {path or 'the module'} was compiled as one; under this plan {len(blocks)} "
                f"block(s) in it are, with {options}",
                stacklevel=2,
            )


# ---- which blocks may be compiled ----------------------------------------------------------------


def candidates(module: nn.Module) -> dict[str, list[str]]:
    """Return the blocks to try, in groups of equal ones by the name of the first.

    These are the layers of stacks, and else the outermost modules that have parts. Modules of torch
    alone are kernels already; what the user has compiled stays as it is.
    """
    numbers = {part.path: part.structure for part in list_modules(module)}
    found: dict[int, list[str]] = {}

    def is_block(path: str) -> bool:
        part = module.get_submodule(path)
        is_kernel = type(part).__module__.startswith("torch.nn.modules") and not any(
            True for _ in part.children()
        )
        own = vars(_holder(part)).get("forward")
        is_ours = isinstance(own, ReplacedForward)
        return not (is_kernel or is_ours or isinstance(part, _CONTAINERS)) and not any(
            map(compiler_of, part.modules())
        )

    def children(path: str) -> list[str]:
        names = module.get_submodule(path).named_children()
        return [f"{path}.{name}".lstrip(".") for name, _ in names]

    def structures(path: str) -> list[int]:
        return [numbers[name] for name in children(path) if is_block(name)]

    def has_stack(path: str) -> bool:
        # Whether two modules in it, children of one, are alike
        found = structures(path)
        return len({*found}) < len(found) or any(map(has_stack, children(path)))

    def visit(path: str) -> None:
        # alike children are layers, and blocks; others are opened if there are layers in them
        alike = Counter(structures(path))
        for name in children(path):
            is_layer = is_block(name) and alike[numbers[name]] > 1
            is_container = isinstance(module.get_submodule(name), _CONTAINERS)
            if is_container or (not is_layer and has_stack(name)):
                visit(name)
            elif is_block(name):
                found.setdefault(numbers[name], []).append(name)

    if not compiler_of(module):
        visit("")
    return {names[0]: names for names in found.values()}


# ---- what a step calls them with -----------------------------------------------------------------


class BlockCall(NamedTuple):
    """A call of a block in a training step.

    `dtypes` are those of its parameters by name, within the call; `autocast` is None without.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtypes: dict[str, torch.dtype]
    autocast: tuple[str, torch.dtype] | None


class CallRecording:
    """Notes a call of the first block of each group in the step that runs next.

    Attributes:
        refusals: by block, why it cannot be compiled, as a clause.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self.refusals: dict[str, str] = {}
        self._calls: dict[str, BlockCall] = {}
        self._undo: list[Callable[[], None]] = []
        for name in names:
            self._watch(name, module.get_submodule(name))

    def _watch(self, name: str, block: nn.Module) -> None:
        forward = block.forward

        def look(gradient: Tensor) -> None:
            if torch.is_grad_enabled():  # in a backward pass: it makes a graph
                self.refusals[name] = "its gradients are differentiated (create_graph=True)"

        def run(*args: Any, **kwargs: Any) -> Any:
            if not _is_training():
                return forward(*args, **kwargs)
            if name not in self._calls:
                self._calls[name] = _call(block, args, kwargs)
            made = forward(*args, **kwargs)
            for tensor in tensors_in(made):
                if tensor.requires_grad:
                    self._undo.append(tensor.register_hook(look).remove)
            return made

        block.forward = ReplacedForward(forward, run)
        self._undo.append(partial(restore_forward, block, ReplacedForward))

    def take(self) -> dict[str, BlockCall]:
        """Return the calls by block, without those refused; blocks are as they were again."""
        while self._undo:
            self._undo.pop()()
        return {name: call for name, call in self._calls.items() if name not in self.refusals}


def _call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
    def kept(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    given = map_tensors((args, kwargs), kept)
    device = next((t.device.type for t in tensors_in(given)), "cpu")
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    dtypes = {name: parameter.dtype for name, parameter in block.named_parameters()}
    args, kwargs = given
    return BlockCall(args, kwargs, dtypes, None if dtype is None else (device, dtype))


# ---- eager against compiled ----------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What came of compiling one block.

    Attributes:
        refusal: why it is not compiled, as a clause; None: it is faster.
        eager, compiled: seconds of its forward and its backward.
        kept_bytes: that compiled code keeps more for the backward pass.
        compilation_seconds: of its first call.
    """

    refusal: str | None
    eager: Sequence[float] = (0.0, 0.0)
    compiled: Sequence[float] = (0.0, 0.0)
    kept_bytes: int = 0
    compilation_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Compiled seconds relative to those of eager mode."""
        return sum(self.compiled) / (sum(self.eager) or 1.0)

    @property
    def saved_seconds(self) -> float:
        """Of one call, forward and backward."""
        return sum(self.eager) - sum(self.compiled)


def compare(
    module: nn.Module, groups: Mapping[str, Sequence[str]], calls: Mapping[str, BlockCall]
) -> dict[str, Trial]:
    """Compile the first block of each group that was called, and compare it with eager mode.

    It changes buffers and generators, so it runs in a copy of the process. What it compiles stays
    in the cache of the compiler, from which other processes take it.
    """
    found: dict[str, Trial] = {}
    for name in calls:
        blocks = [module.get_submodule(each) for each in groups[name]]
        try:
            found[name] = _compare(blocks, calls[name])
        except Exception as error:  # whatever it is, this block stays as it is
            found[name] = Trial(refusal_of(error))
    return found


def _compare(blocks: Sequence[nn.Module], call: BlockCall) -> Trial:
    # Time a block of equal `blocks`, and run the others, which must not compile anew
    eager = _Runner(blocks[0], call)
    with NoCollectives():  # type: ignore[no-untyped-call]
        expected = eager.results()
    start = perf_counter()
    compiled = _Runner(blocks[0], call, compiled=True)
    found = compiled.results()
    compilation = perf_counter() - start
    if compiled.failure:
        return Trial(compiled.failure)
    if difference := _difference(expected, found, in_16_bits=call.autocast is not None):
        return Trial(f"its results differ from those of eager mode by {difference:.0e}")
    # in pairs, so that both meet the same machine
    pairs: list[tuple[float, ...]] = []
    until = perf_counter() + _PAIR_SECONDS
    while len(pairs) < 3 or (len(pairs) < _ROUNDS and perf_counter() < until):
        pairs.append((*eager.seconds(), *compiled.seconds()))
    times = [statistics.median(column) for column in zip(*pairs, strict=True)]
    more = compiled.kept_bytes() - eager.kept_bytes()
    trial = Trial(None, times[:2], times[2:], more, compilation)
    if sum(trial.eager) < LEAST_GAIN * sum(trial.compiled):
        return replace(trial, refusal=f"compiled it takes {trial.share:.2f} of the time")
    for block in blocks:
        with torch._dynamo.config.patch(error_on_recompile=True):
            again = _Runner(block, call, compiled=True)
            again.results()
        if again.failure and block is blocks[0]:
            # it keeps a state, or hooks do: recomputed, it would be another
            return Trial(f"its code is compiled for one call ({again.failure})")
        if again.failure:
            return Trial(f"equal blocks do not share compiled code ({again.failure})")
    return trial


class _Runner:
    # Runs a block, forward and backward, on copies of the inputs of a call

    def __init__(self, block: nn.Module, call: BlockCall, *, compiled: bool = False) -> None:
        _give_values(block, call.dtypes)
        self._block, self._call = block, call
        forward = _holder(block).forward
        self._forward = CompiledForward(forward) if compiled else forward
        devices = [tensor.device for tensor in tensors_in(call[:2])]
        self._device = devices[0] if devices else torch.device("cpu")
        self._gradients: list[Tensor] | None = None
        self._begins: list[float] = []  # of forward, of backward

    @property
    def failure(self) -> str | None:
        own = self._forward
        return own.failure if isinstance(own, CompiledForward) else None

    def results(self) -> list[Tensor]:
        """Return outputs and gradients of a run, always with the same random numbers."""
        torch.manual_seed(0)
        given = map_tensors(
            (self._call.args, self._call.kwargs),
            lambda t: t.detach().clone().requires_grad_(t.requires_grad),
        )
        trained: list[Tensor] = [p for p in self._block.parameters() if p.requires_grad]
        trained += [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        how = self._call.autocast
        self._begins = [self._now()]
        with torch.autocast(*how) if how else nullcontext(), torch.enable_grad():
            # an operator in front: a block may change its input in place
            args, kwargs = map_tensors(given, lambda t: t * 1 if t.requires_grad else t)
            made = [*tensors_in(self._forward(*args, **kwargs))]
        self._begins.append(self._now())
        wanted = [tensor for tensor in made if tensor.requires_grad]
        if not wanted:
            return [tensor.detach() for tensor in made]
        if self._gradients is None:
            self._gradients = [torch.randn_like(tensor) for tensor in wanted]
        gradients = torch.autograd.grad(wanted, trained, self._gradients, allow_unused=True)
        return [t.detach() for t in made] + [t for t in gradients if t is not None]

    def kept_bytes(self) -> int:
        """Return the bytes that are kept for the backward pass, of inputs and parameters too."""
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.results()
        return sum(kept.values())

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of forward and backward of a run."""
        self.results()
        start, middle = self._begins
        return middle - start, self._now() - middle

    def _now(self) -> float:
        synchronize(self._device)
        return perf_counter()


def _give_values(block: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    # Shards become whole parameters of any values, as within a step
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    for name, parameter in [*block.named_parameters()]:
        if isinstance(parameter, DTensor):
            values = torch.empty(
                parameter.shape, dtype=dtypes[name], device=parameter.device
            ).normal_(0, 0.02)
            path, _, last = name.rpartition(".")
            whole = nn.Parameter(values, requires_grad=parameter.requires_grad)
            block.get_submodule(path)._parameters[last] = whole


def _difference(
    expected: Sequence[Tensor], found: Sequence[Tensor], *, in_16_bits: bool
) -> float | None:
    # The largest difference, relative to the largest number of a tensor, if it is too large.
    # Under autocast gradients of float32 come from numbers of 16 bits
    if [t.shape for t in expected] != [t.shape for t in found]:
        return 1.0
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        if not one.numel():
            continue
        is_exact = one.dtype in (torch.float32, torch.float64) and not in_16_bits
        scale = TOLERANCE if is_exact else 0.05
        bound = scale * max(float(one.abs().max()), 1e-6)
        error = float((one.float() - other.float()).abs().max())
        if not error <= bound:
            largest = max(largest, error / bound * scale)
    return largest or None
