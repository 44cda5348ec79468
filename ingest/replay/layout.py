"""What the columns of a log mean, and the steps that its records become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ingest.client.import_client import ImportedStep
from ingest.protocol.errors import ReplayError
from ingest.replay.categories import Categories, category
from ingest.replay.record_files import Record
from ingest.replay.values import CellError, Column, flag_of, micros_of, number_of, value_reader
from storage.spaces.descriptors import Dict, Discrete, Space


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What to import, and what its columns mean.

    `observation` and `action` name columns, each as `NAME` (a number or a list) or
    `NAME:categories` (its values are names: those that the policy declares, or, where its spaces
    have none, codes that the file `categories` keeps, by default beside `path`). `tags` maps a tag
    to the column of its value. `schema_id`: what the policy's spaces have to be. `timeout`: seconds
    without any acknowledgement after which the replay gives up.
    """

    path: Path
    observation: Sequence[str]
    action: str
    reward: str
    address: str = "http://127.0.0.1:8642"
    action_prob: str | None = None
    action_logp: str | None = None
    episode: str | None = None
    time: str | None = None
    terminated: str | None = None
    truncated: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    policy_id: str | None = None
    schema_id: str | None = None
    categories: Path | None = None
    token: str | None = field(default=None, repr=False)
    ca: Path | None = None
    timeout: float = 60.0
    bad_shown: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.observation, str) or not self.observation:
            raise ReplayError("observation: expected one or more columns")
        if self.action_prob is not None and self.action_logp is not None:
            raise ReplayError("expected action_prob or action_logp, got both")

    @property
    def observations(self) -> list[Column]:
        return [Column.parse(text) for text in self.observation]

    @property
    def actions(self) -> list[Column]:
        return [Column.parse(self.action)]

    @property
    def categorical(self) -> list[str]:
        """The columns of categories, each once."""
        every = [*self.observations, *self.actions]
        return list(dict.fromkeys(column.name for column in every if column.categorical))

    @property
    def categories_path(self) -> Path:
        return self.categories or self.path.with_name(self.path.name + ".categories.json")

    def meaning(self) -> dict[str, Any]:
        """The options that change what is imported."""
        apart = (
            "path",
            "address",
            "schema_id",
            "categories",
            "token",
            "ca",
            "timeout",
            "bad_shown",
        )
        document = {**asdict(self), "observation": list(self.observation), "tags": dict(self.tags)}
        return {name: value for name, value in document.items() if name not in apart}


def without_names(options: ReplayOptions, observation: Space, action: Space) -> list[str]:
    """The columns of categories for which the policy's spaces have no names, each once."""
    found = [
        column.name
        for space, columns in ((observation, options.observations), (action, options.actions))
        for column in columns
        if column.categorical and not _is_named(space, column.name)
    ]
    return list(dict.fromkeys(found))


def _is_named(space: Space, column: str) -> bool:
    inner = dict(space.spaces).get(column) if isinstance(space, Dict) else space
    return isinstance(inner, Discrete) and bool(inner.names)


def columns_of(options: ReplayOptions) -> list[str]:
    """The columns that are read, each once; the order of a record's cells."""
    single = ("reward", "action_prob", "action_logp", "episode", "time", "terminated", "truncated")
    names = [column.name for column in (*options.observations, *options.actions)]
    names += [getattr(options, name) for name in single if getattr(options, name) is not None]
    return list(dict.fromkeys([*names, *options.tags.values()]))


class Layout:
    """Where a step's values lie among the cells of a record, and what they must be."""

    def __init__(
        self, options: ReplayOptions, observation: Space, action: Space, found: Categories
    ) -> None:
        self.columns = columns_of(options)
        self._options = options
        self._places = {name: place for place, name in enumerate(self.columns)}
        self._observe = value_reader("observation", observation, options.observations, found)
        self._act = value_reader("action", action, options.actions, found)
        self._obs_places = [self._places[column.name] for column in options.observations]
        self._act_places = [self._places[column.name] for column in options.actions]
        self._number_places = [
            None if name is None else self._places[name]
            for name in (options.reward, options.action_prob, options.action_logp)
        ]
        self._time_place = None if options.time is None else self._places[options.time]
        self._tags = [(tag, self._places[name]) for tag, name in options.tags.items()]

    def key(self, cells: Sequence[Any]) -> str:
        """What names the record's episode. Raises CellError."""
        name = self._options.episode or ""
        cell = cells[self._places[name]]
        if cell is None or isinstance(cell, (list, dict)):
            raise CellError(f"column {name}: expected an episode, got {cell or 'nothing'!r:.80}")
        return category(cell)

    def micros(self, cells: Sequence[Any]) -> int | None:
        """The time of a record. Raises CellError."""
        if self._time_place is None:
            return None
        return micros_of(self._options.time or "", cells[self._time_place])

    def step(self, cells: Sequence[Any]) -> ImportedStep:
        """The step of a record. Raises CellError."""
        reward, prob, logp = (
            None if place is None else number_of(self.columns[place], cells[place])
            for place in self._number_places
        )
        return ImportedStep(
            self._observe([cells[place] for place in self._obs_places]),
            self._act([cells[place] for place in self._act_places]),
            reward,  # type: ignore[arg-type]  # there always is a column for it
            prob,
            logp,
            self.micros(cells),
        )

    def tags(self, cells: Sequence[Any]) -> dict[str, str]:
        return {tag: category(cells[at]) for tag, at in self._tags if cells[at] is not None}

    def is_truncated(self, records: Sequence[Record]) -> bool:
        """Whether an episode's last row says that it was cut off; not before it may one end.

        Without either column it ends as terminated. Raises RowError.
        """
        truncated = False
        for place, record in enumerate(records):
            is_last = place == len(records) - 1
            terminated, truncated = (
                self._flag(record, name) for name in ("terminated", "truncated")
            )
            if (terminated or truncated) and not is_last:
                raise RowError(record, "row: expected the end on its episode's last row")
            if self._options.terminated is not None:
                truncated = truncated or not terminated
        return bool(truncated)

    def _flag(self, record: Record, option: str) -> bool:
        name = getattr(self._options, option)
        if name is None:
            return False
        try:
            return flag_of(name, record.cells[self._places[name]])
        except CellError as error:
            raise RowError(record, str(error)) from error


class RowError(Exception):
    """An episode cannot be used because of this row."""

    def __init__(self, record: Record, reason: str) -> None:
        super().__init__(reason)
        self.record = record
