"""Transient system errors do not exclude a shard; the errors are real ones."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.storage.reading.test_shard_reader import part, write

HERE = Path(__file__).parent
ERRORS = ("EIO", "EMFILE", "ENFILE", "ESTALE", "ENOMEM", "ETIMEDOUT", "EACCES")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("library") / "failing_opens.so"
    source = str(HERE / "failing_opens.c")
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(made), source, "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return made


def outcomes(library: Path, root: Path, word: str, names: Sequence[str]) -> list[dict[str, Any]]:
    control = root / "failing"
    given = [str(root), str(control), word, *(str(getattr(errno, name)) for name in names)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage.reading.failing_reader", *given],
        env={**os.environ, "LD_PRELOAD": str(library), "FAILING_OPENS": str(control)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def failing(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """(the shard of ordinal 1, whose opening failed; what happened, by the error)."""
    root = tmp_path_factory.mktemp("root")
    infos = [write(root, [part(i, 2)]) for i in range(3)]
    found = outcomes(library, root, infos[1].path.name, ERRORS)
    return str(infos[1].path), dict(zip(ERRORS, found, strict=True))


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_that_may_pass_drops_no_shard(
    failing: tuple[str, dict[str, Any]], name: str
) -> None:
    """A follower goes on with the rest, says what it waits for, and reads it when it can; a reader
    that ends gives up and names the file."""
    path, found = failing[0], failing[1][name]
    assert found["during"] == [0, 0, 2, 2]
    assert list(found["retrying"]) == [path]
    assert os.strerror(getattr(errno, name)) in found["retrying"][path]
    assert found["left_out"] == {}
    assert path in found["gave_up"]
    assert (found["after"], found["retrying_after"]) == ([1, 1], {})


def test_a_folder_that_cannot_be_listed_holds_nobody_up(library: Path, tmp_path: Path) -> None:
    """The other stream is read; the first one when it can be listed; a reader that ends gives up
    and names the folder."""
    lone = write(tmp_path, [part(0, 2)], collector="b" * 12)
    write(tmp_path, [part(5, 1)])
    (found,) = outcomes(library, tmp_path, lone.path.parent.name, ["EIO"])
    assert (found["during"], found["after"]) == ([5], [0, 0])
    assert str(lone.path.parent) in found["retrying"]
    assert str(lone.path.parent) in found["gave_up"]
