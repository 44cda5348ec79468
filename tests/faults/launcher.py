"""A collector, or its shard writer, with a planted fault.

python -m tests.faults.launcher MUTANT ingest collect --root DIR --port PORT
python -m tests.faults.launcher MUTANT storage write-shards --directory DIR
"""

from __future__ import annotations

import importlib
import sys

from storage import __name__ as STORAGE
from storage.shards.writer_process import WriterProcess
from tests.faults import mutants


def main(name: str, package: str, *arguments: str) -> int:
    """Break the build, then run the package's `__main__`."""
    mutants.find(name).plant(mutants.Patch(delay=mutants.DELAY_SECONDS))
    WriterProcess.program = ("-m", "tests.faults.launcher", name, STORAGE)
    status: int = importlib.import_module(f"{package}.__main__").main(list(arguments))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
