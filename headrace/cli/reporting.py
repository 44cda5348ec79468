"""`headrace report`: the contents of a root, in one HTML file."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from headrace.cli.options import ROOT, Json, PolicyId, Root
from headrace.cli.roots import require_root
from policy.data.log_options import RetryFor
from storage.wording import counted


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
