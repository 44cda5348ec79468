"""Headrace's front door: one command line over ingest, policy and storage.

A command is a plain function here, registered in `_command_line`; its annotations stay strings
until typer reads them, so that this file loads in a base install, which has no typer.

Exit codes: 0 fine, 1 the work failed, 2 wrong usage or an extra that is not installed.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

try:
    import typer
except ModuleNotFoundError:  # the base install: main() names the extra to install
    typer = None  # type: ignore[assignment]  # a module or nothing

PACKAGES = ("storage", "policy", "ingest")
# Which extra brings the module that a command missed.
EXTRA_OF = {
    "typer": "cli",
    "rich": "cli",
    "uvicorn": "collector",
    "uvloop": "collector",
    "httptools": "collector",
    "starlette": "collector",
    "prometheus_client": "collector",
    "pyarrow": "collector",
    "watchdog": "collector",
    "torch": "train",
    "gymnasium": "train",
    "pandas": "train",
    "fastparquet": "train",
    "scipy": "train",
    "matplotlib": "train",
    "cryptography": "secure",
}


def main() -> None:
    """Run the command line; the entry point of `headrace` and of `python headrace.py`."""
    try:
        _check_packages()
        _command_line()()
    except ModuleNotFoundError as missing:
        extra = EXTRA_OF.get((missing.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(
            f"this needs {missing.name}, which is not installed: pip install 'headrace[{extra}]'", 2
        )


def _check_packages() -> None:
    """Refuse to run over a `storage`, `policy` or `ingest` of another distribution."""
    for name in PACKAGES:
        module = importlib.import_module(name)
        if not hasattr(module, "__headrace__"):
            _fail(
                f"Python found another package named {name!r}: {module.__file__}. "
                "Uninstall or rename it, or put Headrace before it on sys.path.",
                1,
            )


def _command_line() -> typer.Typer:
    if typer is None:
        raise ModuleNotFoundError("No module named 'typer'", name="typer")
    app = typer.Typer(name="headrace", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_options)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Carry experience to a learner and better weights back."""


def _fail(message: str, code: int) -> NoReturn:
    print(f"headrace: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
