"""The options `--algorithm`, `--set` and `--config`, and the settings that `--help` lists."""

# ruff: noqa: PLC0415 - torch, which algorithms need, is loaded when settings are used

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from headrace.cli.options import Command
from headrace.extras import missing_extra

if TYPE_CHECKING:
    from policy.algorithms.base import AlgorithmConfig

ShowSettings = Annotated[bool, "Only print the settings that would be used."]


@dataclass(frozen=True, kw_only=True)
class ChosenAlgorithm:
    """An algorithm and its settings, as options choose them."""

    algorithm: Annotated[
        str | None, "Algorithm; default: dr, or ppo for live clients. See the list below."
    ] = None
    pairs: Annotated[
        Sequence[str],
        "A setting of the algorithm. May be repeated.",
        Meta(extra={"name": "--set", "metavar": "<key=value>"}),
    ] = ()
    config: Annotated[
        Path | None, "TOML file of settings, with the key algorithm; --set replaces them."
    ] = None

    def chosen(self, *, live: bool) -> AlgorithmConfig:
        """The algorithm's config. Raises ValueError, which names the option."""
        from policy.algorithms.by_name import FROM_LOGS, LIVE, algorithm

        settings = {} if self.config is None else _read(self.config)
        named = self.algorithm or str(settings.pop("algorithm", "ppo" if live else "dr"))
        settings.pop("algorithm", None)
        for pair in self.pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"--set: expected key=value, got {pair!r:.80}")
            settings[key.strip()] = value.strip()
        config = algorithm(named, live=live, **settings)
        other = "a log" if live else "live clients (`--follow`, `up`)"
        known = LIVE if live else FROM_LOGS
        if named not in known:
            raise ValueError(
                f"--algorithm: expected one of {', '.join(known)}, got {named}, which learns from "
                f"{other}"
            )
        return config

    def words(self) -> list[str]:
        """The options as words for another command."""
        words = [] if self.algorithm is None else ["--algorithm", self.algorithm]
        words += [word for pair in self.pairs for word in ("--set", pair)]
        return words if self.config is None else [*words, "--config", str(self.config)]


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
