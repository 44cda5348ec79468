"""A driver's worker and N remote ones on Ray: sample from all, learn here, send weights once.

    group = WorkerGroup(
        RolloutWorker, 4, {"env_creator": make, "policy": TrainablePolicy, "num_envs": 8}
    )
    for _ in range(100):
        for batch in group.sample():
            group.local_worker.learn_on_batch(batch)
        group.sync_weights()
    group.stop()

If a remote worker dies, only its current sample is lost: a new worker replaces it and gets the
latest weights, global variables and filters. Needs the [ray] extra. Ray pickles what it sends
between its own processes; Headrace's files and messages contain no pickle.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, Self, TypeVar

from policy.inference.filters import MeanStdFilter
from policy.worker.ray_actor import ray_module
from storage.experience.multi_agent_batch import AnyBatch
from storage.wording import counted

_log = logging.getLogger("headrace.worker")
Result = TypeVar("Result")


@dataclass
class GroupStats:
    """Counts since the group was created."""

    lost: int = 0  # workers that died
    restarted: int = 0  # workers that replaced them
    weights_sent: int = 0  # versions put into Ray's store, each once


class _RemoteMethod(Protocol):
    """A method of a Ray actor; `remote` starts it and returns a reference to its result."""

    def remote(self, *args: Any, **kwargs: Any) -> Any: ...


class _RemoteWorker(Protocol):
    """The handle of a remote worker, with the methods that are called by their names."""

    set_weights: _RemoteMethod
    sync_filters: _RemoteMethod


@dataclass
class _Remote:
    """A remote worker, by its index from 1."""

    index: int
    actor: _RemoteWorker | None  # None once it has died
    version: int = -1  # of the weights that it has
    taking: Any = None  # the pending result of sending them
    failures: int = 0  # failures in a row


class WorkerGroup:
    """`local_worker` (index 0, which learns) and `num_workers` remote ones.

    `worker_args` are the constructor's; `worker_index`, `num_workers` and, for a worker that
    replaces a lost one, `incarnation` are added. `actor_options` are those of `as_remote`. A worker
    that fails more than `most_restarts` times in a row is not replaced; if none is left, `sample`
    raises RuntimeError.
    """

    def __init__(
        self,
        worker_class: type[Any],
        num_workers: int,
        worker_args: Mapping[str, Any],
        *,
        actor_options: Mapping[str, Any] | None = None,
        most_restarts: int = 5,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers: expected 1 or more, got {num_workers}")
        self._ray = ray_module()
        self._args = dict(worker_args)
        self._class = worker_class.as_remote(**(actor_options or {}))
        self._most_restarts = most_restarts
        self.num_workers = num_workers
        self.stats = GroupStats()
        self._last_loss = "none"
        self._stopped = False
        # results of workers in a call in which another worker raised, for the next call
        self._held_batches: dict[int, AnyBatch] = {}
        self._held_metrics: list[Any] = []
        self.local_worker = worker_class(**self._args, worker_index=0, num_workers=num_workers)
        self.version = 0
        self._latest: dict[str, Any] = {}  # of every policy, for new workers
        self._lives: Counter[int] = Counter()  # how many workers each index has had
        self._weights: Any = None  # their reference in Ray's store
        self._put_weights()
        self._remotes = [self._create(index) for index in range(1, num_workers + 1)]

    def __repr__(self) -> str:
        stopped = "; stopped" if self._stopped else ""
        return (
            f"WorkerGroup({counted(self.num_workers, 'worker')}, version {self.version}{stopped})"
        )

    def _create(self, index: int) -> _Remote:
        """Create a remote worker with the driver's weights, global variables and filters.

        A worker that replaces a lost one gets other random numbers, so that it does not repeat the
        lost one's episodes.
        """
        place = {"worker_index": index, "num_workers": self.num_workers}
        if self._lives[index]:
            place["incarnation"] = self._lives[index]
        self._lives[index] += 1
        actor: _RemoteWorker = self._class.remote(**self._args, **place)
        made = _Remote(index, actor)
        self._send(made, self._weights if self._is_whole else self._ray.put(self._latest))
        filters = self.local_worker.get_filters()
        actor.sync_filters.remote({name: _without_buffer(one) for name, one in filters.items()})
        return made

    # weights

    def sync_weights(
        self,
        global_vars: Mapping[str, Any] | None = None,
        *,
        policies: Collection[str] | None = None,
    ) -> int:
        """Send the driver's weights to every worker as a new version; return its number.

        They are put into Ray's store once, however many workers there are. If a worker refuses
        them, its error is raised by the next call to that worker.
        """
        self._require_running()
        self.version += 1
        if global_vars:
            self.local_worker.set_global_vars(global_vars)
        self._put_weights(policies)
        for remote in self._remotes:
            self._send(remote, self._weights)
        return self.version

    def _put_weights(self, policies: Collection[str] | None = None) -> None:
        weights = self.local_worker.get_weights(policies)
        self.local_worker.set_weights(weights, version=self.version)
        self._latest |= weights
        self._is_whole = len(weights) == len(self._latest)
        self._weights = self._ray.put(weights)
        self.stats.weights_sent += 1

    def _send(self, remote: _Remote, weights: Any) -> None:
        if remote.actor is None:
            return  # a replacement gets them when it is created
        remote.taking = remote.actor.set_weights.remote(
            weights, self.local_worker.get_global_vars() or None, version=self.version
        )
        remote.version = self.version

    def sync_filters(self) -> None:
        """Merge all workers' new filter statistics into the driver's, and send them to all.

        No observation is counted twice.
        """
        driver = self.local_worker.filters
        for one in driver.values():
            if isinstance(one, MeanStdFilter):
                one.clear_buffer()  # its statistics already include the driver's own observations
        answers, failed = self._ask("get_filters", True)
        for filters in answers.values():
            for name, theirs in filters.items():
                mine = driver[name]
                if isinstance(mine, MeanStdFilter):
                    mine.apply_changes(theirs)
        if failed is not None:
            raise failed  # the driver has merged the others' observations
        merged = {name: _without_buffer(one) for name, one in driver.items()}
        self._each("sync_filters", merged)

    # sampling

    def sample(self) -> list[AnyBatch]:
        """A sample of every live worker, in the order of their indices.

        A worker that died meanwhile is missing from the list; its replacement is included next
        time. Raises RuntimeError if no worker returned a batch, and exceptions of a worker's own
        code: then the batches of the others are kept for the next call, which does not ask those
        workers again.
        """
        answers, failed = self._ask("sample", but=self._held_batches)
        self._held_batches |= answers
        if failed is not None:
            raise failed
        batches = [batch for _, batch in sorted(self._held_batches.items(), key=itemgetter(0))]
        self._held_batches = {}
        if not batches:
            raise RuntimeError(
                f"sample: none of {counted(self.num_workers, 'remote worker')} answered; "
                f"lost so far: {self.stats.lost}, the last one with: {self._last_loss}"
            )
        return batches

    def _each(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every remote worker in parallel; return the results of the live ones."""
        answers, failed = self._ask(method, *args)
        if failed is not None:
            raise failed
        return list(answers.values())

    def _ask(
        self, method: str, *args: Any, but: Collection[int] = ()
    ) -> tuple[dict[int, Any], BaseException | None]:
        """Call a method on all live workers, except those with an index in `but`.

        Returns (results by index, the first error of a worker's own code); other errors are logged.
        One worker's error does not affect the results of others.
        """
        self._require_running()
        self._revive()
        asked = [
            (remote, getattr(remote.actor, method).remote(*args))
            for remote in self._remotes
            if remote.index not in but
        ]
        answers: dict[int, Any] = {}
        failures: list[BaseException] = []
        for remote, ref in asked:
            taking, remote.taking = remote.taking, None
            if taking is not None:
                self._answer(remote, taking, failures)
            answer = _NOTHING if remote.actor is None else self._answer(remote, ref, failures)
            if answer is not _NOTHING:
                answers[remote.index] = answer
                remote.failures = 0
        for error in failures[1:]:
            _log.warning("%s: another worker raised as well: %s", method, _first_line(error))
        return answers, failures[0] if failures else None

    def _answer(self, remote: _Remote, ref: Any, failures: list[BaseException]) -> Any:
        """A worker's result; _NOTHING if it died or its own code raised."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            self.stats.lost += 1
            remote.failures += 1
            remote.actor = None
            self._last_loss = _first_line(error)
            _log.warning("remote worker %d was lost: %s", remote.index, _first_line(error))
        except self._ray.exceptions.RayTaskError as error:
            failures.append(_own_error(error))
        return _NOTHING

    def _require_running(self) -> None:
        if self._stopped:
            raise RuntimeError("this group was stopped")

    def _revive(self) -> None:
        """Replace the workers that died."""
        revived = []
        for remote in self._remotes:
            if remote.actor is None and remote.failures <= self._most_restarts:
                failures = remote.failures
                remote = self._create(remote.index)
                remote.failures = failures
                self.stats.restarted += 1
            if remote.actor is not None:
                revived.append(remote)
        self._remotes = revived

    # every worker

    def foreach_worker(self, func: Callable[[Any], Result]) -> list[Result]:
        """Call `func(worker)` with the driver's worker and every live remote one, in order.

        Ray pickles the function and its results.
        """
        self._require_running()
        return [func(self.local_worker), *self._each("apply", func)]

    def foreach_policy(self, func: Callable[[Any, str], Result]) -> list[Result]:
        """Call `func(policy, policy id)` for every policy of every worker, the driver's first."""
        found = self.foreach_worker(lambda worker: worker.foreach_policy(func))
        return [result for results in found for result in results]

    def get_metrics(self) -> list[Any]:
        """The metrics of all workers since the last call.

        If a worker's own code raises, the next call includes the metrics of the others.
        """
        self._require_running()
        self._held_metrics += self.local_worker.get_metrics()
        answers, failed = self._ask("get_metrics")
        self._held_metrics += [one for metrics in answers.values() for one in metrics]
        if failed is not None:
            raise failed
        drained, self._held_metrics = self._held_metrics, []
        return drained

    @property
    def remote_workers(self) -> list[Any]:
        """The actor handles of the workers that are not known to be dead."""
        return [remote.actor for remote in self._remotes if remote.actor is not None]

    def stop(self) -> None:
        """Stop all workers and their processes; any other call then raises RuntimeError."""
        self._stopped = True
        self.local_worker.stop()
        for actor in self.remote_workers:
            self._ray.kill(actor)
        self._remotes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_NOTHING: Any = object()


def _own_error(error: Any) -> BaseException:
    """The error that the worker's own code raised, as it would be raised here."""
    own: BaseException = error.as_instanceof_cause()
    own.__cause__ = error
    return own


def _without_buffer(one: Any) -> Any:
    """A plain copy with an empty buffer."""
    if not isinstance(one, MeanStdFilter):
        return one
    copied = one.as_serialisable()
    copied.clear_buffer()
    return copied


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
