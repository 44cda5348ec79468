"""`headrace status` and `headrace report`: how a root is doing, in a terminal or one HTML file."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Meta

from headrace.cli.options import ROOT, Ca, Json, PolicyId, Root, Token
from headrace.cli.roots import declared_policies, require_root
from headrace.cli.serving import ask
from policy.data.log_options import RetryFor
from storage.objects.opening import local_folder
from storage.wording import counted


def status(
    root: Root = ROOT,
    url: Annotated[str | None, "Address of a collector, instead of a root's own."] = None,
    token: Token = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Answer in a terminal what the collector's page does; end with 1 if anything needs attention.

    The running collector is asked. Without one, the answers come from the root's files.
    """
    if url is None:
        require_root(root)
    document = _asked(root, url, token, ca)
    from headrace.output import console, results

    console.line(document) if as_json else results.status(document)
    if document["answers"]["needs"]:
        raise typer.Exit(1)


def _asked(root: Root, url: str | None, token: str | None, ca: Path | None) -> dict[str, Any]:
    """The document of the running collector, or the one of a root's files."""
    from ingest.collector.address_file import LiveAddress
    from ingest.protocol.errors import CollectorUnavailable

    if url is not None:
        answer = ask(url, "/v1/status", token, ca)
        if isinstance(answer, str):
            raise CollectorUnavailable(answer)
        return answer
    folder = local_folder(root)
    live = None if folder is None else LiveAddress.of(folder / "journal")
    if live is None:
        return _at_rest(root, f"No collector is running on {root}")
    with contextlib.closing(live):
        answer = ask(live.address, "/v1/status", token if live.private() else None, ca)
    if isinstance(answer, str):
        return _at_rest(root, f"The collector at {live.address} cannot be asked: {answer}")
    return answer


def _at_rest(root: Root, down: str) -> dict[str, Any]:
    from ingest.status.answers import MOST_DECISIONS, Facts, PolicyFacts, status_document
    from storage.declarations.history_files import read_history
    from storage.errors import WeightStoreError
    from storage.weights.decisions import load_decisions
    from storage.weights.store import WeightFolder

    damaged = []

    def facts(name: str) -> PolicyFacts:
        store, previous = WeightFolder(root, name), None
        live = store.live()
        try:
            previous = None if live is None else store.manifest(live.version).parent
        except WeightStoreError as error:
            damaged.append(f"{name}: {error}")
        found = None if live is None else live.to_json()
        decided = load_decisions(root, name, latest=MOST_DECISIONS).known
        return PolicyFacts.at_rest(name, found, previous, read_history(root, name), decided)

    return status_document(
        Facts(
            policies=[facts(name) for name in declared_policies(root)],
            made=time.time_ns() // 1000,
            root=str(root),
            down=down,
            needs=damaged,
        )
    )


def report(
    output: Annotated[Path, "File to write.", Meta(extra={"name": ("-o", "--output")})] = Path(
        "report.html"
    ),
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    retry_for: RetryFor = 60.0,
    as_json: Json = False,
) -> None:
    """Write data over time, training curves, estimates and decisions to one HTML file.

    The file opens offline. With --json the line has its path and counts of its content.
    """
    require_root(root, policy_id)
    from headrace.output import console
    from headrace.output.report_page import report_page
    from policy.data.overview import overview
    from policy.judging.log_review import review

    with console.progress() as progress:
        document = overview(root, policy_id, retry_for=retry_for, on_progress=progress)
        checks = []
        if document["data"]["steps"]:
            checks = review(root, policy_id, retry_for=retry_for, on_progress=progress)
    found = [one.to_dict() for one in checks]
    page = report_page(document, found).encode(errors="backslashreplace")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(page)
    counts = {name: len(document[name]) for name in ("versions", "decisions")}
    if as_json:
        steps = document["data"]["steps"]
        return console.line({"output": str(output), "bytes": len(page), "steps": steps, **counts})
    return print(
        f"{output}: {counted(document['data']['steps'], 'step')}, "
        f"{counted(counts['versions'], 'version')}, {counted(counts['decisions'], 'decision')}"
    )
