"""Journals restored from a backup: steps that are in shards already are not written again.

After a backup, the collector continued and sealed the backup's steps and later ones. Shards with
ordinals after the ends of the journal's streams show that it was restored. Then, in one
transaction:

* the journal takes a new collector id, so that no ordinal is used twice;
* shards that it has no record of get records, and their steps are counted;
* a waiting part that is in a shard is marked as stored (`Stored`), and not written again;
* an open episode is cut as in the shards; if these contain all its known steps or more, it ends
  as it ended there, otherwise as broken;
* other episodes of those shards are remembered as ended, so that their ids are not reused.

A step is identified by its episode, agent, `t`, and the microsecond in which it was received.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ingest.collector.recovery import (
    FINISHED,
    TOTALS,
    Recovered,
    encode_state,
    recover,
)
from ingest.collector.sealing import owner_of
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.journal_events import (
    Cut,
    Ended,
    JournalEvent,
    Stored,
    encode_event,
    encode_row,
)
from ingest.episodes.open_episode import OpenEpisode
from ingest.episodes.sealed_parts import Finished, Sealed
from ingest.protocol.agent_names import Name
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import Part
from storage.journal.records import FORMER_ID
from storage.journal.sqlite_journal import Journal, ShardRecord
from storage.objects.opening import Root
from storage.shards.names import next_ordinals

if TYPE_CHECKING:
    from storage.shards.unrecorded_shards import FoundPart, FoundShard

log = logging.getLogger("headrace.collector")

CAUSE = "the journal was restored from a backup that is older than this episode's shards"


class Shelf(msgspec.Struct, frozen=True):
    """The shards under a journal's root, to compare with a journal that may have been restored."""

    shards: Root

    def ends(self, collector_ids: set[str]) -> Mapping[str, int]:
        """stream -> the ordinal after its last shard, for the streams of these collectors.

        Uses only the names of the files, because this runs at every start.
        """
        found: dict[str, int] = {}
        for collector_id in collector_ids:
            found.update(next_ordinals(self.shards, collector_id))
        return found

    def later(
        self, known: Mapping[str, int], since: int
    ) -> tuple[Sequence[FoundShard], Mapping[str, int]]:
        """Read the shards that the journal has no record of."""
        from storage.shards.unrecorded_shards import later_shards  # noqa: PLC0415  Arrow, and rarely needed

        return later_shards(self.shards, known, since)


class Restored(msgspec.Struct, frozen=True):
    """The result for a restored journal: its id, the added shards, the steps not written again."""

    beyond: str  # the streams whose shards the backup lacks, and their last ordinals
    previous: str  # collector id
    collector_id: str
    shards: int  # added
    steps: int  # in these shards
    kept_back: int  # steps of the backup that are in shards
    over: int  # episodes that were open in the backup and have ended

    def log(self) -> None:
        """Log what a collector's start has changed."""
        log.error(
            "the journal is older than its shards (%s): it was restored from a backup. Collector "
            "%s continues as %s; %s shards with %s steps were added to the journal, %s steps of "
            "the backup are in shards already and are not written again, %s open episodes were "
            "ended",
            *(self.beyond, self.previous, self.collector_id),
            *(self.shards, self.steps, self.kept_back, self.over),
        )


def notice_restore(
    journal: Journal, policies: Mapping[str, PolicyDeclaration], shelf: Shelf, *, received: int
) -> Restored | None:
    """Update a journal that is older than its shards; return None for any other journal.

    `received` is the current time in microseconds since the epoch.
    """
    streams = journal.streams()
    former = journal.state(FORMER_ID).get(FORMER_ID)
    previous = journal.collector_id if former is None else former.decode()
    ids = {owner_of(name) for name in streams} | {previous, journal.collector_id}
    there = shelf.ends(ids)
    beyond = {name: end for name, end in there.items() if end > streams.get(name, 0)}
    if not beyond:
        return None
    known = {**dict.fromkeys(there, 0), **streams}
    recovered = recover(journal, policies)
    found, ends = shelf.later(known, _oldest(recovered, received))
    beyond_backup = ", ".join(f"{name} up to {end - 1}" for name, end in sorted(beyond.items()))
    return _Restoring(journal, recovered, found).run(ends, received, beyond_backup, previous)


def _oldest(recovered: Recovered, now: int) -> int:
    """When the oldest step was received that is in the journal and in no plan."""
    assembler = recovered.assembler
    held = (*assembler.episodes.values(), *assembler.closing.values())
    times = [episode.received_ts[0] for episode in held if episode.received_ts]
    for item in recovered.waiting:
        if item.part is not None:
            times.append(int.from_bytes(item.part.received_ts[:8], "little", signed=True))
    return min([*times, recovered.last_received, now])


class _Restoring(msgspec.Struct):
    """One restored journal: compares its replayed state with the shards, then updates it."""

    journal: Journal
    recovered: Recovered
    found: Sequence[FoundShard]
    parts: dict[Name, list[FoundPart]] = msgspec.field(default_factory=lambda: defaultdict(list))
    stored: list[Sealed] = msgspec.field(default_factory=list)
    encoded: list[bytes] = msgspec.field(default_factory=list)
    over: int = 0
    ended: int = 0  # episodes of the backup whose last part is in a shard

    def run(self, ends: Mapping[str, int], received: int, beyond: str, previous: str) -> Restored:
        """Compare the state with the shards, then commit the difference."""
        for shard in self.found:
            for part in shard.parts:
                self.parts[_name_of(part)].append(part)
        self._keep_back_waiting()
        assembler = self.recovered.assembler
        for episode in (*assembler.episodes.values(), *assembler.closing.values()):
            if self.parts[episode.started.name]:
                self._bring_up(episode)
        self._break_rests()
        kept_back = sum(item.part.steps for item in self.stored if item.part is not None)
        steps = sum(shard.info.rows for shard in self.found)
        self.encoded += [encode_event(Stored(item.key, item.number)) for item in self.stored]
        accepted = assembler.steps + steps - kept_back
        row = encode_row(received, accepted, self.encoded, assembler.running)
        fresh = self.journal.renew_collector_id(
            [(self.journal.last_row + 1, row)],
            records=self._records(),
            ends=ends,
            put=self._state(accepted, kept_back),
        )
        return Restored(beyond, previous, fresh, len(self.found), steps, kept_back, self.over)

    # --- comparing with shards -------------------------------------------------------------

    def _keep_back_waiting(self) -> None:
        """Mark waiting parts that are in shards; replayed from the same rows, they are equal."""
        assembler, waiting = self.recovered.assembler, list[Sealed]()
        for item in self.recovered.waiting:
            is_known = any(self.parts.get(one.name) for one in item.ended)
            waiting += assembler.split(item) if is_known else [item]
        self.recovered.waiting = waiting
        for item in waiting:
            part = item.part
            if not isinstance(part, Part):
                continue
            there = self.parts[(part.episode_id, part.agent_id) if part.env_t else part.episode_id]
            key = (part.part, part.t0, part.received_ts)
            for one in there:
                if (one.part, one.t0, one.received) == key:
                    there.remove(one)
                    self.stored.append(item)
                    self.ended += one.ended is not None
                    break

    def _bring_up(self, episode: OpenEpisode) -> None:
        """Cut and end an open episode as in the shards."""
        there = self.parts[episode.started.name]
        while (one := self._next(episode, there)) is not None:
            there.remove(one)
            if one.t0 + one.steps >= episode.t_next:
                how = one.ended or self._ending(episode, there)
                self.ended += how is not None
                self._end(episode, how or "broken")
                return self._keep_back()
            self._apply(Cut(episode.started.key, episode.part, one.steps))
            self._keep_back()
        if there and episode.ended is None:  # its id was reused, so the episode had ended
            self._end(episode, "broken")
        return None

    def _next(self, episode: OpenEpisode, there: Sequence[FoundPart]) -> FoundPart | None:
        """The part in the shards that begins at the episode's current step, if there is one."""
        at = (episode.part, episode.t0)
        return next(
            (one for one in there if (one.part, one.t0) == at and _same_steps(episode, one)),
            None,
        )

    def _ending(self, episode: OpenEpisode, there: list[FoundPart]) -> str | None:
        """How an episode ended in the parts that only the shards have; None if it did not."""
        t = episode.t_next
        for one in sorted(there, key=lambda one: one.t0):
            if one.part > episode.part and one.t0 >= t and one.ended is not None:
                return one.ended
        return None

    def _break_rests(self) -> None:
        """End the other tracks of episodes in which one agent's track is abandoned or broken."""
        assembler = self.recovered.assembler
        for name, whole in list(assembler.wholes.items()):
            if whole.stopped is not None and whole.open:
                for ended in assembler.break_episode((name, next(iter(whole.open))), CAUSE):
                    self.over += 1
                    self._apply(ended)

    def _end(self, episode: OpenEpisode, how: str) -> None:
        key = episode.started.key
        if episode.ended is not None:  # it only waits for its reward windows
            self._apply(Cut(key, episode.part, episode.steps))
            return
        self.over += 1
        cause = CAUSE if how == "broken" else ""
        self._apply(Ended(key, episode.next_seq, how, None, cause))

    def _apply(self, event: JournalEvent) -> None:
        """Apply an event, and add it to the new row for replays."""
        assembler, blob = self.recovered.assembler, encode_event(event)
        row, now = self.journal.last_row + 1, assembler.running
        assembler.apply(event, blob, row=row, received=0, now=now)
        self.encoded.append(blob)

    def _keep_back(self) -> None:
        """Mark the parts that the latest event has sealed as stored."""
        self.stored.append(self.recovered.assembler.sealed[-1])

    # --- the transaction -------------------------------------------------------------------

    def _records(self) -> list[ShardRecord]:
        first = self.journal.next_plan_id()
        infos = (shard.info for shard in self.found)
        return [
            ShardRecord(number, i.stream, i.first, i.last, i.path.name, i.digest, i.rows, i.nbytes)
            for number, i in enumerate(infos, first)
        ]

    def _state(self, accepted: int, kept_back: int) -> dict[str, bytes]:
        """State entries: counts, the used ids, and the streams of episodes' first parts."""
        totals, infos = self.recovered.totals, [shard.info for shard in self.found]
        ended = sum(part.ended is not None for shard in self.found for part in shard.parts)
        totals.steps = accepted
        totals.rows += sum(info.rows for info in infos)
        totals.parts += sum(info.parts for info in infos)
        totals.shards += len(infos)
        totals.episodes += ended - self.ended  # `self.ended` are counted when they are released
        totals.restored += kept_back
        put: dict[str, bytes] = {}
        over = self._over(self.recovered.assembler)
        if over:
            known = self.recovered.finished
            last = int(known[-1][0].removeprefix(FINISHED)) if known else -1
            put[f"{FINISHED}{last + 1:012}"] = encode_state(over)
            if totals.kept:
                totals.kept[FINISHED] += 1
        put[TOTALS] = msgspec.json.encode(totals)
        return put

    def _over(self, assembler: EpisodeAssembler) -> list[Finished]:
        """The episodes that are only in shards, as ended ones: their ids are used."""
        over: dict[Name, Finished] = {}
        for name, parts in self.parts.items():
            if parts and name not in assembler.episodes and name not in assembler.finished:
                how = parts[-1].ended or "broken"
                cause = CAUSE if how == "broken" else ""
                episode_id, agent = (name, None) if isinstance(name, str) else name
                over[name] = Finished(episode_id, -1, "", -1, 0, how, cause, agent)
        return list(over.values())[-assembler.limits.finished :]


def _name_of(part: FoundPart) -> Name:
    return (part.episode_id, part.agent_id) if part.is_track else part.episode_id


def _same_steps(episode: OpenEpisode, part: FoundPart) -> bool:
    """Whether a part and the buffered steps agree, up to the shorter of the two.

    The open step may have a newer decision; it is identified by its position only.
    """
    common = min(part.steps, episode.steps)
    if common == episode.steps and episode.ended is None:
        common -= 1
    return common <= 0 or episode.received_ts[:common].tobytes() == part.received[: 8 * common]
