"""The whole loop on the wheel: on each supported Python, and at each dependency's lowest version.

The environments are kept under .make/; tests/project/installed_loop.py is what runs in them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.project.environments import (
    PINS,
    PROJECT,
    ROOT,
    checked,
    environment,
    floors,
    interpreter,
    pins_beside,
    put,
    requirements,
    run,
    wheel_of,
)

LOOP = Path(__file__).with_name("installed_loop.py")
CLAIMED = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
OTHERS = [version for version in CLAIMED if version != f"3.{sys.version_info.minor}"]
ROWS = 112


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


def loop(bin_: Path, folder: Path, *options: str) -> dict[str, Any]:
    """What the loop found, run in a folder without the repository."""
    output = checked(bin_ / "python", LOOP, folder / "root", *options, cwd=folder)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert found["headrace"].startswith(str(bin_.parent))
    return found


def test_every_claimed_version_is_tested() -> None:
    """The classifiers, `requires-python` and the interpreter of the tests agree."""
    assert CLAIMED == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={CLAIMED[0]}"
    assert len(OTHERS) == len(CLAIMED) - 1


@pytest.mark.long
@pytest.mark.parametrize("version", OTHERS)
def test_the_loop_runs_on_another_python(
    version: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
    tmp_path: Path,
) -> None:
    """Client, collector, reader and weights, without torch, at the pinned versions."""
    python = interpreter(version)
    if python is None:
        text = f"Python {version} is not installed: the loop was not run on it"
        assert not os.environ.get("CI"), text
        record_property("notice", text)
        return
    asked = requirements("cli", "collector")
    bin_ = environment(version, python, asked, PINS.read_text())
    put(request.getfixturevalue("wheel"), bin_)
    found = loop(bin_, tmp_path)
    assert found["python"].startswith(f"{version}.")
    assert (found["rows"], found["torch"]) == (ROWS, False)


@pytest.mark.long
def test_the_loop_runs_at_every_floor(wheel: Path, tmp_path: Path) -> None:
    """With training: each direct dependency of these extras at its lowest version."""
    asked = requirements("cli", "collector", "train")
    bin_ = environment("floors", sys.executable, floors(asked), pins_beside(asked))
    put(wheel, bin_)
    found = loop(bin_, tmp_path, "--train")
    assert found["rows"] == found["read_again"] == ROWS
    names = [line.partition("==")[0] for line in floors(asked)]
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    held = checked(bin_ / "python", "-c", code, *names, cwd=tmp_path).split()
    assert [Version(one.partition("+")[0]) for one in held] == [
        Version(line.partition("==")[2]) for line in floors(asked)
    ]


# --- an interpreter that is not there ------------------------------------------------------------


def test_a_shim_that_does_not_run_is_no_interpreter(tmp_path: Path) -> None:
    """A shim of pyenv for a version that is not selected is skipped for a later one on the PATH."""
    version = f"3.{sys.version_info.minor}"
    shims, real = tmp_path / "shims", tmp_path / "real"
    for folder in (shims, real):
        folder.mkdir()
    (shims / f"python{version}").write_text("#!/bin/sh\necho no such version >&2\nexit 127\n")
    (shims / f"python{version}").chmod(0o755)
    assert interpreter(version, str(shims), tmp_path) is None
    (real / f"python{version}").symlink_to(sys.executable)
    path = os.pathsep.join([str(shims), str(real)])
    assert interpreter(version, path, tmp_path) == real / f"python{version}"


def test_a_missing_interpreter_is_printed(tmp_path: Path) -> None:
    """A missing interpreter is reported."""
    node = f"{Path(__file__).name}::test_the_loop_runs_on_another_python[{OTHERS[-1]}]"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node]
    result = run(*words, cwd=Path(__file__).parent, PATH=str(tmp_path), HOME=str(tmp_path), CI="")
    assert result.returncode == 0, result.stdout
    notice = f"notice: Python {OTHERS[-1]} is not installed: the loop was not run on it"
    assert notice in result.stdout


def test_a_missing_interpreter_fails_in_ci(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `CI` set, every supported version must be tested."""
    for name, value in (("PATH", tmp_path), ("HOME", tmp_path), ("CI", "true")):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(AssertionError, match="is not installed"):
        test_the_loop_runs_on_another_python(OTHERS[0], request, lambda *_: None, tmp_path)
