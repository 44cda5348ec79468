"""`--algorithm`, `--set` and `--config`: what they choose, what they refuse, what help lists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from policy.algorithms.by_name import ALGORITHMS
from policy.algorithms.settings import settings_of
from tests.headrace.command import headrace, refused

SHOW = ("train", "--show-settings")


def test_settings_come_from_a_file_and_from_options(tmp_path: Path) -> None:
    """An option replaces what the file says, the file replaces defaults; no root is needed."""
    file = tmp_path / "iql.toml"
    file.write_text('algorithm = "iql"\ntau = 0.9\nupdates = 10\n')
    found = json.loads(headrace(*SHOW, "--config", file, "--set", "updates=20").stdout)
    assert (found["tau"], found["updates"], found["beta"]) == (0.9, 20, 3.0)
    other = ("--algorithm", "marwil", "--config", file)
    assert refused(headrace(*SHOW, *other), "tau: expected a setting of MARWILConfig")
    live = json.loads(headrace(*SHOW, "--follow", "--set", "schedule_steps=none").stdout)
    assert (live["schedule_steps"], live["clip"]) == (None, 0.2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--algorithm", "marvil"), "near marvil: marwil"),
        (("--set", "entropy_coef=0"), "near entropy_coef: entropy_coeff"),
        (("--set", "updates"), "--set: expected key=value, got 'updates'"),
        (("--set", "updates=0"), "updates: expected a whole number >= 1, got '0'"),
        (("--algorithm", "ppo"), "which learns from live clients"),
        (("--algorithm", "dr", "--follow"), ", got dr, which learns from a log"),
        (("--config", "no.toml"), "no.toml"),
    ],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], text: str) -> None:
    """In one sentence, with status 2."""
    assert refused(headrace(*SHOW, *words), text)


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    """With the place of the fault."""
    file = tmp_path / "bad.toml"
    file.write_text("tau: 0.9\n")
    assert refused(headrace(*SHOW, "--config", file), f"--config: expected TOML in {file}")


def test_a_file_with_another_type_of_algorithm_is_refused(tmp_path: Path) -> None:
    """It needs a name."""
    file = tmp_path / "list.toml"
    file.write_text('algorithm = ["iql"]\n')
    assert refused(headrace(*SHOW, "--config", file), "algorithm: expected one of")


@pytest.mark.parametrize("command", ["train", "up"])
def test_help_lists_the_settings_of_each_algorithm(command: str) -> None:
    """With defaults and meanings."""
    text = " ".join(headrace(command, "--help").stdout.split())
    for name, config in ALGORITHMS.items():
        assert f" {name}" in text
        for one in settings_of(type(config)):
            assert f"{one.name}=" in text
            assert one.meaning in text
    assert "beta=3.0 how much better actions count more; 0: imitate all (a number >= 0)" in text


@pytest.mark.parametrize("command", ["train", "up"])
def test_help_without_torch_names_the_extra(command: str) -> None:
    """In place of the list: the base install, or a collector's, shows all options."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = None  # importing it fails\n"
        f"sys.argv = ['headrace', '{command}', '--help']\n"
        "from headrace.__main__ import main\n"
        "main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    text = " ".join(run.stdout.split())
    assert (run.returncode, run.stderr) == (0, "")
    assert "--config" in text
    assert "Settings: the list of settings needs torch, which is not installed" in text
    assert "pip install 'headrace[train]'" in text


def test_up_refuses_settings_before_it_declares_anything(tmp_path: Path) -> None:
    """A trainer that could not start would be started again and again."""
    root = tmp_path / "run"
    words = ("--root", root, "--observation", "box:4", "--action", "discrete:2")
    assert refused(headrace("up", *words, "--set", "clip=wide"), "clip: expected a number > 0")
    assert not root.exists()
