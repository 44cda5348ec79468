"""Reading multi-agent episodes: the streams of several policies as one sequence of batches.

    with MultiAgentReader("run", batch_size=2000) as reader:
        for batch in reader:                       # MultiAgentBatch
            worker.learn_on_batch(batch)

Every agent's run through an episode is a track in the stream of its own policy's spaces. There is a
reader for each policy, which returns whole tracks. Here tracks are joined into episodes by
collector and `eps_id`, and their steps by `env_t`. An episode is returned when all its tracks are
there: tracks that ended with it state how many there are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations
from storage.experience.endings import UNOBSERVED
from storage.experience.interfaces import EndOfInput, InputReader, ReaderError, ReaderState
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import (
    AGENT_ID,
    AGENTS,
    ENV_T,
    EPISODE_ORDINAL,
    EPS_ID,
    SampleBatch,
    T,
)
from storage.reading.agent_joiner import JointEpisode, Ready, Track, TrackJoiner, rows_by_policy
from storage.reading.batching import segment_starts
from storage.reading.exclusion import ReaderStats
from storage.reading.ledger import Ledger
from storage.reading.loading import DEFAULT_COLUMNS, ENDED, STREAM_INDEX
from storage.reading.objects_source import Roots, stores_at
from storage.reading.position import FORMAT_VERSION, require_keys
from storage.reading.prefetch import deadline_after
from storage.reading.shard_reader import Left, Select, ShardReader
from storage.reading.sources import POLL_INTERVAL, ShardSource
from storage.system.backoff import RETRY_FOR
from storage.wording import counted

PATIENCE = 60.0  # s
MOST_WAITING_BYTES = 256_000_000

_RECEIVED = "received_ts"
_ALL = 2**62

Identity: TypeAlias = tuple[str, str, int]


@dataclass(slots=True)
class JointStats:
    """What a reader has done since it was created. `readers`: the statistics by policy."""

    episodes: int = 0  # returned to the caller
    env_steps: int = 0
    agent_steps: int = 0
    waiting: int = 0  # episodes of which only some tracks are here
    waiting_bytes: int = 0
    # returned and maybe incomplete: why -> episodes
    partial: dict[str, int] = field(default_factory=dict)
    readers: dict[str, ReaderStats] = field(default_factory=dict)


class _TrackReader(ShardReader):
    """A `ShardReader` of one policy's whole tracks.

    `arrival` is notified when there may be more. `ended`: the input has ended. `reached`:
    (collector, microseconds since the epoch) of the latest track.
    """

    def __init__(
        self,
        roots: Roots | None,
        policy: PolicyDeclaration,
        arrival: threading.Condition,
        columns: Sequence[str] | None,
        **options: Any,
    ) -> None:
        chosen = DEFAULT_COLUMNS if columns is None else columns
        own = EPS_ID, AGENT_ID, ENV_T, AGENTS, _RECEIVED
        super().__init__(
            roots,
            policy_id=policy.policy_id,
            schema_id=policy.schema_id,
            mode="episodes",
            eager=True,
            columns=(*dict.fromkeys((*chosen, *own)),),
            **options,
        )
        self._brings_default = columns is None
        self._columns -= {AGENTS, _RECEIVED}.difference(chosen)
        self._policy_id, self._arrival = policy.policy_id, arrival
        self.ended, self.reached = False, ("", -1)

    @property
    def filled(self) -> bool:
        """Whether `tracks` would return at once."""
        return self._prefetcher is None or self._prefetcher.filled

    def tracks(self, timeout: float | None) -> list[Track]:
        """The whole tracks that are available; none after `timeout` seconds. Raises EndOfInput."""
        try:
            found = self._split(self._take(_ALL, timeout))
        except EndOfInput:
            self.ended = True
            raise
        if found:
            self.reached = found[-1].episode[0], found[-1].received
        return found

    def ready(self, left: Left) -> bool:
        """Whether the rows of the position were read again within the time that is left."""
        return self._start(left)

    def restored(self) -> list[Track]:
        """The tracks of the restored position, read again; call it once, after `ready`.

        Rows that are in no shard any more are counted in `stats.lost`.
        """
        return self._split(self._cutter.take(_ALL)) if self._cutter.rows else []

    def position(self, held: Sequence[Track]) -> dict[str, Any]:
        """Like `state_dict`, including rows of its tracks among those that the caller holds."""
        return self._position([t.rows for t in held if t.policy_id == self._policy_id])

    def public(self, rows: SampleBatch) -> SampleBatch:
        """The columns that were asked for, and those that identify the steps."""
        return self._public(rows)

    def _split(self, rows: SampleBatch) -> list[Track]:
        if not rows.count:
            return []
        placed = rows.select(list(rows))
        placed[ENV_T] = np.where(rows[ENV_T] < 0, rows[T], rows[ENV_T])
        starts = segment_starts(rows, EPISODE_ORDINAL)
        stops = np.append(starts[1:], rows.count)
        ends = stops - 1
        facts = zip(
            starts.tolist(),
            stops.tolist(),
            (rows[ENV_T][starts] < 0).tolist(),
            rows[AGENTS][ends].tolist(),
            rows[ENDED][ends].tolist(),
            rows[_RECEIVED][ends].tolist(),
            rows[STREAM_INDEX][starts].tolist(),
            strict=True,
        )
        return [
            Track(
                policy_id=self._policy_id,
                stream=self._streams[stream],
                rows=placed.slice(start, stop),
                alone=alone,
                agents=agents,
                stopped=ended in UNOBSERVED,
                received=received,
            )
            for start, stop, alone, agents, ended, received, stream in facts
        ]


class MultiAgentReader(InputReader):
    """`MultiAgentBatch`es of whole episodes from one or more roots, each step exactly once.

    A batch holds `batch_size` environment steps or more; the last one of a finite input may be
    shorter. In it, each policy's rows are sorted by episode, agent and `t`, the agent's own step
    number; `env_t` is the environment's. A single-agent episode comes as one whose agent acts in
    every step.

    Arguments
    - `policies`: whose tracks are read: ids, or declarations by id; default: all that are declared
      under the roots. Name *all* policies of an episode: it is whole only with all its tracks.
    - `tags`, `training_disabled`, `select`, `columns`, `names`, `follow`, `retry_for`, `eager`,
      `prefetch`, `state`: see `ShardReader`. `shuffle` mixes whole episodes, within that many
      environment steps.
    - `patience`: an episode that was abandoned or broken never states how many tracks it has. It is
      returned when none of its rows came for this many seconds. In a finite input it is returned if
      the collector received its last step that long ago; otherwise it waits for the next reading.
    - `most_waiting_bytes`: limit for tracks that wait for others; beyond it, the episode that has
      waited longest is returned incomplete. Its later rows form an episode of their own.
    - `incomplete`: at the end of a finite input, return episodes that still wait.
    - `sources`: by policy, instead of roots. `clock`: microseconds since the epoch.

    `stats.partial` counts episodes that were returned and may be incomplete, as `stopped`, `memory`
    or `end`. Only one thread at a time may use a reader. Raises ValueError for policies that are
    not declared, and the errors of `ShardReader`.
    """

    def __init__(
        self,
        roots: Roots | None = None,
        *,
        sources: Mapping[str, ShardSource] | None = None,
        policies: Iterable[str] | Mapping[str, PolicyDeclaration] | None = None,
        batch_size: int = 4096,
        follow: bool = False,
        eager: bool = False,
        shuffle: int = 0,
        seed: int = 0,
        prefetch: int = 2,
        state: Mapping[str, Any] | None = None,
        training_disabled: bool = False,
        tags: Mapping[str, str] | None = None,
        select: Select | None = None,
        columns: Sequence[str] | None = None,
        names: bool = False,
        incomplete: bool = False,
        patience: float = PATIENCE,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        poll_interval: float = POLL_INTERVAL,
        retry_for: float = RETRY_FOR,
        clock: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("shuffle", shuffle, 0)):
            if value < least:
                raise ReaderError(f"{name}: expected {least} or more, got {value}")
        self.batch_size = batch_size
        self._follow, self._eager, self._incomplete = follow, eager, incomplete
        self._shuffle, self._seed = shuffle, seed
        self._bounds = patience, most_waiting_bytes
        self._clock = clock
        self._arrival = threading.Condition()
        self._readers = {
            policy_id: _TrackReader(
                roots,
                declaration,
                self._arrival,
                columns,
                source=None if sources is None else sources[policy_id],
                names=names,
                follow=follow,
                prefetch=prefetch,
                training_disabled=training_disabled,
                tags=tags,
                select=select,
                incomplete=incomplete,
                poll_interval=poll_interval,
                retry_for=retry_for,
            )
            for policy_id, declaration in _declared(roots, policies).items()
        }
        self.stats = JointStats()
        self._reset()
        if state is not None:
            self.load_state_dict(state)

    def __repr__(self) -> str:
        follow = ", follow=True" if self._follow else ""
        return (
            f"MultiAgentReader(policies {', '.join(self._readers)}{follow}; "
            f"{counted(self.stats.agent_steps, 'step')} of "
            f"{counted(self.stats.episodes, 'episode')} read)"
        )

    def _reset(self) -> None:
        self._rng = np.random.default_rng(self._seed)
        self._joiner = TrackJoiner(*self._bounds)
        self._ready = Ready()
        self._restored: Mapping[str, Any] | None = None
        self._ended = self._closed = False
        self.stats.readers = {name: reader.stats for name, reader in self._readers.items()}

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies whose tracks are read."""
        return tuple(self._readers)

    def want(self, columns: Sequence[str]) -> None:
        for reader in self._readers.values():
            reader.want(columns)

    def taken(self, policy_id: str) -> Ledger:
        """The ordinals of this policy's source that will not be read again. Thread-safe."""
        return self._readers[policy_id].taken

    def caught_up(self) -> bool:
        """Whether all rows that can be read now were returned; see `ShardReader.caught_up`.

        Episodes that wait for tracks of other agents do not count.
        """
        if self._closed or not self._restore(lambda: 0.0):
            return False
        if self._ready.steps >= (1 if self._eager else self.batch_size) + self._shuffle:
            return False
        return all(reader.caught_up() for reader in self._readers.values())

    # batches

    def next(self, timeout: float | None = None) -> Any:
        """The next MultiAgentBatch; an empty one if there is none within `timeout` seconds.

        Raises EndOfInput, and ReaderError after `close`.
        """
        if self._closed:
            raise ReaderError("expected an open reader, this one is closed")
        left = deadline_after(timeout)
        if not self._restore(left):
            return MultiAgentBatch({}, 0)
        wanted = (1 if self._eager else self.batch_size) + self._shuffle
        while self._ready.steps < wanted and not self._ended:
            if not self._gather(left):
                return MultiAgentBatch({}, 0)
        if not self._ready.episodes:
            raise EndOfInput("every shard was read")
        return self._batch(self._ready.take(self.batch_size, self._rng if self._shuffle else None))

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def _batch(self, episodes: Sequence[JointEpisode]) -> MultiAgentBatch:
        steps = sum(episode.steps for episode in episodes)
        rows = rows_by_policy(episodes)
        batch = MultiAgentBatch({p: self._readers[p].public(r) for p, r in rows.items()}, steps)
        self.stats.episodes += len(episodes)
        self.stats.env_steps += steps
        self.stats.agent_steps += batch.agent_steps()
        return batch

    def _gather(self, left: Left) -> bool:
        """Read further tracks; False if the time is over."""
        if self._follow:
            return self._read_any(left)
        open_ = [reader for reader in self._readers.values() if not reader.ended]
        if not open_:
            self._finish()
            return True
        # the reader that is furthest behind, so that few tracks wait
        return self._read(min(open_, key=lambda reader: reader.reached), left())

    def _read_any(self, left: Left) -> bool:
        """Read the available tracks of the reader furthest behind that has any, or wait for some.

        Returns False if the time is over.
        """
        readers = sorted(self._readers.values(), key=lambda reader: reader.reached)
        if any(self._read(reader, 0.0) for reader in readers):
            return True
        expired = self._joiner.expired(time.monotonic())
        if expired:
            self._hand_over(expired, "stopped")
            return True
        due, rest = self._joiner.due(), left()
        waits = [rest, None if due is None else max(0.0, due - time.monotonic())]
        wait = min((one for one in waits if one is not None), default=None)
        with self._arrival:
            came = self._arrival.wait_for(lambda: any(r.filled for r in readers), wait)
        return came or rest is None or (left() or 0.0) > 0.0

    def _read(self, reader: _TrackReader, timeout: float | None) -> bool:
        """Read the tracks of one reader. Returns whether it had any, or has ended."""
        try:
            tracks = reader.tracks(timeout)
        except EndOfInput:
            return True
        now = time.monotonic()
        for track in tracks:
            episode = self._joiner.push(track, now)
            if episode is not None:
                self._ready.push(episode)
            self._hand_over(self._joiner.excess(), "memory")
        self._count_waiting()
        return bool(tracks)

    def _finish(self) -> None:
        self._hand_over(self._joiner.settled(self._clock()), "stopped")
        if self._incomplete:
            self._hand_over(self._joiner.flush(), "end")
        self._ended = True

    def _hand_over(self, episodes: Sequence[JointEpisode], why: str) -> None:
        for episode in episodes:
            self._ready.push(episode)
            self.stats.partial[why] = self.stats.partial.get(why, 0) + 1
        self._count_waiting()

    def _count_waiting(self) -> None:
        self.stats.waiting, self.stats.waiting_bytes = self._joiner.waiting, self._joiner.nbytes

    # positions

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON: each policy's, with the tracks held here, and their order."""
        if self._restored is not None:
            return dict(self._restored)
        ready, waiting = self._ready.episodes, self._joiner.pending()
        held = [*(track for episode in ready for track in episode.tracks), *waiting]
        return {
            "version": FORMAT_VERSION,
            "policies": {name: reader.position(held) for name, reader in self._readers.items()},
            "reached": {name: list(reader.reached) for name, reader in self._readers.items()},
            "ready": [[list(t.identity) for t in episode.tracks] for episode in ready],
            "waiting": [list(track.identity) for track in waiting],
            "rng": dict(self._rng.bit_generator.state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position. Raises ReaderState if it does not fit this reader."""
        require_keys(state, {"version", "policies", "reached", "ready", "waiting", "rng"})
        if set(state["policies"]) != set(self._readers):
            raise ReaderState(
                f"position: expected the policies {sorted(self._readers)}, got "
                f"{sorted(state['policies'])}"
            )
        for name, reader in self._readers.items():
            reader.load_state_dict(state["policies"][name])
            reader.ended = False
        self._reset()
        try:
            self._rng.bit_generator.state = state["rng"]
            for name, reader in self._readers.items():
                collector, received = state["reached"][name]
                reader.reached = str(collector), int(received)
            for one in (*(t for episode in state["ready"] for t in episode), *state["waiting"]):
                _identity(one)
        except (KeyError, TypeError, ValueError) as error:
            raise ReaderState(f"position: {error!r:.200}") from error
        self._restored = state

    def _restore(self, left: Left) -> bool:
        """Read the tracks of a position again, and put them back where they were.

        Returns False if they cannot be read within the time that is left.
        """
        state = self._restored
        if state is None:
            return True
        if not all(reader.ready(left) for reader in self._readers.values()):
            return False
        self._restored = None
        found = {t.identity: t for r in self._readers.values() for t in r.restored()}
        for identities in state["ready"]:
            tracks = [found[one] for one in map(_identity, identities) if one in found]
            if tracks:
                self._ready.push(JointEpisode.of(tracks))
        now = time.monotonic()
        for one in map(_identity, state["waiting"]):
            episode = self._joiner.push(found[one], now) if one in found else None
            if episode is not None:
                self._ready.push(episode)
        self._count_waiting()
        return True

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._closed = True


def _identity(document: Any) -> Identity:
    policy_id, stream, ordinal = document
    return str(policy_id), str(stream), int(ordinal)


def _declared(
    roots: Roots | None,
    policies: Iterable[str] | Mapping[str, PolicyDeclaration] | None,
) -> dict[str, PolicyDeclaration]:
    """The policies to read, by id. Raises ValueError if there are none or one is not declared."""
    if isinstance(policies, Mapping):
        found = dict(policies)
    else:
        found = {}
        for store in stores_at(roots or ()):
            found |= load_declarations(store)
        wanted = sorted(found) if policies is None else list(policies)
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ValueError(f"policies: expected some of {sorted(found)}, got {missing}")
        found = {name: found[name] for name in wanted}
    if not found:
        raise ValueError(f"policies: expected one or more, found none declared under {roots}")
    return found
