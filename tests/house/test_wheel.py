"""The wheel, as a stranger gets it: our modules and nothing else, working on the base install.

Its environment is kept under .make/ between runs and holds the base dependencies alone; the wheel
is built and installed anew each time.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("storage", "policy", "ingest")
EXTRAS = ["torch", "pyarrow", "pandas", "watchdog", "gymnasium", "typer", "rich", "uvicorn"]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def checked(*command: str | Path, cwd: Path) -> str:
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    checked(sys.executable, *build, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def thin(wheel: Path) -> Path:
    """The bin folder of an environment with the wheel and its base dependencies alone."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = ROOT / "constraints.txt"
    key = zlib.crc32(repr(needs).encode() + pins.read_bytes())
    home = ROOT / ".make" / f"venv-thin-{key:08x}"
    if not (home / "complete").exists():
        checked(sys.executable, "-m", "venv", "--clear", home, cwd=wheel.parent)
        install = [home / "bin" / "python", "-m", "pip", "install", "-q"]
        checked(*install, "-c", pins, *needs, cwd=wheel.parent)
        (home / "complete").touch()
    again = [home / "bin" / "python", "-m", "pip", "install", "-q", "--force-reinstall"]
    checked(*again, "--no-deps", wheel, cwd=wheel.parent)
    return home / "bin"


def test_the_wheel_holds_our_modules_and_nothing_else(wheel: Path) -> None:
    """Every module of the three packages, the front door, the metadata: no test, no data."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert held == modules | {f"{package}/py.typed" for package in PACKAGES} | {
        "headrace/__main__.py"
    }


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    """Apache-2.0 asks that a copy travels with the work."""
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        assert b"Apache License" in archive.read(licence)


def test_the_base_install_brings_no_extra(thin: Path, tmp_path: Path) -> None:
    """The environment is what the tests below take it for."""
    code = "import importlib.util as u, sys; print([m for m in sys.argv[1:] if u.find_spec(m)])"
    assert checked(thin / "python", "-Ec", code, *EXTRAS, cwd=tmp_path).strip() == "[]"


@pytest.mark.parametrize("module", ["ingest.client.policy_client", "policy.inference.numpy_policy"])
def test_the_thin_client_works_with_the_base_install(
    thin: Path, tmp_path: Path, module: str
) -> None:
    """It is loaded from the wheel, not from the source tree."""
    code = f"import {module}; print({module}.__file__)"
    loaded = Path(checked(thin / "python", "-Ec", code, cwd=tmp_path).strip())
    assert loaded.is_relative_to(thin.parent)


def test_a_client_is_made_and_closed_with_the_base_install(thin: Path, tmp_path: Path) -> None:
    """By its public name; where no collector answers, making and closing one waits for nobody."""
    code = (
        "from ingest import PolicyClient\n"
        "with PolicyClient('http://127.0.0.1:9', inference_mode='remote') as client:\n"
        "    print(type(client).__name__)\n"
    )
    assert checked(thin / "python", "-Ec", code, cwd=tmp_path).strip() == "PolicyClient"


def test_headrace_without_extras_names_the_one_to_install(thin: Path, tmp_path: Path) -> None:
    """Exit code 2, one line on standard error, no traceback."""
    result = run(thin / "headrace", "--version", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "pip install 'headrace[cli]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
