"""Reading shards as batches: `ShardReader`.

A reader reads the shards that a scan finds, minus the ledger of ordinals already read. A row is
identified by (stream, ordinal, row), so a merged or rewritten file delivers nothing twice. A
position saved with `state_dict()` names every row that has not reached the caller yet.

Example:
    >>> with ShardReader("run", batch_size=256, shuffle=10_000, seed=1) as reader:
    ...     for batch in reader:
    ...         learn(batch["obs"], batch["actions"], batch["new_obs"])
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from storage.experience.episode import Episode
from storage.experience.interfaces import (
    EndOfInput,
    InputReader,
    MixedSchemas,
    ReaderError,
    ReaderState,
)
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import EPISODE_ORDINAL, ORDINAL, STREAM, SampleBatch
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.reading.adapters import episode_of, with_names
from storage.reading.batching import BatchCutter, EpisodeJoiner, Mode, ShuffleWindow, unit_bounds
from storage.reading.deletion import close_if_deleted
from storage.reading.exclusion import Excluded, LeftOut, ReaderStats
from storage.reading.ledger import Ledger, Ranges
from storage.reading.listing import ShardFile
from storage.reading.loading import (
    DEFAULT_COLUMNS,
    EPISODE_COLUMNS,
    REASONS,
    STREAM_INDEX,
    LoadedShard,
    PartFilter,
    ShardLoader,
)
from storage.reading.objects_source import Roots, source_at
from storage.reading.position import FORMAT_VERSION, Position, require_version, restore_rows
from storage.reading.prefetch import EndOfShards, Failure, Prefetcher, deadline_after
from storage.reading.retries import Retries
from storage.reading.sources import (
    POLL_INTERVAL,
    Content,
    DirectorySource,
    ShardChoice,
    ShardSource,
    StoredSource,
)
from storage.spaces.descriptors import Space
from storage.system.backoff import RETRY_FOR
from storage.wording import counted

log = logging.getLogger("headrace.reader")

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: Fibonacci hashing

Left: TypeAlias = Callable[[], float | None]
Select: TypeAlias = Callable[[SampleBatch], npt.NDArray[np.bool_]]


class ShardReader(InputReader):
    """Sample batches from the shards under one or more roots, each row exactly once.

    Instead of a root you can pass its `shards/`, the folder of a stream or a single shard. With
    `follow`, a reader waits for a path that does not exist yet; otherwise `next` raises a
    ReaderError.

    Modes
    - "transitions": batches of exactly `batch_size` rows (the last one of a finite input may be
      shorter); `shuffle` mixes rows.
    - "fragments": the same sizes, and rows of one part stay together in the order of t; `shuffle`
      mixes whole fragments of at most `batch_size` rows.
    - "episodes": whole episodes, joined over their parts, at least `batch_size` rows; incomplete
      ones wait, and are returned at the end of a finite input if `incomplete` is set.

    Every mode returns `new_obs`, the next observation: zeros where there is none (with `names` the
    first name). `has_new_obs` is False where a target would need it, because the row is not
    terminated. Each row has its identity: `stream`, `ordinal`, `episode_ordinal`, `t`. Arrays of
    unshuffled batches, and columns of one value, may be read-only views.

    Arguments
    - `policy_id`, `tags`, `since`/`until` (microseconds of the client's ts) choose parts by their
      first step; `training_disabled=True` also reads episodes logged with training_enabled=False;
      `select(batch)` returns a mask over rows. Rows that these exclude count as read, and are
      counted in `stats`.
    - `ordinals`: a manifest, stream -> ranges: nothing else is read.
    - `schema_id`: which schema to read if the roots hold several; default with a `policy_id`: the
      schema of its steps.
    - `columns`: which columns to return; `obs` includes `obs.<path>`. Default: `obs`, `actions`,
      `rewards`, `terminateds`, `truncateds`, `new_obs`, `has_new_obs`, `eps_id`, `t`, `agent_id`,
      `action_logp`, `policy_id`, `policy_version`. Others of a shard, such as `infos`, `tags` and
      `ts`, are returned only if you name them.
    - `names`: object arrays of names instead of codes, for spaces that have names.
    - `shuffle`: rows of the shuffle window, 0 for the stored order; `prefetch`: shards read ahead.
    - `eager`: return the available rows, at most `batch_size`, without waiting for more.
    - `follow`: wait for new shards instead of ending; the directory is scanned again when something
      changes and every `poll_interval` seconds.
    - `retry_for`: seconds for which an unreadable shard is retried while others are read; then
      `next` raises a ReaderError that names it. With `follow` it is retried forever.
    - `state`: a position from `state_dict()` to continue from.

    Only one thread at a time may use a reader. Its own threads end with `close`, and if it is
    deleted. Raises MixedSchemas, ReaderState, and from `next` EndOfInput.
    """

    def __init__(
        self,
        roots: Roots | None = None,
        *,
        source: ShardSource | None = None,
        policy_id: str | None = None,
        mode: Mode = "transitions",
        batch_size: int = 4096,
        follow: bool = False,
        eager: bool = False,
        shuffle: int = 0,
        seed: int = 0,
        prefetch: int = 2,
        state: Mapping[str, Any] | None = None,
        training_disabled: bool = False,
        tags: Mapping[str, str] | None = None,
        since: int | None = None,
        until: int | None = None,
        select: Select | None = None,
        ordinals: Mapping[str, Ranges] | None = None,
        schema_id: str | None = None,
        columns: Sequence[str] | None = None,
        names: bool = False,
        incomplete: bool = False,
        poll_interval: float = POLL_INTERVAL,
        retry_for: float = RETRY_FOR,
    ) -> None:
        self._given = {name: value for name, value in locals().items() if name != "self"}
        _check_arguments(mode, batch_size, shuffle, prefetch, retry_for)
        if (roots is None) == (source is None):
            raise ReaderError("expected either roots or a source")
        if source is None:
            source = source_at(roots or (), follow=follow, poll_interval=poll_interval)
        self._source = source
        self.mode = mode
        self.batch_size = batch_size
        self.stats = ReaderStats()
        self._follow = follow
        self._retry_for = None if follow else retry_for
        self._left_out = LeftOut(self.stats)
        self._share = 0, 1
        self._process = os.getpid()
        self._eager = eager
        self._prefetch = prefetch
        self._poll_interval = poll_interval
        self._select = select
        self._choice = ShardChoice(
            policy_id=policy_id,
            schema_id=schema_id,
            manifest=None if ordinals is None else Ledger(ordinals),
        )
        self._incomplete = incomplete
        self._names = names
        self._brings_default = columns is None
        chosen = tuple(DEFAULT_COLUMNS if columns is None else columns)
        own = EPISODE_COLUMNS if mode == "episodes" else ()
        self._columns = frozenset({*chosen, STREAM, ORDINAL, EPISODE_ORDINAL, "t"})
        self._loader = ShardLoader(
            tuple(dict.fromkeys((*chosen, *own, *(("new_obs",) if own else ())))),
            PartFilter(policy_id, dict(tags or {}), since, until, training_disabled),
        )
        self._shuffle, self._seed = shuffle, seed
        self._arrival = threading.Condition()
        self._reset()
        if state is not None:
            self.load_state_dict(state)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments and the position, so that a spawned worker continues from here.

        The source and `select` have to be picklable.
        """
        given = {**self._given, "state": self.state_dict()}
        return _made_again, (type(self), given, self._share)

    def _reset(self) -> None:
        """Return to the state before the first read."""
        for shard in self._left_out.shards():
            self._left_out.take_back(shard)
        self._retries = Retries(self._retry_for, partial(setattr, self.stats, "retrying"))
        self._rng = np.random.default_rng(self._seed)
        bounds = unit_bounds(self.mode, self.batch_size)
        self._joiner = EpisodeJoiner()
        self._window = ShuffleWindow(self._shuffle, bounds, self._rng) if self._shuffle else None
        # `next` converts whole episodes; `episodes` needs all their columns
        whole = self.mode == "episodes"
        self._cutter = BatchCutter(
            (lambda rows: rows) if whole else self._public, bounds if whole else None
        )
        self._ledger = Ledger()  # of the rows taken: delivered or pending
        self._streams: list[str] = []
        self._metadata: Any = None
        self._prefetcher: Prefetcher | None = None
        self._restored: Position | None = None
        self._ended = self._closed = False
        self.warns = True  # of an input without a shard; False: the caller says what is missing
        self._failed: BaseException | None = None
        self._empty = SampleBatch()

    # the input

    def __repr__(self) -> str:
        roots = self._given["roots"]
        alone = isinstance(roots, (str, Path, Objects))
        many = [roots] if alone else (roots or [self._source])
        follow = ", follow=True" if self._follow else ""
        closed = "; closed" if self._closed else ""
        return (
            f"{type(self).__name__}({', '.join(map(str, many))}, mode={self.mode!r}{follow}; "
            f"{counted(self.stats.rows, 'row')} of {counted(self.stats.shards, 'shard')} "
            f"read{closed})"
        )

    @property
    def schema_id(self) -> str | None:
        """The schema that is read; None before the first rows."""
        return self._metadata.schema_id if self._metadata else self._choice.schema_id

    @property
    def spaces(self) -> tuple[Space, Space] | None:
        """(observation, action); None before the first rows."""
        return self._metadata.space_pair() if self._metadata else None

    @property
    def taken(self) -> Ledger:
        """The ordinals of a source that will not be read again. Thread-safe."""
        return self._ledger

    @property
    def ledger(self) -> dict[str, list[list[int]]]:
        """Stream -> ranges of the ordinals whose rows have all reached the caller."""
        ledger: dict[str, list[list[int]]] = self.state_dict()["ledger"]
        return ledger

    def caught_up(self) -> bool:
        """Whether all rows that can be read now were returned.

        Then a new scan finds nothing new, and `next` would wait. Excluded and retried shards do not
        count, nor do rows that wait for others of their batch, shuffle window or episode. The scan
        runs in the prefetch thread.
        """
        if self._closed or self._failed is not None or not self._start(lambda: 0.0):
            return False
        if self._cutter.rows >= (1 if self._eager else self.batch_size):
            return False
        if self._prefetcher is None or self._ended:
            return not self._cutter.rows
        return self._prefetcher.idle()

    def want(self, columns: Sequence[str]) -> None:
        if self._brings_default:
            self._columns |= frozenset(columns)
            named = tuple(dict.fromkeys((*self._loader.columns, *columns)))
            self._loader = ShardLoader(named, self._loader.filter)

    def share(self, index: int, count: int) -> None:
        """Read only the episodes of reader `index` out of `count` that share the input.

        All parts of an episode, by (stream, episode_ordinal), go to the same reader. Episodes of
        other readers stay unread here. Each of these readers decodes every shard. Raises
        ReaderError for an index out of range, and if this reader has already read.
        """
        if not 0 <= index < count:
            raise ReaderError(f"share: expected an index below {count}, got {index}")
        if (index, count) == self._share:
            return
        if self._prefetcher is not None:
            raise ReaderError("share: expected a reader that has not read yet, got one that has")
        self._share = index, count

    # batches

    def next(self, timeout: float | None = None) -> SampleBatch:
        rows = self._take(self.batch_size, timeout)
        return self._public(rows) if self.mode == "episodes" else rows

    def episodes(self) -> Iterator[Episode]:
        """Yield the episodes one by one, until the input ends. Requires mode "episodes"."""
        if self.mode != "episodes":
            raise ReaderError(f"episodes(): expected mode 'episodes', this reader's is {self.mode}")
        while True:
            try:
                rows = self._take(1, None)
            except EndOfInput:
                return
            yield self._episode(rows)

    def _take(self, size: int, timeout: float | None) -> SampleBatch:
        if self._closed:
            raise ReaderError("expected an open reader, this one is closed")
        left = deadline_after(timeout)
        if not self._start(left):
            return self._empty
        while self._cutter.rows < (1 if self._eager else size) and not self._ended:
            if self._failed is not None:
                raise self._failed
            found = self._prefetcher.get(left()) if self._prefetcher else None
            if found is None:
                return self._empty
            self._accept(found)
        if not self._cutter.rows:
            raise EndOfInput(self._what_was_read())
        rows = self._cutter.take(size)
        self.stats.rows += rows.count
        if not list(self._empty):
            self._empty = rows.slice(0, 0).copy()
        return rows

    def _what_was_read(self) -> str:
        if self.stats.rows:
            return "every shard was read"
        of = self._choice.policy_id
        rows = "rows" if of is None else f"rows of policy {of!r}"
        return f"every shard was read ({self.stats.shards}), and none has {rows} for this reader"

    def _accept(self, found: LoadedShard | Excluded | EndOfShards | Failure) -> None:
        if isinstance(found, LoadedShard):
            self._take_shard(found)
        elif isinstance(found, Excluded):
            self._left_out.add(found, self._unread(found.shard))
        elif isinstance(found, Failure):
            self._failed = found.error
        else:
            self._finish()

    def _take_shard(self, found: LoadedShard) -> None:
        """Take the new rows of a shard, and pass them to the next stage."""
        stream, parts = found.shard.stream, found.parts
        new = ~self._ledger.contains(stream, parts.ordinals)
        self.stats.doubles += int(parts.steps[~new].sum())
        if self._choice.manifest is not None:
            new &= self._choice.manifest.contains(stream, parts.ordinals)
        new &= self._is_mine(stream, parts.episodes)
        for code, reason in enumerate(REASONS, 1):
            self.stats.exclude(reason, int(parts.steps[new & (parts.verdicts == code)].sum()))
        mask, everything = parts.kept(new)
        rows = found.rows if everything else found.rows.take(mask)
        if rows.count:
            self._check_schema(found)
            rows = self._selected(rows)
        self._ledger.add(stream, parts.ordinals[new])
        self.stats.shards += 1
        self.stats.parts += int(new.sum())
        self.stats.nbytes += found.nbytes
        for shard in self._left_out.shards():
            if shard == found.shard or not self._unread(shard):
                self._left_out.take_back(shard)
        if rows.count:
            self._flow(rows)

    def _is_mine(self, stream: str, episodes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether parts are in this reader's share: bool (P,).

        `episodes`: the ordinals of their episodes, int64 (P,).
        """
        index, count = self._share
        if count == 1:
            return np.ones(len(episodes), np.bool_)
        # ordinals of first parts may be regular, the high bits of a product are not
        mixed = (episodes.astype(np.uint64) + np.uint64(zlib.crc32(stream.encode()))) * _GOLDEN
        return np.asarray((mixed >> np.uint64(32)) % np.uint64(count) == index, np.bool_)

    def _unread(self, shard: ShardFile) -> RangeSet:
        """The ordinals in a shard's name that are to be read and were not taken."""
        unread = self._ledger.missing(shard.stream, shard.first, shard.last)
        if self._choice.manifest is None:
            return unread
        return unread.difference(
            self._choice.manifest.missing(shard.stream, shard.first, shard.last)
        )

    def _selected(self, rows: SampleBatch) -> SampleBatch:
        if self._select is None:
            return rows
        mask = np.asarray(self._select(self._public(rows)))
        if mask.dtype != np.bool_ or mask.shape != (rows.count,):
            raise ReaderError(
                f"select: expected bool of shape ({rows.count},), got {mask.dtype} of {mask.shape}"
            )
        self.stats.exclude("select", rows.count - int(mask.sum()))
        return rows if mask.all() else rows.take(mask)

    def _flow(self, rows: SampleBatch) -> None:
        if self.mode != "episodes":
            self._mix([rows])
        else:
            self._mix(self._joiner.push(rows))
            self.stats.incomplete = self._joiner.waiting

    def _mix(self, ready: Sequence[SampleBatch]) -> None:
        for rows in ready:
            for out in [rows] if self._window is None else self._window.push(rows):
                self._cutter.push(out)

    def _finish(self) -> None:
        if self.warns and not self.stats.shards and not self.stats.excluded_shards:
            log.warning("the input has ended, and no shard was read")
        if self._incomplete:
            self._mix(self._joiner.flush())
        for rows in self._window.flush() if self._window else []:
            self._cutter.push(rows)
        self._ended = True

    def _public(self, rows: SampleBatch) -> SampleBatch:
        names = [name for name in rows if name.partition(".")[0] in self._columns]
        batch = self._named(rows.select(names))
        if rows.count:
            batch[STREAM] = self._stream_names(rows[STREAM_INDEX])
        return batch

    def _named(self, rows: SampleBatch) -> SampleBatch:
        return with_names(rows, self.spaces) if self._names and self.spaces else rows

    def _stream_names(self, index: npt.NDArray[np.int32]) -> npt.NDArray[np.object_]:
        names = np.array(self._streams, object)
        if (index == index[0]).all():
            return np.broadcast_to(names[index[0]], index.shape)
        return names[index]

    def _episode(self, rows: SampleBatch) -> Episode:
        stream = self._streams[int(rows[STREAM_INDEX][0])]
        return episode_of(self._named(rows), stream, self._columns)

    # choosing shards

    def _check_schema(self, found: LoadedShard) -> None:
        known = self._metadata
        if known is None:
            self._metadata = found.metadata
        elif known.schema_id != found.metadata.schema_id:
            raise MixedSchemas(
                f"policy {self._choice.policy_id!r} has steps of the schemas {known.schema_id} and "
                f"{found.metadata.schema_id} ({found.shard.place}): pass schema_id= "
                "(--schema-id)"
            )

    def _load(self, shard: ShardFile, content: Content) -> LoadedShard:
        if shard.stream not in self._streams:
            self._streams.append(shard.stream)
        return self._loader.load(shard, content, self._streams.index(shard.stream))

    # positions

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON: the ordinals returned whole, and every row held inside."""
        return self._position()

    def _position(self, held: Sequence[SampleBatch] = ()) -> dict[str, Any]:
        """The position of a reader whose caller still holds rows, which come first."""
        if self._restored is not None:
            return self._restored.to_json()
        return Position.of(
            mode=self.mode,
            taken=self._ledger,
            streams=self._streams,
            joiner=self._joiner.pending(),
            window=self._window.pending() if self._window else [],
            cutter=[*held, *self._cutter.pending()],
            rng=dict(self._rng.bit_generator.state),
        ).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position. Raises ReaderState if it does not fit this reader."""
        position = Position.from_json(state)
        if position.mode != self.mode:
            raise ReaderState(f"expected a position of mode {self.mode!r}, got {position.mode!r}")
        self._stop()
        self._reset()
        _restore_rng(self._rng, position)
        self._ledger = position.taken()
        self._restored = position

    def _start(self, left: Left) -> bool:
        """Prepare reading. False if a position's rows cannot be read in the time that is left."""
        while self._restored is not None:
            if self._restore(self._restored):
                self._restored = None
            elif not self._may_retry(left):
                return False
        if self._prefetcher is not None and self._process != os.getpid():
            raise ReaderError(
                "expected a reader of this process, got one that has read in the parent process: "
                "make a new one"
            )
        if self._prefetcher is None and not self._ended:
            self._process = os.getpid()
            if not self._follow and isinstance(self._source, DirectorySource):
                self._source.check()
            choice, ledger = self._choice, self._ledger  # its thread must not keep the reader
            self._prefetcher = Prefetcher(
                self._source,
                lambda shards: choice.wanted(shards, ledger),
                partial(_load_for, weakref.ref(self)),
                self._retries,
                follow=self._follow,
                depth=self._prefetch,
                poll_interval=self._poll_interval,
                changed=self._arrival,
            )
            self._deleted = close_if_deleted(self, self._prefetcher.close)
        return True

    def _may_retry(self, left: Left) -> bool:
        """Wait until the next try; False if it is later than the time that is left."""
        given_up = self._retries.given_up()
        if given_up:
            raise ReaderError(given_up)
        due, rest = self._retries.next_due() or 0.0, left()
        if rest is not None and rest < due:
            time.sleep(rest)
            return False
        time.sleep(due)
        return True

    def _restore(self, position: Position) -> bool:
        """Read the pending rows again, into the stages that held them.

        Returns False if some cannot be read now.
        """
        stages = restore_rows(position, self._source, self._load, self._retries)
        if stages is None:
            return False
        for why, count in stages.lost.items():
            self.stats.lost += count
            self.stats.exclude(why, count)
            gone = counted(count, "row of the position is", "rows of the position are")
            log.warning("%s no longer in any shard: %s", gone, why)
        for bad in stages.bad:
            self.stats.excluded_shards[bad.shard.place] = bad.text
            log.warning("left out as %s: %s", bad.reason, bad.text)
        self._metadata = stages.metadata
        if stages.joiner.count:
            self._joiner.restore(stages.joiner)
            self.stats.incomplete = self._joiner.waiting
        if stages.window.count and self._window:
            self._window.restore(stages.window)
            stages.window = SampleBatch()
        for rows in (stages.cutter, stages.window):
            self._cutter.push(rows)
        return True

    def save(self, name: str) -> Path:
        """Write the position to `readers/{name}.json` under the first root, and return its path.

        This copy is for people and for `retain`; a learner stores its position in its own
        checkpoint.
        """
        if not isinstance(self._source, StoredSource):
            raise ReaderError("save: expected a reader of roots, this one has none")
        home, file = self._source.home, _position_name(name)
        home.replace(file, json.dumps(self.state_dict()).encode())
        return Path(f"{home}/{file}")

    def close(self) -> None:
        self._stop()
        self._source.close()
        self._closed = True

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._deleted.detach()
            self._prefetcher.close()
            self._prefetcher = None


def read_position(root: Root, name: str) -> dict[str, Any]:
    """Read the position that `save(name)` wrote.

    Raises FileNotFoundError, NewerFormat, ReaderState.
    """
    objects, file = objects_at(root), _position_name(name)
    where = f"{objects}/{file}"
    try:
        state = json.loads(objects.read(file))
        if isinstance(state, Mapping):
            require_version(state, FORMAT_VERSION, where)
        position = Position.from_json(state)
        if position.mode not in get_args(Mode):
            raise ReaderState(f"expected a position's mode, got {position.mode!r:.80}")
        _restore_rng(np.random.default_rng(), position)
    except (ValueError, RecursionError, ReaderError) as error:
        raise ReaderState(f"{where}: {error}") from error
    return position.to_json()


def _restore_rng(rng: np.random.Generator, position: Position) -> None:
    try:
        rng.bit_generator.state = position.rng
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ReaderState(f"rng: {error!r:.200}") from error


def _load_for(reader: weakref.ref[ShardReader], shard: ShardFile, content: Content) -> LoadedShard:
    found = reader()
    if found is None:
        raise ReaderError(f"{shard.place}: its reader has been deleted")
    return found._load(shard, content)


def _made_again(
    kind: type[ShardReader], given: dict[str, Any], share: tuple[int, int]
) -> ShardReader:
    reader = kind(given.pop("roots"), **given)
    reader.share(*share)
    return reader


# --- checks ----------------------------------------------------------------------------------


def _check_arguments(
    mode: str, batch_size: int, shuffle: int, prefetch: int, retry_for: float
) -> None:
    if mode not in get_args(Mode):
        raise ReaderError(f"mode: expected one of {', '.join(get_args(Mode))}, got {mode!r}")
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("shuffle", shuffle, 0),
        ("prefetch", prefetch, 1),
        ("retry_for", retry_for, 0),
    ):
        if value < least:
            raise ReaderError(f"{name}: expected {least} or more, got {value}")


def _position_name(name: str) -> str:
    if not name or name.startswith(".") or not all(c.isalnum() or c in "-_." for c in name):
        raise ReaderError(f"name: expected letters, digits, '-', '_' and '.', got {name!r:.80}")
    return f"readers/{name}.json"
