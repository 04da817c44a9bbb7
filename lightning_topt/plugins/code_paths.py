"""Paths of names in compiled code (``self.net.weight``), and where each of them ends.

`listing` goes through a code object once, from top to bottom, with a stack whose slots hold paths
instead of values. So it is known of a call what is called, and with what. Where branches meet, a
slot holds the paths of both. Opcodes differ between releases of Python: those that are not named
here take as many slots as they leave fewer, and what they put there is unknown.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class StackSlot(NamedTuple):
    """What is in one place of the stack: any of `paths`, or a constant; unknown without these."""

    paths: tuple[tuple[Any, ...], ...] = ()
    constant: Any = None


class Call(NamedTuple):
    """A step in a path: a call of what is before it. What comes by ``*`` and ``**`` is left out."""

    arguments: tuple[StackSlot, ...]
    keywords: dict[str, StackSlot]


class Use(NamedTuple):
    """The end of a path: names, `Call` and the steps below, as far as they follow one another.

    With a `callee` it is an argument, the one at `place` (a position, a keyword, None for neither).
    With `names_in_loop` it is looped over; these are the variables of the loop.
    """

    path: tuple[Any, ...]
    callee: StackSlot | None = None
    place: int | str | None = None
    names_in_loop: list[str] | None = None


class PathStep(str):
    """What is in a path besides names and calls."""


NEXT, LOOP = PathStep("next()"), PathStep("for")
RESULT = PathStep("?")  # of something without a name


@dataclass
class Listing:
    """What is in a code object, without what is in inner functions."""

    uses: list[Use] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)


class _Loop(list[str]):
    """The variables of a loop; once an item goes elsewhere, `ELSEWHERE` is among them."""


ELSEWHERE = "*"
_NULL = StackSlot(constant=types.SimpleNamespace())  # marks on the stack what is called
_UNKNOWN = StackSlot()
_VARIABLES = re.compile(r"LOAD_(FAST(?!_AND_CLEAR)|GLOBAL|NAME|DEREF|CLASSDEREF)")
_SILENT = frozenset(
    [
        *("CACHE", "NOP", "EXTENDED_ARG", "RESUME", "PRECALL", "GEN_START", "MAKE_CELL"),
        *("COPY_FREE_VARS", "SETUP_ANNOTATIONS", "NOT_TAKEN", "TO_BOOL", "SETUP_FINALLY"),
        *("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
    ]
)
# They put nothing on the stack.
_TAKERS = re.compile(
    "STORE|DELETE|POP|RETURN_(VALUE|CONST)|RAISE|RERAISE|LIST_|SET_(ADD|UPDATE)|MAP_ADD|DICT_|END_|"
    "CLEANUP|JUMP_IF|PRINT|IMPORT_STAR"
)
# What comes next is reached from elsewhere alone.
_LEAVERS = re.compile("RETURN_(VALUE|CONST)|RAISE|RERAISE|JUMP_(FORWARD|BACKWARD|ABSOLUTE)")
_ADDERS = re.compile("LOAD|PUSH|BUILD|IMPORT|MAKE")  # they look at nothing on the stack
_ENTERERS = re.compile("(BEFORE|SETUP)_(ASYNC_)?WITH|LOAD_SPECIAL")  # a context: one becomes two
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


@functools.cache
def listing(code: types.CodeType) -> Listing:
    """Return the paths in `code`."""
    return _Walk(code).found


def inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code objects of functions and comprehensions in `code`, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from inner_codes(constant)


class _Walk:
    def __init__(self, code: types.CodeType) -> None:
        self.code, self.found = code, Listing()
        self.stack: list[StackSlot] = []
        self.keywords: tuple[str, ...] = ()
        waiting: dict[int, list[StackSlot]] = {}  # stacks of jumps to places that are still to come
        # Handlers of exceptions are in a table from Python 3.11 on; before, jumps go there.
        table = getattr(dis.Bytecode(code), "exception_entries", ())
        handlers = {entry.start: entry for entry in reversed(table)}
        is_reached = True
        for each in dis.get_instructions(code):
            if each.offset in waiting:
                other = waiting.pop(each.offset)
                self.stack = _merged(self.stack, other) if is_reached else other
            elif not is_reached:
                self.stack = []
            if (handler := handlers.get(each.offset)) and handler.target not in waiting:
                # A loop is over then.
                kept = [
                    _UNKNOWN if any(path[-1] == LOOP for path in slot.paths) else slot
                    for slot in self.stack[: handler.depth]
                ]
                waiting[handler.target] = [*kept, *[_UNKNOWN] * (1 + handler.lasti)]
            is_reached = not _LEAVERS.match(each.opname)
            before = list(self.stack)
            if each.opname == "FOR_ITER":
                before[-1:] = [_UNKNOWN]  # used up
            self._run(each)
            if each.opcode in _JUMPS and each.argval > each.offset:
                effect = dis.stack_effect(each.opcode, each.arg, jump=True)
                there = before[: len(before) + min(effect, 0)] + [_UNKNOWN] * effect
                met = waiting.get(each.argval)
                waiting[each.argval] = there if met is None else _merged(met, there)

    def _run(self, each: dis.Instruction) -> None:
        kind, value, stack = each.opname, each.argval, self.stack
        size = each.arg or 0
        if kind in _SILENT:
            pass
        elif kind == "KW_NAMES":
            self.keywords = self.code.co_consts[size]
        elif _VARIABLES.match(kind):
            self._load(kind, value, size)
        elif kind in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            self._attribute(kind, value, size)
        elif kind in ("STORE_ATTR", "DELETE_ATTR"):
            self._use(self._after(self._pop(), value))
            self.found.attributes.add(value)
            self._take(kind == "STORE_ATTR")
        elif kind.startswith("STORE_FAST"):
            names = value if isinstance(value, tuple) else (value,)
            self._store(names[0])
            if kind == "STORE_FAST_LOAD_FAST":
                self._load(kind, names[1], 0)
            elif len(names) > 1:
                self._store(names[1])
        elif kind in ("STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"):
            self._store(value)
        elif kind.startswith("UNPACK"):
            item = self._pop()
            if not isinstance(item.constant, _Loop):  # else its parts are items of the loop
                self._use(item)
                item = _UNKNOWN
            stack += [item] * (dis.stack_effect(each.opcode, each.arg) + 1)
        elif kind.startswith("LOAD_CONST"):
            stack.append(StackSlot(constant=value))
        elif kind == "PUSH_NULL":
            stack.append(_NULL)
        elif kind in ("CALL", "CALL_KW", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD"):
            self._call(kind, size)
        elif kind == "CALL_FUNCTION_EX":
            self._call_with_stars(size)
        elif kind in ("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE"):
            slots = [self._pop() for _ in range(1 - dis.stack_effect(each.opcode, each.arg))]
            codes = [slot for slot in slots if isinstance(slot.constant, types.CodeType)]
            for slot in slots:
                self._use(slot)
            stack.append(codes[0] if codes else _UNKNOWN)
        elif kind == "GET_ITER":
            stack.append(StackSlot(tuple((*path, LOOP) for path in self._pop().paths)))
        elif kind == "FOR_ITER":
            loop = _Loop()
            self._use(self._pop(), names_in_loop=loop)
            stack += [_UNKNOWN, StackSlot(constant=loop)]
        elif kind in ("COPY", "DUP_TOP", "DUP_TOP_TWO"):
            count = {"DUP_TOP": 1, "DUP_TOP_TWO": 2}.get(kind, size)
            copied = self._top(count)
            stack += copied[:1] if kind == "COPY" else copied
        elif kind == "SWAP":
            self._top(size)
            stack[-size], stack[-1] = stack[-1], stack[-size]
        elif kind.startswith("ROT_"):
            count = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}.get(kind, size)
            self._top(count)
            stack.insert(len(stack) - count, stack.pop())
        elif _ENTERERS.match(kind):
            self._take(1)
            stack += [_UNKNOWN, _UNKNOWN]
        else:
            self._run_unknown(each)

    def _run_unknown(self, each: dis.Instruction) -> None:
        effect = dis.stack_effect(each.opcode, each.arg, jump=False)
        if _TAKERS.search(each.opname):
            self._take(-effect)
        elif effect > 0:
            if not _ADDERS.match(each.opname):
                self._use(self._pop())
                self.stack.append(_UNKNOWN)
            self.stack += [_UNKNOWN] * effect
        else:
            self._take(1 - effect)
            self.stack.append(_UNKNOWN)

    # ---- names

    def _load(self, kind: str, value: Any, size: int) -> None:
        names = value if isinstance(value, tuple) else (value,)  # two in one instruction
        # A cell that is handed to an inner function (from Python 3.13 on).
        cells = {*self.code.co_cellvars, *self.code.co_freevars} if "FAST" in kind else {*()}
        slots = [_UNKNOWN if name in cells else StackSlot(((name,),)) for name in names]
        if kind == "LOAD_GLOBAL" and sys.version_info >= (3, 11) and size & 1:
            slots.insert(1 if sys.version_info >= (3, 13) else 0, _NULL)
        self.stack += slots

    def _attribute(self, kind: str, name: str, size: int) -> None:
        self.found.attributes.add(name)
        if kind == "LOAD_SUPER_ATTR":
            del self.stack[-3:]
            slot = StackSlot((("super", Call((), {}), name),))
        else:
            slot = self._after(self._pop(), name)
        has_flag = sys.version_info >= (3, 12) and bool(size & 1)
        self.stack += [slot, _NULL] if kind == "LOAD_METHOD" or has_flag else [slot]

    def _after(self, owner: StackSlot, name: str) -> StackSlot:
        if isinstance(owner.constant, _Loop):
            owner.constant.append(ELSEWHERE)
        return StackSlot(tuple((*path, name) for path in owner.paths or ((RESULT,),)))

    def _store(self, name: str) -> None:
        slot = self._pop()
        if isinstance(slot.constant, _Loop):
            slot.constant.append(name)
        else:
            self._use(slot)

    # ---- calls

    def _call(self, kind: str, size: int) -> None:
        keywords, self.keywords = self.keywords, ()
        if kind in ("CALL_KW", "CALL_FUNCTION_KW"):
            keywords = self._pop().constant or ()
        arguments = [self._pop() for _ in range(size)][::-1]
        callee = self._pop()
        if kind not in ("CALL_FUNCTION", "CALL_FUNCTION_KW"):
            # A function and NULL, in either order; a function and its first argument.
            first = self._pop()
            if callee is _NULL or first is not _NULL:
                callee, first = first, callee
            arguments = arguments if first is _NULL else [first, *arguments]
        count = len(arguments) - len(keywords)
        by_name = dict(zip(keywords, arguments[count:], strict=True))
        if callee.paths == (("next",),) and arguments:
            # Its result stands for the first argument.
            for slot in arguments[1:]:
                self._use(slot)
            self.stack.append(StackSlot(tuple((*path, NEXT) for path in arguments[0].paths)))
            return
        for place, slot in enumerate(arguments[:count]):
            self._use(slot, callee, place)
        for name, slot in by_name.items():
            self._use(slot, callee, name)
        self._push_result(callee, Call(tuple(arguments[:count]), by_name))

    def _call_with_stars(self, size: int) -> None:
        count = 2 if sys.version_info >= (3, 14) else 1 + (size & 1)
        arguments = [self._pop() for _ in range(count)]
        slots = [self._pop() for _ in range(1 + (sys.version_info >= (3, 11)))]
        callee = next((slot for slot in slots if slot is not _NULL), _UNKNOWN)
        for slot in arguments:
            self._use(slot, callee)
        self._push_result(callee, Call((), {}))

    def _push_result(self, callee: StackSlot, call: Call) -> None:
        self.stack.append(StackSlot(tuple((*path, call) for path in callee.paths)))

    # ---- the stack

    def _pop(self) -> StackSlot:
        return self.stack.pop() if self.stack else _UNKNOWN

    def _top(self, count: int) -> list[StackSlot]:
        self.stack[:0] = [_UNKNOWN] * (count - len(self.stack))
        return self.stack[len(self.stack) - count :]

    def _take(self, count: int) -> None:
        for _ in range(count):
            self._use(self._pop())

    def _use(
        self,
        slot: StackSlot,
        callee: StackSlot | None = None,
        place: int | str | None = None,
        names_in_loop: list[str] | None = None,
    ) -> None:
        if isinstance(slot.constant, _Loop):
            slot.constant.append(ELSEWHERE)
        self.found.uses += [Use(path, callee, place, names_in_loop) for path in slot.paths]


def _merged(one: list[StackSlot], other: list[StackSlot]) -> list[StackSlot]:
    """Return the stack where two branches meet: equal from the top on."""
    if len(one) < len(other):
        one, other = other, one
    rest = len(one) - len(other)
    merged = one[:rest]
    for a, b in zip(one[rest:], other, strict=True):
        both = (*a.paths, *(path for path in b.paths if path not in a.paths))
        merged.append(
            a if a == b else StackSlot(both, a.constant if a.constant is b.constant else None)
        )
    return merged
