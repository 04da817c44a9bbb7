"""A `fingerprint` takes of code its instructions, and what they refer to by name.

Code of libraries goes by version (see `fingerprint_packages`); the user's own is followed wherever
it leads. A module that a function imports when it runs is followed without importing it, for the
function may never be called.
"""

from __future__ import annotations

import dis
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from lightning_topt.data.cache.fingerprint_packages import (
    find_spec,
    home,
    is_library,
    is_standard,
    version,
)

# Of a class: what Python keeps there (some of it only after the first use), and where its text
# stood.
_NO_CODE = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__abstractmethods__",
    "_abc_impl",
    "__slotnames__",
    "__firstlineno__",
    "__static_attributes__",
    "__annotations_cache__",
    "_value2member_map_",
    "__pydantic_core_schema__",  # with ids
    "__pydantic_serializer__",
    "__pydantic_validator__",
}
_IMPORT = dis.opmap["IMPORT_NAME"]
_LATER: set[str] = set()  # modules that were not imported when they were first met


class Words(NamedTuple):
    """To be taken as they are."""

    words: tuple[str | bytes, ...]


class Own(NamedTuple):
    """A value without which the code would be another."""

    value: Any


class Referred(NamedTuple):
    """A value that the code finds under a name. It is no part of the data set's state: a lock, a
    connection go by name.
    """

    value: Any


class LaterModule(NamedTuple):
    """A module that is not imported yet."""

    name: str


Parts = Iterator[Words | Own | Referred | LaterModule]


def parts_of(code: Any) -> Parts:
    """Return the parts of a function, a class, a module or a code object: what makes it what it
    is.
    """
    if isinstance(code, types.FunctionType):
        return _of_function(code)
    if isinstance(code, types.ModuleType):
        return _of_module(
            code, sorted(name for name in vars(code) if not name.startswith("__")), set()
        )
    if isinstance(code, types.CodeType):
        return _of_instructions(code)
    return _of_later_module(code.name) if isinstance(code, LaterModule) else _of_class(code)


def _of_function(function: types.FunctionType) -> Parts:
    module = home(function)
    yield Words(("function", module, function.__qualname__, version(module)))
    if is_standard(module):
        return
    yield Own([function.__defaults__, function.__kwdefaults__])
    yield Own([cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)])
    if not is_library(module):
        attributes = dict(vars(function))
        attributes.pop("_clear_cache", None)  # of singledispatch: it holds what was called so far
        yield Referred(attributes)
        yield from _of_code(
            function.__code__, function.__globals__, package=_package_of(function.__globals__)
        )


def _of_class(cls: type) -> Parts:
    yield Words(("class", home(cls), cls.__qualname__, version(home(cls))))
    yield Own([type(cls), *cls.__bases__])
    if not is_library(home(cls)):
        for name in sorted(vars(cls).keys() - _NO_CODE):
            yield Words((name,))
            yield Referred(vars(cls)[name])


def _of_later_module(name: str) -> Parts:
    yield Words(("module", name, version(name)))
    spec = find_spec(name)
    try:
        code = spec.loader.get_code(name)  # type: ignore[union-attr]
    except Exception:  # no such module, or none that Python can read: importing it will fail too
        code = None
    if spec is not None and code is not None:
        is_package = spec.submodule_search_locations is not None
        yield from _of_code(code, {}, package=name if is_package else name.rpartition(".")[0])


def _of_code(code: types.CodeType, namespace: dict[str, Any], *, package: str) -> Parts:
    """Yield the parts of the instructions and what they mean in `namespace`; relative imports start
    from `package`.
    """
    yield from _of_instructions(code)
    names, modules = _names_in(code), set[int]()
    yield from _of_names(names, namespace, modules)
    for name in _imports_in(code, package=package):
        module = None if is_library(name) else _imported(name)
        if module is not None:
            yield from _of_module(module, names, modules)
        else:
            yield Words(("module", name, version(name))) if is_library(name) else LaterModule(name)


def _of_instructions(code: types.CodeType) -> Parts:
    variables = [*code.co_varnames, *code.co_cellvars, *code.co_freevars]
    exceptions = getattr(code, "co_exceptiontable", b"")  # Python 3.10 has none
    yield Words((code.co_code, exceptions, " ".join(code.co_names), " ".join(variables)))
    yield Own(list(code.co_consts))


def _of_names(names: list[str], namespace: dict[str, Any], modules: set[int]) -> Parts:
    """Yield what `names` mean in a namespace and those of the user's modules they lead to, each of
    which is kept in `modules`.
    """
    for name in names:
        if name in namespace:
            value = namespace[name]
            if not isinstance(value, types.ModuleType):
                yield Words((name,))
                yield Referred(value)
            elif value.__name__ not in _LATER:
                yield Words((name,))
                yield from _of_module(value, names, modules)


def _of_module(module: types.ModuleType, names: list[str], modules: set[int]) -> Parts:
    yield Words(("module", module.__name__, version(module.__name__)))
    if not is_library(module.__name__) and id(module) not in modules:
        modules.add(id(module))
        yield from _of_names(names, vars(module), modules)


def _imported(name: str) -> types.ModuleType | None:
    """A module, or None if it was not imported when it was first met: that samples import it
    changes nothing.
    """
    module = sys.modules.get(name)
    if name not in _LATER and isinstance(module, types.ModuleType):
        return module
    if find_spec(name) is not None:
        _LATER.add(name)
    return None


def _names_in(code: types.CodeType) -> list[str]:
    """Return the names of globals and attributes that `code` uses, and the functions and
    comprehensions inside it.
    """
    inner = [
        _names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    ]
    return list(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _imports_in(code: types.CodeType, *, package: str) -> list[str]:
    """Full names of the modules that `code` imports when it runs, and the functions inside it."""
    found: list[str] = []
    if _IMPORT in code.co_code[::2]:  # reading the instructions is slow
        constants: list[Any] = []
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                constants.append(instruction.argval)
            elif instruction.opcode == _IMPORT:
                level, wanted = constants[-2:]
                found += _targets("." * level + instruction.argval, wanted or (), package=package)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _imports_in(constant, package=package)
    return list(dict.fromkeys(found))


def _targets(name: str, wanted: tuple[str, ...], *, package: str) -> list[str]:
    """Return the targets of one import: the module, and what is taken from it that is a module too;
    without that, all on the way to it.
    """
    try:
        module = importlib.util.resolve_name(name, package)
    except ImportError:  # as it will be when it runs
        return []
    if not wanted:
        return [module[:end] for end, letter in enumerate(module + ".") if letter == "."]
    if is_library(module):
        return [module]
    parts = [f"{module}.{part}" for part in wanted]
    return [module, *(part for part in parts if part in sys.modules or find_spec(part) is not None)]


def _package_of(namespace: dict[str, Any]) -> str:
    """From where the relative imports of a module start, given its globals."""
    package, name = namespace.get("__package__"), namespace.get("__name__") or ""
    return str(
        (name if "__path__" in namespace else name.rpartition(".")[0])
        if package is None
        else package
    )


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
