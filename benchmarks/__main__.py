"""`make bench`: one table of ratios, each to a named baseline in the same run."""

from __future__ import annotations

import importlib
import sys

from benchmarks.report import render

MODULES = (
    "client",
    "footprint",
    "outages",
    "images",
    "collector",
    "bulk",
    "importing",
    "safety",
    "live",
    "acting",
    "onnx_acting",
    "external_env",
    "reader",
    "content_checks",
    "following",
    "steps",
    "worker",
)


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all, and print their figures."""
    figures = []
    for name in names or MODULES:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        figures += importlib.import_module(f"benchmarks.{name}").run()
    print(render(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
