"""The episodes in the shards of a root: which parts they have, and which of them a command means.

    found = StoredEpisodes.of(root, journal)
    chosen = found.named({"e1"})     # episodes, as numbers
    found.steps(chosen)              # the parts of these, as steps of a plan

One pass reads six columns of each shard. An episode is all parts with its id, in all streams, with
the episodes that continue it and that it continues: they are removed together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.experience.range_set import RangeSet
from storage.journal.copying import Recorded
from storage.maintenance.plans import Remove
from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.objects.ranged import RangedFile
from storage.shards.names import SUFFIX, ShardError, shard_names, streams
from storage.shards.replacements import REPLACED, Replacements
from storage.shards.schema import columns_for, stored_names
from storage.shards.shard import read_shard, shard_metadata
from storage.shards.stored_tables import in_file
from storage.verify.audit import OnProgress, no_progress
from storage.verify.quarantine import QUARANTINE

COLUMNS = ["eps_id", "continues", "tags", "ended", "ordinal", "ts"]
_CODED = ["eps_id", "continues", "tags", "ended"]

Numbers = npt.NDArray[np.int64]
OfText = Callable[[str], bool]


def number(episode_id: str) -> int:
    """The number of an episode in this process: two of them collide once in 2^63 pairs."""
    return hash(episode_id)


@dataclass(frozen=True)
class _IndexedShard:
    """The parts of one shard. Arrays int64 (P,): `newest` is the time of the latest step."""

    stream: str
    name: str
    place: str  # under the root
    nbytes: int
    rows: int
    ordinals: Numbers
    episodes: Numbers
    counts: Numbers
    newest: Numbers

    def has(self, chosen: Numbers) -> bool:
        """Whether any of these episodes has a part here."""
        return bool(np.isin(self.episodes, chosen).any())

    def step(self, chosen: Numbers) -> Remove | None:
        """What a plan removes of this shard; None if it has no part of these episodes."""
        mask = np.isin(self.episodes, chosen)
        if not mask.any():
            return None
        ranges = tuple(RangeSet.of_array(self.ordinals[mask]).ranges())
        return Remove(self.stream, self.name, ranges, int(self.counts[mask].sum()), self.rows)


@dataclass
class StoredEpisodes:
    """An index of all parts in the shards that count; see the module.

    `aside` are shards that do not count: replaced ones, and those in quarantine.
    """

    shards: list[_IndexedShard] = field(default_factory=list)
    aside: list[_IndexedShard] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)  # shard -> why it cannot be read
    damaged_aside: dict[str, str] = field(default_factory=dict)  # of those that do not count
    _parents: dict[int, int] = field(default_factory=dict)  # of episodes that continue another
    _ended: list[Numbers] = field(default_factory=list)
    _meant: list[Numbers] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        root: Root,
        journal: Recorded | None,
        *,
        is_meant: OfText = lambda episode_id: False,
        is_tagged: OfText = lambda tags: False,
        also_aside: bool = False,
        on_progress: OnProgress = no_progress,
    ) -> StoredEpisodes:
        """Read the shards of a root; of the journal's streams only those that it has recorded.

        `is_meant`, `is_tagged`: whether an episode with this id, or with these tags (JSON), is one
        that is looked for. `also_aside`: read the shards that do not count, too.
        """
        meant = (is_meant, is_tagged)
        found, objects = cls(), objects_at(root)
        shards, replaced = objects.under("shards"), Replacements.of(objects)
        there = [(s, name) for s in streams(shards) for name in shard_names(shards, s)]
        names = {(stream, str(name)) for stream, name in there}
        known = {*replaced.made, *(journal.shards if journal else ())}
        aside = list(_aside(objects)) if also_aside else []
        for done, (stream, name) in enumerate(there, 1):
            place = f"shards/{stream}/{name}"
            ours = journal is not None and stream in journal.streams
            if replaced.by(stream, str(name), lambda *one: one in names) is not None:
                aside.append(place)
            elif not ours or (stream, str(name)) in known:
                found._add(objects, place, found.shards, meant)
            on_progress("reading episodes", done, len(there))
        for place in aside if also_aside else ():
            found._add(objects, place, found.aside, meant)
        return found

    def _add(
        self, root: Objects, place: str, to: list[_IndexedShard], meant: tuple[OfText, OfText]
    ) -> None:
        try:
            table = read_shard(RangedFile(root, place), columns=COLUMNS, coded=_CODED)
        except FileNotFoundError:  # replaced meanwhile: the plan looks again when it is applied
            return
        except (ShardError, OSError) as error:
            found = self.damaged if to is self.shards else self.damaged_aside
            found[place] = str(error)
            return
        _, stream, name = place.split("/")
        ordinals = table.column("ordinal").to_numpy()
        first = np.concatenate(([0], np.flatnonzero(ordinals[1:] != ordinals[:-1]) + 1))
        whole = _by_text(table.column("eps_id"), number, np.int64)
        episodes = whole[first]
        status = root.status(place)
        to.append(
            _IndexedShard(
                stream,
                name.removesuffix(REPLACED),
                place,
                0 if status is None else status.size,
                len(table),
                ordinals[first],
                episodes,
                np.diff(np.append(first, len(ordinals))),
                np.maximum.reduceat(table.column("ts").to_numpy(), first),
            )
        )
        named = _by_text(table.column("eps_id"), meant[0], np.bool_)
        tagged = _by_text(table.column("tags"), meant[1], np.bool_)
        self._meant.append(np.unique(whole[named | tagged]))
        over = table.column("ended").is_valid().to_numpy(zero_copy_only=False)
        self._ended.append(np.unique(whole[over]))
        edges = table.column("continues").take(pa.array(first))
        for at in np.flatnonzero(edges.is_valid().to_numpy(zero_copy_only=False)).tolist():
            before = edges[at].as_py()
            self._join(int(episodes[at]), number(before))
            if meant[0](before):  # which may be in no shard any more
                self._meant.append(episodes[at : at + 1])

    # --- episodes that continue one another -------------------------------------------------

    def _join(self, one: int, other: int) -> None:
        one, other = self._head(one), self._head(other)
        if one != other:
            self._parents[one] = other

    def _head(self, one: int) -> int:
        while (above := self._parents.get(one)) is not None:
            one = above
        return one

    def _heads(self, episodes: Numbers) -> Numbers:
        """The number that stands for each episode and those that it is joined with."""
        if not self._parents:
            return episodes
        linked = np.fromiter(self._parents, np.int64, len(self._parents))
        result = episodes.copy()
        for at in np.flatnonzero(np.isin(episodes, linked)).tolist():
            result[at] = self._head(int(episodes[at]))
        return result

    # --- choosing --------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def named(self, ids: Iterable[str]) -> Numbers:
        """The episodes with these ids, those that were looked for, and those joined to them.

        Numbers of ids that are in no shard are among them.
        """
        known = np.array([number(one) for one in ids], np.int64)
        return self._whole(np.unique(np.concatenate([known, *self._meant])))

    def ids(self, root: Root, chosen: Numbers) -> set[str]:
        """The ids of these episodes, from the shards that have parts of them."""
        known, found = {*chosen.tolist()}, set[str]()
        for shard in (one for one in (*self.shards, *self.aside) if one.has(chosen)):
            file = RangedFile(objects_at(root), shard.place)
            texts = read_shard(file, columns=["eps_id"], coded=["eps_id"]).column(0)
            for text in texts.unique().to_pylist():
                if number(text) in known:
                    found.add(text)
        return found

    def _whole(self, chosen: Numbers) -> Numbers:
        heads = np.unique(self._heads(chosen))
        linked = np.fromiter(self._parents, np.int64, len(self._parents))
        more = linked[np.isin(self._heads(linked), heads)]
        return np.unique(np.concatenate([chosen, heads, more]))

    def oldest(self) -> tuple[Numbers, Numbers, npt.NDArray[np.floating[Any]]]:
        """Episodes that have ended, by the time of their latest step: (numbers, times, bytes).

        Joined episodes count as one, which is as old as its latest step. The bytes are an
        episode's share of its files.
        """
        if not self.shards:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        heads = self._heads(np.concatenate([shard.episodes for shard in self.shards]))
        newest = np.concatenate([shard.newest for shard in self.shards])
        share = np.concatenate([s.counts * (s.nbytes / s.rows) for s in self.shards])
        names, at = np.unique(heads, return_inverse=True)
        times = np.full(len(names), np.iinfo(np.int64).min)
        np.maximum.at(times, at, newest)
        nbytes = np.bincount(at, share, len(names)).astype(np.float64)
        every = np.concatenate([shard.episodes for shard in self.shards])
        going_on = np.setdiff1d(every, np.concatenate(self._ended))
        over = ~np.isin(names, self._heads(going_on))
        order = np.argsort(times[over], kind="stable")
        return names[over][order], times[over][order], nbytes[over][order]

    def steps(self, chosen: Numbers) -> tuple[Remove, ...]:
        """What a plan removes: all parts of these episodes and of those joined to them."""
        whole = self._whole(np.unique(chosen))
        return tuple(step for shard in self.shards if (step := shard.step(whole)) is not None)


def _aside(root: Objects) -> Iterator[str]:
    """The replaced shards that are still there, and those in quarantine."""
    for folder, suffix in (("shards", REPLACED), (QUARANTINE, SUFFIX)):
        for stream in streams(root.under(folder)):
            names = root.names(f"{folder}/{stream}/")
            yield from (name for name in names if name.endswith(suffix))


def _by_text(column: pa.ChunkedArray, function: Callable[[str], Any], dtype: Any) -> Any:
    """A function of each text, computed once per text: (N,) of a dtype, 0 for null."""
    pieces = []
    for chunk in column.chunks:
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        values = [0 if text is None else function(text) for text in coded.dictionary.to_pylist()]
        codes = pc.fill_null(coded.indices, len(values)).to_numpy(zero_copy_only=False)
        pieces.append(np.array([*values, 0], dtype)[codes])
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)


def ids_where(root: Root, found: StoredEpisodes, condition: str) -> set[str]:
    """The ids of the episodes with a step for which a condition of SQL holds.

    It sees the columns of the shards by their names. Raises ValueError for SQL that DuckDB refuses.
    """
    import duckdb  # noqa: PLC0415 - the extra `import`

    objects = objects_at(root)
    if not isinstance(objects, FolderObjects):
        raise ValueError(f"--where: expected a root in a folder, got {objects}")
    ids: set[str] = set()
    every = [*found.shards, *found.aside]
    for stream in sorted({one.stream for one in every}):
        paths = [str(objects.root / one.place) for one in every if one.stream == stream]
        ids |= _ids_in(duckdb, paths, condition)
    return ids


def _named_in(condition: str, path: str) -> pa.Table:
    """The columns of a shard whose names in a file are in a condition of SQL."""
    specs = shard_metadata(path).specs
    names = columns_for(specs).names
    pairs = zip(names, stored_names(names, specs), strict=True)
    wanted = [name for name, one in pairs if one.lower() in condition.lower() or one == "eps_id"]
    return in_file(read_shard(path, columns=wanted), specs).replace_schema_metadata(None)


def _ids_in(duckdb: Any, paths: Sequence[str], condition: str) -> set[str]:
    with duckdb.connect(":memory:", config={"threads": 2}) as connection:
        try:
            connection.execute("SET TimeZone = 'UTC'")
            first = {path for path in paths if shard_metadata(path).format_version == 1}
            if first:
                # of an earlier format: converted in memory, only what the condition names
                tables = [_named_in(condition, path) for path in first]
                connection.register("first", pa.concat_tables(tables, promote_options="default"))
            if rest := [path for path in paths if path not in first]:
                connection.register("rest", connection.read_parquet(rest, union_by_name=True))
            sources = ["FROM first"] * bool(first) + ["FROM rest"] * bool(rest)
            connection.execute(f"CREATE TEMP VIEW steps AS {' UNION ALL BY NAME '.join(sources)}")
            query = f"SELECT DISTINCT eps_id FROM steps WHERE ({condition}\n)"
            return {row[0] for row in connection.execute(query).fetchall()}
        except duckdb.Error as error:
            text = str(error).partition("\n\n")[0][:600]
            raise ValueError(f"--where: {text}") from error
