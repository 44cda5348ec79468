"""What the reference says about records: the fields of each, and the comments on them.

mkdocstrings shows the fields of a dataclass in its signature. This extension of griffe gives
msgspec's Structs and NamedTuples such a signature, too, and makes a section "Attributes" of the
comments on fields, or of the meanings in their annotations, unless the docstring has its own list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from griffe import (
    Attribute,
    Class,
    ExprSubscript,
    Extension,
    Function,
    Module,
    Parameter,
    ParameterKind,
)
from griffe import Parameters as Signature

_LISTED = re.compile(r"^ *(Args|Attributes):$", re.MULTILINE)
_COMMENT = re.compile(r"  # (?!type:|noqa)(.*?)(?:  # .*)?$")


class FieldComments(Extension):
    """Adds the fields of records to what griffe has collected."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for cls in _classes(pkg):
            self._document(cls)

    def _document(self, cls: Class) -> None:
        bases = {str(base).rpartition(".")[2] for one in _lineage(cls) for base in one.bases}
        if bases & {"Struct", "NamedTuple"}:
            cls.set_member("__init__", _constructor(cls))
        elif not any("dataclass" in str(one.value) for one in cls.decorators):
            return
        if cls.docstring and not _LISTED.search(cls.docstring.value):
            pairs = [(one.name, _meaning(one) or _comment(one)) for one in _fields(cls)]
            lines = [f"    {name}: {text}" for name, text in pairs if text]
            if lines:
                cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *lines])


def _classes(module: Module) -> Iterator[Class]:
    for member in module.members.values():
        if isinstance(member, Module):
            yield from _classes(member)
        elif isinstance(member, Class):
            yield member


def _lineage(cls: Class) -> list[Class]:
    """The class and its base classes in the same package, base first."""
    return [*reversed(cls.mro()), cls]


def _fields(cls: Class) -> list[Attribute]:
    members = [member for one in _lineage(cls) for member in one.members.values()]
    named = [one for one in members if isinstance(one, Attribute) and one.annotation]
    own = {
        one.name: one  # a subclass may replace a field
        for one in named
        if "property" not in one.labels and "ClassVar" not in str(one.annotation)
    }
    return list(own.values())


def _constructor(cls: Class) -> Function:
    """The constructor that its fields give a class."""
    kind = ParameterKind.positional_or_keyword
    own = Parameter("self", kind=kind)
    given = [
        Parameter(one.name, annotation=one.annotation, kind=kind, default=one.value)
        for one in _fields(cls)
    ]
    return Function("__init__", parameters=Signature(own, *given), parent=cls)


def _meaning(one: Attribute) -> str:
    """The description in a field's annotation, which then shows the type alone."""
    found, extra = one.annotation, one.extra["fields"]
    if isinstance(found, ExprSubscript) and str(found.left) == "Annotated":
        inner, *metas = found.slice.elements  # type: ignore[union-attr]  # Annotated has several
        for meta in metas:
            if isinstance(meta, str):
                extra["meaning"] = ast.literal_eval(meta)
            for given in getattr(meta, "arguments", ()):
                if given.name == "description":
                    extra["meaning"] = ast.literal_eval(str(given.value))
        one.annotation = inner
        made = one.parent.members.get("__init__") if one.parent else None
        for parameter in getattr(made, "parameters", ()):
            if parameter.name == one.name:
                parameter.annotation = inner
    return str(extra.get("meaning", ""))


def _comment(one: Attribute) -> str:
    """The comment behind a field, or else the lines of comment above it."""
    lines, at = one.module.lines, (one.lineno or 1) - 1
    found = _COMMENT.search(lines[at])
    if found:
        return found[1]
    above: list[str] = []
    while (line := lines[at - 1 - len(above)].strip()).startswith("# "):
        above.insert(0, line[2:])
    return " ".join(above)
