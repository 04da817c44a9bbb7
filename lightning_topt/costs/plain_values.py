"""Plain values from files that people wrote or changed: bounded in size, checked by type.

YAML and JSON, and readers of what is in them. A reader is a function
``read(value, name=...)`` that returns what a value stands for; `record` and `list_of` make readers
of others:

    read_link = record(Link, latency_seconds=parse_seconds, bandwidth=parse_bandwidth)
    read_link({"latency_seconds": "5us", "bandwidth": "25Gb/s"}, name="cluster.inter")

Everything raises ValueError with one sentence; those of readers name the place of the value in its
file. Values in messages are cut (`shown`): a file of a few hundred bytes can stand for gigabytes
once aliases are followed, so aliases are refused and nothing is printed whole.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import reprlib
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

MAX_BYTES, MAX_DEPTH = 2**23, 12  # of a file; a plan has a depth of 3, a cluster of 4

T = TypeVar("T")
Read = TypeVar("Read", covariant=True)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        # YAML forbids a key that stands twice, of which PyYAML takes the last
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(
                    f"the key {shown(key.value)} stands twice, again in line {line}"
                )
            keys.add(str(key.value))
        return super().construct_mapping(node, deep)


def shown(value: Any) -> str:
    """Return the value as it may stand in a message: short, whatever it is."""
    try:
        return re.sub(r"\s+", " ", _SHORT.repr(value))[:200]
    except Exception:  # a broken __repr__, or digits that Python refuses to print
        return f"a {type(value).__name__}"


def names(keys: Any) -> str:
    """Return keys of any types, sorted and short."""
    found = sorted(shown(key) for key in keys)
    return f"[{', '.join(found[:8])}{', ...' if len(found) > 8 else ''}]"


def read_text(path: str | Path) -> str:
    """Return the text of a regular file of at most `MAX_BYTES`. Raises OSError, ValueError."""
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise ValueError("it is not a regular file")
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return data.decode()


def write_text(path: str | Path, text: str) -> None:
    """Write a file that `read_text` reads. Raises ValueError for a text that is too long for it."""
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"it would have more than {MAX_BYTES} bytes, and could not be read again")
    Path(path).write_text(text)


def parse_yaml(text: str) -> Any:
    """Return the plain values of YAML `text`, without aliases."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("YAML aliases (*name) are not read here: write the values out")
            # PyYAML's loader in C recurses until the stack ends
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
        return yaml.load(text, Loader=_Loader)
    except (
        yaml.YAMLError,
        LookupError,
        ArithmeticError,
        RecursionError,
        AttributeError,
        TypeError,
    ) as error:
        # PyYAML's constructors of tagged values (`!!int ''`) raise whatever Python does
        raise ValueError(f"not YAML: {one_line(error)}") from error


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True  # `parse_yaml` refuses them


def dump_yaml(data: Any) -> str:
    """Return plain values as YAML text, entries in their order."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
    return text


def parse_json(text: str) -> Any:
    """Return the plain values of JSON `text`. NaN and infinities are refused."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a number")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("not JSON that is read here: its values are nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return the message of `error` in one line of bounded length."""
    return re.sub(r"\s+", " ", str(error)).strip()[:300]


# ---- readers of values


class ValueReader(Protocol[Read]):
    """Reads a value of a file; `name` is its place there, which errors say."""

    def __call__(self, value: Any, /, *, name: str) -> Read:
        """Return what `value` stands for. Raises ValueError for others."""


def record(kind: Callable[..., T], /, **readers: ValueReader[Any]) -> ValueReader[T]:
    """Return the reader of a mapping whose entries are the arguments of `kind`.

    An entry that is left out or null has the default of its argument, and is missing without one.
    """
    arguments = inspect.signature(kind).parameters.values()
    needed = [each.name for each in arguments if each.default is each.empty]

    def read(value: Any, /, *, name: str) -> T:
        return kind(**read_entries(value, readers, needed=needed, name=name))

    return read


def list_of(read: ValueReader[T]) -> ValueReader[tuple[T, ...]]:
    """Return the reader of a list whose entries `read` reads."""

    def read_list(value: Any, /, *, name: str) -> tuple[T, ...]:
        # Hydra's lists are no `list`
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError(f"{name} must be a list, got {shown(value)}")
        return tuple(read(each, name=f"{name}[{index}]") for index, each in enumerate(value))

    return read_list


def read_entries(
    data: Any, readers: Mapping[str, ValueReader[Any]], *, needed: Collection[str], name: str
) -> dict[str, Any]:
    """Return the entries of a mapping as `readers` read them, without those that are null.

    Raises ValueError also for what is no mapping, for other entries, and where one of `needed` is
    missing.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} must be a mapping, got {shown(data)}")
    if unknown := set(data) - set(readers):
        raise ValueError(
            f"{name}: unknown entries {names(unknown)}; known are {', '.join(sorted(readers))}"
        )
    given = {key: data[key] for key in readers if data.get(key) is not None}
    if missing := [key for key in needed if key not in given]:
        raise ValueError(f"{name}: the entry {missing[0]!r} is missing")
    return {key: readers[key](value, name=f"{name}.{key}") for key, value in given.items()}


def anything(value: Any, /, *, name: str) -> Any:
    """Return `value` as it is, to be read later."""
    return value


def number(value: Any, *, name: str) -> float:
    """Return a finite number of at least 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {shown(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not 0 <= result < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {shown(value)}")
    return result


def truth(value: Any, *, name: str) -> bool:
    """Return `value`, true or false. Raises ValueError that names it."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value


def whole(value: Any, *, name: str, least: int = 1) -> int:
    """Return a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {shown(value)}")
    return value


def text(value: Any, *, name: str) -> str:
    """Return text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {shown(value)}")
    return value
