"""Environments kept under .make/ between runs, and the wheel that is installed into them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from storage.system.files import FileLock

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = ROOT / "constraints.txt"
KEPT = ROOT / ".make"


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def checked(*command: str | Path, cwd: Path, **env: str) -> str:
    result = run(*command, cwd=cwd, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def wheel_of(source: Path, folder: Path) -> Path:
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    checked(sys.executable, *build, source, cwd=source.parent)
    (built,) = folder.glob("*.whl")
    return built


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    return canonical(re.split(r"[\[<>=~!; ]", requirement)[0])


def requirements(*extras: str) -> list[str]:
    """The requirements of the base install and some extras, without our own name."""
    lists = (PROJECT["dependencies"], *(PROJECT["optional-dependencies"][one] for one in extras))
    lines = dict.fromkeys(line for asked in lists for line in asked)
    return [line for line in lines if name_of(line) != "headrace"]


def floors(asked: Iterable[str]) -> list[str]:
    """The same requirements, each at exactly its lowest version."""
    found = [(name_of(line), re.search(r">=([\w.]+)", line)) for line in asked]
    assert all(floor for _, floor in found), f"a floor is missing in {found}"
    return [f"{name}=={floor[1]}" for name, floor in found if floor]


def pins_beside(asked: Iterable[str]) -> str:
    """constraints.txt without the required packages: their dependencies at the tested versions."""
    own = {name_of(line) for line in asked}
    lines = PINS.read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if "==" in line and name_of(line) not in own)


def environment(name: str, python: str | Path, asked: Sequence[str], pins: str) -> Path:
    """The bin folder of an environment with these packages; rebuilt when one of them changes.

    An older environment of this name is removed.
    """
    version = checked(python, "-c", "import sys; print(sys.version)", cwd=ROOT)
    key = zlib.crc32(repr((version, asked, pins)).encode())
    home = KEPT / f"venv-{name}-{key:08x}"
    KEPT.mkdir(exist_ok=True)
    with FileLock(KEPT / f"venv-{name}.lock"):
        if not (home / "complete").exists():
            for old in KEPT.glob(f"venv-{name}-*"):
                shutil.rmtree(old)
            checked(python, "-m", "venv", "--clear", home, cwd=ROOT)
            limits = home / "constraints.txt"
            limits.write_text(pins)
            install = [home / "bin" / "python", "-m", "pip", "install", "-q"]
            checked(*install, "-c", limits, *asked, cwd=ROOT)
            (home / "complete").touch()
    return home / "bin"


def put(wheel: Path, bin_: Path) -> None:
    """Reinstall the wheel, without dependencies."""
    install = [bin_ / "python", "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps"]
    checked(*install, wheel, cwd=wheel.parent)


def interpreter(version: str, path: str | None = None, home: Path | None = None) -> Path | None:
    """A python of this minor version that runs, on the PATH or of pyenv; None without one.

    pyenv puts shims of all its versions on the PATH, but only the selected ones run.
    """
    folders = [Path(folder) for folder in (path or os.environ["PATH"]).split(os.pathsep)]
    folders += sorted((home or Path.home()).glob(f".pyenv/versions/{version}.*/bin"))
    for folder in folders:
        found = folder / f"python{version}"
        if not os.access(found, os.X_OK):
            continue
        result = run(found, "-c", "import ensurepip, sys; print(sys.version)", cwd=ROOT)
        if result.returncode == 0 and result.stdout.startswith(f"{version}."):
            return found
    return None
