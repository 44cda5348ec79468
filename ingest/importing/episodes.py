"""Chunks of rows become whole episodes in the columns of the bulk route."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.importing.categories import Categories
from ingest.importing.cells import Array, Cells, Fault, Faults, logarithms
from ingest.importing.grouping import EPISODE, NUMBER, UNIT, Chunk
from ingest.importing.options import ImportOptions
from ingest.importing.report import Account, BadRow, segment_sums
from ingest.importing.values import value_reader
from ingest.protocol.errors import ImportFailed
from storage.experience.episode import LOGP_TOLERANCE
from storage.spaces.descriptors import Box, Discrete, MultiBinary, MultiDiscrete, Space
from storage.spaces.leaves import leaves

_ODD_KEY = r"[/\pC]|[^\PZ ]"  # what a path or a terminal would take for something else
_ID_CHARACTERS = 200
_ESCAPED = r'["\\\x00-\x1f]'


class Episodes(NamedTuple):
    """Whole episodes behind each other: a pyarrow.Table of the bulk route's columns.

    `begins`: the first row of each; `units`, `numbers`: where each row stood in the source.
    """

    table: Any
    begins: Array
    units: Array
    numbers: Array

    def slice(self, first: int, last: int) -> Episodes:
        """The episodes [first, last)."""
        ends = np.append(self.begins, self.table.num_rows)
        begin, end = int(ends[first]), int(ends[last])
        rows = slice(begin, end)
        table = self.table.slice(begin, end - begin)
        return Episodes(
            table, self.begins[first:last] - begin, self.units[rows], self.numbers[rows]
        )


class Layout:
    """What the rows of an import mean for one policy. Raises ImportFailed where they cannot."""

    def __init__(
        self,
        options: ImportOptions,
        spaces: tuple[Space, Space],
        found: Categories,
        prefixes: Sequence[str],
        labels: Sequence[str],
    ) -> None:
        """`prefixes` of episode ids, and `labels` of sources, by unit."""
        observation, action = spaces
        self._options, self._labels = options, labels
        self._prefixes = pa.array(prefixes, pa.string())
        self._observe = value_reader("observation", "obs", observation, options.observations, found)
        self._act = value_reader("action", "actions", action, options.actions, found)
        self._uniform = uniform_logp(action) if options.uniform else None
        has_densities = any(isinstance(leaf.space, Box) for leaf in leaves(action))
        self._most = math.inf if has_densities else LOGP_TOLERANCE

    def episodes(self, chunk: Chunk, account: Account) -> Episodes:
        """The episodes of a chunk that are fine; what is not is told to the account."""
        table, report = chunk.table, account.report
        report.rows += len(table) + len(chunk.problems)
        report.rows_left_out += len(chunk.problems)
        faults = Faults(len(table))
        cells = Cells(table, self._options, faults)
        owner, columns = self._owners(cells, table), self._columns(cells)
        order = self._order(cells, owner, columns)
        kept = self._ends(cells, owner, columns, order)
        kept = kept[~_with_any(faults.bad, owner)[kept]]
        columns["eps_id"] = self._ids(table)
        report.rows_dropped += int(faults.dropped.sum())
        report.rows_left_out += int((~faults.dropped).sum()) - len(kept)
        self._tell(chunk, faults.found, columns["eps_id"], account)
        return self._put_together(table, owner, columns, kept, account)

    # --- what rows hold ----------------------------------------------------------------------

    def _owners(self, cells: Cells, table: Any) -> Array:
        """Which episode of the chunk each row belongs to, from 0 on."""
        if self._options.episode is None or not len(table):
            return np.arange(len(table))
        keys = table[EPISODE].combine_chunks()
        name = self._options.episode
        absent = cells.missing(name, keys, "an episode", has_value=False)
        filled = keys.fill_null("")
        differs = pc.not_equal(filled.slice(1), filled.slice(0, len(filled) - 1))
        return np.append(0, np.cumsum(differs.to_numpy(zero_copy_only=False) | absent[1:]))

    def _columns(self, cells: Cells) -> dict[str, Any]:
        """Column -> pyarrow.Array of each row as it stands in the source."""
        options = self._options
        columns: dict[str, Any] = {**self._observe(cells), **self._act(cells)}
        rewards = sum(cells.numbers(name) for name in options.rewards)
        made = pa.array(np.asarray(rewards, np.float64))
        cells.faults.add(~np.isfinite(rewards), "reward: expected a finite number", made)
        columns["rewards"] = made
        logp = self._propensities(cells)
        if logp is not None:
            columns["action_logp"] = pa.array(logp)
        if options.time is not None:
            columns["ts"] = pa.array(cells.micros(options.time))
        return columns

    def _propensities(self, cells: Cells) -> Array | None:
        options = self._options
        if self._uniform is not None:
            return np.full(cells.rows, self._uniform)
        if options.action_prob is not None:
            given = cells.numbers(options.action_prob)
            reason = "action_prob: expected a number in (0, 1]"
            cells.faults.add(~((given > 0) & (given <= 1)), reason, pa.array(given))
            return logarithms(given)
        if options.action_logp is not None:
            given = cells.numbers(options.action_logp)
            fine = np.isfinite(given) & (given <= self._most)
            text = "of 0 or less" if math.isfinite(self._most) else "that is finite"
            cells.faults.add(~fine, f"action_logp: expected a number {text}", pa.array(given))
            return given
        return None

    # --- order and ends ------------------------------------------------------------------------

    def _order(self, cells: Cells, owner: Array, columns: dict[str, Any]) -> Array:
        """The rows in the order of their episodes' steps."""
        times = columns["ts"].to_numpy() if "ts" in columns else None
        step = self._options.step
        if step is None:
            if times is None or self._options.episode is None:
                return np.arange(len(owner))
            return np.lexsort((times, owner))
        numbers = cells.numbers(step, whole=True)
        order = np.lexsort((numbers, owner))
        fine = ~(cells.faults.bad | cells.faults.dropped)[order]
        is_first = np.diff(owner[order], prepend=-1) != 0
        grown = np.diff(numbers[order], prepend=0)
        odd = np.where(is_first, (numbers[order] < 0) | (numbers[order] > 1), grown != 1)
        shown = pa.array(numbers)
        cells.faults.add(_at(order, odd & fine), f"column {step}: expected no gap or repeat", shown)
        if times is not None:
            back = ~is_first & (np.diff(times[order], prepend=0) < 0) & fine
            text = f"column {self._options.time}: expected times in the order of {step}"
            cells.faults.add(_at(order, back), text)
        return order

    def _ends(self, cells: Cells, owner: Array, columns: dict[str, Any], order: Array) -> Array:
        """The rows that are not dropped, in order; adds `truncateds`."""
        options = self._options
        named = {"terminated": options.terminated, "truncated": options.truncated}
        flags = {key: cells.flags(name) for key, name in named.items() if name is not None}
        none = np.zeros(cells.rows, bool)
        terminated, truncated = flags.get("terminated", none), flags.get("truncated", none)
        kept = order[~cells.faults.dropped[order]]
        is_last = np.diff(owner[kept], append=-1) != 0
        early = _at(kept, (terminated | truncated)[kept] & ~is_last, cells.rows)
        cells.faults.add(early, "row: expected the end on its episode's last row")
        if options.terminated is not None:
            truncated = truncated | ~terminated
        columns["truncateds"] = pa.array(_at(kept, truncated[kept] & is_last, cells.rows))
        return kept

    # --- what is sent ----------------------------------------------------------------------------

    def _ids(self, table: Any) -> Any:
        """The episodes' ids: the import's own, so that two sources may use the same names."""
        prefixes = self._prefixes.take(table[UNIT].combine_chunks())
        if self._options.episode is None:
            keys = table[NUMBER].combine_chunks().cast(pa.string())
        else:
            keys = _safe(table[EPISODE].combine_chunks().cast(pa.string()).fill_null(""))
        return pc.binary_join_element_wise(prefixes, keys, "-")

    def _put_together(
        self, table: Any, owner: Array, columns: dict[str, Any], kept: Array, account: Account
    ) -> Episodes:
        begins = np.flatnonzero(np.diff(owner[kept], prepend=-1))
        chosen = pa.array(kept)
        whole = len(kept) == len(table) and bool((np.diff(kept) == 1).all())
        made = {name: one if whole else one.take(chosen) for name, one in columns.items()}
        lengths = np.diff(np.append(begins, len(kept)))
        t = np.arange(len(kept)) - np.repeat(begins, lengths)
        made |= {"t": pa.array(t)}
        if self._options.tags:
            made["tags"] = self._tags(table.take(pa.array(kept[begins])), begins, len(kept))
        if self._options.policy_id is not None:
            made["policy_id"] = pa.repeat(pa.scalar(self._options.policy_id), len(kept))
        rewards = made["rewards"].to_numpy()
        logp = np.exp(made["action_logp"].to_numpy()) if "action_logp" in made else rewards[:0]
        account.see(
            {
                "steps": lengths,
                "rewards": rewards,
                "returns": segment_sums(rewards, begins),
                "propensities": logp,
                "times": made["ts"].to_numpy() if "ts" in made else rewards[:0],
            }
        )
        units = table[UNIT].to_numpy()[kept]
        return Episodes(pa.table(made), begins, units, table[NUMBER].to_numpy()[kept])

    def _tags(self, firsts: Any, begins: Array, rows: int) -> Any:
        """JSON objects at the first rows of episodes, null at the others."""
        cells = Cells(firsts, self._options, Faults(len(firsts)))
        pairs = []
        for tag, name in self._options.tags.items():
            values = _escaped(cells.texts(name).cast(pa.string()))
            opened = json.dumps(tag) + ':"'
            pairs.append(pc.binary_join_element_wise(opened, values, '"', ""))
        inner = pc.binary_join_element_wise(*pairs, ",", null_handling="skip")
        made = pc.binary_join_element_wise("{", inner, "}", "")
        if len(begins) == rows:
            return made
        places = np.full(rows, -1)
        places[begins] = np.arange(len(begins))
        return made.take(pa.array(places, mask=places < 0))

    def _tell(self, chunk: Chunk, found: Sequence[Fault], ids: Any, account: Account) -> None:
        """Count the faults, and name the first rows."""
        table = chunk.table
        units, numbers = table[UNIT], table[NUMBER]
        named: list[tuple[int, int, str, str | None]] = []
        for unit, number, reason in chunk.problems:
            account.count(reason, 1)
            named.append((unit, number, reason, None))
        for fault in found:
            account.count(fault.reason, len(fault.rows))
            for row in fault.rows[: account.room].tolist():
                episode = None
                if self._options.episode is not None and table[EPISODE][row].is_valid:
                    episode = ids[row].as_py()
                where = units[row].as_py(), numbers[row].as_py()
                named.append((*where, fault.text(row), episode))
        for unit, number, reason, episode in sorted(named, key=itemgetter(0, 1))[: account.room]:
            account.name(BadRow(self._labels[unit], number, reason, episode))


def uniform_logp(space: Space) -> float:
    """The logarithm of each action's probability, or density, under a uniform policy.

    Raises ImportFailed for a space on which there is none.
    """
    if isinstance(space, Discrete):
        return -math.log(space.n)
    if isinstance(space, MultiDiscrete):
        return -sum(math.log(n) for n in space.nvec)
    if isinstance(space, MultiBinary):
        return -math.prod(space.shape) * math.log(2)
    if isinstance(space, Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        if space.dtype.kind == "f":
            return -float(np.log(space.high.astype(float) - space.low.astype(float)).sum())
        return -float(np.log(space.high.astype(float) - space.low.astype(float) + 1).sum())
    raise ImportFailed("uniform: expected an action space of choices, or a box with bounds")


def _at(places: Array, mask: Array, rows: int | None = None) -> Array:
    """A mask over rows, of one over places among them."""
    found = np.zeros(len(mask) if rows is None else rows, bool)
    found[places[mask]] = True
    return found


def _with_any(bad: Array, owner: Array) -> Array:
    """Which rows are of an episode that has a bad one."""
    if not bad.any():
        return bad
    episodes = np.zeros(int(owner.max()) + 1, bool)
    episodes[owner[bad]] = True
    return np.asarray(episodes[owner])


def _safe(keys: Any) -> Any:
    """Keys as parts of ids; those that cannot be become digests."""
    odd = pc.or_(
        pc.match_substring_regex(keys, _ODD_KEY), pc.greater(pc.utf8_length(keys), _ID_CHARACTERS)
    )
    if not pc.any(odd).as_py():
        return keys
    found = keys.filter(odd).to_pylist()
    made = {key: hashlib.sha256(key.encode()).hexdigest()[:32] for key in set(found)}
    return pc.replace_with_mask(keys, odd, pa.array([made[key] for key in found], pa.string()))


def _escaped(texts: Any) -> Any:
    """Texts as they stand between the quotes of JSON."""
    odd = pc.fill_null(pc.match_substring_regex(texts, _ESCAPED), False)
    if not pc.any(odd).as_py():
        return texts
    made = pa.array([json.dumps(text)[1:-1] for text in texts.filter(odd).to_pylist()], pa.string())
    return pc.replace_with_mask(texts, odd, made)
