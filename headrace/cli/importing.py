"""The command `import`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import (
    ADDRESS,
    Address,
    Ca,
    Json,
    Redeclare,
    Text,
    Texts,
    Token,
    local_root,
)

if TYPE_CHECKING:
    from ingest.importing.options import ImportOptions
    from ingest.importing.report import ImportReport
    from policy.judging.log_review import ImportReview
    from storage.declarations.declaration import PolicyDeclaration

ExpectedSchema = Annotated[
    str | None, typer.Option(help="Refuse a policy whose spaces have another schema.")
]
Declare = Annotated[
    Path | None,
    typer.Option(
        parser=local_root,
        metavar="<path>",
        help="Send nothing: declare the columns' spaces under this root.",
    ),
]
Categories = Annotated[
    Path | None,
    typer.Option(help="For spaces without names: file of codes, one for all of the policy's logs."),
]
Missing = Annotated[
    str, typer.Option(help="For an empty cell: error, drop (the row), or value (0).")
]
Sql = Annotated[
    Text, typer.Option(help="SELECT over the rows of the source, the view `source`; or its file.")
]
Types = Annotated[
    Texts, typer.Option("--type", help="COLUMN=TYPE of a column in `source`. May be repeated.")
]
SampleProb = Annotated[
    Text, typer.Option(help="Column, or number: probability that a row was kept in the log.")
]
Dedupe = Annotated[
    Texts, typer.Option(help="Column of a row's key; the first row is kept. May be repeated.")
]
Episode = Annotated[
    Text, typer.Option(help="Column of the episode's key; without it episodes end at the flags.")
]
Reward = Annotated[
    list[str], typer.Option(help="Column of the reward, or -COLUMN of a cost; repeated: the sum.")
]
Step = Annotated[Text, typer.Option(help="Column of the step's number; gaps are errors.")]
Truncated = Annotated[Text, typer.Option(help="Column: true where a limit ended the episode.")]
Default = Annotated[
    Texts,
    typer.Option(help="COLUMN=VALUE for the column's empty cells. May be repeated."),
]
BadShown = Annotated[
    int,
    typer.Option(min=0, help="Most rows with errors to list, a third of them for one reason."),
]


def import_source(
    source: Annotated[str, typer.Argument(help="File, folder, or URL of a database.")],
    observation: Annotated[
        list[str],
        typer.Option(
            help="Column, or NAME:categories[:other] if values are names. May be repeated. "
            "POLICY=COLUMN with several policies."
        ),
    ],
    action: Annotated[
        list[str],
        typer.Option(help="Columns of the action, in the same forms, or NAME:box, NAME:discrete."),
    ],
    reward: Reward,
    final_observation: Annotated[
        Texts,
        typer.Option(help="Columns of the next observation, in the order of --observation."),
    ] = None,
    query: Annotated[Text, typer.Option(help="SQL, for the URL of a database.")] = None,
    sql: Sql = None,
    type: Types = None,
    address: Address = ADDRESS,
    token: Token = None,
    ca: Ca = None,
    action_prob: Annotated[
        Text, typer.Option(help="Column of the action's probability, or density.")
    ] = None,
    action_logp: Annotated[Text, typer.Option(help="Or: column of its natural logarithm.")] = None,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Or: all actions were equally likely.")
    ] = False,
    sample_prob: SampleProb = None,
    sample_weight: Annotated[Text, typer.Option(help="Or: column of its inverse.")] = None,
    dedupe: Dedupe = None,
    episode: Episode = None,
    agent: Annotated[Text, typer.Option(help="Column of a row's agent.")] = None,
    policy: Annotated[
        Texts, typer.Option(help="AGENT=POLICY; other agents have --policy-id. May be repeated.")
    ] = None,
    policy_column: Annotated[Text, typer.Option(help="Or: column of a row's policy.")] = None,
    step: Step = None,
    time: Annotated[Text, typer.Option(help="Column of the time: numbers, or ISO 8601.")] = None,
    time_unit: Annotated[str, typer.Option(help="Unit of numeric times: s, ms, us or ns.")] = "us",
    timezone: Annotated[str, typer.Option(help="Time zone of times without one.")] = "UTC",
    terminated: Annotated[Text, typer.Option(help="Column: true on an episode's last row.")] = None,
    truncated: Truncated = None,
    tag: Annotated[Texts, typer.Option(help="NAME=COLUMN. May be repeated.")] = None,
    info: Annotated[Texts, typer.Option(help="NAME=COLUMN of the info. May be repeated.")] = None,
    missing: Missing = "error",
    default: Default = None,
    categories: Categories = None,
    name: Annotated[
        Text, typer.Option(help="Name of the import; default: a digest of its content.")
    ] = None,
    policy_id: Annotated[
        Text, typer.Option(help="Policy; default: the collector's only one.")
    ] = None,
    schema_id: ExpectedSchema = None,
    check: Annotated[
        bool, typer.Option("--check", help="Send nothing: show what would be imported.")
    ] = False,
    bad_shown: BadShown = 10,
    declare: Declare = None,
    redeclare: Redeclare = False,
    as_json: Json = False,
) -> None:
    """Log the rows of a source through a collector; a repeated import adds nothing."""
    given = dict(locals())
    options = _options(given)
    if declare is not None:
        return _declare(declare, options, redeclare=redeclare, as_json=as_json)
    report, logs = _sent(options, check=check)
    _show(report, options, logs, as_json=as_json)
    # rows that --check would leave out are invalid input, and so is a source without a usable row
    left_out = report.rows_left_out
    raise typer.Exit(2 if left_out and (check or left_out == report.rows) else 0)


def _sent(options: ImportOptions, *, check: bool) -> tuple[ImportReport, dict[str, list[Any]]]:
    """(the report of the import, the checks of its rows by policy)."""
    from headrace.output import console
    from ingest.importing.importing import run_import

    review = _review()
    on_actions = None if review is None else review.add
    with console.progress() as on_progress:
        report = run_import(options, check=check, on_progress=on_progress, on_actions=on_actions)
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
    if not options.has_propensities:
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


def _options(given: Mapping[str, Any]) -> ImportOptions:
    """The options, from the command's parameters by name. Raises ValueError, ImportFailed."""
    from ingest.importing.options import ImportOptions

    named = {name: given[name] for name in ImportOptions.__dataclass_fields__ if name in given}
    named["tags"] = _pairs("--tag", "NAME=COLUMN", given["tag"] or [])
    named["infos"] = _pairs("--info", "NAME=COLUMN", given["info"] or [])
    named["policies"] = _pairs("--policy", "NAME=COLUMN", given["policy"] or [])
    named["policy"] = given["policy_column"]
    several = bool(named["policies"]) or named["policy"] is not None
    named["observation"] = _by_policy(given["observation"], several)
    named["final_observation"] = _by_policy(given["final_observation"] or [], several)
    named["action"] = _by_policy(given["action"], several)
    named["dedupe"] = given["dedupe"] or []
    named["sample_prob"] = _number_or_column(given["sample_prob"])
    named["types"] = _pairs("--type", "COLUMN=TYPE", given["type"] or [])
    named["sql"] = _statement(given["sql"])
    named["default"] = _pairs("--default", "COLUMN=VALUE", given["default"] or [])
    return ImportOptions(**named)


def _number_or_column(given: str | None) -> str | float | None:
    try:
        return None if given is None else float(given)
    except ValueError:
        return given


def _statement(given: str | None) -> str | None:
    """The SQL, or that of the file that is named instead."""
    if given is None or len(given.split()) > 1 or not Path(given).is_file():
        return given
    return Path(given).read_text(encoding="utf-8")


def _by_policy(words: Sequence[str], several: bool) -> list[str] | dict[str, list[str]]:
    """The columns, by policy if there are several and all words are POLICY=COLUMN."""
    if not several or not words or not all("=" in word for word in words):
        return list(words)
    found: dict[str, list[str]] = {}
    for policy, _, column in (word.partition("=") for word in words):
        found.setdefault(policy, []).append(column)
    return found


def _pairs(option: str, form: str, words: Sequence[str]) -> dict[str, str]:
    """Parse words NAME=VALUE to a dict. Raises ValueError."""
    pairs = [word.partition("=") for word in words]
    for word, (name, equals, value) in zip(words, pairs, strict=True):
        if not name or not equals or (form == "NAME=COLUMN" and not value):
            raise ValueError(f"{option}: expected {form}, got {word!r}")
    return {name: value for name, _, value in pairs}


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
    from ingest.importing.inference import infer_spaces
    from ingest.server.declare import declare
    from storage.declarations.declaration import PolicyDeclaration
    from storage.experience.episode import DEFAULT_POLICY

    observation, action = infer_spaces(options)
    declared = PolicyDeclaration(
        observation=observation, action=action, policy_id=options.policy_id or DEFAULT_POLICY
    )
    for change in declare(root, declared, spaces_only=True, redeclare=redeclare):
        print(change, file=sys.stderr)
    return declared
