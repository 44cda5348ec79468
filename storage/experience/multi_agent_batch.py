"""The batches of several policies, and the environment steps that they belong to.

    both = MultiAgentBatch({"seller": sellers, "buyer": buyers}, env_steps=200)
    both.env_steps(), both.agent_steps()        # 200, 350
    for piece in both.timeslices(50): ...       # 50 steps of the environment each

An environment step is one (episode, t), with all agents that act in it. Rows of episodes with
several agents have it in `env_t`, whether they come from a collector or from a worker; their `t` is
then each agent's own consecutive number, which learners use. Such episodes are identified by
collector and `eps_id`, because agents of one episode may be in the streams of different policies.

Pure, like `storage.experience.sample_batch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from storage.experience.compressed_columns import Compression
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.sample_batch import (
    ENV_T,
    EPISODE_ORDINAL,
    EPS_ID,
    STREAM,
    BatchError,
    SampleBatch,
    T,
    concat_samples,
)
from storage.wording import counted

IntArray: TypeAlias = npt.NDArray[np.intp]


class MultiAgentBatch:
    """Batches by policy id, in `policy_batches`.

    `count` and `len()` are environment steps; `total` and `agent_steps()` count every agent's.
    """

    def __init__(self, policy_batches: Mapping[str, SampleBatch], env_steps: int) -> None:
        if env_steps < 0:
            raise BatchError(f"env_steps: expected 0 or more, got {env_steps}")
        self.policy_batches = dict(policy_batches)
        self.count = env_steps

    def __getitem__(self, policy_id: str) -> SampleBatch:
        try:
            return self.policy_batches[policy_id]
        except KeyError:
            known = sorted(self.policy_batches)
            raise KeyError(f"no policy {policy_id!r}; the policies are {known}") from None

    def __len__(self) -> int:
        return self.count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiAgentBatch):
            return NotImplemented
        return self.count == other.count and self.policy_batches == other.policy_batches

    __hash__ = None  # type: ignore[assignment]  # a batch is mutable

    def __repr__(self) -> str:
        return f"MultiAgentBatch({counted(self.count, 'env step')}; {self.policy_batches})"

    # sizes

    def env_steps(self) -> int:
        """Steps of the environment."""
        return self.count

    def agent_steps(self) -> int:
        """Steps of all agents together."""
        return sum(batch.agent_steps() for batch in self.policy_batches.values())

    @property
    def total(self) -> int:
        """The number of steps of all agents, as `agent_steps()`."""
        return self.agent_steps()

    @property
    def nbytes(self) -> int:
        """Bytes of the columns of all policies."""
        return sum(batch.nbytes for batch in self.policy_batches.values())

    # to and from batches of one policy

    @staticmethod
    def wrap_as_needed(
        policy_batches: Mapping[str, SampleBatch], env_steps: int
    ) -> SampleBatch | MultiAgentBatch:
        """The default policy's batch if there is no other, else a MultiAgentBatch."""
        if set(policy_batches) == {DEFAULT_POLICY}:
            return policy_batches[DEFAULT_POLICY]
        return MultiAgentBatch(policy_batches, env_steps)

    @staticmethod
    def of(batch: SampleBatch | MultiAgentBatch) -> MultiAgentBatch:
        """The batch itself, or a batch of the default policy wrapped: undoes `wrap_as_needed`."""
        if isinstance(batch, MultiAgentBatch):
            return batch
        return MultiAgentBatch({DEFAULT_POLICY: batch}, batch.env_steps())

    @staticmethod
    def concat_samples(batches: Sequence[SampleBatch | MultiAgentBatch]) -> MultiAgentBatch:
        """Concatenate each policy's rows, and add up the environment steps.

        Raises BatchError if a policy's columns differ.
        """
        grouped: dict[str, list[SampleBatch]] = {}
        wrapped = [MultiAgentBatch.of(batch) for batch in batches]
        for batch in wrapped:
            for name, rows in batch.policy_batches.items():
                grouped.setdefault(name, []).append(rows)
        joined = {name: concat_samples(rows) for name, rows in grouped.items()}
        return MultiAgentBatch(joined, sum(batch.count for batch in wrapped))

    # parts

    def timeslices(self, size: int) -> Iterator[MultiAgentBatch]:
        """Batches of `size` environment steps; the last one may be shorter.

        All agents' rows of one environment step stay together. Episodes come in the order of their
        first rows, their steps in the order of t. Raises BatchError if columns that identify the
        steps are missing.
        """
        if size < 1:
            raise BatchError(f"timeslices: expected a size of 1 or more, got {size}")
        _, steps = self._identities()
        for start in range(0, _total(steps), size):
            stop = min(start + size, _total(steps))
            masks = {name: (start <= s) & (s < stop) for name, s in steps.items()}
            yield self._where(masks, steps)

    def split_by_episode(self) -> list[MultiAgentBatch]:
        """One batch per episode, with all its agents, in the order of their first rows."""
        episodes, steps = self._identities()
        return [
            self._where({name: e == number for name, e in episodes.items()}, steps)
            for number in range(_total(episodes))
        ]

    def _where(self, masks: Mapping[str, Any], steps: Mapping[str, IntArray]) -> MultiAgentBatch:
        """The masked rows in the order of their steps; a policy without any is omitted."""
        pieces, seen = {}, []
        for name, mask in masks.items():
            rows = np.flatnonzero(mask)
            if len(rows):
                order = rows[np.argsort(steps[name][rows], kind="stable")]
                pieces[name] = self.policy_batches[name].take(order)
                seen.append(steps[name][rows])
        return MultiAgentBatch(pieces, len(np.unique(np.concatenate(seen))))

    def _identities(self) -> tuple[dict[str, IntArray], dict[str, IntArray]]:
        """By policy, for each row (N,): the number of its episode, and of its environment step."""
        filled = {name: batch for name, batch in self.policy_batches.items() if batch.count}
        if not filled:
            return {}, {}
        joint = all(ENV_T in batch for batch in filled.values())
        whole = concat_samples([b.select(_identity(name, b, joint)) for name, b in filled.items()])
        labels = np.zeros(whole.count, np.intp)
        for name in (n for n in (STREAM, EPISODE_ORDINAL, EPS_ID) if n in whole):
            values, codes = np.unique(whole[name], return_inverse=True)
            if joint and name == STREAM:  # {collector}-{schema}
                collectors = [str(stream).rpartition("-")[0] for stream in values]
                values, places = np.unique(collectors, return_inverse=True)
                codes = places[codes]
            labels = np.unique(labels * len(values) + codes, return_inverse=True)[1]
        first = np.unique(labels, return_index=True)[1]
        episode = np.argsort(np.argsort(first))[labels]  # numbered by first row
        pairs = np.stack([episode, whole[ENV_T if joint else T]], axis=1)
        step = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
        cuts = np.cumsum([batch.count for batch in filled.values()])[:-1]
        return tuple(  # type: ignore[return-value]  # two
            dict(zip(filled, np.split(column, cuts), strict=True)) for column in (episode, step)
        )

    # columns

    def copy(self, *, shallow: bool = False) -> MultiAgentBatch:
        """A copy with its own, writable arrays; with `shallow`, one that shares the arrays."""
        copies = {name: b.copy(shallow=shallow) for name, b in self.policy_batches.items()}
        return MultiAgentBatch(copies, self.count)

    def without_rows(self) -> MultiAgentBatch:
        """The same policies and columns, without rows."""
        return MultiAgentBatch({k: b.without_rows() for k, b in self.policy_batches.items()}, 0)

    def compress(
        self,
        *,
        bulk: bool = False,
        columns: Sequence[str] | None = None,
        codec: Compression = "zstd",
    ) -> None:
        """`SampleBatch.compress` of every policy's batch."""
        for batch in self.policy_batches.values():
            batch.compress(bulk=bulk, columns=columns, codec=codec)

    def decompress_if_needed(self, columns: Sequence[str] | None = None) -> MultiAgentBatch:
        """Undo `compress` in place; returns this batch."""
        for batch in self.policy_batches.values():
            batch.decompress_if_needed(columns)
        return self

    def to_torch(self, device: Any = None, *, dtype: Any = None) -> dict[str, dict[str, Any]]:
        """`SampleBatch.to_torch` by policy id."""
        return {k: b.to_torch(device, dtype=dtype) for k, b in self.policy_batches.items()}

    def to_arrow(self) -> dict[str, Any]:
        """`SampleBatch.to_arrow` by policy id, as policies may have different columns."""
        return {k: b.to_arrow() for k, b in self.policy_batches.items()}

    def to_pandas(self) -> dict[str, Any]:
        """`SampleBatch.to_pandas` by policy id, as policies may have different columns."""
        return {k: b.to_pandas() for k, b in self.policy_batches.items()}


def _total(numbers: Mapping[str, IntArray]) -> int:
    return int(max((n.max(initial=-1) for n in numbers.values()), default=-1)) + 1


def _identity(policy_id: str, batch: SampleBatch, joint: bool) -> list[str]:
    """The columns that identify a row's environment step. Raises BatchError if one is missing."""
    stream = [STREAM] if STREAM in batch else []
    if joint:
        names = [*stream, EPS_ID, ENV_T]
    else:
        names = [*([EPISODE_ORDINAL, *stream] if EPISODE_ORDINAL in batch else [EPS_ID]), T]
    missing = [name for name in names if name not in batch]
    if missing:
        raise BatchError(f"policy {policy_id!r}: expected the columns {names}, missing {missing}")
    return names


AnyBatch: TypeAlias = SampleBatch | MultiAgentBatch
"""What a worker samples and learns from: a batch of one policy, or of several."""
