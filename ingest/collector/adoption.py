"""`adopt`: a journal that is older than its shards takes them over, offline.

The collector went on after the backup of such a journal, and sealed its steps and later ones. A
start is refused (`require_current`), because it would give ordinals and steps twice. `adopt` closes
everything that was open, writes the steps that no shard has, and in one transaction:

* the journal takes a new collector id, so that no ordinal is used twice;
* shards that it has no record of get records, and their steps are counted;
* its rows are dropped, because all of their steps are in shards;
* other episodes of those shards are remembered as ended, so that their ids are not reused.

A step is identified by its episode, agent, `t`, and the microsecond in which it was received. So
after a kill before the transaction, the next run finds the shards that this one has written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ingest.collector.group_commit import Transaction
from ingest.collector.recovery import FINISHED, Recovered, encode_state, recover
from ingest.collector.sealing import Sealing, owner_of
from ingest.collector.writer_thread import SealJob
from ingest.episodes.journal_events import Cut, Ended, encode_event
from ingest.episodes.open_episode import OpenEpisode
from ingest.episodes.sealed_parts import Finished, Sealed, steps_of
from ingest.protocol.agent_names import Name
from storage.declarations.declaration import PolicyDeclaration
from storage.errors import JournalBehind
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns
from storage.journal.records import FORMER_ID, Journal, ShardRecord, new_collector_id
from storage.shards.names import ShardInfo

if TYPE_CHECKING:
    from storage.shards.unrecorded_shards import FoundPart, FoundShard

CAUSE = "the journal was restored from a backup, which closed the episodes that were open in it"

Write = Callable[[str, str, Sequence[Part | PartColumns]], ShardInfo]
"""Writes parts of a stream, with its spaces as canonical JSON, to a shard."""
Ends = Callable[[str], Mapping[str, int]]
"""collector id -> its streams in `shards/`, with the ordinals after their last shards."""
Later = Callable[[Mapping[str, int], int], "tuple[Sequence[FoundShard], Mapping[str, int]]"]
"""`storage.shards.unrecorded_shards.later_shards` of a root."""


class Adopted(msgspec.Struct, frozen=True):
    """What `adopt` has done. Counts are steps, except for `shards` and `closed` (episodes)."""

    previous: str  # collector id
    collector_id: str
    shards: int  # that got records
    steps: int  # in these shards
    kept_back: int  # of the journal that were in them
    written: int  # of the journal that were in no shard
    closed: int


def require_current(journal: Journal, ends: Ends) -> None:
    """Raise JournalBehind if shards have later ordinals than the journal."""
    there, streams = _there(journal, ends), journal.streams()
    later = [(name, end) for name, end in sorted(there.items()) if end > streams.get(name, 0)]
    beyond = ", ".join(f"{name} up to {end - 1}" for name, end in later)
    if beyond:
        raise JournalBehind(
            f"the journal is older than its shards ({beyond}), as after a restore: run `headrace "
            "adopt` with this root"
        )


def _there(journal: Journal, ends: Ends) -> dict[str, int]:
    """`ends` of all collector ids that the journal knows."""
    former = journal.state(FORMER_ID).get(FORMER_ID, b"").decode() or journal.collector_id
    ids = {*map(owner_of, journal.streams()), former, journal.collector_id}
    return {stream: end for one in ids for stream, end in ends(one).items()}


def adopt(
    journal: Journal,
    policies: Mapping[str, PolicyDeclaration],
    ends: Ends,
    later: Later,
    write: Write,
    *,
    received: int,
    removed: Callable[[Mapping[str, int]], int] = lambda known: 0,
) -> Adopted:
    """Make a journal current that may be older than its shards; see the module.

    `received` is the current time in microseconds since the epoch. `removed`: how many rows with
    ordinals from given ones on were removed from shards. Raises the errors of the journal and of
    `write`; then nothing has changed but shards that a repetition finds.
    """

    def commit(change: Transaction, then: Callable[[], None]) -> None:
        journal.commit(**{name: getattr(change, name) for name in change.__struct_fields__})
        then()

    def sealing(recovered: Recovered) -> Sealing:
        """Sealing that writes and records each shard at once."""

        def submit(job: SealJob) -> None:
            job.done(write(job.plan.stream, job.canonical_json, job.parts))

        return Sealing(recovered, submit, transact=commit, guard=lambda function: function)

    with journal.transaction():
        marked = set[tuple[int, int]]()
        recovered = recover(journal, policies, marked=marked)
        if recovered.planned:  # the backup has their ordinals: complete them as a start would
            recovered.waiting = []
            sealing(recovered).resume(recovered.assembler.running)
            recovered = recover(journal, policies, marked=marked)
        there = _there(journal, ends)
        known = {**dict.fromkeys(there, 0), **journal.streams()}
        found, next_ordinals = later(known, _oldest(recovered, received))
        next_ordinals = {
            stream: max(there.get(stream, 0), next_ordinals.get(stream, 0), known.get(stream, 0))
            for stream in {*there, *next_ordinals}
        }
        work = _Adoption(recovered, found, marked)
        put = work.run()
        recovered.assembler.steps += removed(known)
        infos = [shard.info for shard in found]
        records = [
            ShardRecord(number, i.stream, i.first, i.last, i.path.name, i.digest, i.rows, i.nbytes)
            for number, i in enumerate(infos, journal.next_plan_id())
        ]
        previous, fresh = recovered.collector_id, new_collector_id()
        journal.renew_collector_id(fresh, records=records, ends=next_ordinals, put=put)
        recovered.collector_id, recovered.next_plan = fresh, journal.next_plan_id()
        last = sealing(recovered)
        last.release(work.stored)
        recovered.assembler.sealed = work.rest
        last.add(recovered.assembler.running)
        last.plan_all()
        last.settle(all_rows=True)
    rows = sum(info.rows for info in infos)
    written = steps_of(work.rest)
    return Adopted(previous, fresh, len(infos), rows, work.kept_back, written, work.closed)


def _oldest(recovered: Recovered, now: int) -> int:
    """When the oldest step was received that is in the journal and in no plan."""
    assembler = recovered.assembler
    held = (*assembler.episodes.values(), *assembler.closing.values())
    times = [episode.received_ts[0] for episode in held if episode.received_ts]
    for item in recovered.waiting:
        if item.part is not None:
            times.append(int.from_bytes(item.part.received_ts[:8], "little", signed=True))
    return min([*times, recovered.last_received, now])


class _Adoption(msgspec.Struct):
    """Sorts what a journal holds by whether it is in shards, and closes what is open.

    `marked`: the parts that release 0.1.0 has marked as stored, by key and number.
    """

    recovered: Recovered
    found: Sequence[FoundShard]
    marked: set[tuple[int, int]]
    parts: dict[Name, list[FoundPart]] = msgspec.field(default_factory=lambda: defaultdict(list))
    stored: list[Sealed] = msgspec.field(default_factory=list)
    rest: list[Sealed] = msgspec.field(default_factory=list)
    closed: int = 0
    ended: int = 0  # episodes of the journal whose end is in a shard

    def run(self) -> dict[str, bytes]:
        """Fill `stored` and `rest`; return the state's entry of episodes that only shards have."""
        recovered, assembler = self.recovered, self.recovered.assembler
        for shard in self.found:
            for part in shard.parts:
                self.parts[_name_of(part)].append(part)
        known = {*assembler.episodes, *assembler.finished}
        waiting, recovered.waiting, recovered.planned = recovered.waiting, [], []
        for item in waiting:
            self._sort(item)
        self.closed = len(assembler.episodes)
        for episode in (*assembler.episodes.values(), *assembler.closing.values()):
            self._close(episode)
        self._count()
        return self._over(known)

    @property
    def kept_back(self) -> int:
        """Steps of the journal that the found shards have."""
        return steps_of([one for one in self.stored if (one.key, one.number) not in self.marked])

    def _sort(self, item: Sealed) -> None:
        """Sort a part that waited for a shard; replayed from the same rows, it is equal there."""
        keys = {item.key + n for n in range(len(item.ended))}
        known = any(key in keys for key, _ in self.marked) or any(
            self.parts.get(one.name) for one in item.ended
        )
        for one in self.recovered.assembler.split(item) if known else [item]:
            stored = (one.key, one.number) in self.marked
            if isinstance(part := one.part, Part):
                there = self.parts[
                    (part.episode_id, part.agent_id) if part.env_t else part.episode_id
                ]
                key = (part.part, part.t0, part.received_ts)
                for found in [p for p in there if (p.part, p.t0, p.received) == key][:1]:
                    there.remove(found)
                    self.ended += found.ended is not None
                    stored = True
            self._keep(one, stored=stored)

    def _close(self, episode: OpenEpisode) -> None:
        """Cut an open episode as in the shards, and end it."""
        key, there = episode.started.key, self.parts[episode.started.name]
        stored = False
        while not stored and (one := _next(episode, there)) is not None:
            there.remove(one)
            stored = one.t0 + one.steps >= episode.t_next
            if not stored:
                self._apply(Cut(key, episode.part, one.steps), stored=True)
            elif one.ended or any(p.ended for p in there if p.part > episode.part):
                self.ended += 1
        if episode.ended is not None:  # it only waits for its reward windows
            self._apply(Cut(key, episode.part, episode.steps), stored=stored)
        else:
            self._apply(Ended(key, episode.next_seq, "broken", None, CAUSE), stored=stored)

    def _apply(self, event: Cut | Ended, *, stored: bool) -> None:
        """Apply an event that seals a part, as if the latest row had it: all rows are dropped."""
        assembler, row = self.recovered.assembler, self.recovered.last_row
        now = assembler.running
        assembler.apply(event, encode_event(event), row=row, received=0, now=now)
        self._keep(assembler.sealed.pop(), stored=stored)

    def _keep(self, item: Sealed, *, stored: bool) -> None:
        """Keep a part to be released or written. Nothing is open afterwards, so no cut remains."""
        item = msgspec.structs.replace(item, carry=None)
        (self.stored if stored else self.rest).append(item)

    def _count(self) -> None:
        """Add the found shards to the totals."""
        infos, totals = [shard.info for shard in self.found], self.recovered.totals
        rows, kept_back = sum(info.rows for info in infos), self.kept_back
        ended = sum(part.ended is not None for shard in self.found for part in shard.parts)
        self.recovered.assembler.steps += rows - kept_back
        totals.rows += rows
        totals.parts += sum(info.parts for info in infos)
        totals.shards += len(infos)
        totals.episodes += ended - self.ended  # the others are counted when they are released
        totals.restored += kept_back

    def _over(self, known: set[Name]) -> dict[str, bytes]:
        """The state's entry with the episodes that only shards have: their ids are used."""
        over: list[Finished] = []
        for name, parts in self.parts.items():
            if parts and name not in known:
                how = parts[-1].ended or "broken"
                episode_id, agent = (name, None) if isinstance(name, str) else name
                cause = CAUSE if how == "broken" else ""
                over.append(Finished(episode_id, -1, "", -1, 0, how, cause, agent))
        if not over:
            return {}
        over = over[-self.recovered.assembler.limits.finished :]
        entries = self.recovered.finished
        number = int(entries[-1][0].removeprefix(FINISHED)) + 1 if entries else 0
        entries.append((f"{FINISHED}{number:012}", len(over)))
        return {entries[-1][0]: encode_state(over)}


def _next(episode: OpenEpisode, there: Sequence[FoundPart]) -> FoundPart | None:
    """The part in the shards that begins at the episode's current step, if there is one.

    It has the same steps, up to the shorter of the two. The open step may have a newer decision; it
    is identified by its position only.
    """
    for one in there:
        common = min(one.steps, episode.steps)
        common -= common == episode.steps and episode.ended is None
        same = common <= 0 or episode.received_ts[:common].tobytes() == one.received[: 8 * common]
        if (one.part, one.t0) == (episode.part, episode.t0) and same:
            return one
    return None


def _name_of(part: FoundPart) -> Name:
    return (part.episode_id, part.agent_id) if part.is_track else part.episode_id
