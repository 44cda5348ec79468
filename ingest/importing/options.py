"""What to import, and what its columns mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

from ingest.protocol.errors import ImportFailed
from storage.spaces.descriptors import OTHER

_SUFFIX, _OTHER = ":categories", f":{OTHER}"

UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 0.001}
"""Microseconds in a unit of `time_unit`."""

_APART = frozenset(
    ("source", "address", "schema_id", "categories", "token", "ca", "timeout", "bad_shown", "name")
)
"""Options that do not change what is imported."""


@dataclass(frozen=True)
class Column:
    """A column as an option names it: `NAME`, or `NAME:categories` where its values are names.

    `NAME:categories:other` declares a name for those that a later log brings.
    """

    name: str
    categorical: bool = False
    other: bool = False

    @classmethod
    def parse(cls, text: str) -> Column:
        has_other = text.endswith(_SUFFIX + _OTHER)
        listed = text.removesuffix(_OTHER) if has_other else text
        name = listed.removesuffix(_SUFFIX)
        if not name:
            raise ImportFailed(f"expected the name of a column, got {text!r}")
        return cls(name, name != listed, has_other)


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What to import, and what its columns mean. Raises ImportFailed for what makes no sense.

    Args:
        source: a file or folder (CSV, TSV, JSON lines, Parquet, Arrow IPC; text and Arrow also as
            `.gz` or `.zst`), a database's URL, or in Python a table: pandas, polars, pyarrow, or
            whatever has `__arrow_c_stream__`. Folders are read in the order of their files' paths;
            `name=value` in a path is a column.
        query: of a database's URL: SQLAlchemy's, or `adbc+NAME:...` for the driver
            `adbc_driver_NAME`.
        observation: columns, each as `NAME` (a number, a list or a text) or `NAME:categories` (its
            values are names: those that the policy declares, or, where its spaces have none, codes
            that the file `categories` keeps, by default beside a source that is a file or folder).
        action: a column, likewise.
        reward: a column, or several, which are added up.
        action_prob: the propensity's column.
        action_logp: or that of its natural logarithm.
        uniform: or that actions were drawn uniformly from the policy's action space.
        episode: the column of an episode's key; without one a row is an episode of one step.
        step: the column of a step's number in its episode, from 0 or 1; gaps and repeats are
            faults. `time` orders the steps otherwise, and without either the source does.
        time: a time with its date, or numbers of `time_unit` since the epoch. `timezone`, such as
            Europe/Berlin, is for times that name none; an hour that comes twice is the first.
        terminated: a column that is true on an episode's last row only. Without either an episode
            ends as terminated.
        truncated: likewise, where a limit ended the episode.
        tags: tag -> the column of its value, taken from an episode's first row.
        missing: a cell with nothing in it makes its row a fault (`error`), leaves the row alone out
            (`drop`), or is 0, false or the empty text (`value`). `default`: column -> what stands
            in for its missing cells, whatever `missing` says.
        name: names the import in place of its content: for readers and queries.
        schema_id: what the policy's spaces have to be.
        timeout: seconds without an answer after which the import gives up.
    """

    source: Any
    query: str | None = None
    observation: Sequence[str]
    action: str
    reward: str | Sequence[str]
    address: str = "http://127.0.0.1:8642"
    action_prob: str | None = None
    action_logp: str | None = None
    uniform: bool = False
    episode: str | None = None
    step: str | None = None
    time: str | None = None
    time_unit: str = "us"
    timezone: str = "UTC"
    terminated: str | None = None
    truncated: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    missing: Literal["error", "drop", "value"] = "error"
    default: Mapping[str, str] = field(default_factory=dict)
    policy_id: str | None = None
    schema_id: str | None = None
    categories: Path | None = None
    name: str | None = None
    token: str | None = field(default=None, repr=False)
    ca: Path | None = None
    timeout: float = 60.0
    bad_shown: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.observation, str) or not self.observation:
            raise ImportFailed("observation: expected one or more columns")
        if not self.rewards:
            raise ImportFailed("reward: expected one or more columns")
        told = [self.action_prob is not None, self.action_logp is not None, self.uniform]
        if sum(told) > 1:
            raise ImportFailed("expected one of action_prob, action_logp and uniform, got several")
        if self.step is not None and self.episode is None:
            raise ImportFailed("step: expected an episode's column beside it")
        if self.missing not in ("error", "drop", "value"):
            raise ImportFailed(f"missing: expected error, drop or value, got {self.missing!r}")
        if self.time_unit not in UNITS:
            raise ImportFailed(f"time_unit: expected {', '.join(UNITS)}, got {self.time_unit!r}")
        try:
            ZoneInfo(self.timezone)
        except (ValueError, OSError) as error:  # ZoneInfoNotFoundError is a KeyError
            raise ImportFailed(f"timezone: {error}") from error
        except KeyError as error:
            text = f"timezone: expected one such as Europe/Berlin, got {self.timezone!r}"
            raise ImportFailed(text) from error
        unused = sorted(set(self.default) - set(self.columns))
        if unused:
            raise ImportFailed(f"default: expected columns that are imported, got {unused}")

    @property
    def rewards(self) -> list[str]:
        return [self.reward] if isinstance(self.reward, str) else list(self.reward)

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
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        single = ("action_prob", "action_logp", "episode", "step", "time")
        named = [getattr(self, name) for name in (*single, "terminated", "truncated")]
        names = [column.name for column in (*self.observations, *self.actions)]
        names += [*self.rewards, *(name for name in named if name is not None)]
        return list(dict.fromkeys([*names, *self.tags.values()]))

    def meaning(self) -> dict[str, Any]:
        """The options that change what is imported, as JSON has them."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lists = {"observation": list(self.observation), "reward": self.rewards}
        maps = {"tags": dict(self.tags), "default": dict(self.default)}
        return {name: value for name, value in (named | lists | maps).items() if name not in _APART}
