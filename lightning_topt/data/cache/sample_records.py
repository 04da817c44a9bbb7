"""NamedTuples and dataclasses, taken apart and put together as they are: their own code has run
once and does not run again.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_record_types: dict[str, type] = {}


def type_name(kind: type) -> str:
    """Return the module and qualified name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def register_sample_type(record: type) -> None:
    """Let a NamedTuple or dataclass be decoded here. Encoding one registers it; a process that only
    decodes may need this.

    Raises ValueError for a class that is neither, or whose instances hold more than attributes (a
    dataclass that is a dict).
    """
    if not (is_named(record) or is_record(record)):
        raise ValueError(
            "a sample's own type is a NamedTuple or dataclass with no other built-in base; got "
            f"{record!r}"
        )
    _record_types[type_name(record)] = record


def named_type(name: str) -> type | None:
    """Return the registered NamedTuple or dataclass of that name (module and qualified name)."""
    return _record_types.get(name)


@lru_cache(maxsize=1024)
def is_named(kind: type) -> bool:
    """Return whether it is a NamedTuple."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


@lru_cache(maxsize=1024)
def is_record(kind: type) -> bool:
    """Return whether it is a dataclass whose instances hold attributes and nothing else."""
    if not hasattr(kind, "__dataclass_fields__") or issubclass(kind, enum.Enum):
        return False
    try:
        # which Python refuses where another built-in class keeps something of its own
        object.__new__(kind)
    except TypeError:
        return False
    return True


def fields_of(kind: type) -> list[str]:
    """Return the names of the fields, which tell a class from an earlier one of the same name."""
    return list(kind._fields if is_named(kind) else kind.__dataclass_fields__)  # type: ignore[attr-defined]


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an instance holds in slots and beside them, whether it is a field or not."""
    kind: type = type(value)
    found = dict(getattr(value, "__dict__", ()))
    for name, slot in _slots(kind).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue  # it has been deleted, or was never set
    return found


def record_of(kind: type, attributes: Iterable[tuple[str, Any]]) -> Any:
    """Return an instance that holds these attributes."""
    value: Any = object.__new__(kind)
    slots = _slots(kind)
    for name, item in attributes:
        # Not setattr: a frozen dataclass refuses it, and others may do more than to set.
        if name in slots:
            slots[name].__set__(value, item)
        else:
            value.__dict__[name] = item
    return value


@lru_cache(maxsize=1024)
def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    members = [item for base in reversed(kind.__mro__) for item in vars(base).items()]
    return {
        name: member for name, member in members if isinstance(member, types.MemberDescriptorType)
    }
