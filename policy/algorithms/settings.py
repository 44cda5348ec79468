"""Settings of algorithms: frozen dataclasses whose annotations say what each setting means.

    @dataclass(frozen=True, kw_only=True)
    class MineConfig(AnnotatedSettings):
        lr: Annotated[float, Meta(gt=0, description="Adam's learning rate")] = 1e-3

    changed(MineConfig(), {"lr": "3e-4"})    # MineConfig(lr=0.0003)

The annotations are all that a command line needs: types, limits and meanings, each a text or a
`Meta` (see headrace.cli.declared).
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

Config = TypeVar("Config", bound=Any)


@dataclass(frozen=True)
class Setting:
    """One field of a config."""

    name: str
    annotation: Any

    @cached_property
    def meaning(self) -> str:
        """What it is for; "" if its annotation has no text."""
        known = getattr(self.annotation, "__metadata__", ())
        said = (one.description if isinstance(one, Meta) else one for one in known)
        return next((one for one in said if isinstance(one, str)), "")

    @cached_property
    def extra(self) -> dict[str, Any]:
        """What a command line says of it that follows from neither name nor type."""
        return {
            name: one
            for meta in _metas(self.annotation)
            for name, one in (meta.extra or {}).items()
        }

    @property
    def limits(self) -> dict[str, Any]:
        """Its least (`ge`, `gt`) and greatest (`le`) value, where there is one."""
        return _limits(self.annotation)

    @property
    def expected(self) -> str:
        """The values that it may have, in words."""
        return _expected(self.annotation)

    def parsed(self, value: Any, *, strict: bool) -> Any:
        """The value, converted from text unless `strict`. Raises ValueError that names it."""
        plain = value.item() if hasattr(value, "dtype") else value  # a number of numpy
        if not strict and isinstance(plain, str) and plain.lower() == "none":
            plain = None
        try:
            found = msgspec.convert(plain, self.annotation, strict=strict)
        except msgspec.ValidationError as error:
            raise self._error(value) from error
        if isinstance(found, float) and not math.isfinite(found):
            raise self._error(value)
        return found

    def _error(self, value: Any) -> ValueError:
        return ValueError(f"{self.name}: expected {self.expected}, got {value!r:.80}")


class AnnotatedSettings:
    """The base of configs. Raises ValueError for a value outside its annotation's range."""

    def __post_init__(self) -> None:
        for one in settings_of(type(self)):
            one.parsed(getattr(self, one.name), strict=True)


def settings_of(config: type) -> tuple[Setting, ...]:
    """The settings of a config's class, in their order."""
    hints = get_type_hints(config, include_extras=True)
    return tuple(Setting(one.name, hints[one.name]) for one in fields(config))


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other values, which may be text.

    Raises ValueError for an unknown name, with those that are near it, and for a bad value.
    """
    known = {one.name: one for one in settings_of(type(config))}
    for name in values:
        if name not in known:
            raise ValueError(
                f"{name}: expected a setting of {type(config).__name__} "
                f"({', '.join(known)}){near_names(name, known)}"
            )
    return replace(
        config, **{name: known[name].parsed(value, strict=False) for name, value in values.items()}
    )


def near_names(name: str, known: Collection[str]) -> str:
    """The end of an error's text: known names similar to an unknown one; "" without any."""
    near = sorted(difflib.get_close_matches(name, known))
    return f"; near {name}: {', '.join(near)}" if near else ""


def _metas(annotation: Any) -> list[Meta]:
    return [one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Meta)]


def _limits(annotation: Any) -> dict[str, Any]:
    named = (
        (name, getattr(one, name)) for one in _metas(annotation) for name in ("ge", "gt", "le")
    )
    return {name: limit for name, limit in named if limit is not None}


def _expected(annotation: Any, limits: Mapping[str, Any] = MappingProxyType({})) -> str:
    """An annotation's values in words, such as "0 to 1" or "ips, snips or dr"."""
    if get_origin(annotation) is Annotated:
        return _expected(get_args(annotation)[0], _limits(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_expected(one, limits) for one in get_args(annotation))
    if get_origin(annotation) is Literal:
        *first, last = map(str, get_args(annotation))
        return f"{', '.join(first)} or {last}" if first else last
    words = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
    text = words.get(annotation, str(annotation))
    if annotation not in (int, float):
        return text
    least, above, most = (limits.get(name) for name in ("ge", "gt", "le"))
    if most is not None:
        return f"{least} to {most}"
    if least is not None:
        return f"{text} >= {least}"
    return text if above is None else f"{text} > {above}"
