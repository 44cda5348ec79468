"""A collector, its shard writer or a command, with a planted fault.

python -m tests.faults.launcher MUTANT tests.plain_collector collect --root DIR --port PORT
python -m tests.faults.launcher MUTANT storage write-shards --directory DIR
python -m tests.faults.launcher MUTANT headrace compact --root DIR
"""

from __future__ import annotations

import importlib
import sys

from headrace import __name__ as HEADRACE
from storage import __name__ as STORAGE
from storage.shards.writer_process import WriterProcess
from tests.faults import mutants


def main(name: str, package: str, *arguments: str) -> int:
    """Break the build, then run the package's `__main__`."""
    mutants.find(name).plant(mutants.Patch(delay=mutants.DELAY_SECONDS))
    WriterProcess.program = ("-m", "tests.faults.launcher", name, STORAGE)
    run = importlib.import_module(f"{package}.__main__").main
    if package == HEADRACE:
        sys.argv = [package, *arguments]
        run()
        return 0
    status: int = run(list(arguments))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
