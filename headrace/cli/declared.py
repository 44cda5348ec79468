"""Options of a command from the annotated fields of the dataclasses that its work takes.

    @dataclass(frozen=True, kw_only=True)
    class Mine:
        steps: Annotated[int, "Steps per update.", Meta(ge=1)] = 256

    def run(*, mine: Mine) -> None: ...       # expanded(run) has the option --steps

A field whose annotation has a text is an option, and the text is its help; other fields are for
programs alone. The type says how it is written: a bool is a flag; a sequence is repeated, and so is
a mapping, whose text begins with the form of its words, such as NAME=COLUMN (only a VALUE may be
empty). The names of both become singular: `tags` is --tag. Options in `SHARED` have one environment
variable for all commands. `Meta(extra={...})` has the rest:

- `name`: another name of the option, or several.
- `argument`: an argument in place of an option.
- `parse`: a function of the text, or of all texts if the option is `repeated`. It raises
  ValueError, which names the option.
- `envvar`, `metavar`, `parser`: as in typer.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from policy.algorithms.settings import Setting, settings_of

SHARED = frozenset(("address", "ca", "json", "retry_for", "seed", "token"))
"""Options whose environment variable names no command, such as HEADRACE_SEED."""


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command, as typer takes it: with an option for each of its parameters that has a text,
    and for each field of those that are dataclasses.

    Fields of the same name share one option. A class method `from_words` makes the dataclass if
    one field's words mean what another field says.
    """
    hints = get_type_hints(command, include_extras=True)
    plain: list[_Option] = []
    groups: dict[str, tuple[type, list[_Option]]] = {}
    found: dict[str, inspect.Parameter] = {}
    for name, one in inspect.signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and is_dataclass(kind):
            options = _options(kind)
            groups[name] = kind, options
        else:
            default = MISSING if one.default is inspect.Parameter.empty else one.default
            options = [_Option(Setting(name, kind), default)]
            plain += options
        for option in options:
            found.setdefault(option.name, option.parameter())

    def run(**given: Any) -> None:
        own = _values(plain, given)
        for name, (kind, options) in groups.items():
            own[name] = getattr(kind, "from_words", kind)(**_values(options, given))
        command(**own)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {name: one.annotation for name, one in found.items()}
    run.__dict__["__signature__"] = inspect.Signature(list(found.values()))
    return run


@dataclass(frozen=True)
class _Option:
    """A field as an option."""

    setting: Setting
    default: Any  # MISSING: it has to be given

    @property
    def names(self) -> tuple[str, ...]:
        given = self.setting.extra.get("name", ())
        return (given,) if isinstance(given, str) else given

    @cached_property
    def name(self) -> str:
        """The parameter's name, which is also that of the environment variable."""
        usual = self.setting.name.removesuffix("s") if self.is_repeated else self.setting.name
        long = (one for one in self.names if one.startswith("--"))
        return next(long, usual).partition("/")[0].strip("-").replace("-", "_")

    @cached_property
    def kind(self) -> Any:
        """The type as which its value is written."""
        if "parse" in self.setting.extra:
            return list[str] if self.setting.extra.get("repeated") else str
        return _written(self.setting.annotation)

    @property
    def is_repeated(self) -> bool:
        return bool(self.kind == list[str])

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def parameter(self) -> inspect.Parameter:
        """What typer makes the option of; an empty collection is an option that is not given."""
        default = None if self.is_repeated and self.default is not MISSING else self.default
        annotation = self._annotation(default)
        default = inspect.Parameter.empty if default is MISSING else default
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=default, annotation=annotation)

    def _annotation(self, default: Any) -> Any:
        extra, limits = self.setting.extra, self.setting.limits
        how: dict[str, Any] = {"envvar": f"HEADRACE_{self.name.upper()}"}
        how = how if self.name in SHARED else {}
        how |= {"metavar": "<low high>"} if self.kind == tuple[float, float] else {}
        how |= {name: extra[name] for name in ("envvar", "metavar", "parser") if name in extra}
        how |= {to: limits[by] for by, to in (("ge", "min"), ("le", "max")) if by in limits}
        typed = self.kind if default is not None else self.kind | None
        if "argument" in extra:
            return Annotated[typed, typer.Argument(help=self.setting.meaning, **how)]
        names = self.names or ((self.flag,) if default is False or self.is_repeated else ())
        return Annotated[typed, typer.Option(*names, help=self.setting.meaning, **how)]

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The field's value by its name; nothing if the option is not given."""
        value, extra = values[self.name], self.setting.extra
        if value is None or value == []:
            return {}
        if "parse" in extra:
            value = extra["parse"](value)
        elif isinstance(self.default, Mapping):
            value = _pairs(self.flag, self.setting.meaning.split()[0].rstrip(".;"), value)
        elif isinstance(self.default, tuple):
            value = tuple(value)
        return {self.setting.name: value}


def _values(options: list[_Option], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for option in options for name, one in option.given(given).items()}


def _options(config: type) -> list[_Option]:
    factories = {one.name: one.default_factory for one in fields(config)}
    defaults = {one.name: one.default for one in fields(config)}
    defaults |= {name: make() for name, make in factories.items() if make is not MISSING}
    return [_Option(one, defaults[one.name]) for one in settings_of(config) if one.meaning]


def _written(annotation: Any) -> Any:
    """The type as which an option's value is written."""
    if get_origin(annotation) is Annotated:
        return _written(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [_written(one) for one in get_args(annotation) if one is not type(None)]
        known = [one for one in (list[str], Path, str) if one in kinds]
        return (known or kinds)[0]
    if get_origin(annotation) in (Sequence, Mapping) or annotation == tuple[str, ...]:
        return list[str]
    return str if get_origin(annotation) is Literal else annotation


def _pairs(option: str, form: str, words: Sequence[str]) -> dict[str, str]:
    """Parse words NAME=VALUE to a dict. Raises ValueError."""
    pairs = [word.partition("=") for word in words]
    for word, (name, equals, value) in zip(words, pairs, strict=True):
        if not name or not equals or not (value or form.endswith("VALUE")):
            raise ValueError(f"{option}: expected {form}, got {word!r}")
    return {name: value for name, _, value in pairs}
