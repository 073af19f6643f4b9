"""The public interface as text, so that a change of it is seen where it is made.

``python tests/acme/interface.py`` writes the snapshot anew, once API_VERSION says what kind of change it was.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from guide import GUIDE, promised
from pydantic import BaseModel

from engram_core.info import API_VERSION

SNAPSHOT = Path(__file__).with_name("interface.json")
_PLAIN = (bool, int, float, str, type(None), tuple)


def current() -> dict[str, Any]:
    """Every promised name, with its signature or its public members."""
    names: dict[str, Any] = {}
    for module, promises in promised(GUIDE.read_text(encoding="utf-8")).items():
        if module.startswith("engram_core.kernels") and find_spec("triton") is None:
            continue
        for name in promises:
            names[f"{module}.{name}"] = _described(getattr(import_module(module), name))
    return {"api_version": list(API_VERSION), "names": names}


def differences(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What was added, and what was changed or removed, one line each."""
    then, current = _flat(before), _flat(now)
    added = [f"+ {key}  {current[key]}" for key in current if key not in then]
    broken = [
        f"! {key}  {then[key]}  ->  {current[key]}" if key in current else f"- {key}  {then[key]}"
        for key in then
        if current.get(key) != then[key]
    ]
    return added, broken


def _flat(names: dict[str, Any]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, found in names.items():
        for member, text in found.items() if isinstance(found, dict) else [("", found)]:
            flat[f"{name}.{member}" if member else name] = text
    return flat


def _described(value: Any) -> Any:
    if isinstance(value, type):
        return _members(value)
    if inspect.isfunction(value):
        return str(inspect.signature(value))
    if isinstance(value, bool) or type(value).__module__.startswith("triton"):
        # Triton's interpreter changes both.
        return "bool" if isinstance(value, bool) else "kernel"
    if isinstance(value, _PLAIN) or type(value).__module__ == "torch":
        return repr(value)
    return type(value).__name__


def _members(cls: type) -> dict[str, str]:
    if issubclass(cls, enum.Enum):
        return {member.name: repr(member.value) for member in cls}
    if issubclass(cls, BaseModel):
        fields = {name: str(field.annotation) for name, field in cls.model_fields.items()}
        return fields | {name: text for name, text in _own(cls).items() if name not in fields}
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("engram_core"):
            found |= _own(base)
    if dataclasses.is_dataclass(cls):
        found |= {field.name: f": {field.type}{_default(field)}" for field in dataclasses.fields(cls)}
    return dict(sorted(found.items()))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    return " = ..." if field.default_factory is not dataclasses.MISSING else ""


def _own(cls: type) -> dict[str, str]:
    found = {name: f": {kind}" for name, kind in inspect.get_annotations(cls).items() if name[0] != "_"}
    for name, value in vars(cls).items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, (classmethod, staticmethod)):
            found[name] = f"{type(value).__name__}{inspect.signature(value.__func__)}"
        elif isinstance(value, property):
            found[name] = f"property{inspect.signature(value.fget)}" if value.fget else "property"
        elif inspect.isfunction(value):
            abstract = "abstract" if getattr(value, "__isabstractmethod__", False) else ""
            found[name] = f"{abstract}{inspect.signature(value)}"
            if name == "__init__" and not dataclasses.is_dataclass(cls):
                found = _attributes(value) | found
        elif isinstance(value, _PLAIN):
            found[name] = f"{found.get(name, '')} = {value!r}"
    return found


def _attributes(init: Any) -> dict[str, str]:
    """Public attributes that a constructor sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
    targets = [
        target
        for node in ast.walk(tree)
        for target in (getattr(node, "targets", None) or [getattr(node, "target", None)])
        if isinstance(node, (ast.Assign, ast.AnnAssign))
    ]
    return {
        target.attr: "attribute"
        for target in targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and not target.attr.startswith("_")
    }


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
