"""Runs in experiment trackers: TensorBoard, MLflow and Weights & Biases.

    run = begin("tensorboard", folder, "shop")
    run.note({"lr": 0.001})                 # settings, a manifest's digest, a verdict
    run.measure({"loss": 0.2}, 4000)        # numbers, by updates of a log or rows of clients
    run.close()
    continue_run(run.uri)                   # the same run, such as for an evaluation

Trouble with a tracker is a warning: no training fails because of it. Each tracker stores on this
machine, under `folder`, unless its own environment variables name a server (MLFLOW_TRACKING_URI,
WANDB_MODE). Its package is imported when a run begins.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from storage.wording import counted

log = logging.getLogger("headrace.tracking")


class TrackedRun(Protocol):
    """A run of one tracker. `uri` names it, for `continue_run`."""

    @property
    def uri(self) -> str: ...

    def note(self, values: Mapping[str, Any], /) -> None:
        """Record single values; a later one of the same name replaces the earlier one."""

    def measure(self, values: Mapping[str, float], step: int, /) -> None:
        """Record numbers at a step."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in a folder; notes are texts."""

    def __init__(self, place: str, name: str, run: str | None) -> None:
        import tensorboard  # noqa: F401, PLC0415  an optional extra, which torch's writer needs
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  an optional extra

        folder = place if run else f"{place}/{name}-{secrets.token_hex(4)}"
        self.uri = f"tensorboard:{folder}#{run or Path(folder).name}"
        self._writer = SummaryWriter(folder)

    def note(self, values: Mapping[str, Any], /) -> None:
        for name, value in values.items():
            self._writer.add_text(name, value if isinstance(value, str) else json.dumps(value))

    def measure(self, values: Mapping[str, float], step: int, /) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of an experiment; notes are tags, which, unlike parameters, may change."""

    def __init__(self, place: str, name: str, run: str | None) -> None:
        import alembic  # noqa: F401, PLC0415  an optional extra, which a file of SQLite needs
        from mlflow.tracking import MlflowClient  # noqa: PLC0415  an optional extra

        if run is None:
            Path(place).mkdir(parents=True, exist_ok=True)
            place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place}/mlflow.db"
        self._client = MlflowClient(tracking_uri=place)
        if run is None:
            known = self._client.get_experiment_by_name(name)
            number = known.experiment_id if known else self._client.create_experiment(name)
            run = self._client.create_run(number).info.run_id
        self.uri, self._run = f"mlflow:{place}#{run}", run

    def note(self, values: Mapping[str, Any], /) -> None:
        for name, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value)
            self._client.set_tag(self._run, name, text)

    def measure(self, values: Mapping[str, float], step: int, /) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WandB:
    """A run of a project, offline by default; notes are its summary."""

    def __init__(self, place: str, name: str, run: str | None) -> None:
        import wandb  # noqa: PLC0415  an optional extra

        Path(place).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=name,
            dir=place,
            id=run,
            resume=None if run is None else "allow",
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]  # checked there
            settings=wandb.Settings(silent=True),
        )
        self.uri = f"wandb:{place}#{self._run.id}"

    def note(self, values: Mapping[str, Any], /) -> None:
        self._run.summary.update(dict(values))

    def measure(self, values: Mapping[str, float], step: int, /) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Tolerant:
    """A run that warns of its first failure, and then records nothing more."""

    def __init__(self, run: TrackedRun) -> None:
        self.uri = run.uri
        self._run: TrackedRun | None = run

    def note(self, values: Mapping[str, Any], /) -> None:
        self._do(lambda run: run.note(values))

    def measure(self, values: Mapping[str, float], step: int, /) -> None:
        self._do(lambda run: run.measure(values, step))

    def close(self) -> None:
        self._do(lambda run: run.close())

    def _do(self, call: Callable[[TrackedRun], None]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:  # of any kind: each tracker has its own
            self._run = None
            log.warning("nothing more is recorded in the run %s: %s", self.uri, error)


TRACKERS: Mapping[str, Callable[[str, str, str | None], TrackedRun]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}


def begin(tracker: str, folder: Path | str, name: str) -> TrackedRun:
    """Begin a run of a tracker. Raises ValueError for an unknown one, ImportError without it."""
    if tracker not in TRACKERS:
        raise ValueError(f"track: expected one of {', '.join(TRACKERS)}, got {tracker!r:.80}")
    return _Tolerant(TRACKERS[tracker](str(Path(folder).resolve()), name, None))


def continue_run(uri: str, name: str = "") -> TrackedRun:
    """A run that was begun before, by its `uri`.

    Raises ValueError, ImportError, FileNotFoundError for one that is not on this machine, and what
    the tracker raises, as do the methods of the run.
    """
    tracker, _, rest = uri.partition(":")
    place, _, run = rest.rpartition("#")
    if tracker not in TRACKERS or not place or not run:
        raise ValueError(f"run: expected tracker:place#run, got {uri!r:.200}")
    if tracker != "mlflow" and not Path(place).is_dir():
        raise FileNotFoundError(f"expected the folder {place}, which is not there")
    return TRACKERS[tracker](place, name, run)


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a training under the names that they have in a run."""
    return {f"train/{name}": float(value) for name, value in metrics.items()}


def report_judgement(metrics: Mapping[str, Any], name: str, judged: Mapping[str, Any]) -> None:
    """Add a judgement to the run that a candidate's metrics name, if any.

    `judged` has some of `verdict`, `reasons`, `target` (estimates) and `version`. Trouble with the
    tracker is a warning: no judgement or publication fails because of it.
    """
    uri = metrics.get("run")
    if not uri:
        return
    numbers = {
        f"estimate/{one['name']}{suffix}": float(value)
        for one in judged.get("target") or ()
        for suffix, value in (
            ("", one["value"]),
            *zip(("/low", "/high"), one["interval"] or (), strict=False),
        )
        if value is not None
    }
    notes = {k: judged[k] for k in ("verdict", "version") if judged.get(k) is not None}
    reasons = judged.get("reasons")
    notes |= {"reasons": "; ".join(reasons)} if reasons else {}
    try:
        run = continue_run(str(uri), name)
        run.measure(numbers, int(metrics.get("rows_trained") or 0))
        run.note(notes)
        run.close()
    except Exception as error:  # of any kind: each tracker has its own
        text = "%s and %s of a judgement are not in the run %s: %s"
        log.warning(text, counted(len(numbers), "number"), counted(len(notes), "note"), uri, error)
