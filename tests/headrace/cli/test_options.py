"""Options of every command: nothing that was given is dropped without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    """Else the last would be taken alone: half of the data, another root."""
    assert refused(headrace(*words), "expected once, got 2 times")


def test_an_option_of_several_values_is_repeated(tmp_path: Path) -> None:
    """And the command line goes before the environment, which is no second value."""
    root = ("--root", tmp_path)
    made = headrace("token", "create", "web", *root, "--scope", "log", "--scope", "act")
    assert made.returncode == 0
    listed = headrace("token", "list", *root, "--json", env={"HEADRACE_ROOT": "elsewhere"})
    (token,) = answer(listed)["tokens"]
    assert sorted(token["scopes"]) == ["act", "log"]
