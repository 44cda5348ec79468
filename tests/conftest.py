"""Shared by all suites: hypothesis profiles, and the summary at the end of a run."""

from __future__ import annotations

import gc
import os
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from storage.system.startup import loading

# For torch in this process and in every child: threads that wait by spinning took six times the CPU
# time, and ten times as long, next to other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEADRACE = PROJECT["tool"]["headrace"]
BUDGETS: dict[str, int] = HEADRACE["test-budgets"]

# No deadline: a shared machine stalls for a second without anything being wrong.
settings.register_profile("local", deadline=None)
# In CI the same commit must give the same result, so its examples are derived from the test.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def is_whole(config: pytest.Config) -> bool:
    """Whether the run has all tests, not a file, folder or marker."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection: what is imported stays, in each of xdist's workers."""
    with loading():
        return (yield)


def pytest_unconfigure() -> None:
    """Let the interpreter collect everything at its end, else duckdb reports leaks."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests out of a whole run, and begin with the files that take longest."""
    if is_whole(config):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
    first = {ROOT / name: place for place, name in enumerate(HEADRACE["first"])}
    items.sort(key=lambda item: first.get(item.path, len(first)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each suite's test time and budget, the notices of tests, and what was left out.

    A test adds a notice with `record_property("notice", text)`, for a check that this machine
    lacks.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[report.nodeid.removeprefix("tests/").partition("/")[0]] += report.duration
                notices = [text for name, text in report.user_properties if name == "notice"]
                if report.when == "call":
                    for text in notices:
                        terminalreporter.write_line(f"notice: {text}", yellow=True)
    for suite, seconds in sorted(spent.items()):
        if suite in BUDGETS:
            over = "  over budget" if seconds > BUDGETS[suite] else ""
            terminalreporter.write_line(f"{suite:8} {seconds:6.1f} s of {BUDGETS[suite]} s{over}")
    if is_whole(terminalreporter.config):
        targets = ", ".join(f"make {target}" for target in HEADRACE["left-out"])
        terminalreporter.write_line(f"left out, because they take longer: {targets}")
