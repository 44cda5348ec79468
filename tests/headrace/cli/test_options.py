"""Options of every command: no given value is silently dropped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.__main__ import _command_line
from tests.headrace.command import answer, headrace, refused


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--root", "one", "--root", "two"),
        ("ls", "--root=one", "--root", "one"),
        ("token", "list", "--root", "one", "--root", "two"),
        ("collect", "--port", "1", "--root", "one", "--port", "2"),
    ],
)
def test_an_option_of_one_value_is_given_once(words: tuple[str, ...]) -> None:
    """Otherwise only the last value would be used: half of the data, another root."""
    assert refused(headrace(*words), "expected once, got 2 times")


def test_an_option_of_several_values_is_repeated(tmp_path: Path) -> None:
    """The command line overrides the environment, which does not count as a second value."""
    root = ("--root", tmp_path)
    made = headrace("token", "create", "web", *root, "--scope", "log", "--scope", "act")
    assert made.returncode == 0
    listed = headrace("token", "list", *root, "--json", env={"HEADRACE_ROOT": "elsewhere"})
    (token,) = answer(listed)["tokens"]
    assert sorted(token["scopes"]) == ["act", "log"]


@pytest.mark.parametrize("width", [80, 120])
def test_help_can_be_read_at_every_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Help cuts nothing, shows an argument by its type, and wraps sentences."""
    monkeypatch.setenv("COLUMNS", str(width))
    group = typer.main.get_command(_command_line())
    help_texts = {}

    def ask(command: Any, name: str) -> None:
        with command.make_context(name, ["--json"], resilient_parsing=True) as ctx:
            ctx.terminal_width = width
            help_texts[name] = command.get_help(ctx)
        for inner, one in getattr(command, "commands", {}).items():
            ask(one, f"{name} {inner}")

    ask(group, "headrace")
    assert len(help_texts) > 20
    for name, text in help_texts.items():
        assert max(map(len, text.splitlines())) <= width, name
        assert not re.search(r"[a-z,;]\.\.\.$|[{}]|\(\)", text, re.M), name
        assert not re.search(r"<list|range>|Path", text), name
    assert "Usage: headrace import [OPTIONS] <source>" in help_texts["headrace import"]
    assert "HEADRACE_IMPORT_" not in help_texts["headrace import"]
    assert "env var: HEADRACE_ROOT" in " ".join(help_texts["headrace verify"].split())
    assert "compare ([train])" in " ".join(help_texts["headrace verify"].split())
    paragraph = help_texts["headrace collect"].split("\n\n")[2].splitlines()
    assert all(len(line) > width - 40 for line in paragraph[:-1]), paragraph
