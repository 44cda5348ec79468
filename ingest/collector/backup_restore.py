"""A journal that came from a backup: what shards hold already is not put into shards again.

The collector that lived on after the backup sealed what the backup still holds, and more. Shards
behind the ends of its streams tell a restored journal. Then, in one transaction:

* it takes a new collector id, so that no ordinal is given twice;
* the shards that it does not know of become records of its own, and their steps count;
* a part that waits here and lies in a shard is marked as stored (`Stored`): no shard is written;
* an open episode is cut as it was cut in the shards; where they hold all that is known of it here,
  or more, it ends: as it ended there, else as broken;
* every other episode of those shards is remembered as over, so that its id is not begun again.

A step is known by its episode, its agent, its `t` and the microsecond in which it was received.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from ingest.collector.recovery import (
    FINISHED,
    TOTALS,
    Recovered,
    encode_finished,
    recover,
)
from ingest.collector.sealing import owner_of
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.journal_events import Cut, Ended, Event, Stored, encode_event, encode_row
from ingest.episodes.open_episode import OpenEpisode
from ingest.episodes.sealed_parts import Finished, Sealed
from ingest.protocol.agent_names import Name
from storage.declarations.declaration import PolicyDeclaration
from storage.journal.records import FORMER_ID
from storage.journal.sqlite_journal import Journal, ShardRecord

if TYPE_CHECKING:
    from storage.shards.unrecorded_shards import FoundPart, FoundShard

log = logging.getLogger("headrace.collector")

CAUSE = "the journal was restored from a backup that is older than this episode's shards"


class Shelf(Protocol):
    """The shards beside a journal."""

    def ends(self, collector_ids: set[str]) -> Mapping[str, int]:
        """stream -> the ordinal after its last shard, of these collectors' streams."""

    def later(
        self, known: Mapping[str, int], since: int
    ) -> tuple[Sequence[FoundShard], Mapping[str, int]]:
        """See `storage.shards.unrecorded_shards.later_shards`."""


class Restored(msgspec.Struct, frozen=True):
    """What came of a restored journal: its ids, what was taken up, what was not doubled."""

    previous_id: str
    collector_id: str
    shards: int  # taken up
    steps: int  # in them
    kept_back: int  # steps of the backup that are in shards
    over: int  # episodes that were open in the backup, and are over


def notice_restore(
    journal: Journal, policies: Mapping[str, PolicyDeclaration], shelf: Shelf, *, received: int
) -> Restored | None:
    """Bring a journal that is older than its shards up to them; None for any other journal.

    `received` is now, in microseconds since the epoch.
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
    restored = _Restoring(journal, recovered, found).run(previous, ends, received)
    log.error(
        "the journal is older than its shards (%s): it was restored from a backup. Collector %s "
        "goes on as %s; %s shards with %s steps are taken up, %s steps of the backup are in them "
        "and not written again, %s open episodes are over",
        ", ".join(f"{name} up to {end - 1}" for name, end in sorted(beyond.items())),
        previous,
        restored.collector_id,
        restored.shards,
        restored.steps,
        restored.kept_back,
        restored.over,
    )
    return restored


def _oldest(recovered: Recovered, now: int) -> int:
    """When the oldest step came that the journal holds and no plan names."""
    assembler = recovered.assembler
    held = (*assembler.episodes.values(), *assembler.closing.values())
    times = [episode.received[0] for episode in held if episode.received]
    for item in recovered.waiting:
        if item.part is not None:
            times.append(int.from_bytes(item.part.received_ts[:8], "little", signed=True))
    return min([*times, recovered.last_received, now])


class _Restoring(msgspec.Struct):
    """One restored journal, from its replayed state to the transaction that brings it up."""

    journal: Journal
    recovered: Recovered
    found: Sequence[FoundShard]
    parts: dict[Name, list[FoundPart]] = msgspec.field(default_factory=lambda: defaultdict(list))
    stored: list[Sealed] = msgspec.field(default_factory=list)
    encoded: list[bytes] = msgspec.field(default_factory=list)
    over: int = 0
    ended: int = 0  # episodes of the backup whose last part is in a shard

    def run(self, previous: str, ends: Mapping[str, int], received: int) -> Restored:
        """Compare, then commit."""
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
        return Restored(previous, fresh, len(self.found), steps, kept_back, self.over)

    # --- what is there already -------------------------------------------------------------

    def _keep_back_waiting(self) -> None:
        """Parts that wait for a plan: sealed again from the same rows, they came out the same."""
        for item in self.recovered.waiting:
            part = item.part
            if part is None:
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
        """Cut and end an open episode as it was in shards."""
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
        if there and episode.ended is None:  # its id was begun again, so it was over
            self._end(episode, "broken")
        return None

    def _next(self, episode: OpenEpisode, there: Sequence[FoundPart]) -> FoundPart | None:
        """The part in shards that begins where the episode stands here, if there is one."""
        at = (episode.part, episode.t0)
        return next(
            (one for one in there if (one.part, one.t0) == at and _same_steps(episode, one)),
            None,
        )

    def _ending(self, episode: OpenEpisode, there: list[FoundPart]) -> str | None:
        """How the rest of an episode, which shards alone know, ended; None when it did not."""
        t = episode.t_next
        for one in sorted(there, key=lambda one: one.t0):
            if one.part > episode.part and one.t0 >= t and one.ended is not None:
                return one.ended
        return None

    def _break_rests(self) -> None:
        """With one agent's track all of an episode is over."""
        assembler = self.recovered.assembler
        for name, whole in list(assembler.wholes.items()):
            if whole.stopped is not None and whole.open:
                for ended in assembler.break_episode((name, next(iter(whole.open))), CAUSE):
                    self.over += 1
                    self._apply(ended)

    def _end(self, episode: OpenEpisode, how: str) -> None:
        key = episode.started.key
        if episode.ended is not None:  # its windows would have closed it
            self._apply(Cut(key, episode.part, episode.steps))
            return
        self.over += 1
        cause = CAUSE if how == "broken" else ""
        self._apply(Ended(key, episode.next_seq, how, None, cause))

    def _apply(self, event: Event) -> None:
        """One more event of the history: what a replay will find in the new row."""
        assembler, blob = self.recovered.assembler, encode_event(event)
        row, now = self.journal.last_row + 1, assembler.running
        assembler.apply(event, blob, row=row, received=0, now=now)
        self.encoded.append(blob)

    def _keep_back(self) -> None:
        """What was sealed by the latest event lies in a shard."""
        self.stored.append(self.recovered.assembler.sealed[-1])

    # --- what is written down --------------------------------------------------------------

    def _records(self) -> list[ShardRecord]:
        first = self.journal.next_plan_id()
        infos = (shard.info for shard in self.found)
        return [
            ShardRecord(number, i.stream, i.first, i.last, i.path.name, i.digest, i.rows, i.nbytes)
            for number, i in enumerate(infos, first)
        ]

    def _state(self, accepted: int, kept_back: int) -> dict[str, bytes]:
        """Counts, the ids that are taken, and whose stream the first parts of episodes are in."""
        totals, infos = self.recovered.totals, [shard.info for shard in self.found]
        ended = sum(part.ended is not None for shard in self.found for part in shard.parts)
        totals.steps = accepted
        totals.rows += sum(info.rows for info in infos)
        totals.parts += sum(info.parts for info in infos)
        totals.shards += len(infos)
        totals.episodes += ended - self.ended  # those are counted when they are let go
        totals.restored += kept_back
        put: dict[str, bytes] = {}
        over = self._over(self.recovered.assembler)
        if over:
            known = self.recovered.finished
            last = int(known[-1][0].removeprefix(FINISHED)) if known else -1
            put[f"{FINISHED}{last + 1:012}"] = encode_finished(over)
            if totals.kept:
                totals.kept[FINISHED] += 1
        put[TOTALS] = msgspec.json.encode(totals)
        return put

    def _over(self, assembler: EpisodeAssembler) -> list[Finished]:
        """The episodes that only shards know: their ids are taken."""
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
    """Whether a part holds the very steps that are buffered here, as far as both go.

    The open step alone may have been decided anew since; then its place says that it is the same.
    """
    common = min(part.steps, episode.steps)
    if common == episode.steps and episode.ended is None:
        common -= 1
    return common <= 0 or episode.received[:common].tobytes() == part.received[: 8 * common]
