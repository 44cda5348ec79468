"""The commands `freeze`, `train`, `evaluate`, `publish` and `decisions`.

A command is a plain function that `headrace.__main__` registers. It contains its own imports, so
that `--help` loads neither torch nor Arrow, and a command only what it needs.
"""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Meta

from headrace.cli import canaries
from headrace.cli.options import ROOT, Json, Manifest, PolicyId, Root, Text
from headrace.cli.publishing import audited
from headrace.cli.roots import require_root
from headrace.cli.serving import WaitFor, Where, report_served
from headrace.cli.settings import ChosenAlgorithm, ShowSettings
from policy.data.log_options import RetryFor, SchemaId
from policy.inference.action_rule import ActionRule
from policy.judging.settings import EvaluationSettings, Gate
from policy.training.settings import FollowSettings, TrainSettings
from storage.wording import counted

if TYPE_CHECKING:
    from policy.algorithms.base import AlgorithmConfig
    from policy.inference.weight_store import WeightStore
    from policy.judging.gate import Elsewhere
    from policy.tracking import TrackedRun


_WITHOUT_GATE = (
    "neither --url nor an option of the gate: `canary` judges its own episodes, by "
    "the range that `collect --reward-range LOW HIGH` declares"
)
CandidateDigest = Annotated[
    str, "Digest of a candidate (6 or more characters), or latest.", Meta(extra={"argument": True})
]

CANNOT_TELL_EXIT = 4
"""The exit status of an undecided judgement; see docs/exit_statuses.md."""


@contextlib.contextmanager
def _elsewhere(where: Where) -> Iterator[Elsewhere | None]:
    """Yield the collector that publishes; None without an address."""
    if where.url is None:
        yield None
    else:
        with where.publisher() as elsewhere:
            yield elsewhere


def freeze(
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    schema_id: SchemaId = None,
    up_to: Annotated[
        list[str] | None,
        "Only the stream's ordinals up to this one; no stream without. May be repeated.",
        Meta(extra={"metavar": "<stream=ordinal>"}),
    ] = None,
    retry_for: RetryFor = 60.0,
    as_json: Json = False,
) -> None:
    """Write a manifest of the stored ordinals; the same shards give the same file.

    With --up-to, as a collector's --on-seal posts them, later shards change nothing. Exit status 7:
    no data yet.
    """
    require_root(root, policy_id)
    from headrace.output import console
    from policy.data.freeze import freeze as run

    marks = None if up_to is None else dict(_mark(text) for text in up_to)
    frozen = run(root, policy_id, schema_id=schema_id, up_to=marks, retry_for=retry_for)
    if as_json:
        return console.line(frozen.to_dict())
    for name, why in frozen.skipped.items():
        print(f"left out, damaged: {name}: {why}", file=sys.stderr)
    if frozen.other_schemas:
        print(f"left out: other schemas: {counted(frozen.other_schemas, 'row')}", file=sys.stderr)
    known = "known already" if frozen.unchanged else "new"
    return print(
        f"{counted(frozen.rows, 'row')} in {counted(frozen.parts, 'part')}: {frozen.path} ({known})"
    )


def _mark(text: str) -> tuple[str, int]:
    stream, _, ordinal = text.partition("=")
    if not (stream and ordinal.isdecimal()):
        raise ValueError(f"--up-to: expected stream=ordinal, got {text!r:.80}")
    return stream, int(ordinal)


def train(
    *,
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    choice: ChosenAlgorithm,
    show_settings: ShowSettings = False,
    settings: TrainSettings,
    manifest: Manifest = None,
    follow: Annotated[
        bool,
        "Train on live clients, with PPO by default, and publish.",
        Meta(extra={"name": "--follow/--no-follow"}),
    ] = False,
    following: FollowSettings,
    track: Annotated[
        str | None, "Tracker of the run: tensorboard, mlflow or wandb, under <root>/tracking."
    ] = None,
    as_json: Json = False,
) -> None:
    """Train on the shards; the result is a candidate, which no client uses yet.

    With --follow: train on what clients do and publish after every update, until SIGTERM. Exit
    status 3: another trainer has the policy; 1: another publisher was first (--on-conflict end).
    """
    if show_settings:
        return _show_settings(choice.chosen(live=follow))
    require_root(root, policy_id)
    if follow and not following.lease_wait:
        _require_no_other(root, policy_id)
    from headrace.output import console
    from policy.data.freeze import load_frozen
    from policy.training.train import train as run
    from policy.training.train import train_once

    picked = choice.chosen(live=follow)
    if settings.schema_id is not None and (follow or manifest is not None):
        raise ValueError("--schema-id: expected none with --follow, nor with --manifest")
    if follow:
        _require_none_with_follow(settings)
        with _tracked(root, policy_id, track, picked) as tracked:
            return _follow(root, policy_id, picked, following, tracked, as_json)
    with console.progress() as progress, _tracked(root, policy_id, track, picked) as tracked:
        tell: dict[str, Any] = {"run": tracked, "on_progress": progress}
        if manifest is None:
            document = run(root, policy_id, picked, settings, **tell).to_dict()
        else:
            frozen = load_frozen(manifest)
            document = train_once(root, policy_id, picked, frozen, settings, **tell)
    return _show_trained(document, root, policy_id, as_json)


@contextlib.contextmanager
def _tracked(
    root: Root, policy_id: str, track: str | None, config: AlgorithmConfig
) -> Iterator[TrackedRun | None]:
    """Yield a run of the tracker under the root; None without a tracker."""
    if track is None:
        yield None
        return
    from policy.tracking import begin
    from storage.objects.opening import require_local
    from storage.weights.manifest import finite

    folder = require_local(root, "--track") / "tracking" / track
    with contextlib.closing(begin(track, folder, policy_id)) as run:
        run.note({"config": finite(asdict(config))})
        yield run


def _show_settings(config: AlgorithmConfig) -> None:
    from headrace.output import console

    console.line(asdict(config))


def _show_trained(document: dict[str, Any], root: Root, policy_id: str, as_json: bool) -> None:
    from headrace.output import console, results
    from policy.inference.weight_store import WeightStore

    if as_json:
        return console.line(document)
    return results.trained(document, WeightStore(root, policy_id).latest())


def _require_no_other(root: Root, policy_id: str) -> None:
    """Raise LeaseHeld while another trainer has the policy, before torch is loaded.

    `headrace up` starts a trainer again and again as long as another one has the lease.
    """
    from storage.weights.files import PolicyFiles
    from storage.weights.lease import require_free

    with contextlib.suppress(OSError):  # `follow` tries that again
        require_free(PolicyFiles(root, policy_id), time.time())


def _require_none_with_follow(settings: TrainSettings) -> None:
    if settings.cross_fit is not None:
        raise ValueError("--cross-fit: expected none with --follow, which publishes without a gate")
    if settings.action_rule is not None or settings.explore is not None:
        raise ValueError(
            "--action-rule and --explore: expected none with --follow, whose PPO samples"
        )
    if settings.since is not None or settings.until is not None:
        raise ValueError("--since and --until: expected none with --follow, which reads on")


def _follow(
    root: Root,
    policy_id: str,
    config: AlgorithmConfig,
    settings: FollowSettings,
    run: TrackedRun | None,
    as_json: bool,
) -> None:
    from headrace.output import console, results
    from ingest.server.logs import configure
    from policy.training.train_live import follow
    from storage.system.process import stop_on_signal
    from storage.weights.manifest import finite

    configure()

    def show_update(metrics: dict[str, float]) -> None:
        return console.line(finite(metrics)) if as_json else results.updated(metrics)

    def began(version: int) -> None:
        return console.line({"start_version": version}) if as_json else results.began(version)

    with stop_on_signal() as stop:
        tell: dict[str, Any] = {"on_start": began, "on_update": show_update, "run": run}
        result = follow(root, policy_id, config, settings, stop=stop.is_set, **tell)
    if as_json:
        console.line({"followed": asdict(result)})
    else:
        print(f"Stopped at version {result.version} after {counted(result.rows_trained, 'step')}.")
        for why, rows in result.excluded.items():
            print(f"left out: {counted(rows, 'step')}: {why}")
        for name, why in result.excluded_shards.items():
            print(f"left out: {name}: {why}", file=sys.stderr)
    if result.ended == "conflict":
        raise typer.Exit(1)


def evaluate(
    *,
    weights: Annotated[
        str,
        "Digest of a candidate (6 or more characters), version number, latest or live.",
        Meta(extra={"argument": True}),
    ] = "latest",
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    log: Annotated[
        list[str] | None,
        "Another root, all of whose episodes are evaluated too.",
        Meta(extra={"metavar": "<path>"}),
    ] = None,
    settings: EvaluationSettings,
    plot: Annotated[Path | None, "PNG file of all intervals."] = None,
    html: Annotated[Path | None, "HTML file of the whole report."] = None,
    manifest: Manifest = None,
    every: Annotated[
        bool,
        "A scorecard: the live version of every policy, and the checks of its log.",
        Meta(extra={"name": "--all"}),
    ] = False,
    as_json: Json = False,
) -> None:
    """Judge weights off-policy on the logged episodes: better, worse, or cannot tell.

    The bars are the live version and the logging policy. The exit status is 0 for every verdict.
    """
    if every:
        if weights not in ("latest", "live") or log or plot or html or manifest is not None:
            raise ValueError("--all: expected no weights, nor --log, --plot, --html or --manifest")
        return _scorecard(root, settings, as_json)
    require_root(root, policy_id)
    for other in log or ():
        require_root(other, option="--log")
    from headrace.output import console, results
    from policy.inference.weight_store import WeightStore
    from policy.judging.gate import evaluate_logs

    chosen = _weights(WeightStore(root, policy_id), weights)
    with console.progress() as progress:
        document = evaluate_logs(
            root,
            policy_id,
            chosen,
            settings,
            others=log or (),
            manifest=manifest,
            plot=plot,
            on_progress=progress,
        )
    if html is not None:
        _write_page(html, document["logs"])
    return console.line(document) if as_json else results.evaluated(document["logs"])


def _scorecard(root: Root, settings: EvaluationSettings, as_json: bool) -> None:
    """Judge every policy's live version; one that cannot be judged does not hide the others."""
    require_root(root)
    from headrace.output import console, results
    from policy.judging.scorecard import scorecard

    with console.progress() as progress:
        found = scorecard(root, settings, on_progress=progress)
    if as_json:
        return console.line({"policies": found})
    for policy_id, one in found.items():
        print(f"{policy_id}: {one['error'] or 'version ' + str(one['version'])}")
        results.evaluated(one["logs"])
    return None


def _write_page(path: Path, logs: list[dict[str, Any]]) -> None:
    from headrace.output.report_page import evaluation_page

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(evaluation_page(logs), encoding="utf-8")


def _weights(store: WeightStore, name: str) -> str | int | None:
    """Parse the name of weights on the command line for `policy.judging.evaluate`."""
    if name == "live":
        return None
    if name != "latest":
        return int(name) if name.isdigit() and len(name) < 6 else name
    return _latest(store)


def _latest(store: WeightStore) -> str:
    """The digest of the candidate that was added last. Raises NothingYet."""
    from storage.errors import NothingYet

    found = store.latest()
    if found is None:
        raise NothingYet(
            f"{store.files}: no candidate yet; `headrace train` with this root makes one"
        )
    return found


def publish(
    *,
    digest: CandidateDigest = "latest",
    where: Where,
    gate: Annotated[bool, "Judge it first."] = True,
    settings: Gate,
    manifest: Manifest = None,
    canary: Annotated[
        Text, "Let it act as a canary in this share of the episodes, such as 10%."
    ] = None,
    onnx: Annotated[
        Path | None, "ONNX file that becomes the candidate; its spaces are the declared ones."
    ] = None,
    head: Annotated[
        Text,
        "What the file's outputs are: categorical, q_values, diag_gaussian, squashed_gaussian ...; "
        "default: the usual one of the action space.",
    ] = None,
    action_rule: Annotated[
        ActionRule | None,
        "Action rule of the file, as for `train`; default: sample, of q_values epsilon_greedy.",
        Meta(extra={"parse": ActionRule.parse}),
    ] = None,
    refused_exit: Annotated[int, "Exit status if it is worse."] = 1,
    waiting: WaitFor,
    as_json: Json = False,
) -> None:
    """Make a candidate the live version, if it is better than every bar.

    With --onnx the candidate is a network that was made elsewhere. With --canary its own episodes
    decide: see `canary`, `promote` and `rollback`. With --url a
    collector publishes it; the gate still uses the data of the root. Exit status 1: worse; 4:
    cannot tell, with the reasons; 5: wanted, but not served in time by a registered collector; 6:
    a pin or a canary holds the policy.
    """
    root, policy_id, url = where.root, where.policy_id, where.url
    require_root(root, policy_id)
    from headrace.output import console, results
    from policy.data.freeze import load_frozen
    from policy.inference.weight_store import WeightStore
    from policy.judging.gate import publish as run

    chosen = digest
    if onnx is not None:
        from policy.inference.own_models import publish_onnx

        if digest != "latest":
            raise ValueError(f"--onnx: expected no digest of another candidate, got {digest!r:.80}")
        how = {"policy_id": policy_id, "head": head, "action_rule": action_rule}
        chosen = publish_onnx(root, onnx, metrics={"onnx": onnx.name}, live=False, **how)
    elif head is not None or action_rule is not None:
        raise ValueError("--head and --action-rule: expected them with --onnx alone")
    elif digest == "latest":
        chosen = _latest(WeightStore(root, policy_id))
    if canary is not None:
        if url is not None or settings != Gate():
            raise ValueError(f"--canary: expected {_WITHOUT_GATE}")
        frozen = None if manifest is None else load_frozen(manifest)
        return canaries.start(
            root, policy_id, chosen, canary, waiting, frozen=frozen, as_json=as_json
        )
    if url is not None and manifest is not None:
        raise ValueError("--url: expected no --manifest, whose decisions name versions of the root")
    frozen = None if manifest is None else load_frozen(manifest)
    judge = settings if gate else None
    with _elsewhere(where) as elsewhere, console.progress() as progress:
        document = run(
            root, policy_id, chosen, judge, frozen=frozen, on_progress=progress, elsewhere=elsewhere
        )
    for note in document.get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    if not document["published"]:
        _refuse(document, refused_exit, as_json)
    fresh = not (document.get("unchanged") or document.get("already_live"))
    if fresh and url is None:  # a collector writes its own line
        version, by = document["version"], "command line"
        audited("published", policy=policy_id, version=version, by=by, candidate=chosen)
    note = f" ({results.why_published(document)})"
    return report_served(document, where, waiting, note=note, as_json=as_json)


def _refuse(document: dict[str, Any], refused_exit: int, as_json: bool) -> None:
    """Show why the gate refused, and end with the status for that."""
    from headrace.output import console, results

    results.refused(document["gate"])
    if as_json:
        console.line(document)
    worse = document["gate"]["verdict"] == "worse"
    raise typer.Exit(refused_exit if worse else CANNOT_TELL_EXIT)


def decisions(root: Root = ROOT, policy_id: PolicyId = "default", as_json: Json = False) -> None:
    """List the decisions on candidates, with reasons."""
    require_root(root, policy_id)
    from headrace.output import console, results
    from storage.weights.decisions import load_decisions

    found = load_decisions(root, policy_id)
    document = {
        "policy_id": policy_id,
        "decisions": list(found.known),
        "damaged": dict(found.damaged),
    }
    return console.line(document) if as_json else results.decisions(document)
