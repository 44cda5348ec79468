"""The commands `demo`, `collect`, `up`, `ls`, `verify` and `pseudonym`.

A command is a plain function that `headrace.__main__` registers. It contains its own imports, so
that `--help` loads neither torch nor Arrow, and a command only what it needs.
"""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Meta

from headrace.cli.options import (
    LOCAL_ROOT,
    ROOT,
    AdminToken,
    Ca,
    Json,
    LocalRoot,
    PolicyId,
    Port,
    Root,
    local_root,
)
from headrace.cli.roots import require_root
from headrace.cli.settings import ChosenAlgorithm
from ingest.server.options import Declaring, DeclaringSpaces, Listening, ServeOptions
from policy.data.log_options import Seed
from storage.system.startup import loading, use_one_blas_thread
from storage.wording import counted

if TYPE_CHECKING:
    from ingest.collector.collector import Collector
    from storage.declarations.declaration import PolicyDeclaration


def demo(
    root: Annotated[
        Path,
        "Folder for its data; existing data is moved aside.",
        Meta(extra={"parser": local_root, "metavar": "<path>"}),
    ] = LOCAL_ROOT / "demo",
    data: Annotated[Path, "Folder of the logs."] = Path("data"),
    live: Annotated[bool, "Also run CartPole live."] = True,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run the loop on three problems, from log to published policy, and check its verdicts."""
    from headrace.demo.run import make_place, run_demo, show
    from headrace.demo.stage import DemoFailed

    make_place(root, data)
    try:
        found = run_demo(root, data, seed=seed, live=live)
    except DemoFailed as error:
        print(f"headrace: the demo stopped: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if as_json:
        from headrace.output import console

        console.line(found)
    else:
        show(found)
    raise typer.Exit(0 if found["ok"] else 1)


def collect(
    *,
    root: LocalRoot = LOCAL_ROOT,
    listening: Listening,
    declaring: Declaring,
    options: ServeOptions,
    log_format: Annotated[str, "text or json, one event per line."] = "text",
    log_level: Annotated[str, "debug, info, warning or error."] = "warning",
    as_json: Json = False,
) -> None:
    """Run the collector. SIGTERM or Ctrl-C drains and stops it.

    Declare a policy's spaces with --observation and --action, --env or --policy. They are stored
    under the root, with --reward-window and --reward-range, so later starts need none of these
    options. A start with other spaces than the root's is refused without --redeclare.
    """
    use_one_blas_thread()
    with loading():
        from ingest.server.declare import declaration_of
        from ingest.server.logs import configure
        from ingest.server.process import serve

    declared = declaration_of(declaring)
    first = None
    rewards = {
        "reward_window": declaring.reward_window,
        "reward_range": declaring.reward_range,
    }
    if declared is not None or any(one is not None for one in rewards.values()):
        settings = {"spaces_only": declaring.policy is None, "redeclare": declaring.redeclare}
        first = partial(_declare_first, root, declared, **settings, **rewards)
    configure(log_format, log_level)  # type: ignore[arg-type]  # configure checks the values
    running: list[Collector] = []

    def announce(address: str, collector: Collector) -> None:
        running.append(collector)
        _greet(address, collector, root, as_json)

    own = version("headrace")
    status = serve(
        replace(
            options,
            root=root,
            listening=listening,
            version=own,
            announce=announce,
            declare=first,
        )
    )
    if running and not as_json:
        steps, rows = running[0].assembler.steps, running[0].sealing.totals.rows
        print(f"Stopped: {counted(steps, 'step')} acknowledged so far, {rows:,} in shards.")
    raise typer.Exit(status)


def _declare_first(root: Path, declared: PolicyDeclaration | None, **settings: Any) -> None:
    """Declare the policy of a collector's options, and print the changes.

    Raises ServeError if a collector runs on this root: what it declares is in use.
    """
    from ingest.server.declare import declare, only_declaration
    from ingest.server.listening import starting
    from storage.journal.sqlite_journal import require_free

    with starting():
        require_free(root / "journal")
        new = only_declaration(root) if declared is None else declared
        for change in declare(root, new, **settings):
            print(change, file=sys.stderr)


def _greet(address: str, collector: Collector, root: Path, as_json: bool) -> None:
    """Print the collector's address and state when it listens."""
    from headrace.output import console
    from ingest.access.key_files import load_tokens
    from storage.experience.episode import policy_of_id

    if as_json:
        document = {"address": address, "root": str(root), "collector_id": collector.collector_id}
        return console.line({**document, "pid": os.getpid()})
    print(f"Collecting on {address} into {root} for {', '.join(collector.policies)}.")
    curl = "curl --cacert CA.pem" if address.startswith("https:") else "curl"
    curl += ' -H "Authorization: Bearer $HEADRACE_TOKEN"' if load_tokens(root) else ""
    first = {"episode_id": "first"}
    if policy_of_id(None, collector.policies) not in collector.policies:
        first["policy_id"] = next(iter(collector.policies))
    print(f"Begin with:  {curl} --json '{json.dumps(first)}' {address}/v1/episodes")
    return print("Ctrl-C or SIGTERM drains and stops it.", flush=True)


def up(
    *,
    root: LocalRoot = LOCAL_ROOT,
    policy_id: PolicyId = "default",
    port: Port = 8642,
    declaring: DeclaringSpaces,
    steps_per_version: Annotated[int, "Steps acted with a version before the next."] = 256,
    max_lag: Annotated[
        int | None, "Most versions that a step may be behind to be trained on."
    ] = None,
    choice: ChosenAlgorithm,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run a collector and a trainer that follows it; clients act with each new version."""
    from headrace.output import console, results
    from headrace.up import Up, require_settings
    from ingest.server.declare import declaration_of
    from ingest.server.listening import bind_of
    from ingest.server.logs import configure
    from storage.system.process import stop_on_signal

    words = choice.words()
    require_settings(words)
    declared = declaration_of(declaring)
    with contextlib.closing(bind_of(root, Listening(port=port))):  # a taken port declares nothing
        if declared is not None:
            _declare_first(root, declared, spaces_only=True, redeclare=declaring.redeclare)

    configure()

    def show_message(who: str, message: dict[str, Any]) -> None:
        return console.line({who: message}) if as_json else results.child_message(root, message)

    with stop_on_signal() as stop:
        both = Up(
            root,
            policy_id,
            port=port,
            seed=seed,
            steps_per_version=steps_per_version,
            max_lag=max_lag,
            settings=words,
            on_line=show_message,
        )
        well = both.watch(stop)
        both.close()
    raise typer.Exit(0 if well else 1)


def ls(root: Root = ROOT, token: AdminToken = None, ca: Ca = None, as_json: Json = False) -> None:
    """List streams, their shards and rows, and the journal's episodes."""
    require_root(root)
    from headrace.output import console, results
    from ingest.protocol.errors import IngestError
    from ingest.verification import journal_account
    from storage.declarations.policy_files import load_declarations
    from storage.errors import JournalLocked
    from storage.verify.inventory import list_streams

    declared = load_declarations(root)
    account, why = None, ""
    try:
        account = journal_account(root, token=token, ca=ca)
        why = "" if account else "there is no journal"
    except (JournalLocked, IngestError) as error:
        why = str(error)
    found = list_streams(root, declared, account)
    document = {
        "streams": [one.to_dict() for one in found.streams],
        "policies": sorted(declared),
        "open_episodes": account and dict.fromkeys(declared, 0) | dict(account.open_episodes),
        "open_steps": account and account.open_steps,
        "steps_being_written": found.being_written,
        "why": why,
    }
    return console.line(document) if as_json else results.streams(document)


def verify(
    root: Root = ROOT,
    quarantine: Annotated[bool, "Move damaged shards to quarantine/."] = False,
    second_reader: Annotated[
        bool, "Also read all shards with fastparquet, and compare ([train])."
    ] = False,
    token: AdminToken = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Check that every acknowledged step is in exactly one place."""
    require_root(root)
    from headrace.output import console, results
    from ingest.verification import verified
    from storage.verify.second_reader import SecondReader

    with contextlib.ExitStack() as stack:
        second = stack.enter_context(SecondReader()) if second_reader else None
        on_progress = stack.enter_context(console.progress())
        report = verified(
            root,
            token=token,
            ca=ca,
            quarantine=quarantine,
            second=second,
            on_progress=on_progress,
        )
        document = {**report.to_dict(), "logs": _reviewed(root, on_progress)}
    console.line(document) if as_json else results.verified(document)
    raise typer.Exit(0 if report.ok else 1)


def _reviewed(root: Root, on_progress: Any) -> dict[str, list[dict[str, Any]]]:
    """The checks of each policy's log; empty without the packages of [train].

    A log that cannot be read is named, and changes nothing else: `verified` reports damage.
    """
    from storage.declarations.policy_files import load_declarations
    from storage.errors import StorageError

    try:
        from policy.judging.log_review import review
    except ModuleNotFoundError:
        return {}
    found = {}
    for policy_id in sorted(load_declarations(root)):
        try:
            checks = review(root, policy_id, retry_for=0.0, on_progress=on_progress)
        except (StorageError, ValueError, OSError) as error:
            print(f"log of {policy_id}: not checked: {error}", file=sys.stderr)
        else:
            found[policy_id] = [one.to_dict() for one in checks]
    return found


def pseudonym(
    value: Annotated[
        str, "Value whose field is redacted by `hash`.", Meta(extra={"argument": True})
    ],
    root: LocalRoot = LOCAL_ROOT,
    as_json: Json = False,
) -> None:
    """Show the pseudonym of a redacted value under this root, to find its rows."""
    require_root(root)
    from headrace.output import console
    from ingest.access.key_files import kept_key
    from ingest.episodes.redaction import pseudonym as stand_in

    found = stand_in(kept_key(root), value)
    return console.line({"pseudonym": found}) if as_json else print(found)
