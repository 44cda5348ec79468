"""Find each row's episode, agent's track and policy, and the order of rows.

In an episode of several agents, each agent's rows are the steps of its track. A fault leaves out
the whole episode; steps, ends and final observations belong to a track.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.columns.arrow_kinds import Array, nulls
from ingest.importing.categories import spelled_as
from ingest.importing.cells import Cells, at_places
from ingest.importing.grouping import EPISODE
from ingest.importing.options import ImportOptions


@dataclass
class Owned:
    """For each row of a chunk: the numbers of its episode, track and policy (-1: none).

    `agents` has the names of the tracks' agents, a pyarrow.Array over rows, and `env_t` the steps
    of the environment; both are None if episodes have one agent.
    """

    owner: Array
    track: Array
    policy: Array
    agents: Any = None
    env_t: Array | None = None
    same_time: int = 0  # rows with the time of another row of their episode

    def firsts(self, kept: Array) -> Array:
        """The first kept row of each episode; arbitrary for episodes without kept rows."""
        order = (
            kept if self.env_t is None else kept[np.lexsort((self.env_t[kept], self.owner[kept]))]
        )
        begins = order[np.diff(self.owner[order], prepend=-1) != 0]
        found = np.zeros(int(self.owner.max(initial=-1)) + 1, np.int64)
        found[self.owner[begins]] = begins
        return found

    def columns(self, kept: Array) -> dict[str, Any]:
        """The route's columns of tracks, over all rows; `kept` are the rows that will be sent."""
        if self.env_t is None:
            return {}
        tracks = kept[np.diff(self.track[kept], prepend=-1) != 0]
        agents = np.bincount(self.owner[tracks], minlength=int(self.owner.max(initial=-1)) + 1)
        counts = pa.array(agents[self.owner].astype(np.int32))
        return {"agent_id": self.agents, "env_t": pa.array(self.env_t), "agents": counts}


class Owners:
    """Finds the owners of rows, for an import into the given policies."""

    def __init__(self, options: ImportOptions, policies: Sequence[str | None]) -> None:
        self._options, self._policies = options, list(policies)

    def of(self, cells: Cells, table: Any) -> Owned:
        owner = self._episodes(cells, table)
        name = self._options.agent
        if name is None:
            return Owned(owner, owner, self._policy(cells, None, owner))
        agents = cells.texts(name)
        cells.missing(name, agents, "an agent", has_value=False)
        lengths = pc.utf8_length(agents).fill_null(1).to_numpy(zero_copy_only=False)
        fine = (lengths > 0) & (lengths <= 256)
        cells.fault(name, ~fine, "expected 1 to 256 characters", agents)
        found = agents.fill_null("").dictionary_encode()
        names = found.dictionary.to_pylist()
        ranks = np.argsort(np.argsort(np.array(names, object))) if names else np.zeros(0, int)
        codes = ranks[found.indices.to_numpy(zero_copy_only=False)]
        track = np.unique(owner * max(1, len(names)) + codes, return_inverse=True)[1]
        return Owned(owner, track, self._policy(cells, agents, track), agents)

    def _episodes(self, cells: Cells, table: Any) -> Array:
        """The number of each row's episode in the chunk, from 0."""
        if EPISODE not in table.column_names or not len(table):
            return np.arange(len(table))
        keys = table[EPISODE].combine_chunks()
        absent = nulls(keys)
        if self._options.episode is not None:
            cells.texts(self._options.episode)  # an unreadable key is not a missing one
            cells.missing(self._options.episode, keys, "an episode", has_value=False)
        filled = keys.fill_null("")
        differs = pc.not_equal(filled.slice(1), filled.slice(0, len(filled) - 1))
        return np.append(0, np.cumsum(differs.to_numpy(zero_copy_only=False) | absent[1:]))

    def _policy(self, cells: Cells, agents: Any, track: Array) -> Array:
        """The index of each row's policy."""
        options = self._options
        if options.policy is None and not options.policies:
            return np.zeros(cells.rows, np.int64)
        known = pa.array([name or "" for name in self._policies], pa.string())
        if options.policy is None:
            places = [self._policies.index(name) for name in options.policies.values()]
            places.append(self._policies.index(options.policy_id) if options.policy_id else -1)
            found = pc.index_in(agents, pa.array(list(options.policies), pa.string()))
            codes = np.array(places)[found.fill_null(-1).to_numpy(zero_copy_only=False)]
            codes = np.where(nulls(agents), -1, codes)
            expected = "expected an agent that has a policy"
            cells.fault(str(options.agent), codes < 0, expected, agents)
            return codes
        texts = spelled_as(known.to_pylist(), cells.texts(options.policy))
        cells.missing(options.policy, texts, "a policy", has_value=False)
        codes = pc.index_in(texts, known).fill_null(-1).to_numpy(zero_copy_only=False)
        names = ", ".join(name or "" for name in self._policies)
        cells.fault(options.policy, codes < 0, f"expected one of {names:.200}", texts)
        firsts = codes[np.unique(track, return_index=True)[1]]
        whose = "an episode" if agents is None else "an agent in an episode"
        expected = f"expected one policy for {whose}"
        cells.fault(options.policy, codes != firsts[track], expected, texts)
        return np.asarray(codes)


def ordered(cells: Cells, owned: Owned, options: ImportOptions, times: Array | None) -> Array:
    """The rows in the order of their tracks' steps; also sets `env_t` for several agents."""
    step, name = options.step, str(options.step or options.time)
    if step is None and (times is None or options.episode is None):
        return np.arange(cells.rows)
    numbers = cells.numbers(step, whole=True) if step is not None else times
    if numbers is None:
        return np.arange(cells.rows)
    fine = ~(cells.faults.bad | cells.faults.dropped)

    def fault(places: Array, odd: Array, column: str, expected: str, given: Any = None) -> None:
        cells.fault(column, at_places(places, odd) & fine, f"expected {expected}", given)

    by_track, grown, begins = _sorted(numbers, owned.track)
    along, given = by_track, pa.array(numbers)
    if options.agent is not None:
        text = "at most one row per agent at each time"
        fault(by_track, ~begins & (grown == 0), name, text, given)
        along, grown, first = _sorted(numbers, owned.owner)
        ranks = np.cumsum(first | (grown > 0)) if step is None else numbers[along]
        owned.env_t = np.empty(cells.rows, np.int64)
        owned.env_t[along] = ranks - ranks[first][owned.owner[along]]
        grown[grown == 0] = 1  # other agents that act in the same step
    else:
        first = begins
    if step is None:
        owned.same_time = int((~begins & (grown == 0)).sum()) if options.agent is None else 0
        return by_track
    lowest = numbers[along]
    odd = np.where(first, (lowest < 0) | (lowest > 1), grown != 1)
    fault(along, odd, step, "no gap or repeat", given)
    if times is not None:
        back = ~begins & (np.diff(times[by_track], prepend=0) < 0)
        fault(by_track, back, str(options.time), f"times in the order of {step}")
    return by_track


def _sorted(numbers: Array, groups: Array) -> tuple[Array, Array, Array]:
    """The rows sorted by group and number; their differences, and which rows begin a group."""
    order = np.lexsort((numbers, groups))
    return order, np.diff(numbers[order], prepend=0), np.diff(groups[order], prepend=-1) != 0
