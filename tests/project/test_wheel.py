"""The wheel as a user gets it: one package, on the base install and with every extra.

Two environments are kept under .make/ between runs: one with the base dependencies only, one that
uses the packages of the environment that runs the tests. The wheel is rebuilt and installed into
both each time.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from hatch_build import PACKAGES, as_installed, module_names
from tests.project.environments import (
    PINS,
    ROOT,
    checked,
    environment,
    put,
    requirements,
    run,
    wheel_of,
)

EXTRAS = ["torch", "pyarrow", "pandas", "watchdog", "gymnasium", "typer", "rich", "uvicorn"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def thin(wheel: Path) -> Path:
    """The bin folder of an environment with the wheel and its base dependencies alone."""
    bin_ = environment("thin", sys.executable, requirements(), PINS.read_text())
    put(wheel, bin_)
    return bin_


def borrowing(home: Path) -> Path:
    """The interpreter of a new environment with the packages of the one that runs the tests.

    They are added by a path file, which does not add the editable install of the repository: path
    files inside a folder that a path file names are not read.
    """
    home.parent.mkdir(exist_ok=True)
    checked(sys.executable, "-m", "venv", "--without-pip", home, cwd=home.parent)
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and every package that the tests have."""
    home = tmp_path_factory.mktemp("full") / "venv"
    pip = [sys.executable, "-m", "pip", "--python", borrowing(home), "install", "-q"]
    checked(*pip, "--no-deps", "--force-reinstall", wheel, cwd=wheel.parent)
    return home / "bin"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's service with packages that have the names of three of ours."""
    folder = tmp_path_factory.mktemp("service")
    for package in PACKAGES:
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(f"OWNER = 'the service, {package}'\n")
    return folder


# --- what it holds ---------------------------------------------------------------------------


def test_the_wheel_holds_one_package_and_nothing_else(wheel: Path) -> None:
    """The wheel has every module of the four packages under `headrace`, but no tests or data."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {f"headrace/{name.replace('.', '/')}" for name in module_names(ROOT)}
    folders = {name for name in ours if (ROOT / name.removeprefix("headrace/")).is_dir()}
    modules = {f"{name}/__init__.py" if name in folders else f"{name}.py" for name in ours}
    top = {path.relative_to(ROOT).as_posix() for path in (ROOT / "headrace").rglob("*.py")}
    typed = {"headrace/py.typed"} | {f"headrace/{package}/py.typed" for package in PACKAGES}
    assert held == modules | top | typed


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    """Apache-2.0 requires a copy of the licence in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        assert b"Apache License" in archive.read(licence)


def test_no_module_of_the_wheel_imports_a_name_of_the_repository(wheel: Path) -> None:
    """The wheel does not occupy the names `ingest`, `policy` and `storage`."""
    with zipfile.ZipFile(wheel) as archive:
        sources = {
            name: archive.read(name).decode() for name in archive.namelist() if name[-3:] == ".py"
        }
    assert len(sources) > 200
    found = {
        (name, module)
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source))
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if module.partition(".")[0] in PACKAGES
    }
    assert found == set()


def test_the_rename_takes_imports_and_names_of_modules_alone() -> None:
    """A word that only looks like one of our packages is not renamed."""
    modules = {"storage", "storage.shards", "storage.shards.shard"}
    source = (
        "from storage.shards.shard import x\n"
        "    import policy\n"
        "from storages import y\n"
        'HOME = "storage.shards.shard"; METHOD = "storage.shards.shard.write"\n'
        "FILE = 'storage.toml'; WORD = 'storage'; import_storage = 1\n"
    )
    assert as_installed(source, modules) == (
        "from headrace.storage.shards.shard import x\n"
        "    import headrace.policy\n"
        "from storages import y\n"
        'HOME = "headrace.storage.shards.shard"; METHOD = "headrace.storage.shards.shard.write"\n'
        "FILE = 'storage.toml'; WORD = 'storage'; import_storage = 1\n"
    )


def test_no_module_binds_a_package_by_a_plain_import() -> None:
    """`import storage.shards` would bind `headrace` in the wheel, where the code says `storage`."""
    for package in ("headrace", *PACKAGES):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    tops = {alias.name.partition(".")[0] for alias in node.names}
                    assert not tops & set(PACKAGES), file


def test_the_wheel_of_the_sdist_is_the_same_file(wheel: Path, tmp_path: Path) -> None:
    """The wheel built here and the one built from the source distribution are identical."""
    checked(sys.executable, "-m", "build", "--no-isolation", "-o", tmp_path, ROOT, cwd=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert again.read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked archive of the repository, without tests, data and git."""
    folder = tmp_path_factory.mktemp("archive") / "headrace-main"
    hidden = shutil.ignore_patterns(".*", "__pycache__")

    def left_out(directory: str, names: list[str]) -> set[str]:
        own = {"tests", "data", "dist", "build"} if Path(directory) == ROOT else set()
        return own | hidden(directory, names)

    shutil.copytree(ROOT, folder, ignore=left_out)
    shutil.copy(ROOT / ".gitignore", folder)
    return folder


def test_the_wheel_of_an_unpacked_archive_is_the_same_file(
    wheel: Path, archive: Path, tmp_path: Path
) -> None:
    """A wheel built from an unpacked source archive, without a repository, has the same bytes."""
    assert wheel_of(archive, tmp_path).read_bytes() == wheel.read_bytes()


def test_an_editable_install_is_the_folder_as_it_lies_there(archive: Path, tmp_path: Path) -> None:
    """`pip install -e .`, as in `make setup`, makes no copy, and no second object of one name."""
    python = borrowing(tmp_path / "venv")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    checked(*install, "--no-build-isolation", "-e", archive, cwd=tmp_path)
    code = (
        "import headrace, storage.spaces.descriptors as d; from headrace import Box\n"
        "print(headrace.__file__, Box is d.Box)"
    )
    words = checked(python, "-c", code, cwd=tmp_path).split()
    assert words == [str(archive / "headrace" / "__init__.py"), "True"]


# --- on the base install, in somebody else's service ---------------------------------------------


def test_the_base_install_brings_no_extra(thin: Path, tmp_path: Path) -> None:
    """The environment has the properties that the tests below assume."""
    code = "import importlib.util as u, sys; print([m for m in sys.argv[1:] if u.find_spec(m)])"
    assert checked(thin / "python", "-c", code, *EXTRAS, cwd=tmp_path).strip() == "[]"


def test_a_service_with_such_names_of_its_own_uses_the_client(thin: Path, service: Path) -> None:
    """The service's own packages `storage`, `policy` and `ingest` stay importable. Creating and
    closing a client without a collector does not wait."""
    code = (
        "import ingest, policy, storage\n"
        "from headrace import PolicyClient\n"
        "with PolicyClient('http://127.0.0.1:9', inference_mode='remote') as client:\n"
        "    print(type(client).__module__)\n"
        "import ingest, policy, storage, sys\n"
        "print(ingest.OWNER, policy.OWNER, storage.OWNER, sep='|')\n"
        "print(sorted(n for n in sys.modules if n.partition('.')[0] in "
        "('ingest', 'policy', 'storage')))\n"
    )
    lines = checked(thin / "python", "-c", code, cwd=service).splitlines()
    assert lines == [
        "headrace.ingest.client.policy_client",
        "the service, ingest|the service, policy|the service, storage",
        "['ingest', 'policy', 'storage']",
    ]


def test_headrace_without_extras_names_the_one_to_install(thin: Path, tmp_path: Path) -> None:
    """Exit code 2, one line on standard error, no traceback."""
    result = run(thin / "headrace", "--version", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "pip install 'headrace[cli]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


# --- with every extra ------------------------------------------------------------------------


def test_the_full_environment_has_the_wheel_and_not_the_repository(
    full: Path, service: Path
) -> None:
    """The environment has the properties that the tests below assume."""
    code = "import headrace, storage; print(headrace.__file__, storage.OWNER)"
    output = checked(full / "python", "-c", code, cwd=service)
    assert output.startswith(str(full.parent / "lib"))
    assert output.strip().endswith("the service, storage")


@pytest.mark.long
def test_the_demo_runs_on_the_wheel(full: Path, service: Path, tmp_path: Path) -> None:
    """`headrace demo --no-live`: collector, shard writer, replay, training, gate, publication,
    from a folder whose `storage` is not ours."""
    words = ["demo", "--no-live", "--root", tmp_path / "run", "--data", ROOT / "data", "--json"]
    output = checked(full / "headrace", *words, cwd=service)
    assert json.loads(output.splitlines()[-1])


@pytest.mark.long
def test_a_worker_is_a_ray_actor_on_the_wheel(full: Path, service: Path) -> None:
    """Ray's worker process finds the package under the driver's name."""
    code = (
        "import gymnasium, ray\n"
        "from headrace import RolloutWorker, TrainablePolicy\n"
        "ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
        "remote = RolloutWorker.as_remote(num_cpus=1)\n"
        "worker = remote.remote(env_creator=lambda context: gymnasium.make('CartPole-v1'),\n"
        "                       policy=TrainablePolicy, batch_steps=10)\n"
        "print(ray.get(worker.sample_with_count.remote())[1])\n"
    )
    output = checked(
        full / "python", "-c", code, cwd=service, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0"
    )
    assert output.split()[-1] == "10"


INSTALLED_SUITES = [
    "ingest/client",
    "ingest/delivery",
    "ingest/protocol",
    "storage/reading",
    "storage/weights",
]


@pytest.mark.long
def test_the_unit_tests_of_clients_and_readers_pass_on_the_wheel(
    full: Path, tmp_path: Path
) -> None:
    """The same tests, with the same rename as the modules, from a folder without the repository."""
    modules = module_names(ROOT)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignore)
    for file in (tmp_path / "tests").rglob("*.py"):
        file.write_text(as_installed(file.read_text(), modules))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "data" / "open_bandit", tmp_path / "data" / "open_bandit")
    suites = [f"tests/{suite}" for suite in INSTALLED_SUITES]
    output = checked(full / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites,
                   cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1")  # fmt: skip
    assert " passed" in output
