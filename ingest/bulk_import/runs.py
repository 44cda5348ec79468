"""Runs of rows: where each episode, or each agent's track through one, begins in a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ingest.columns.arrow_kinds import Array, load_arrow

_LENGTH = 256

_NAMELESS, _LONG, _REPEATED, _AGENT = 1, 2, 3, 4
UNFIT = {
    _NAMELESS: ("eps_id", "expected an episode id"),
    _LONG: ("eps_id", "expected an episode id of at most 256 characters"),
    _REPEATED: ("eps_id", "expected the rows of an episode to be contiguous"),
    _AGENT: ("agent_id", "expected an agent of 1 to 256 characters"),
}
"""Reasons why a run is invalid, by number: (column, what was expected)."""


@dataclass(slots=True)
class Runs:
    """The first row, episode and agent of each run (`agents` is None in episodes of one agent).

    `faults` has for each run a number of `UNFIT`, or 0 for a valid one; None: all are valid.
    """

    begins: Array
    names: list[str]
    agents: list[str] | None = None
    faults: Array | None = None


def runs_of(ids: Any, agents: Any, rows: int) -> Runs:
    """Find the runs of a column of ids and, unless None, one of agents: pyarrow.Arrays of text."""
    if not rows:
        return Runs(np.zeros(0, np.int64), [])
    arrow, compute = load_arrow(), load_arrow().compute

    def filled(column: Any) -> Any:
        return column.cast("string").fill_null("") if column.null_count else column

    def differs(column: Any) -> Array:
        found = compute.not_equal(column.slice(1), column.slice(0, rows - 1))
        return np.asarray(found.to_numpy(zero_copy_only=False))

    ids = filled(ids)
    agents = None if agents is None else filled(agents)
    other = differs(ids) if agents is None else differs(ids) | differs(agents)
    begins = np.append(0, np.flatnonzero(other) + 1)
    words = ids.take(arrow.array(begins)).dictionary_encode()
    known = words.dictionary.to_pylist()
    fit = all(known) and max(map(len, known)) <= _LENGTH
    if fit and agents is None and len(known) == len(begins):
        return Runs(begins, known)
    places = words.indices.to_numpy()
    names = [known[place] for place in places.tolist()]
    faults, whose = np.zeros(len(begins), np.int8), places
    listed: list[str] | None = None
    if agents is not None:
        found = agents.take(arrow.array(begins)).dictionary_encode()
        called, at = found.dictionary.to_pylist(), found.indices.to_numpy()
        listed = [called[place] for place in at.tolist()]
        whose = np.unique(places.astype(np.int64) * len(called) + at, return_inverse=True)[1]
        unfit = np.array([not 0 < len(agent) <= _LENGTH for agent in called])
        faults[unfit[at]] = _AGENT
    faults[(np.bincount(whose) > 1)[whose]] = _REPEATED
    faults[np.array([len(word) > _LENGTH for word in known])[places]] = _LONG
    faults[np.array([not word for word in known])[places]] = _NAMELESS
    return Runs(begins, names, listed, faults if faults.any() else None)
