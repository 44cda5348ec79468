"""Shards of a root: the episodes that a collector wrote, for another root."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from ingest.importing.engine import Workspace
from ingest.importing.formats.recipes import (
    ENDED,
    EPISODE,
    REWARDS,
    Recipe,
    StepArrays,
    actions_option,
    batches_of_rows,
    ended,
    with_next,
)
from ingest.importing.options import ImportOptions
from ingest.importing.readers import Blocks, numbered
from ingest.protocol.errors import ImportFailed
from storage.experience.episode import DEFAULT_AGENT, Episode, encode_tags
from storage.experience.interfaces import ReaderError
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import Discrete, Space
from storage.spaces.leaves import leaves

_STEP = ("rewards", "action_logp", "policy_version", "pass_prob", "ts", "infos")


def headrace(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """A root, its shards or one of them; of several policies, those of `policy_id`."""
    unit = _ShardsUnit(path, options.policy_id)
    names = unit.names()
    observation, action = unit.spaces
    observed = [name for name in names if name.partition(".")[0] == "obs"]
    acted = [name for name in names if name.partition(".")[0] == "actions"]
    coded = {*_coded(observation, "obs"), *_coded(action, "actions")}
    floats = any(leaf.dtype.kind == "f" for leaf in leaves(action) if not leaf.is_text)
    found = {
        "observation": [name + ":categories" * (name in coded) for name in observed],
        "final_observation": [f"next.{name}" for name in observed],
        "action": [name + ":categories" if name in coded else name for name in acted]
        if coded & {*acted}
        else actions_option(acted, floats),
        "reward": REWARDS,
        "action_logp": "action_logp",
        "sample_prob": "pass_prob",
        "episode": EPISODE,
        "time": "ts",
        "terminated": ENDED,
        "missing": "value",
        "shards": True,
    }
    return Recipe([unit], found)


def _coded(space: Space, prefix: str) -> Iterator[str]:
    """The columns whose codes have names."""
    for leaf in leaves(space):
        if isinstance(leaf.space, Discrete) and leaf.space.names:
            yield leaf.column(prefix)


class _ShardsUnit:
    """The episodes of some shards, in the order in which a reader joins their parts."""

    once = False

    def __init__(self, path: Path, policy_id: str | None) -> None:
        self.label, self._path, self._policy_id = path.name, path, policy_id
        self._names: list[str] = []
        self.spaces: tuple[Space, Space]

    def names(self) -> list[str]:
        if not self._names:
            rows = next(self._episodes(), None)
            if rows is None:
                raise ImportFailed(f"{self._path}: expected shards with episodes, got none")
            self._names = list(rows)
        return self._names

    def digest(self) -> str | None:
        """A digest of the names of the shards, which have digests of their content."""
        files = sorted(file.name for file in self._path.rglob("*.parquet"))
        return hashlib.sha256("\n".join(files or [self._path.name]).encode()).hexdigest()

    def blocks(self, columns: Sequence[str]) -> Blocks:
        own = [name for name in columns if name in self.names()]
        yield from numbered(batches_of_rows(self._episodes(), own, self._path), own)

    def _episodes(self) -> Iterator[StepArrays]:
        chosen = ("obs", "actions", *_STEP)
        reader = ShardReader(
            self._path,
            policy_id=self._policy_id,
            mode="episodes",
            columns=chosen,
            names=True,
            incomplete=True,
            training_disabled=True,
        )
        with closing(reader):
            try:
                policies: set[str] = set()
                for episode in reader.episodes():
                    self.spaces = reader.spaces or self.spaces
                    policies.add(episode.policy_id)
                    if len(policies) > 1:
                        text = f"one policy, got {', '.join(sorted(policies))}: give policy_id"
                        raise ImportFailed(f"{self._path}: expected {text}")
                    yield _rows(episode)
            except ReaderError as error:
                raise ImportFailed(f"{self._path}: {error}") from error


def _rows(episode: Episode) -> StepArrays:
    if episode.agent_id != DEFAULT_AGENT:
        got = f"the track of {episode.agent_id!r}"
        raise ImportFailed(f"{episode.episode_id}: expected an episode of one agent, got {got}")
    columns = episode.columns
    steps = len(columns[REWARDS])
    seen = {name: column for name, column in columns.items() if name.partition(".")[0] == "obs"}
    if episode.final_obs is not None:
        for path, value in episode.final_obs.items():
            name = f"obs.{path}" if path else "obs"
            seen[name] = np.concatenate([seen[name], np.asarray(value)[None]])
    rows = {
        EPISODE: np.full(steps, episode.episode_id),
        **with_next(seen, steps),
        **{n: column for n, column in columns.items() if n.partition(".")[0] == "actions"},
        **{name: columns[name] for name in _STEP},
        ENDED: ended(steps, episode.terminated),
        "training_enabled": np.full(steps, episode.training_enabled),
        "tags": np.full(steps, encode_tags(episode.tags, episode.episode_id), object),
        "continues": np.full(steps, episode.continues, object),
    }
    logp = columns["action_logp"]
    rows["action_logp"] = np.ma.MaskedArray(logp, np.isnan(logp))
    return rows
