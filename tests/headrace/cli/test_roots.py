"""Commands that read a root refuse other folders, and policies that the root does not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.__main__ import _command_line
from headrace.cli.roots import require_root
from storage.declarations.policy_files import save_declaration
from tests.headrace.command import ROOT
from tests.policy.judging.test_canary import EQUAL, Traffic
from tests.storage.weights.any_weights import add, store_in

READERS = [
    "ls",
    "verify",
    "pseudonym x",
    "token list",
    "token revoke x",
    "report",
    "versions",
    "decisions",
    "resume",
    "rollback",
    "pause",
    "evaluate",
    "publish",
    "train",
    "train --follow",
    "freeze",
    "canary",
    "promote",
]


def error_text(*words: object) -> str:
    """The text of the error that a command raises; `headrace.__main__.main` prints it, with status
    2."""
    result = CliRunner().invoke(_command_line(), [str(word) for word in words])
    assert isinstance(result.exception, ValueError), result.output
    return str(result.exception)


@pytest.mark.parametrize("command", READERS)
def test_a_root_that_is_not_there(command: str, tmp_path: Path) -> None:
    """All commands use one wording, and create nothing at the path."""
    expected = f"--root: expected a folder, found none at {tmp_path / 'frist'}"
    assert error_text(*command.split(), "--root", tmp_path / "frist") == expected
    assert not (tmp_path / "frist").exists()


def test_a_root_is_looked_for_before_extras(tmp_path: Path) -> None:
    """Without torch or Arrow, the error is the mistyped root, which no installation would fix."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from headrace.__main__ import _command_line\n"
        "from headrace.extras import EXTRA_OF\n"
        "sys.modules |= {name: None for name, extra in EXTRA_OF.items() if extra != 'cli'}\n"
        "for command in sys.argv[2:]:\n"
        "    words = [*command.split(), '--root', sys.argv[1]]\n"
        "    print(repr(CliRunner().invoke(_command_line(), words).exception))\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "frist"), *READERS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    expected = f"ValueError('--root: expected a folder, found none at {tmp_path / 'frist'}')"
    assert done.stdout.splitlines() == [expected] * len(READERS)


@pytest.mark.parametrize("command", READERS)
def test_a_folder_that_holds_roots(command: str, tmp_path: Path) -> None:
    """A folder of roots is refused, and the error names the roots in it."""
    for name in ("first", "second"):
        (tmp_path / name / "policies").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    text = error_text(*command.split(), "--root", tmp_path)
    assert text.startswith("--root: expected a root of Headrace")
    assert text.endswith("holds the roots first, second")


@pytest.mark.parametrize("command", READERS[5:])
def test_a_policy_that_nobody_declared(command: str, tmp_path: Path) -> None:
    """The error names the declared policies."""
    Traffic(tmp_path).log(1, EQUAL)
    text = error_text(*command.split(), "--root", tmp_path, "--policy-id", "shop")
    assert text == f"--policy-id: expected a policy of {tmp_path} (default), got 'shop'"


def test_a_policy_is_known_by_its_weights_too(tmp_path: Path) -> None:
    """A policy whose declaration was removed is known by its weights; a root without declarations
    may hold any policy."""
    store = store_in(tmp_path)
    add(store, 1.0)
    require_root(tmp_path, "other")
    save_declaration(tmp_path, Traffic(tmp_path / "beside").declaration)
    (tmp_path / "policies" / "default.json").rename(tmp_path / "policies" / "shop.json")
    require_root(tmp_path, "default")
    with pytest.raises(ValueError, match=r"--policy-id: .*\(shop\)"):
        require_root(tmp_path, "other")
