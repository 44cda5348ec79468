"""Journal an import's episodes, a group at a time, and count them in its reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ingest.access.tokens import Caller
from ingest.bulk_import.import_reply import ImportReply
from ingest.bulk_import.step_columns import BlockRuns, Run, StepBlock, StepColumns
from ingest.collector.collector import Collector, OpenRow
from ingest.collector.quotas import owned
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.event_checks import REPLAYED, agents_problem
from ingest.episodes.journal_events import Imported, ImportedBlock, ImportedEpisode, Started
from ingest.protocol.agent_names import name_of
from ingest.protocol.errors import Refusal, erased
from storage.experience.endings import ENDINGS
from storage.experience.range_set import RangeSet

GROUP_EPISODES, COMMIT_GROUPS = 100, 5
"""The most episodes of a group, and the number of groups between waits for the disk.

A group takes about 3 ms of the event loop, and is one journal row.
"""

GROUP_WHOLE, GROUP_ROWS = 1_000, 5_000
"""The most episodes, and steps, of a group in columns, between which the disk is awaited.

Rows of other callers would wait for the disk behind all groups that were submitted before.
"""

MAX_EPISODE_BYTES = 128_000_000
"""The most bytes of an episode's columns that may wait in memory for the episode's last piece."""


class Acceptance:
    """Accepts the episodes of one import.

    `known` are the numbers of the episodes that earlier requests with its key delivered.
    """

    def __init__(
        self,
        collector: Collector,
        found: StepColumns,
        caller: Caller,
        instance: str | None,
        known: RangeSet,
    ) -> None:
        self.reply = ImportReply(durable=collector.keeps)
        self._collector, self._found, self._caller = collector, found, caller
        self._instance, self._known = instance, known
        self._over = -1  # the number of the episode whose other pieces are ignored
        self._skipped: list[int] = []  # numbers that the next journal row marks as used
        self._staged: tuple[Started, EpisodeAssembler] | None = None

    def wants(self, begin: int) -> bool:
        """Whether a block that begins at this row must be examined."""
        return self._over < 0 or begin >= int(self._found.ends[self._over])

    @property
    def has_begun(self) -> bool:
        """Whether any event was accepted or staged."""
        return bool(self.reply.message.accepted) or self.is_staging

    @property
    def is_staging(self) -> bool:
        """Whether pieces of a long episode wait for its last one."""
        return self._staged is not None

    def groups(self, block: StepBlock) -> Iterator[list[Run] | BlockRuns]:
        """Split a block's episodes into groups that each occupy the event loop only briefly."""
        self.reply.count_rows(block.sums())
        runs, fresh = block.runs, list[Run]()
        if runs.plain.any():
            yield from self._plain_groups(
                runs if runs.plain.all() else runs.take(np.flatnonzero(runs.plain))
            )
        for at in np.flatnonzero(~runs.plain).tolist():
            run = block.run(runs, at)
            if run.number in self._known:
                self._tell_known(block, run)
            else:
                fresh.append(run)
        for number, rows, row in block.refused:
            self._over = number
            self._misfit(block, row, rows + 2, self._found.name(number))
        if self._instance is not None:
            self._skipped = [number for number, _, _ in block.refused if number not in self._known]
        for at in range(0, max(len(fresh), len(self._skipped)), GROUP_EPISODES):
            yield fresh[at : at + GROUP_EPISODES]

    def _plain_groups(self, runs: BlockRuns) -> Iterator[BlockRuns]:
        """The new ones of some plain runs, in groups; the others are counted."""
        span = RangeSet([(int(runs.numbers[0]), int(runs.numbers[-1]))])
        known = self._known.intersection(span)
        if known:
            mask = np.isin(runs.numbers, list(known))
            self._duplicates(runs.take(np.flatnonzero(mask)))
            runs = runs.take(np.flatnonzero(~mask))
        ends, first, names = np.cumsum(runs.lengths), 0, runs.names
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            most = int(ends.searchsorted(before + GROUP_ROWS, "right"))
            last = min(max(most, first + 1), first + GROUP_WHOLE, len(ends))
            while last < len(ends) and names[last] == names[last - 1]:  # tracks of an episode
                last += 1
            yield runs.take(slice(first, last))
            first = last

    def accept(self, block: StepBlock, group: Sequence[Run] | BlockRuns) -> int:
        """Accept some episodes as one journal row; return the row that the reply waits for.

        Raises Refusal if nothing can be accepted.
        """
        if isinstance(group, BlockRuns):
            return self._accept_plain(block, group)
        rules = self._found.rules
        waits = rules.declaration.reward_window > 0
        if waits and group and self._collector.is_full:
            text = "episodes that are open or in their reward windows fill their memory"
            raise Refusal("busy", text, retry_after=1.0)
        self._require_staged(group)
        skipped, self._skipped = self._skipped, []
        if not group and not skipped:
            return -1
        taken: list[Run] = []

        def fill(row: OpenRow) -> None:
            episodes = list(self._judged(block, group, taken))
            if not episodes and not skipped:
                return
            event = Imported(
                episodes,
                REPLAYED,
                **block.columns_of((run.begin, run.end) for run in taken),
                part_steps=block.part_steps,
                waits=waits,
                instance=self._instance or "",
                skipped=skipped,
            )
            row.apply(event)

        return self._collector.compose(fill)

    def _accept_plain(self, block: StepBlock, group: BlockRuns) -> int:
        """Accept plain runs as one event; one by one if any of them is known or refused."""
        found, collector, caller = self._found, self._collector, self._caller
        policy, names, agents = block.policy_id, group.names, group.agent_ids
        starts = group.numbers if self._instance is not None else None
        began = None
        if caller.open_episodes is None:
            began = collector.judge.judge_whole(self._instance, names, agents, starts, policy)
        tags = None if began is None else self._encoded_tags(group)
        if began is None or tags is None:
            return self.accept(block, [block.run(group, at) for at in range(len(group))])
        spans = zip(group.begins.tolist(), group.ends.tolist(), strict=True)
        event = ImportedBlock(
            collector.assembler.next_key,
            self._instance or "",
            caller.token_id,
            policy,
            found.rules.schema_id,
            group.names,
            began.tobytes(),
            group.lengths.astype(np.int64).tobytes(),
            bytes(map(ENDINGS.index, group.how)),
            tags,
            group.continues,
            group.enabled,
            group.finals,
            REPLAYED,
            **block.columns_of(spans),
            part_steps=block.part_steps,
            agent_ids=agents,
            agents=group.agents,
        )
        row = collector.compose(lambda row: row.apply(event))
        events = int(group.lengths.sum()) + 2 * len(group.names)
        collector.stats.accepted += events
        collector.stats.ended.update(Counter(group.how))
        self.reply.take(events)
        return row

    def _encoded_tags(self, group: BlockRuns) -> list[str] | None:
        """The tags as stored; None if some are refused, or were erased."""
        judge, rules, known = self._collector.judge, self._found.rules, dict[str, str]()
        found = []
        for name, tags in zip(group.names, group.tags, strict=False):
            key = repr(tags)
            if key not in known:
                try:
                    known[key] = judge.stored_tags(name, tags, rules)
                except Refusal:
                    return None
                if self._collector.erased.hide_tags(known[key]):
                    return None
            found.append(known[key])
        return found

    def _duplicates(self, runs: BlockRuns) -> None:
        events = int(runs.lengths.sum()) + 2 * len(runs)
        self._collector.stats.duplicates += events
        self.reply.take(0, events)

    def stop(self) -> None:
        """Drop the pieces of an episode whose last piece has not come."""
        if self._staged is not None:
            started, assembler = self._staged
            self._staged = None
            if assembler is self._collector.assembler:
                self._collector.drop_staged(started.key)

    def _judged(
        self, block: StepBlock, group: Sequence[Run], taken: list[Run]
    ) -> Iterator[ImportedEpisode]:
        for run in group:
            try:
                started = self._judge(run, len(taken))
            except Refusal as refusal:
                self._drop(run)
                path = f"$.eps_id[{run.begin - run.t0}]"
                error = {**refusal.to_json(), "path": path}
                self._refuse(run.begin - run.t0, run.all_events, refusal.code, error.copy)
                continue
            if started is None:
                self._drop(run)
                self._duplicate(run)
                continue
            taken.append(run)
            self._staged = None if run.how else (started, self._collector.assembler)
            if run.how:
                self._take(block, run)
            yield ImportedEpisode(
                started, run.steps, run.how, run.t0, run.cause, run.final_obs, run.agents
            )

    def _judge(self, run: Run, ahead: int) -> Started | None:
        """The start of an episode, with its owner; None if the episode is known. Raises Refusal."""
        assembler, caller = self._collector.assembler, self._caller
        started = self._collector.judge.judge_start(self._instance, run.start, ahead=ahead)
        if started is None:
            return None
        if self._collector.erased.hide_tags(started.tags):
            raise erased(started.episode_id)
        if run.t0 and self._staged is not None:  # judged again: its id may have been used since
            return self._staged[0]
        if not run.how and run.rows * self._found.row_bytes > MAX_EPISODE_BYTES:
            text = f"expected at most {MAX_EPISODE_BYTES} bytes of columns in an episode"
            raise Refusal("too_large", text, episode_id=started.episode_id)
        whole = assembler.wholes.get(started.episode_id)
        if run.agents > 0 and whole is not None:
            acted = len(whole.acted | {started.agent_id})
            problem = agents_problem(whole, run.agents, acted)
            if problem:
                raise Refusal("invalid", problem, episode_id=started.episode_id)
        if not caller.token_id:
            return started
        return owned(started, caller, assembler.open_of)[0]

    def _require_staged(self, group: Sequence[Run]) -> None:
        """Raise Refusal for a piece of an episode whose earlier pieces were dropped."""
        staged = self._staged
        if not (group and group[0].t0):
            return
        if not (staged and staged[1] is self._collector.assembler):
            raise rebuilt()

    def _drop(self, run: Run) -> None:
        """Ignore the rest of an episode."""
        self._over = run.number
        self.stop()

    def _take(self, block: StepBlock, run: Run) -> None:
        stats = self._collector.stats
        stats.accepted += run.events
        stats.ended[run.how] += 1
        self.reply.take(run.events)
        if run.bad is not None:
            self._over = run.number
            self._collector.tell_broken(name_of(run.start), run.cause)
            self._misfit(block, run.bad, run.all_events - run.events, run.start.episode_id)

    def _misfit(self, block: StepBlock, row: int, events: int, name: str) -> None:
        self._refuse(row, events, "invalid", lambda: block.error(row, name))

    def _refuse(self, row: int, events: int, code: str, error: Callable[[], Any]) -> None:
        self._collector.stats.refused += 1
        self._collector.stats.refused_by[code] += 1
        self.reply.refuse(row, events, code, error)

    def _duplicate(self, run: Run) -> None:
        self._collector.stats.duplicates += run.all_events
        self.reply.take(0, run.all_events)

    def _tell_known(self, block: StepBlock, run: Run) -> None:
        """Count an episode that an earlier request delivered; report its faults again."""
        name = run.start.episode_id
        if run.bad is not None:
            self._over = run.number
            self._misfit(block, run.bad, run.all_events, name)
        elif run.how:
            self._duplicate(run)


def rebuilt() -> Refusal:
    text = "the state was rebuilt, and some accepted events may be lost: send the import again"
    return Refusal("busy", text, retry_after=1.0)
