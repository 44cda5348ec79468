"""The command line: `headrace`, or `python -m headrace`.

The commands are plain functions in `headrace.cli`; `_command_line` combines them. This file loads
in a base install, which lacks typer. Each command imports what it needs when it runs, so that
`--help` loads neither torch nor Arrow, and a collector loads only its own modules.

Every option is also an environment variable, such as HEADRACE_COLLECT_PORT for `collect --port`;
options that several commands share have one variable, such as HEADRACE_ROOT. With --json the result
is one line of JSON, and stdout has nothing else; progress goes to stderr.

HEADRACE_DEBUG=1 shows tracebacks of errors. With HEADRACE_PARENT=PID, the id of the process that
starts it, a command ends with that process even if that is killed; schedulers set it.

docs/exit_statuses.md lists the exit statuses.
"""

# ruff: noqa: PLC0415 - the commands are imported when they are needed

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, NoReturn

from headrace.extras import missing_extra

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    import typer
except ModuleNotFoundError:  # the base install: main() names the extra to install
    typer = None  # type: ignore[assignment]  # typer is optional


_NAMES = ("EAGAIN", "ENOSPC", "EDQUOT", "EIO", "EMFILE", "ENFILE", "ENOMEM", "ESTALE", "ETIMEDOUT")
PASSING = frozenset(getattr(errno, name) for name in _NAMES)
"""Errors of the system that may pass, so that another try may succeed."""
HELD = 6
"""The exit status if a pin or a canary holds the policy, or another generation is live."""
NOTHING_YET = 7
"""The exit status if there is no data, candidate or live version so far."""


def main() -> None:
    """Run the command line; the entry point of `headrace`."""
    try:
        _follow_parent()
        _command_line()()
    except ModuleNotFoundError as missing:
        hint = missing_extra(missing, "this command")
        if hint is None:
            raise
        _fail(str(hint), 2)
    except Exception as error:
        if not _is_the_users(error) or os.environ.get("HEADRACE_DEBUG"):
            raise
        _fail(_advised(error), _status(error))


def _follow_parent() -> None:
    """Die with the process in HEADRACE_PARENT. The variable is removed, so children ignore it."""
    parent = os.environ.pop("HEADRACE_PARENT", "")
    if parent:
        from storage.system.process import die_with_parent

        die_with_parent(int(parent))


def _is_the_users(error: Exception) -> bool:
    """Whether an error is about input, files or a collector, and not a bug."""
    from ingest.protocol.errors import IngestError
    from storage.errors import StorageError

    return isinstance(error, (IngestError, StorageError, ValueError, OSError))


def _advised(error: Exception) -> str:
    """The text of an error, with the setting that a missing token needs."""
    from ingest.protocol.errors import Refusal

    if isinstance(error, Refusal) and error.code == "unauthorized":
        return f"{error} (set --token or HEADRACE_TOKEN)"
    return str(error)


def _status(error: Exception) -> int:
    """The exit status of an error: docs/exit_statuses.md; 2 for what a retry cannot change."""
    from ingest.protocol.errors import CollectorUnavailable, Refusal
    from ingest.server.listening import ServeError
    from storage.errors import (
        GenerationConflict,
        LeaseHeld,
        LiveChanged,
        NothingYet,
        PolicyPinned,
        WeightsDamaged,
        WeightStoreError,
    )

    if isinstance(error, (PolicyPinned, LiveChanged)):
        return HELD
    if isinstance(error, NothingYet):
        return NOTHING_YET
    if isinstance(error, (GenerationConflict, WeightsDamaged, CollectorUnavailable)):
        return 1
    if isinstance(error, Refusal) and error.code in ("pinned", "conflict", "disk_full", "busy"):
        return HELD if error.code == "pinned" else 1
    cause = error.__cause__ if isinstance(error, WeightStoreError) else error
    if isinstance(cause, OSError) and cause.errno in PASSING:
        return 1
    if isinstance(error, LeaseHeld):
        return 3
    return error.exit_status if isinstance(error, ServeError) else 2


def _command_line() -> typer.Typer:
    if typer is None:
        raise ModuleNotFoundError("No module named 'typer'", name="typer")
    app = typer.Typer(
        name="headrace",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich keeps a docstring's line breaks and drops what is in []
        context_settings={"auto_envvar_prefix": "HEADRACE", "max_content_width": 100},
    )
    from headrace.cli.declared import expanded
    from headrace.cli.options import Command, Group
    from headrace.cli.settings import SettingsCommand

    app.callback(cls=Group)(_options)
    for command in _commands():
        name = "import" if command.__name__ == "import_source" else None  # a keyword of Python
        summary = " ".join((command.__doc__ or "").partition("\n\n")[0].split())
        cls = SettingsCommand if command.__name__ in ("train", "up") else Command
        app.command(name, cls=cls, short_help=summary)(expanded(command))
    for group in _groups():
        app.add_typer(group)
    return app


def _commands() -> tuple[Callable[..., None], ...]:
    """Every command, in the order of `--help`."""
    from headrace.cli import canaries as canaries
    from headrace.cli import collecting as edge
    from headrace.cli import exporting as exporting
    from headrace.cli import importing as importing
    from headrace.cli import learning as learning
    from headrace.cli import maintaining as maintaining
    from headrace.cli import publishing as publishing
    from headrace.cli import reporting as reporting

    whole_way = (edge.demo, edge.up)
    judging = (learning.freeze, learning.train, learning.evaluate, learning.publish)
    numbering = (
        learning.decisions,
        publishing.versions,
        canaries.canary,
        canaries.promote,
        publishing.rollback,
        publishing.pause,
        publishing.resume,
    )
    looking = (reporting.status, edge.ls, reporting.report, edge.verify, edge.pseudonym)
    bringing = (edge.collect, importing.import_source, exporting.export)
    upkeep = (maintaining.compact, maintaining.retain, maintaining.erase)
    keeping = (*upkeep, maintaining.backup, maintaining.restore, maintaining.adopt)
    return (*whole_way, *bringing, *judging, *numbering, *looking, *keeping)


def _groups() -> tuple[typer.Typer, ...]:
    """Commands with subcommands."""
    from headrace.cli import tokens as token_commands

    return (token_commands.app,)


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
    """Carry experience to a learner and better weights back.

    Each option is an environment variable, too: --reward of `import` is HEADRACE_IMPORT_REWARD. The
    help of a command names the variables that several commands share.
    """


def _fail(message: str, code: int) -> NoReturn:
    print(f"headrace: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
