"""The command `export`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from headrace.cli.options import ROOT, Json, Manifest, PolicyId, Root
from headrace.cli.roots import require_root
from policy.data.log_options import RetryFor, SchemaId, Since, Until
from storage.system.periods import require_period
from storage.wording import counted


def export(
    *,
    to: Annotated[
        str,
        "Format: d3rlpy, huggingface, jsonl, lerobot, minari, rllib, rllib-episodes or torchrl.",
    ],
    output: Annotated[
        Path, "New folder for the data set.", Meta(extra={"name": ("-o", "--output")})
    ] = Path("export"),
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    manifest: Manifest = None,
    since: Since = None,
    until: Until = None,
    schema_id: SchemaId = None,
    retry_for: RetryFor = 60.0,
    as_json: Json = False,
) -> None:
    """Write the steps of a log as a data set of another program.

    An episode that is open or was cut off ends with a time-out. The folder's headrace.json has the
    ordinals of the rows, as the lineage of what is trained on them.
    """
    require_period(since, until)
    require_root(root, policy_id)
    from headrace.output import console
    from policy.data.freeze import load_frozen
    from policy.data.log_selection import LogSelection
    from policy.exporting.opening import export as run

    selection = LogSelection(
        root=root,
        policy_id=policy_id,
        since=since,
        until=until,
        manifest=None if manifest is None else load_frozen(manifest).streams,
        schema_id=schema_id,
        retry_for=retry_for,
    )
    report = run(selection, to, output)
    if as_json:
        return console.line(report.to_dict())
    print(f"{output}: {counted(report.rows, 'step')} of {counted(report.episodes, 'episode')}")
    if report.left_out:
        left = counted(report.left_out, "last step", "last steps")
        print(f"left out: {left} without a next observation, which {to} needs")
    return None
