"""What the techniques of the registry did to one module, taken together, and how it is undone.

Each technique returns an `Applied`: its contexts, the parameters that it replaced or cut, and how
to undo all that. The engine, and a `PipelineRun`, see them as one (`AppliedTechniques`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.optim.parallel_step import ParallelStep
from lightning_topt.techniques.technique import Applied
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor


@contextmanager
def _entered(
    contexts: Iterable[Callable[[], AbstractContextManager[Any]]],
) -> Generator[None, None, None]:
    # Enter what `contexts` make, in their order
    with ExitStack() as stack:
        for make in contexts:
            stack.enter_context(make())
        yield


@final
class AppliedTechniques:
    """What each technique did, in the order of application; it is undone in the reverse order.

    `parameters` are those of the module before, by block and name. Methods are collective calls
    where techniques communicate.
    """

    def __init__(self, parameters: Mapping[str, Mapping[str, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._applied: list[Applied] = []
        # How original parameters are cut along tensor axes, and the slices of present ones.
        self.split: dict[Tensor, SplitTensor] = {}
        self._slices: dict[Tensor, int] = {}
        self._is_joined = False

    def add(self, applied: Applied) -> None:
        """Add what the next technique did."""
        self._applied.append(applied)
        self.split.update(applied.split)
        # By present parameters, which callers have.
        now = self.replaced
        self._slices = {now[original]: how.slices for original, how in self.split.items()}

    def undo(self) -> None:
        """Give the module back as it was."""
        for applied in reversed(self._applied):
            applied.undo()
        self._applied, self.split, self._slices = [], {}, {}

    # ---- parameters ------------------------------------------------------------------------------

    @property
    def has_shards(self) -> bool:
        """Whether parameters are in shards or slices now."""
        return any(applied.replaced or applied.split for applied in self._applied)

    @property
    def replaced(self) -> dict[Tensor, Tensor]:
        """The parameter that is now in the place of each original one."""
        found: dict[Tensor, Tensor] = {}
        for applied in self._applied:
            # what a later technique replaced again is found under its original, the rest is new
            later = dict(applied.replaced)
            found = {original: later.pop(now, now) for original, now in found.items()} | later
        return found

    @property
    def attach(self) -> list[Callable[[Optimizer], ParallelStep | None]]:
        """The functions that make the step of an optimizer follow, one for each technique."""
        return [applied.attach for applied in self._applied]

    def slices_of(self, parameter: Tensor) -> int:
        """Return into how many slices along tensor axes a present parameter is cut."""
        return self._slices.get(parameter, 1)

    def split_names(self) -> dict[str, SplitTensor]:
        """Return how parameters are cut now, by their names; none are within `joined`."""
        if self._is_joined:
            return {}
        # Names of original parameters are those of present ones.
        named = (item for of_block in self._parameters.values() for item in of_block.items())
        return {name: self.split[parameter] for name, parameter in named if parameter in self.split}

    @contextmanager
    def joined(self) -> Generator[None, None, None]:
        """Unshard parameters in slices within."""
        with _entered(applied.joined for applied in self._applied):
            self._is_joined = True
            try:
                yield
            finally:
                self._is_joined = False

    def reshard(self) -> None:
        """Free gathered parameters."""
        for applied in self._applied:
            applied.reshard()

    # ---- steps -----------------------------------------------------------------------------------

    def around_step(self) -> AbstractContextManager[None]:
        """Return the context required around forward and backward."""
        return _entered(applied.around_step for applied in self._applied)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates gradients without their exchange.

        A later backward exchanges them; techniques whose shards that would not help do it at once.
        """
        return _entered(applied.no_sync for applied in self._applied)

    @contextmanager
    def around_microbatch(self, is_last: bool) -> Generator[None, None, None]:
        """Run forward and backward of one microbatch within; the last one exchanges gradients."""
        # Gradients of all but the last are only added up.
        with nullcontext() if is_last else self.no_sync(), self.around_step():
            yield

    def whole(self, value: Any) -> Any:
        """Return what a step returned, with unsharded tensors; within `around_step`."""
        for applied in self._applied:
            value = applied.whole(value)
        return value
