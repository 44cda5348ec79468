"""Headrace's front door: one command line over ingest, policy and storage.

A command is a plain function here, registered in `_command_line`; its annotations stay strings
until typer reads them, so that this file loads in a base install, which has no typer. Each command
is a lazy door: it imports what it needs, so that `--help` loads neither torch nor Arrow, and the
collector nothing but itself.

Every option is also an environment variable: HEADRACE_COLLECT_PORT for `collect --port`; those
that several commands share have one name for all, as HEADRACE_ROOT. With --json the result is
one line of JSON, and nothing else is on stdout; progress goes to stderr.

HEADRACE_DEBUG=1 shows where in the code an error came from. HEADRACE_PARENT=PID, of the process
that starts the command, makes the command die with it, whatever kills it: schedulers set it.

Exit codes: 0 fine, 1 the answer is no (verify found something, the gate refused), 2 wrong usage,
bad input or an extra that is not installed.
"""

# ruff: noqa: PLC0415 - every import inside a function here is a command's lazy door

from __future__ import annotations

import importlib
import logging
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

if TYPE_CHECKING:
    from ingest.collector import Collector
    from storage.weights import WeightStore

try:
    import typer
except ModuleNotFoundError:  # the base install: main() names the extra to install
    typer = None  # type: ignore[assignment]  # a module or nothing
else:
    Root = Annotated[
        Path,
        typer.Option(
            envvar="HEADRACE_ROOT", help="The folder that holds journal, shards and weights."
        ),
    ]
    PolicyId = Annotated[
        str, typer.Option(envvar="HEADRACE_POLICY_ID", help="Which policy, when there are several.")
    ]
    Manifest = Annotated[
        Path | None,
        typer.Option(help="Of `freeze`: use nothing else, and do it once, however often asked."),
    ]
    Json = Annotated[
        bool,
        typer.Option("--json", envvar="HEADRACE_JSON", help="Print one line of JSON instead."),
    ]
    Seed = Annotated[int, typer.Option(envvar="HEADRACE_SEED", help="Same seed, same result.")]

ROOT = Path("data/run")
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
        _follow_parent()
        _check_packages()
        _command_line()()
    except ModuleNotFoundError as missing:
        extra = EXTRA_OF.get((missing.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(
            f"this needs {missing.name}, which is not installed: pip install 'headrace[{extra}]'", 2
        )
    except Exception as error:
        if not _is_the_users(error) or os.environ.get("HEADRACE_DEBUG"):
            raise
        _fail(str(error), 2)


def _follow_parent() -> None:
    """Die with the process that HEADRACE_PARENT names; what we start in turn is not meant."""
    parent = os.environ.pop("HEADRACE_PARENT", "")
    if parent:
        from storage.parent_death import die_with_parent

        die_with_parent(int(parent))


def _is_the_users(error: Exception) -> bool:
    """Whether an error tells of input, files or a collector: all of ours do, bugs do not."""
    from ingest.errors import IngestError
    from storage.errors import StorageError

    return isinstance(error, (IngestError, StorageError, ValueError, OSError))


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
    app = typer.Typer(
        name="headrace",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"auto_envvar_prefix": "HEADRACE", "max_content_width": 100},
    )
    app.callback()(_options)
    every = (demo, up, collect, replay, freeze, train, evaluate, publish, versions, ls, verify)
    for command in every:
        app.command()(command)
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


# --- the whole way ---------------------------------------------------------------------------


def demo(
    root: Annotated[
        Path, typer.Option(help="Where its data stays; what is there is moved aside.")
    ] = ROOT / "demo",
    data: Annotated[Path, typer.Option(help="The folder of the two logs.")] = Path(
        "data/open_bandit"
    ),
    live: Annotated[bool, typer.Option(help="Part B too: learn CartPole live.")] = True,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Carry a real production log all the way to a published policy, and check it."""
    from ingest.demo import DemoFailed, make_room, run_demo, show

    make_room(root, data)
    try:
        found = run_demo(root, data, seed=seed, live=live)
    except DemoFailed as error:
        _fail(f"the demo stopped: {error}", 1)
    if as_json:
        from ingest import console

        console.line(found)
    else:
        show(found)
    raise typer.Exit(0 if found["ok"] else 1)


# --- collecting ------------------------------------------------------------------------------


def collect(
    root: Root = ROOT,
    host: Annotated[str, typer.Option(help="Loopback only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8642,
    observation: Annotated[str | None, typer.Option(help="A space such as box:4.")] = None,
    action: Annotated[str | None, typer.Option(help="A space such as discrete:2.")] = None,
    env: Annotated[str | None, typer.Option(help="A gymnasium id, for its spaces.")] = None,
    policy: Annotated[Path | None, typer.Option(help="A policy file (JSON).")] = None,
    compression: Annotated[str, typer.Option(help="Of shards: zstd or lz4.")] = "zstd",
    as_json: Json = False,
) -> None:
    """Run the collector until SIGTERM or Ctrl-C, which drain it.

    Declare a policy's spaces with --observation and --action, --env or --policy; they are kept
    under the root, and later starts need none.
    """
    from ingest import console
    from ingest.declaring import declaration_of, declare
    from ingest.server import ServeError, ServeOptions, serve

    if compression not in ("zstd", "lz4"):
        raise ValueError(f"--compression: expected zstd or lz4, got {compression!r}")
    declared = declaration_of(observation=observation, action=action, env=env, file=policy)
    if declared is not None:
        for change in declare(root, declared, spaces_only=policy is None):
            print(change, file=sys.stderr)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    running: list[Collector] = []

    def announce(address: str, collector: Collector) -> None:
        running.append(collector)
        told = {"address": address, "root": str(root), "collector_id": collector.collector_id}
        if as_json:
            return console.line({**told, "pid": os.getpid()})
        print(f"Collecting on {address} into {root} for {', '.join(collector.policies)}.")
        print(f"""Begin with:  curl --json '{{"episode_id": "first"}}' {address}/v1/episodes""")
        return print("Ctrl-C or SIGTERM drains and stops it.", flush=True)

    try:
        status = serve(ServeOptions(root, host, port, compression, version("headrace"), announce))
    except ServeError as error:
        _fail(str(error), 2)
    if running and not as_json:
        print(
            f"Stopped: {running[0].steps} steps acknowledged so far, "
            f"{running[0].totals.rows} in shards."
        )
    raise typer.Exit(status)


def replay(
    file: Annotated[Path, typer.Argument(help="CSV, JSON lines or Parquet.")],
    observation: Annotated[
        list[str],
        typer.Option(help="A column, or NAME:categories for codes of its values. Repeat it."),
    ],
    action: Annotated[str, typer.Option(help="The column of the action; :categories as well.")],
    reward: Annotated[str, typer.Option(help="The column of the reward.")],
    address: Annotated[
        str, typer.Option(envvar="HEADRACE_ADDRESS", help="Of the collector.")
    ] = "http://127.0.0.1:8642",
    action_prob: Annotated[str | None, typer.Option(help="Its probability.")] = None,
    action_logp: Annotated[str | None, typer.Option(help="Or the logarithm of it.")] = None,
    episode: Annotated[str | None, typer.Option(help="Default: a row is an episode.")] = None,
    time: Annotated[str | None, typer.Option(help="Microseconds, or ISO 8601.")] = None,
    terminated: Annotated[str | None, typer.Option(help="True on an episode's last row.")] = None,
    truncated: Annotated[str | None, typer.Option(help="Or this: a limit ended it.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN. Repeat it.")] = None,
    categories: Annotated[
        Path | None, typer.Option(help="Where codes are kept; default: beside the file.")
    ] = None,
    policy_id: Annotated[str | None, typer.Option(help="Default: the collector's only.")] = None,
    declare: Annotated[
        Path | None,
        typer.Option(help="Send nothing: declare what the columns hold under this root."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Log the rows of a file through a collector; running it twice adds nothing."""
    from ingest import console, results
    from ingest.replay import ReplayOptions
    from ingest.replay import replay as run
    from ingest.replay_words import declare_columns, tag_columns

    options = ReplayOptions(
        path=file,
        observation=observation,
        action=action,
        reward=reward,
        address=address,
        action_prob=action_prob,
        action_logp=action_logp,
        episode=episode,
        time=time,
        terminated=terminated,
        truncated=truncated,
        tags=tag_columns(tag or []),
        policy_id=policy_id,
        categories=categories,
    )
    if declare is not None:
        declared = declare_columns(declare, options)
        if as_json:
            return console.line({"root": str(declare), "policy": declared.to_json()})
        return print(f"Declared. Now: headrace collect --root {declare}")
    with console.progress() as on_progress:
        report = run(options, on_progress=on_progress)
    document = report.to_dict()
    return console.line(document) if as_json else results.replayed(document)


# --- learning and judging --------------------------------------------------------------------


def freeze(root: Root = ROOT, policy_id: PolicyId = "default", as_json: Json = False) -> None:
    """Name the ordinals at rest in a manifest; the same shards give the same file."""
    from ingest import console
    from policy.freeze import freeze as run

    frozen = run(root, policy_id)
    if as_json:
        return console.line(frozen.to_dict())
    for name, why in frozen.skipped.items():
        print(f"damaged, left out: {name}: {why}", file=sys.stderr)
    known = "known already" if frozen.unchanged else "new"
    return print(f"{frozen.rows} rows in {frozen.parts} parts: {frozen.path} ({known})")


def train(
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    algorithm: Annotated[str, typer.Option(help="ips, snips or dr.")] = "dr",
    epochs: Annotated[int | None, typer.Option(help="Passes over the log.")] = None,
    held_out: Annotated[float, typer.Option(help="Share of episodes kept for evaluate.")] = 0.3,
    checkpoint: Annotated[Path | None, typer.Option(help="Where to keep the learner.")] = None,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
    manifest: Manifest = None,
    follow: Annotated[bool, typer.Option(help="PPO on what clients do; publishes.")] = False,
    steps_per_update: Annotated[int, typer.Option(help="With --follow.")] = 256,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train on the shards; the result is a candidate, which nobody acts with yet.

    With --follow: train on what live clients do, publish after every update, until SIGTERM.
    """
    from ingest import console, results
    from policy.freeze import load_frozen
    from policy.train import ALGORITHMS
    from policy.train import train as run
    from policy.train_once import train_once

    if follow:
        return _follow(root, policy_id, steps_per_update, seed, as_json)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"--algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    chosen = ALGORITHMS[algorithm]
    settings: dict[str, Any] = {
        "epochs": epochs,
        "held_out": held_out,
        "checkpoint": checkpoint,
        "threads": threads,
        "seed": seed,
    }
    with console.progress() as told:
        if manifest is None:
            document = run(root, policy_id, chosen, on_progress=told, **settings).to_dict()
        else:
            frozen = load_frozen(manifest)
            document = train_once(root, policy_id, chosen, frozen, on_progress=told, **settings)
    return console.line(document) if as_json else results.trained(document)


def _follow(root: Path, policy_id: str, steps: int, seed: int, as_json: bool) -> None:
    from ingest import console, results
    from ingest.up import stop_on_signal
    from policy.follow import follow

    told = console.line if as_json else results.updated
    with stop_on_signal() as stop:
        result = follow(
            root, policy_id, stop=stop.is_set, steps_per_update=steps, on_update=told, seed=seed
        )
    if as_json:
        return console.line({"followed": asdict(result)})
    return print(f"Stopped at version {result.version} after {result.rows_trained} steps.")


def up(
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8642,
    observation: Annotated[str | None, typer.Option(help="A space such as box:4.")] = None,
    action: Annotated[str | None, typer.Option(help="A space such as discrete:2.")] = None,
    env: Annotated[str | None, typer.Option(help="A gymnasium id, for its spaces.")] = None,
    steps_per_version: Annotated[int, typer.Option(help="Steps acted between updates.")] = 256,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run a collector and a trainer that follows it; clients act with what they learn."""
    from ingest import console, results
    from ingest.declaring import declaration_of, declare
    from ingest.up import Up, stop_on_signal

    declared = declaration_of(observation=observation, action=action, env=env, file=None)
    if declared is not None:
        declare(root, declared, spaces_only=True)

    def told(who: str, said: dict[str, Any]) -> None:
        return console.line({who: said}) if as_json else results.heard(root, said)

    with stop_on_signal() as stop:
        settings = {"port": port, "seed": seed, "steps_per_version": steps_per_version}
        both = Up(root, policy_id, on_line=told, **settings)
        well = both.watch(stop)
        both.close()
    raise typer.Exit(0 if well else 1)


def evaluate(
    weights: Annotated[
        str, typer.Argument(help="A candidate's digest, a version's number, latest or live.")
    ] = "latest",
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    log: Annotated[
        list[Path] | None,
        typer.Option(help="Another root whose episodes, all of them, to judge by as well."),
    ] = None,
    split: Annotated[str, typer.Option(help="Of the root's own: held_out or all.")] = "held_out",
    estimator: Annotated[list[str] | None, typer.Option(help="One or more; default: all.")] = None,
    gamma: Annotated[float, typer.Option(help="Discount of a step.")] = 1.0,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    interval: Annotated[str, typer.Option(help="student or bootstrap.")] = "student",
    plot: Annotated[Path | None, typer.Option(help="A PNG of all intervals.")] = None,
    manifest: Manifest = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Estimate what weights would have earned on the logged episodes, off-policy."""
    from ingest import console, results
    from policy.judging import evaluate_logs
    from storage.weights import WeightStore

    chosen = _weights(WeightStore(root, policy_id), weights)
    with console.progress() as told:
        document = evaluate_logs(
            root,
            policy_id,
            chosen,
            others=log or (),
            manifest=manifest,
            plot=plot,
            on_progress=told,
            split=split,  # type: ignore[arg-type]  # it checks
            estimators=estimator,
            gamma=gamma,
            confidence=confidence,
            interval=interval,
            seed=seed,
        )
    return console.line(document) if as_json else results.estimates(document["logs"])


def _weights(store: WeightStore, name: str) -> str | int | None:
    """What names weights on the command line, as `policy.evaluate` takes it."""
    if name == "live":
        return None
    if name != "latest":
        return int(name) if name.isdigit() and len(name) < 6 else name
    return _latest(store)


def _latest(store: WeightStore) -> str:
    """The digest of the candidate that was added last."""
    found = store.candidates()
    if not found:
        raise ValueError(f"{store.directory}: no candidate yet; `headrace train` makes one")
    return max(found, key=lambda d: (store.directory / "candidates" / d).stat().st_mtime_ns)


def publish(
    digest: Annotated[str, typer.Argument(help="A candidate's digest, or latest.")] = "latest",
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    gated: Annotated[bool, typer.Option("--gate/--no-gate", help="Evaluate first.")] = True,
    min_ess: Annotated[float, typer.Option(help="Effective sample size that is enough.")] = 100.0,
    rule: Annotated[
        str, typer.Option(help="What must lie above the baseline: lower_bound or value.")
    ] = "lower_bound",
    baseline: Annotated[
        str, typer.Option(help="behaviour (the logging policy's value) or a number.")
    ] = "behaviour",
    estimator: Annotated[str | None, typer.Option(help="That decides; default: dr.")] = None,
    manifest: Manifest = None,
    refused_exit: Annotated[int, typer.Option(help="The status when the gate refuses.")] = 1,
    as_json: Json = False,
) -> None:
    """Make a candidate the live version, if the gate lets it pass."""
    from ingest import console
    from policy.freeze import load_frozen
    from policy.judging import Gate
    from policy.judging import publish as run
    from storage.weights import WeightStore

    chosen = _latest(WeightStore(root, policy_id)) if digest == "latest" else digest
    settings = Gate(
        min_ess=min_ess,
        rule=rule,  # type: ignore[arg-type]  # it checks
        baseline="behaviour" if baseline == "behaviour" else float(baseline),
        estimator=estimator,
    )
    frozen = None if manifest is None else load_frozen(manifest)
    with console.progress() as told:
        document = run(
            root, policy_id, chosen, settings if gated else None, frozen=frozen, on_progress=told
        )
    refused = [] if document["published"] else document["gate"]["reasons"]
    for reason in refused:
        print(f"refused: {reason}", file=sys.stderr)
    if as_json:
        console.line(document)
    elif not refused:
        passed = "the gate passed" if gated else "without a gate: nothing says that it is better"
        print(f"Version {document['version']} of {policy_id} is live ({passed}).")
    raise typer.Exit(refused_exit if refused else 0)


# --- looking ---------------------------------------------------------------------------------


def versions(root: Root = ROOT, policy_id: PolicyId = "default", as_json: Json = False) -> None:
    """List versions, what is live, and candidates."""
    from ingest import console, results
    from storage.weights import WeightStore

    store = WeightStore(root, policy_id)
    live = store.live()
    manifests = [store.manifest(number) for number in store.versions()]
    candidates = [store.candidate(digest) for digest in store.candidates()]
    document = {
        "policy_id": policy_id,
        "live": None if live is None else live.to_json(),
        "versions": [manifest.to_json() for manifest in manifests],
        "candidates": [{"digest": c.digest, **c.to_json()} for c in candidates],
    }
    return console.line(document) if as_json else results.versions(document)


def ls(root: Root = ROOT, as_json: Json = False) -> None:
    """List streams, their shards and rows, and open episodes when no collector runs."""
    from ingest import console, results
    from ingest.audit import journal_account
    from storage.errors import JournalLocked
    from storage.inventory import list_streams
    from storage.policy_files import load_declarations

    _require_folder(root)
    declared = load_declarations(root)
    listed = [one.to_dict() for one in list_streams(root, declared)]
    document = {"streams": listed, "policies": sorted(declared), "open_episodes": None, "why": ""}
    try:
        with journal_account(root) as account:
            if account is None:
                document["why"] = "there is no journal"
            else:
                known = dict.fromkeys(declared, 0) | dict(account.open_episodes)
                document["open_episodes"] = known
    except JournalLocked as error:
        document["why"] = str(error)
    return console.line(document) if as_json else results.streams(document)


def verify(
    root: Root = ROOT,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move damaged shards to quarantine/.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that every acknowledged step is at rest exactly once. No collector may run."""
    from ingest import console, results
    from ingest.audit import journal_account
    from storage.maintenance import verify as run

    _require_folder(root)
    with journal_account(root) as account, console.progress() as on_progress:
        report = run(root, account, quarantine=quarantine, on_progress=on_progress)
    document = report.to_dict()
    console.line(document) if as_json else results.verified(document)
    raise typer.Exit(0 if report.ok else 1)


def _require_folder(root: Path) -> None:
    if not root.is_dir():
        raise ValueError(f"--root: expected a folder, found none at {root}")


def _fail(message: str, code: int) -> NoReturn:
    print(f"headrace: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
