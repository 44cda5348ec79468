"""The options `--algorithm`, `--set` and `--config`, and the settings that `--help` lists."""

# ruff: noqa: PLC0415 - torch, which algorithms need, is loaded when settings are used

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from headrace.cli.options import Command
from headrace.extras import missing_extra

if TYPE_CHECKING:
    from policy.algorithms.base import AlgorithmConfig

__all__ = [
    "Algorithm",
    "Config",
    "Set",
    "SettingsCommand",
    "ShowSettings",
    "chosen",
    "setting_words",
]

Algorithm = Annotated[
    str | None, "Algorithm; default: dr, or ppo for live clients. See the list below."
]
Set = Annotated[
    list[str] | None,
    "A setting of the algorithm. May be repeated.",
    Meta(extra={"name": "--set", "metavar": "<key=value>"}),
]
Config = Annotated[
    Path | None, "TOML file of settings, with the key algorithm; --set replaces them."
]
ShowSettings = Annotated[bool, "Only print the settings that would be used."]


def chosen(
    name: str | None, pairs: Sequence[str], file: Path | None, *, live: bool
) -> AlgorithmConfig:
    """The config that the options choose. Raises ValueError, which names the option."""
    from policy.algorithms.by_name import FROM_LOGS, LIVE, algorithm

    settings = {} if file is None else _read(file)
    named = name or str(settings.pop("algorithm", "ppo" if live else "dr"))
    settings.pop("algorithm", None)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set: expected key=value, got {pair!r:.80}")
        settings[key.strip()] = value.strip()
    config = algorithm(named, **settings)
    known, elsewhere = (LIVE, "a log") if live else (FROM_LOGS, "live clients (`--follow`, `up`)")
    if named not in known:
        raise ValueError(
            f"--algorithm: expected one of {', '.join(known)}, got {named}, which learns from "
            f"{elsewhere}"
        )
    return config


def setting_words(name: str | None, pairs: Sequence[str], file: Path | None) -> list[str]:
    """The options as words for another command."""
    words = [] if name is None else ["--algorithm", name]
    words += [word for pair in pairs for word in ("--set", pair)]
    return words if file is None else [*words, "--config", str(file)]


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: expected TOML in {file}: {error}") from error


class SettingsCommand(Command):
    """A command whose help lists the settings of each algorithm."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)
        try:
            from policy.algorithms.by_name import ALGORITHMS
            from policy.algorithms.settings import settings_of
        except ModuleNotFoundError as missing:
            hint = missing_extra(missing, "the list of settings")
            if hint is None:
                raise
            with formatter.section("Settings"):
                formatter.write_text(str(hint))
            return
        names: dict[type, list[str]] = {}
        for name, config in ALGORITHMS.items():
            names.setdefault(type(config), []).append(name)
        for kind, alike in names.items():
            defaults = asdict(ALGORITHMS[alike[0]])
            rows = [
                (f"{one.name}={_shown(defaults[one.name])}", f"{one.meaning} ({one.expected})")
                for one in settings_of(kind)
            ]
            with formatter.section(f"Settings of {', '.join(alike)}"):
                formatter.write_dl(rows)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
