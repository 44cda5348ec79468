"""How a process of ours starts sooner, seen in processes of their own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.system.startup import loading

BLAS = "OPENBLAS_NUM_THREADS"
PROGRAM = Path(__file__).parents[3]


def output_of(code: str, **environment: str) -> object:
    """What a fresh interpreter prints as JSON; without a word on threads in its environment."""
    plain = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**plain, **environment},
        cwd=PROGRAM,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_garbage_waits_until_loading_is_over() -> None:
    """Nothing is collected within the block; afterwards it is as before, after an error too."""
    with loading():
        within = gc.isenabled()
    assert (within, gc.isenabled()) == (False, True)
    with pytest.raises(ValueError, match="on the way"), loading():
        raise ValueError("on the way")
    assert gc.isenabled()
    gc.unfreeze()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, "1"), ({BLAS: "4"}, "4"), ({"OMP_NUM_THREADS": "3"}, None)],
    ids=["nothing asked", "asked for BLAS", "asked for all"],
)
def test_blas_gets_one_thread_unless_more_are_asked_for(
    asked: dict[str, str], expected: str | None
) -> None:
    """A number of threads that the environment gives is kept."""
    code = (
        "import json, os; from storage.system.startup import use_one_blas_thread as one; one();"
        f"print(json.dumps(os.environ.get('{BLAS}')))"
    )
    assert output_of(code, **asked) == expected


def test_what_is_left_out_is_as_if_it_were_not_installed() -> None:
    """The import of a module that is left out fails as if it were missing; others are imported as
    usual."""
    code = """
import json
from storage.system.startup import leave_out
leave_out("colorsys")
try:
    import colorsys
except ModuleNotFoundError as error:
    found = error.name
import wave
print(json.dumps([found, wave.__name__]))
"""
    assert output_of(code) == ["colorsys", "wave"]


def test_the_collector_sets_its_threads_before_numpy_is_there() -> None:
    """The entry point imports nothing that would make the setting too late."""
    code = "import json, sys, headrace.cli.collecting; print(json.dumps('numpy' in sys.modules))"
    assert output_of(code) is False


def test_a_collector_that_only_logs_loads_no_policy() -> None:
    """The package `policy` is imported with the first version, and not before."""
    code = "import json, sys, ingest.server.process; print(json.dumps('policy' in sys.modules))"
    assert output_of(code) is False
