"""What a mutant is, and how the reference becomes one and itself again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any


class StaleMutant(AssertionError):  # noqa: N818 (a fault of the table, not of a backend)
    """The line that a mutant changes is gone, or there twice: the table must follow the code."""


@dataclass(frozen=True)
class Mutant:
    """One fault. ``area``: of the suite; ``function``: ``module:qualified.name``; ``says``: the fault in words.

    ``old``: a piece of one line of that function, there exactly once; ``new``: what stands there instead. ``cases``:
    conformance cases that must catch it (more may). ``apart``: in a process of its own, since they may spoil it.
    """

    name: str
    area: str
    function: str
    says: str
    old: str
    new: str
    cases: tuple[str, ...]
    apart: bool = False

    @property
    def module(self) -> ModuleType:
        """Where the fault is."""
        return import_module(self.function.partition(":")[0])

    @property
    def qualname(self) -> str:
        """The function's name in its module."""
        return self.function.partition(":")[2]

    def source(self) -> tuple[str, str]:
        """The module's source, and the mutant's. Raises :class:`StaleMutant`."""
        text = Path(str(self.module.__file__)).read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        first, last = _extent(ast.parse(text), self.qualname)
        found = [i for i in range(first, last) for _ in range(lines[i].count(self.old))]
        if len(found) != 1 or "\n" in self.old + self.new:
            raise StaleMutant(f"{self.name}: {self.old!r} is in {len(found)} places of {self.function}; one is needed")
        lines[found[0]] = lines[found[0]].replace(self.old, self.new)
        return text, "".join(lines)

    def code(self) -> CodeType:
        """The function's code with the fault in it. Raises :class:`StaleMutant` where that changes nothing."""
        before, after = self.source()
        if ast.dump(ast.parse(before)) == ast.dump(ast.parse(after)):
            raise StaleMutant(f"{self.name}: {self.new!r} is what {self.function} does anyway")
        return _code(after, str(self.module.__file__), self.qualname)

    def target(self) -> FunctionType:
        """The live function, out of whatever wraps it."""
        found: Any = self.module
        for name in self.qualname.split("."):
            found = vars(found)[name]
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        function = unwrap(found)
        assert isinstance(function, FunctionType), f"{self.function} is {function!r}"
        return function


@contextmanager
def applied(mutant: Mutant | None) -> Iterator[None]:
    """The reference backend with the fault in it; None: as it is.

    The function's code object is exchanged in place: every module that imported it sees the fault, and nothing else
    about the backend (its registration, its classes, the objects that exist) is another one than the control's.
    """
    if mutant is None:
        yield
        return
    function, code = mutant.target(), mutant.code()
    before, held = function.__code__, dict(function.__dict__)
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before
        function.__dict__.clear()
        function.__dict__.update(held)


def _extent(tree: ast.Module, qualname: str) -> tuple[int, int]:
    """Lines of a function, from 0, the last one exclusive."""
    body: Any = tree.body
    for name in qualname.split("."):
        nodes = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name]
        if len(nodes) != 1:
            raise StaleMutant(f"{qualname}: {len(nodes)} definitions of {name}; one is needed")
        body = nodes[0].body
    return nodes[0].lineno - 1, int(nodes[0].end_lineno or 0)


def _code(source: str, file: str, qualname: str) -> CodeType:
    pending = [compile(source, file, "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        if code.co_qualname == qualname:
            return code
        pending += [const for const in code.co_consts if isinstance(const, CodeType)]
    raise StaleMutant(f"{qualname}: no such function in {file}")
