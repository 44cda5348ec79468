"""The content of a root as one dict: rewards and data over time, versions, decisions.

    overview(root, "default")["data"]["bars"]      # [{"hour", "version", "source", "steps", ...}]

`headrace report` draws it. Memory grows with the number of hours and versions, not with rows.
"""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import numpy as np

from policy.progress import Progress, no_progress
from storage.errors import StorageError
from storage.experience.reward_history import RewardHistory
from storage.experience.sample_batch import (
    ACTION_LOGP,
    AGENT_ID,
    EPISODE_ORDINAL,
    REWARDS,
    STREAM,
    SampleBatch,
    T,
)
from storage.experience.step_columns import SOURCES
from storage.objects.opening import Root, local_folder
from storage.reading.shard_reader import ShardReader
from storage.weights.decisions import load_decisions
from storage.weights.off_chain import described
from storage.weights.store import WeightFolder

Document: TypeAlias = dict[str, Any]
Bars: TypeAlias = dict[tuple[int, int, str], tuple[int, float, int]]

HOUR = 3_600_000_000
RECEIVED, VERSION, SOURCE, ENDED = "received_ts", "policy_version", "source", "ended"
EPISODE = (STREAM, EPISODE_ORDINAL, AGENT_ID)


def overview(
    root: Root,
    policy_id: str,
    *,
    retry_for: float = 60.0,
    on_progress: Progress = no_progress,
) -> Document:
    """Read the data, versions and decisions of a policy. Times are microseconds since the epoch.

    `history` has the rewards by version and time, as a collector keeps them. `data` has `bars`
    (steps, summed rewards and ended episodes by hour of arrival, version and source), `steps`,
    `skipped` shards, and `why` (the error, if the shards cannot be read). The other keys are
    `live`, `served`, `versions` with their metrics, `damaged` files, and `decisions`, oldest first.
    `retry_for`: seconds for which an unreadable shard is tried again.
    """
    store = WeightFolder(root, policy_id)
    try:
        live = store.live()
        problem = None
    except StorageError as error:
        live, problem = None, str(error)
    versions, damaged = described(store)
    decided = load_decisions(root, policy_id)
    history = RewardHistory()
    now = time.time()
    return {
        "root": str(folder.resolve() if (folder := local_folder(root)) else root),
        "policy_id": policy_id,
        "made": int(now * 1e6),
        "data": _data(root, policy_id, history, retry_for, on_progress),
        "history": history,
        "live": None if live is None else live.to_json(),
        "served": [one.to_json() for one in store.served.registered(now)],
        "versions": versions,
        "damaged": {
            **({"live.json": problem} if problem else store.pointer_damage()),
            **{f"version {number}": why for number, why in damaged.items()},
            **decided.damaged,
        },
        "decisions": list(decided.known),
    }


def _data(
    root: Root, policy_id: str, history: RewardHistory, retry_for: float, on_progress: Progress
) -> Document:
    bars: Bars = {}
    returns = _Returns(history)
    rows = 0
    try:
        with ShardReader(
            root,
            policy_id=policy_id,
            columns=(RECEIVED, VERSION, SOURCE, REWARDS, ENDED, ACTION_LOGP, T, *EPISODE),
            training_disabled=True,
            retry_for=retry_for,
        ) as reader:
            for batch in reader:
                _add(bars, batch)
                returns.add(batch)
                rows += batch.count
                on_progress("reading", rows, None)
            skipped = dict(reader.stats.excluded_shards)
    except (StorageError, OSError) as error:
        return {"bars": [], "steps": 0, "skipped": {}, "why": str(error)}
    named = [
        dict(zip(("hour", "version", "source"), key, strict=True))
        | dict(zip(("steps", "rewards", "episodes"), value, strict=True))
        for key, value in sorted(bars.items())
    ]
    return {"bars": named, "steps": rows, "skipped": skipped, "why": None}


class _Returns:
    """Adds batches to a history; the episodes of a batch may go on in a later one."""

    def __init__(self, history: RewardHistory) -> None:
        self._history = history
        self._open: dict[tuple[Any, ...], tuple[int, float]] = {}

    def add(self, batch: SampleBatch) -> None:
        came, versions = (np.asarray(batch[name], np.int64) for name in (RECEIVED, VERSION))
        rewards, logp = (np.asarray(batch[name], np.float64) for name in (REWARDS, ACTION_LOGP))
        self._history.add_steps(came, versions, rewards, logp)
        changed = np.zeros(batch.count, bool)
        changed[:1] = True
        for name in EPISODE:
            changed[1:] |= batch[name][1:] != batch[name][:-1]
        starts = np.flatnonzero(changed)
        lasts = np.append(starts[1:], batch.count) - 1
        acted, earned = versions[starts], np.add.reduceat(rewards, starts)
        begun = np.asarray(batch[T])[starts] == 0
        ended = np.array([batch[ENDED][at] is not None for at in lasts.tolist()])
        for at in np.flatnonzero(~(begun & ended)).tolist():
            key = tuple(batch[one][starts[at]] for one in EPISODE)
            first, before = self._open.pop(key, (None, 0.0))
            version = int(acted[at]) if begun[at] else first
            earned[at] += before
            if version is None:  # its beginning is not there
                ended[at] = False
            elif ended[at]:
                acted[at] = version
            else:
                self._open[key] = version, float(earned[at])
        self._history.add("returns", came[lasts[ended]], acted[ended], earned[ended])


def _add(bars: Bars, batch: SampleBatch) -> None:
    hours = np.asarray(batch[RECEIVED], np.int64) // HOUR
    sources = np.asarray(batch[SOURCE]).astype(str)
    numbers = np.searchsorted(sorted(SOURCES), sources)
    versions = np.asarray(batch[VERSION], np.int64)
    keys, inverse = np.unique(np.stack([hours, versions, numbers]), axis=1, return_inverse=True)
    group = inverse.reshape(-1)
    size = keys.shape[1]
    ended = np.array([word is not None for word in batch[ENDED].tolist()], np.float64)
    steps = np.bincount(group, minlength=size)
    rewards = np.bincount(group, np.asarray(batch[REWARDS], np.float64), size)
    episodes = np.bincount(group, ended, size)
    for i, (hour, version, number) in enumerate(keys.T.tolist()):
        key = hour * HOUR, version, sorted(SOURCES)[number]
        known = bars.get(key, (0, 0.0, 0))
        bars[key] = (
            known[0] + int(steps[i]),
            known[1] + float(rewards[i]),
            known[2] + int(episodes[i]),
        )
