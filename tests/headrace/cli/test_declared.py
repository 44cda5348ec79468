"""Options from annotated dataclasses: how each type is written, what is refused, what is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from headrace.cli.declared import expanded


@dataclass(frozen=True, kw_only=True)
class Base:
    seed: Annotated[int, "The same for both."] = 7


ENVIRONMENT = {"A_PLACE": "there", "HEADRACE_SEED": "1"}  # a variable of one, and one of all


def _sizes(words: Sequence[str]) -> tuple[int, ...]:
    return tuple(map(int, words))


@dataclass(frozen=True, kw_only=True)
class First(Base):
    what: Annotated[Any, "What to do.", Meta(extra={"argument": True, "parse": str.upper})]
    count: Annotated[int, "How many.", Meta(ge=1, le=9)] = 3
    kind: Annotated[Literal["a", "b"], "One of them."] = "a"
    where: Annotated[Path | str | None, "A place.", Meta(extra={"envvar": "A_PLACE"})] = None
    columns: Annotated[str | Sequence[str], "Repeated."] = ()
    tags: Annotated[Mapping[str, str], "NAME=COLUMN of a tag."] = field(default_factory=dict)
    default: Annotated[Mapping[str, str], "NAME=VALUE."] = field(default_factory=dict)
    sizes: Annotated[
        tuple[int, ...], "Read as one.", Meta(extra={"repeated": True, "parse": _sizes})
    ] = ()
    limits: Annotated[tuple[float, float] | None, "Low and high."] = None
    fast: Annotated[bool, "A flag."] = False
    safe: Annotated[bool, "Another, on by default."] = True
    hidden: int = 1


@dataclass(frozen=True, kw_only=True)
class Second(Base):
    words: str = ""

    @classmethod
    def from_words(cls, **given: Any) -> Second:
        return cls(words=f"seed {given['seed']}", **given)


def run(*words: str, env: dict[str, str] | None = None) -> tuple[First, Second, bool]:
    """The dataclasses that these words make. Raises what the command raises."""
    made: list[Any] = []

    def command(*, first: First, second: Second, plain: bool = False) -> None:
        made.extend((first, second, plain))

    app = typer.Typer()
    app.command()(expanded(command))
    result = CliRunner(env=env).invoke(app, list(words))
    if result.exception is not None:
        raise result.exception
    first, second, plain = made
    return first, second, plain


def test_each_type_is_written_in_its_own_way() -> None:
    """What is not given has the dataclass's default; an environment variable gives a value."""
    assert run("go") == (First(what="GO"), Second(words="seed 7"), False)
    words = "go --count 9 --kind b --column x --column y --tag k=c --size 1 --size 2"
    more = "--default k= --limits 0 inf --fast --no-safe --plain"
    found, second, plain = run(*words.split(), *more.split(), env=ENVIRONMENT)
    assert found == First(
        what="GO",
        count=9,
        kind="b",
        where=Path("there"),
        columns=("x", "y"),
        tags={"k": "c"},
        sizes=(1, 2),
        default={"k": ""},
        limits=(0.0, float("inf")),
        fast=True,
        safe=False,
        seed=1,
    )
    assert (second, plain) == (Second(seed=1, words="seed 1"), True)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("go --tag k=", "--tag: expected NAME=COLUMN, got 'k='"),
        ("go --default k", "--default: expected NAME=VALUE, got 'k'"),
        ("go --count 0", "2"),  # the exit status, after typer's own message
        ("go --count 10", "2"),
        ("go --hidden 2", "2"),  # a field without a text is no option
        ("go --no-fast", "2"),
        ("", "2"),
    ],
)
def test_what_does_not_fit_is_refused(words: str, error: str) -> None:
    """By the option's name."""
    with pytest.raises((ValueError, SystemExit)) as raised:
        run(*words.split())
    assert str(raised.value) == error
