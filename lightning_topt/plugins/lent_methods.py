"""Methods of Lightning's objects that are wrapped for the time of a run, on the object itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_NOTHING = object()


class LentMethods:
    """Methods of objects that call ours instead, until they are given back."""

    def __init__(self) -> None:
        self._lent: list[tuple[Any, str, Any]] = []

    def lend(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Let ``owner.name(*args)`` call ``ours(own, *args)``, where `own` is what it was."""
        own = getattr(owner, name)
        self._lent.append((owner, name, vars(owner).get(name, _NOTHING)))
        vars(owner)[name] = partial(ours, own)

    def give_back(self) -> None:
        """Let all methods be what they were."""
        for owner, name, before in reversed(self._lent):
            if before is _NOTHING:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self._lent.clear()
