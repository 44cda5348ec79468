"""The programs of docs/own_loop.md, on a small log: `python -m tests.docs.own_loop d3rlpy`."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from pathlib import Path

from tests.policy.training.live_log import declare, part, write

EPISODES = 30
"""Of ten steps each."""


def programs() -> list[str]:
    page = (Path(__file__).parents[2] / "docs/own_loop.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def run(program: str) -> None:
    code = compile(program, "docs/own_loop.md", "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})  # noqa: S102 - our page


def fill(folder: Path) -> None:
    """The root `run` as the programs read it."""
    declare(folder / "run")
    write(folder / "run", *(part(i) for i in range(EPISODES)))


def main(library: str) -> None:
    (program,) = (one for one in programs() if f"import {library}" in one)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        fill(Path(folder))
        run(program)


if __name__ == "__main__":
    main(sys.argv[1])
