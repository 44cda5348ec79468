"""Convert chunks of rows to whole episodes in the columns of the bulk route."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.columns.arrow_kinds import Array, nulls
from ingest.columns.step_numbers import COLUMNS, unfit
from ingest.importing.categories import Categories
from ingest.importing.cells import CellFaults, Cells, at_places, logarithms
from ingest.importing.engine import FILE, ROW
from ingest.importing.grouping import EPISODE, NUMBER, UNIT, Chunk
from ingest.importing.options import ImportOptions
from ingest.importing.owners import Owned, Owners, ordered
from ingest.importing.report import Account, BadRow, segment_sums
from ingest.importing.values import value_reader
from ingest.protocol.errors import ImportFailed
from storage.experience.step_columns import LOGP_TOLERANCE
from storage.spaces.descriptors import Box, Discrete, MultiBinary, MultiDiscrete, Space
from storage.spaces.leaves import leaves

_ODD_KEY = r"[/\pC]|[^\PZ ]"  # characters with a meaning in paths or terminals
_ID_CHARACTERS = 200


class WholeEpisodes(NamedTuple):
    """Consecutive whole episodes: a pyarrow.Table with the bulk route's columns.

    `begins`: the first row of each episode; `units`, `numbers`: each row's place in the source.
    """

    table: Any
    begins: Array
    units: Array
    numbers: Array

    def slice(self, first: int, last: int) -> WholeEpisodes:
        """The episodes [first, last)."""
        ends = np.append(self.begins, self.table.num_rows)
        begin, end = int(ends[first]), int(ends[last])
        rows = slice(begin, end)
        table = self.table.slice(begin, end - begin)
        return WholeEpisodes(
            table, self.begins[first:last] - begin, self.units[rows], self.numbers[rows]
        )


class Filler:
    """Fills in one policy's observations and actions. Raises ImportFailed if columns do not fit."""

    def __init__(
        self,
        options: ImportOptions,
        policy_id: str | None,
        spaces: tuple[Space, Space],
        found: Categories,
    ) -> None:
        observation, action = spaces
        self.policy_id, self._options = policy_id, options
        seen, finals = options.observations_of(policy_id), options.finals_of(policy_id)
        self._observe = value_reader("observation", "obs", observation, seen, found)
        acted = options.actions_of(policy_id)
        self._act = value_reader("action", "actions", action, acted, found)
        self._finish = None
        if finals:
            what = "final observation"
            self._finish = value_reader(what, "final_obs", observation, finals, found)
        self._finals = [column.name for column in finals]
        self.uniform = uniform_logp(action) if options.uniform else 0.0
        self.has_densities = any(isinstance(leaf.space, Box) for leaf in leaves(action))

    def fill(self, cells: Cells, table: Any, rows: Array) -> dict[str, Any]:
        """Column -> pyarrow.Array of those rows."""
        if len(rows) == cells.rows:
            return {**self._observe(cells), **self._act(cells)}
        some = Cells(table.take(pa.array(rows)), self._options, CellFaults(len(rows)))
        made = {**self._observe(some), **self._act(some)}
        cells.faults.take(some.faults, rows)
        return made

    def finish(self, cells: Cells, table: Any, lasts: Array) -> tuple[Array, dict[str, Any]]:
        """(mask of the last rows with a final observation, column -> pyarrow.Array of these)."""
        if self._finish is None:
            return lasts[:0], {}
        there = np.zeros(len(lasts), bool)
        ends = table.select(self._finals).take(pa.array(lasts))
        for column in ends.columns:
            there |= ~nulls(column)
        rows = lasts[there]
        faults = CellFaults(len(rows))
        made = self._finish(Cells(ends.filter(pa.array(there)), self._options, faults))
        kept = ~faults.dropped  # an incomplete final observation counts as absent
        faults.dropped[:] = False
        cells.faults.take(faults, rows)
        return rows[kept], {name: column.filter(pa.array(kept)) for name, column in made.items()}


class Layout:
    """Converts the rows of an import to episodes. Raises ImportFailed if the options do not fit."""

    def __init__(
        self,
        options: ImportOptions,
        spaces: Mapping[str | None, tuple[Space, Space]],
        found: Categories,
        prefixes: Sequence[Sequence[str]],
        labels: Sequence[str],
    ) -> None:
        """`spaces` by policy; `prefixes` of episode ids by policy and unit; `labels` by unit."""
        self._options, self._labels = options, labels
        self._has_places = options.sql is not None or options.format is not None
        self._prefixes = pa.array(itertools.chain(*prefixes), pa.string())
        self._fillers = [Filler(options, name, pair, found) for name, pair in spaces.items()]
        self._owners = Owners(options, list(spaces))

    def episodes(self, chunk: Chunk, account: Account) -> list[tuple[str | None, WholeEpisodes]]:
        """The valid episodes, or tracks, by policy; the account gets the faults of the others."""
        table, report = chunk.table, account.report
        report.rows += len(table) + len(chunk.problems)
        report.rows_left_out += len(chunk.problems)
        faults = CellFaults(len(table))
        cells = Cells(table, self._options, faults)
        owned = self._owners.of(cells, table)
        columns = self._columns(cells, owned.policy)
        filled = []
        for number, filler in enumerate(self._fillers):
            rows = np.flatnonzero(owned.policy == number)
            filled.append((rows, filler.fill(cells, table, rows)))
        times = columns["ts"].to_numpy() if "ts" in columns else None
        order = ordered(cells, owned, self._options, times)
        account.same_time += owned.same_time
        kept = self._ends(cells, owned.track, columns, order, account)
        lasts = kept[np.diff(owned.track[kept], append=-1) != 0]
        finals = [
            filler.finish(cells, table, lasts[owned.policy[lasts] == number])
            for number, filler in enumerate(self._fillers)
        ]
        kept = kept[~_with_any(faults.bad, owned.owner)[kept]]
        columns["eps_id"] = self._ids(table, owned.policy)
        if self._options.shards:
            earlier = cells.texts("continues")
            columns["continues"] = self._ids(table, owned.policy, earlier)
        report.rows_dropped += int(faults.dropped.sum())
        report.rows_left_out += int((~faults.dropped).sum()) - len(kept)
        self._tell(chunk, faults, columns["eps_id"], account)
        account.count_other({name: int(mask[kept].sum()) for name, mask in faults.as_other.items()})
        columns |= owned.columns(kept)
        made = []
        for number, filler in enumerate(self._fillers):
            mine = kept[owned.policy[kept] == number]
            rows, own = filled[number]
            places = np.searchsorted(rows, mine)
            own = {name: _taken(column, places) for name, column in own.items()}
            own |= {name: _taken(column, mine) for name, column in columns.items()}
            own |= _placed(*finals[number], mine)
            whole = self._put_together(table, owned, own, kept, mine, filler.policy_id)
            self._see(whole, account)
            made.append((filler.policy_id, whole))
        return made

    # --- source columns ----------------------------------------------------------------------

    def _columns(self, cells: Cells, policy: Array) -> dict[str, Any]:
        """Column -> pyarrow.Array with a value for each source row, independent of its policy."""
        options, columns = self._options, dict[str, Any]()
        rewards = sum(
            sign * cells.numbers(name, booleans=True) for name, sign in options.reward_terms
        )
        rewards = np.asarray(rewards, np.float64)
        bad, expected = unfit(COLUMNS["rewards"], rewards)
        cells.faults.add(bad, "reward", expected, rewards.item)
        columns["rewards"] = pa.array(rewards)
        logp = self._propensities(cells, policy)
        if logp is not None:
            columns["action_logp"] = pa.array(logp, from_pandas=True)  # NaN is unknown
        passed = self._sampled(cells)
        if passed is not None:
            columns["pass_prob"] = pa.array(passed)
        if options.shards:
            columns["policy_version"] = pa.array(cells.numbers("policy_version", whole=True))
            columns["training_enabled"] = pa.array(cells.flags("training_enabled"))
            columns |= {name: cells.texts(name) for name in ("infos", "tags")}
        if options.time is not None:
            columns["ts"] = pa.array(cells.micros(options.time))
        for name in options.tags.values():
            cells.texts(name)  # an unreadable cell is a fault, also in other rows than the first
        if options.infos:
            pairs = {key: cells.json(name) for key, name in options.infos.items()}
            columns["infos"] = _objects(pairs)
        return columns

    def _sampled(self, cells: Cells) -> Array | None:
        """The probability with which each row was kept in the log."""
        given, weight = self._options.sample_prob, self._options.sample_weight
        if given is None and weight is None:
            return None
        if weight is not None:
            found = cells.numbers(weight)
            expected = "expected a finite number of 1 or more"
            fine = np.isfinite(found) & (found >= 1 - LOGP_TOLERANCE)
            cells.faults.add(~fine, "sample_weight", expected, found.item)
            return np.minimum(1 / np.where(fine, found, 1.0), 1.0)
        if not isinstance(given, str):
            return np.full(cells.rows, given, np.float64)
        found = cells.numbers(given)
        rounded = np.where(found <= 1 + LOGP_TOLERANCE, np.minimum(found, 1.0), found)
        bad, expected = unfit(COLUMNS["pass_prob"], rounded)
        expected += "; its inverse is a sample_weight"
        cells.faults.add(bad, "sample_prob", expected, found.item)
        return rounded

    def _propensities(self, cells: Cells, policy: Array) -> Array | None:
        options = self._options
        if options.uniform:
            return np.array([filler.uniform for filler in self._fillers])[policy]
        name = options.action_prob or options.action_logp
        if name is None:
            return None
        dense = np.array([filler.has_densities for filler in self._fillers])[policy]
        given = cells.numbers(name)
        if options.action_logp is not None:
            bad, expected = unfit(COLUMNS["action_logp"], given, dense)
            unknown = np.zeros(cells.rows, bool)
            if options.missing == "value":  # 0 would state that it is 1
                unknown = nulls(cells.raw(name))
            cells.faults.add(bad & ~unknown, "action_logp", expected, given.item)
            return np.where(unknown, math.nan, given)
        fine = (given > 0) & np.isfinite(given) & (dense | (given <= 1 + LOGP_TOLERANCE))
        text = "expected above 0" if dense.any() else "expected a number in (0, 1]"
        hint = "; logarithms of probabilities are action_logp"
        cells.faults.add(~fine, "action_prob", text, lambda row: f"{given[row]}{hint}")
        return logarithms(np.where(dense, given, np.minimum(given, 1.0)))

    def _ends(
        self,
        cells: Cells,
        track: Array,
        columns: dict[str, Any],
        order: Array,
        account: Account,
    ) -> Array:
        """The rows that are not dropped, in order; sets `truncateds`."""
        options = self._options
        named = {"terminated": options.terminated, "truncated": options.truncated}
        flags = {key: cells.flags(name) for key, name in named.items() if name is not None}
        none = np.zeros(cells.rows, bool)
        terminated, truncated = flags.get("terminated", none), flags.get("truncated", none)
        kept = order[~cells.faults.dropped[order]]
        for key, flag in flags.items():
            account.true[str(named[key])] += int(flag.sum())
        is_last = np.diff(track[kept], append=-1) != 0
        early = at_places(kept, (terminated | truncated)[kept] & ~is_last, cells.rows)
        whose = "episode" if options.agent is None else "agent"
        cells.faults.add(early, "row", f"expected an end only on the last row of its {whose}")
        if options.terminated is not None or options.ends:
            truncated = truncated | ~terminated
        columns["truncateds"] = pa.array(at_places(kept, truncated[kept] & is_last, cells.rows))
        return kept

    # --- columns of requests ---------------------------------------------------------------------

    def _ids(self, table: Any, policy: Array, keys: Any = None) -> Any:
        """The episodes' ids, with the import's prefix, so that sources can use the same names.

        `keys`: of other episodes than the rows' own.
        """
        units = np.maximum(policy, 0) * len(self._labels) + table[UNIT].to_numpy()
        prefixes = self._prefixes.take(pa.array(units))
        if keys is not None:
            keys = _safe(keys.cast(pa.string()))
        elif EPISODE not in table.column_names:
            keys = table[NUMBER].combine_chunks().cast(pa.string())
        else:
            keys = _safe(table[EPISODE].combine_chunks().cast(pa.string()).fill_null(""))
        return pc.binary_join_element_wise(prefixes, keys, "-")

    def _put_together(
        self,
        table: Any,
        owned: Owned,
        made: dict[str, Any],
        kept: Array,
        mine: Array,
        policy_id: str | None,
    ) -> WholeEpisodes:
        begins = np.flatnonzero(np.diff(owned.track[mine], prepend=-1))
        lengths = np.diff(np.append(begins, len(mine)))
        made["t"] = pa.array(np.arange(len(mine)) - np.repeat(begins, lengths))
        if self._options.tags:
            firsts = table.take(pa.array(owned.firsts(kept)[owned.owner[mine[begins]]]))
            cells = Cells(firsts, self._options, CellFaults(len(firsts)))
            tags = {tag: cells.quoted(name) for tag, name in self._options.tags.items()}
            made["tags"] = _spread(_objects(tags), begins, len(mine))
        if policy_id is not None:
            made["policy_id"] = pa.repeat(pa.scalar(policy_id), len(mine))
        units, numbers = table[UNIT].to_numpy()[mine], table[NUMBER].to_numpy()[mine]
        return WholeEpisodes(pa.table(made), begins, units, numbers)

    def _see(self, episodes: WholeEpisodes, account: Account) -> None:
        table, begins = episodes.table, episodes.begins
        rewards = table["rewards"].to_numpy()
        there = table.column_names
        logp = np.exp(table["action_logp"].to_numpy()) if "action_logp" in there else rewards[:0]
        logp = logp[~np.isnan(logp)]
        account.see(
            {
                "steps": np.diff(np.append(begins, len(table))),
                "rewards": rewards,
                "returns": segment_sums(rewards, begins),
                "propensities": logp,
                "times": table["ts"].to_numpy() if "ts" in there else rewards[:0],
            }
        )

    def _tell(self, chunk: Chunk, faults: CellFaults, ids: Any, account: Account) -> None:
        """Count the faults, and describe the first rows."""
        table = chunk.table
        units, numbers = table[UNIT], table[NUMBER]
        for number, reason, label in chunk.problems:
            account.count(reason, 1)
            account.name(BadRow(label or "", number, reason, None))
        named: list[tuple[str, int, str, str | None]] = []
        for fault, rows in faults.each():
            account.count(fault.reason, len(rows))
            for row in rows[: account.room(fault.reason)].tolist():
                episode = None
                if EPISODE in table.column_names and table[EPISODE][row].is_valid:
                    episode = ids[row].as_py()
                where = self._labels[units[row].as_py()], numbers[row].as_py()
                if self._has_places and {FILE, ROW} <= {*table.column_names}:
                    where = str(table[FILE][row].as_py()), table[ROW][row].as_py()
                named.append((*where, fault.text(row), episode))
        for label, number, reason, episode in sorted(named, key=itemgetter(0, 1)):
            account.name(BadRow(label, number, reason, episode))


def uniform_logp(space: Space) -> float:
    """The logarithm of each action's probability, or density, under a uniform policy.

    Raises ImportFailed for a space without a uniform distribution.
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
    raise ImportFailed("uniform: expected a discrete action space, or a box with bounds")


def _with_any(bad: Array, owner: Array) -> Array:
    """A mask of the rows whose episode has a bad row."""
    if not bad.any():
        return bad
    episodes = np.zeros(int(owner.max()) + 1, bool)
    episodes[owner[bad]] = True
    return np.asarray(episodes[owner])


def _safe(keys: Any) -> Any:
    """Keys as parts of ids; keys with special characters or too long are replaced by digests."""
    odd = pc.or_(
        pc.match_substring_regex(keys, _ODD_KEY), pc.greater(pc.utf8_length(keys), _ID_CHARACTERS)
    )
    if not pc.any(odd).as_py():
        return keys
    found = keys.filter(odd).to_pylist()
    made = {key: hashlib.sha256(key.encode()).hexdigest()[:32] for key in set(found)}
    return pc.replace_with_mask(keys, odd, pa.array([made[key] for key in found], pa.string()))


def _objects(values: Mapping[str, Any]) -> Any:
    """JSON objects from columns of JSON values by key; keys with null values are left out."""
    pairs = [
        pc.binary_join_element_wise(json.dumps(key) + ":", column, ",", "").fill_null("")
        for key, column in values.items()
    ]
    inner = pc.utf8_rtrim(pc.binary_join_element_wise(*pairs, ""), characters=",")
    return pc.binary_join_element_wise("{", inner, "}", "")


def _taken(column: Any, rows: Array) -> Any:
    """A column's values in some rows; the column itself if these are all rows."""
    whole = len(rows) == len(column) and bool((np.diff(rows) == 1).all())
    return column if whole else column.take(pa.array(rows))


def _spread(column: Any, places: Array, rows: int) -> Any:
    """A column with `rows` rows that has values at `places`, and nulls elsewhere."""
    if len(places) == rows:
        return column
    at = np.full(rows, -1)
    at[places] = np.arange(len(places))
    return column.take(pa.array(at, mask=at < 0))


def _placed(rows: Array, columns: Mapping[str, Any], kept: Array) -> dict[str, Any]:
    """Convert columns over `rows` to columns over the subset `kept`."""
    if not columns:
        return {}
    places, order = np.flatnonzero(np.isin(kept, rows)), np.argsort(rows)
    chosen = pa.array(order[np.searchsorted(rows[order], kept[places])])
    return {n: _spread(one.take(chosen), places, len(kept)) for n, one in columns.items()}
