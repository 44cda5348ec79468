"""The command line names the extra that a command needs."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.__main__ import _status
from headrace.extras import EXTRA_OF, missing_extra
from ingest.protocol.errors import CollectorUnavailable
from storage.errors import (
    GenerationConflict,
    LeaseHeld,
    LiveChanged,
    NothingYet,
    PolicyPinned,
    WeightsDamaged,
    WeightsRefused,
    WeightStoreError,
)

ROOT = Path(__file__).parents[2]
EXTRAS = (
    *("cli", "collector", "train", "sql", "import", "hdf5"),
    *("torchrl", "tensorboard", "mlflow", "wandb", "onnx", "export"),
)


def test_every_module_of_an_extra_is_known() -> None:
    """For every module of every extra, the error of a missing module names an extra with it."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {
        (re.split(r"[>=<~!]", need)[0].removesuffix("-skinny").replace("-", "_"), extra)
        for extra in EXTRAS
        for need in listed["optional-dependencies"][extra]
        if not need.startswith("headrace[")
    }
    assert set(EXTRA_OF.items()) <= brought
    assert EXTRA_OF.keys() == {module for module, _ in brought}


def test_the_command_lines_extra_is_named_with_those_that_include_it() -> None:
    """The hint names the smallest extra with the module, and for the command line also `collector`,
    which includes it."""
    text = str(missing_extra(ModuleNotFoundError("typer", name="typer"), "this command"))
    assert "pip install 'headrace[cli]', or 'headrace[collector]' to collect" in text
    text = str(missing_extra(ModuleNotFoundError("torch", name="torch"), "this command"))
    assert text.endswith("pip install 'headrace[train]'")


def test_a_bug_is_not_taken_for_a_missing_extra(tmp_path: Path) -> None:
    """A missing module of no extra keeps its traceback: it is our error, not the user's."""
    broken = "from headrace import __main__ as m; m._command_line = lambda: __import__('no_such'); "
    result = subprocess.run(
        [sys.executable, "-c", broken + "m.main()"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "ModuleNotFoundError: No module named 'no_such'" in result.stderr


def test_help_and_version_need_no_extra_but_the_command_lines_own(tmp_path: Path) -> None:
    """`headrace --help` loads neither torch nor pyarrow nor pandas: it answers at once."""
    code = (
        "import sys\n"
        "from headrace.__main__ import main\n"
        "sys.argv = ['headrace', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    print(end.code, {'torch', 'pyarrow', 'pandas'} & set(sys.modules))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines()[-1] == "0 set()", result.stdout + result.stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CollectorUnavailable("nobody listens"), 1),
        (GenerationConflict("somebody was faster"), 1),
        (PolicyPinned("a rollback"), 6),
        (LiveChanged("generation 3"), 6),
        (WeightsDamaged("a flipped byte"), 1),
        (NothingYet("no shard yet"), 7),
        (OSError(errno.ENOSPC, "full"), 1),
        (FileNotFoundError(errno.ENOENT, "no such file"), 2),
        (WeightsRefused("not finite"), 2),
        (LeaseHeld("another trainer"), 3),
    ],
)
def test_the_exit_status_says_whether_another_try_may_go_well(
    error: Exception, status: int
) -> None:
    """A scheduler retries status 1, but not 2."""
    assert _status(error) == status


def test_a_full_disk_in_the_store_is_no_wrong_usage() -> None:
    """A WeightStoreError has status 1 if an error of the system caused it, else 2."""
    full = WeightStoreError("cannot write")
    assert _status(full) == 2
    full.__cause__ = OSError(errno.ENOSPC, "full")
    assert _status(full) == 1
