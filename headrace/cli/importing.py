"""The command `import`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Meta

from headrace.cli.options import Json, Redeclare, local_root
from ingest.importing.options import ImportOptions

if TYPE_CHECKING:
    from ingest.importing.report import ImportReport
    from policy.judging.log_review import ImportReview
    from storage.declarations.declaration import PolicyDeclaration


SECONDS = 15.0
"""Between lines with the rows so far, where stderr is no terminal."""


def import_source(
    *,
    options: ImportOptions,
    check: Annotated[bool, "Send nothing: show what would be imported."] = False,
    declare: Annotated[
        Path | None,
        "Send nothing: declare the columns' spaces under this root.",
        Meta(extra={"parser": local_root, "metavar": "<path>"}),
    ] = None,
    redeclare: Redeclare = False,
    as_json: Json = False,
) -> None:
    """Log the rows of a source through a collector; a repeated import adds nothing."""
    if declare is not None:
        return _declare(declare, options, redeclare=redeclare, as_json=as_json)
    report, logs = _sent(options, check=check, as_json=as_json)
    _show(report, options, logs, as_json=as_json)
    # rows that --check would leave out are invalid input, and so is a source without a usable row
    left_out = report.rows_left_out
    raise typer.Exit(2 if left_out and (check or left_out == report.rows) else 0)


def _sent(
    options: ImportOptions, *, check: bool, as_json: bool
) -> tuple[ImportReport, dict[str, list[Any]]]:
    """(the report of the import, the checks of its rows by policy)."""
    from headrace.output import console
    from ingest.importing.importing import run_import

    review = _review()
    on_actions = None if review is None else review.add
    with console.counting(math.inf if as_json else SECONDS) as tell:
        report = run_import(
            options,
            check=check,
            on_report=lambda report: tell(report.rows, report.rows_left_out),
            on_actions=on_actions,
        )
    return report, {} if review is None else review.checks()


def _review() -> ImportReview | None:
    """The check of propensities; None without the packages of [train]."""
    try:
        from policy.judging.log_review import ImportReview
    except ModuleNotFoundError:
        return None
    return ImportReview()


def _show(
    report: ImportReport,
    options: ImportOptions,
    logs: Mapping[str, Sequence[Any]],
    *,
    as_json: bool,
) -> None:
    from headrace.output import console, results

    document = {**report.to_dict(), "logs": logs}
    if as_json:
        console.line(document)
        return
    results.imported(document, options.name)
    if not (options.has_propensities or report.understood["propensities"]["count"]):
        again = "adds" if options.name is None else "needs another --name, and adds"
        print(
            "Propensities are unknown: give --action-prob, --action-logp or --uniform. Without "
            "one, `train` by dr, ips or snips, `evaluate` and `publish` leave these episodes out."
        )
        if not report.checked:
            print(
                f"A second import with one of these options {again} all rows again. Look first "
                "with --check, which sends nothing."
            )
    if not report.steps or report.checked:
        return
    if report.rows_left_out and options.query is None:
        print(
            "Import mended rows from a file of their own: the whole file, changed, would be "
            "another import, which stores its other rows again."
            if options.name is None
            else "Append mended rows to the source: under its name, other changes are refused."
        )
    if options.name is None and options.query is None:
        print(
            "A longer file is another import, which stores these rows again: give --name NAME for "
            "one that grows, from its first import on."
        )


def _declare(root: Path, options: ImportOptions, *, redeclare: bool, as_json: bool) -> None:
    from headrace.output import console

    declared = _declare_columns(root, options, redeclare=redeclare)
    if as_json:
        return console.line({"root": str(root), "policy": declared.to_json()})
    observation, action = declared.observation.to_json(), declared.action.to_json()
    print(
        f"Declared the observation {json.dumps(observation)} and the action {json.dumps(action)}."
    )
    return print(f"Now: headrace collect --root {root}")


def _declare_columns(root: Path, options: ImportOptions, *, redeclare: bool) -> PolicyDeclaration:
    """Declare the spaces that the columns need, for a collector that will be started on `root`."""
    from ingest.importing.inference import infer_policy
    from ingest.server.declare import declare

    declared = infer_policy(options)
    for change in declare(root, declared, spaces_only=True, redeclare=redeclare):
        print(change, file=sys.stderr)
    return declared
