"""The options of an import: its source, and the meaning of its columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from ingest.protocol.errors import ImportFailed
from storage.system.periods import parse_moment, require_period
from storage.wording import counted

_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_ ]*(\(\d+( *, *\d+)?\))?(\[\])*")
_KINDS = ("box", "discrete")
_SUFFIX, _OTHER = ":categories", ":other"

UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 0.001}
"""Microseconds in a unit of `time_unit`."""

_APART = frozenset(
    ("source", "address", "schema_id", "categories", "token", "ca", "timeout", "bad_shown", "name")
) | {"format"}
"""Options that do not change what is imported."""


_ADDED = frozenset(
    (
        *("sql", "types", "sample_prob", "sample_weight", "dedupe", "shards", "since", "until"),
        *("candidate_features", "most_candidates"),
    )
)
"""Options that the first release did not have: unused, they leave an import's name as it was."""

SHARD_COLUMNS = ("policy_version", "training_enabled", "infos", "tags", "continues")
"""What the other options have no column for: infos and tags as JSON, and an episode's key."""

_COLUMNS = ("action", "reward", "episode", "step", "time", "terminated", "truncated", "tags")
_MAPS = ("tags", "infos", "default")

_ALTERNATIVES = (
    ("observation", "final_observation"),
    ("action_prob", "action_logp", "uniform"),
    ("sample_prob", "sample_weight"),
)
"""Options of which one that is given replaces all that a format finds."""


def _number_or_column(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _statement(text: str) -> str:
    """The SQL, or that of the file that is named instead."""
    if len(text.split()) > 1 or not Path(text).is_file():
        return text
    return Path(text).read_text(encoding="utf-8")


@dataclass(frozen=True)
class ColumnOption:
    """A column as an option names it: `NAME`, or `NAME:categories` if its values are names.

    `NAME:categories:other` also declares a name that stands for values of later logs. `NAME:box`
    and `NAME:discrete` (`kind`) choose the space of an action. `part` is the column's part of a
    Dict, and names its categories: a final observation's column uses the name of the observation's
    column.
    """

    name: str
    categorical: bool = False
    other: bool = False
    part: str = ""
    kind: str = ""

    @classmethod
    def parse(cls, text: str) -> ColumnOption:
        if not isinstance(text, str):
            raise ImportFailed(f"expected the names of columns, which are texts, got {text!r:.80}")
        has_other = text.endswith(_SUFFIX + _OTHER)
        listed = text.removesuffix(_OTHER) if has_other else text
        name = listed.removesuffix(_SUFFIX)
        kind = name.rpartition(":")[2] if name == text else ""
        kind = kind if kind in _KINDS else ""
        name = name.removesuffix(f":{kind}") if kind else name
        if not name:
            raise ImportFailed(f"expected the name of a column, got {text!r}")
        return cls(name, name != listed and not kind, has_other, name, kind)


class ImportArguments(TypedDict, total=False):
    """The fields of ImportOptions, except `source`, as arguments by keyword."""

    query: str | None
    sql: str | None
    types: Mapping[str, str]
    format: str | None
    observation: Sequence[str] | Mapping[str, Sequence[str]]
    action: str | Sequence[str] | Mapping[str, str | Sequence[str]]
    reward: str | Sequence[str]
    final_observation: Sequence[str] | Mapping[str, Sequence[str]]
    address: str
    action_prob: str | None
    action_logp: str | None
    uniform: bool
    sample_prob: str | float | None
    sample_weight: str | None
    dedupe: Sequence[str]
    episode: str | None
    agent: str | None
    policies: Mapping[str, str]
    policy: str | None
    step: str | None
    time: str | None
    time_unit: str
    timezone: str
    since: int | None
    until: int | None
    terminated: str | None
    truncated: str | None
    tags: Mapping[str, str]
    infos: Mapping[str, str]
    missing: Literal["error", "drop", "value"]
    default: Mapping[str, str]
    shards: bool
    candidate_features: Sequence[str]
    most_candidates: int
    policy_id: str | None
    schema_id: str | None
    categories: Path | str | None
    name: str | None
    token: str | None
    ca: Path | str | None
    timeout: float
    bad_shown: int


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The source of an import, and the meaning of its columns. Raises ImportFailed if invalid.

    docs/import.md describes each field. More about some:

    Args:
        source: a file, a folder or a pattern such as `logs/*.csv`, a database's URL, or in Python a
            table: pandas, polars, pyarrow, or any object with `__arrow_c_stream__`.
        format: one of `ingest.importing.formats.opening.FORMATS`; columns that are given replace
            those that it finds.
        query: SQLAlchemy's, or for `adbc+NAME:...` that of the driver `adbc_driver_NAME`.
        observation: columns, each as `NAME` or `NAME:categories`; a mapping by policy, as `action`
            and `final_observation` may be.
        reward: a column, or several, which are added up; `-NAME` is subtracted, as a cost.
        tags: tag -> the column of its value, taken from an episode's first row.
        infos: key -> the column of its value in each step's info.
        default: column -> the value of its missing cells, which overrides `missing`.
        since: only episodes whose earliest time is at or after this, in microseconds.
        until: only episodes whose earliest time is before this, in microseconds.
        shards: whether the columns of SHARD_COLUMNS are taken as shards have them.
        candidate_features: the names of the columns of candidates, as a format finds them, or as
            they are declared.
        most_candidates: the most candidates of a decision, found or declared likewise.
        name: the import's name; default: a digest of the content and of these options.
        timeout: seconds without an answer after which the import gives up.
    """

    source: Annotated[
        Any,
        "File, folder, or URL of a database.",
        Meta(extra={"argument": True, "parse": str}),
    ]
    observation: Annotated[
        Sequence[str] | Mapping[str, Sequence[str]],
        "Column, or NAME:categories[:other] if values are names. May be repeated. POLICY=COLUMN "
        "with several policies.",
    ] = ()
    action: Annotated[
        str | Sequence[str] | Mapping[str, str | Sequence[str]],
        "Columns of the action, in the same forms, or NAME:box, NAME:discrete.",
    ] = ()
    reward: Annotated[
        str | Sequence[str], "Column of the reward, or -COLUMN of a cost; repeated: the sum."
    ] = ()
    format: Annotated[
        str | None, "Program that wrote the files, such as minari; finds the columns itself."
    ] = None
    final_observation: Annotated[
        Sequence[str] | Mapping[str, Sequence[str]],
        "Columns of the next observation, in the order of --observation.",
    ] = ()
    query: Annotated[str | None, "SQL, for the URL of a database."] = None
    sql: Annotated[
        str | None,
        "SELECT over the rows of the source, the view `source`; or its file.",
        Meta(extra={"parse": _statement}),
    ] = None
    types: Annotated[Mapping[str, str], "COLUMN=TYPE of a column in `source`. May be repeated."] = (
        field(default_factory=dict)
    )
    address: Annotated[str, "Address of the collector."] = "http://127.0.0.1:8642"
    token: Annotated[str | None, "Token. Prefer the variable: `ps` shows options."] = field(
        default=None, repr=False
    )
    ca: Annotated[Path | str | None, "PEM certificates to trust for https."] = None
    action_prob: Annotated[str | None, "Column of the action's probability, or density."] = None
    action_logp: Annotated[str | None, "Or: column of its natural logarithm."] = None
    uniform: Annotated[bool, "Or: all actions were equally likely."] = False
    sample_prob: Annotated[
        str | float | None,
        "Column, or number: probability that a row was kept in the log.",
        Meta(extra={"parse": _number_or_column}),
    ] = None
    sample_weight: Annotated[str | None, "Or: column of its inverse."] = None
    dedupe: Annotated[
        Sequence[str], "Column of a row's key; the first row is kept. May be repeated."
    ] = ()
    episode: Annotated[
        str | None, "Column of the episode's key; without it episodes end at the flags."
    ] = None
    agent: Annotated[str | None, "Column of a row's agent."] = None
    policies: Annotated[
        Mapping[str, str],
        "AGENT=POLICY; other agents have --policy-id. May be repeated.",
        Meta(extra={"name": "--policy"}),
    ] = field(default_factory=dict)
    policy: Annotated[
        str | None, "Or: column of a row's policy.", Meta(extra={"name": "--policy-column"})
    ] = None
    step: Annotated[str | None, "Column of the step's number; gaps are errors."] = None
    time: Annotated[str | None, "Column of the time: numbers, or ISO 8601."] = None
    time_unit: Annotated[str, "Unit of numeric times: s, ms, us or ns."] = "us"
    timezone: Annotated[str, "Time zone of times without one."] = "UTC"
    since: Annotated[
        int | None,
        "Only episodes whose earliest --time is this or later: 2026-11-23, ...T08:00Z.",
        Meta(extra={"parse": partial(parse_moment, "--since")}),
    ] = None
    until: Annotated[
        int | None,
        "Only episodes whose earliest --time is before this one.",
        Meta(extra={"parse": partial(parse_moment, "--until")}),
    ] = None
    terminated: Annotated[str | None, "Column: true on an episode's last row."] = None
    truncated: Annotated[str | None, "Column: true where a limit ended the episode."] = None
    tags: Annotated[Mapping[str, str], "NAME=COLUMN. May be repeated."] = field(
        default_factory=dict
    )
    infos: Annotated[Mapping[str, str], "NAME=COLUMN of the info. May be repeated."] = field(
        default_factory=dict
    )
    missing: Annotated[
        Literal["error", "drop", "value"],
        "For an empty cell: error, drop (the row), or value (0).",
    ] = "error"
    default: Annotated[
        Mapping[str, str], "COLUMN=VALUE for the column's empty cells. May be repeated."
    ] = field(default_factory=dict)
    shards: bool = False
    candidate_features: Sequence[str] = ()
    most_candidates: int = 0
    categories: Annotated[
        Path | str | None,
        "For spaces without names: file of codes, one for all of the policy's logs.",
    ] = None
    name: Annotated[str | None, "Name of the import; default: a digest of its content."] = None
    policy_id: Annotated[str | None, "Policy; default: the collector's only one."] = None
    schema_id: Annotated[str | None, "Refuse a policy whose spaces have another schema."] = None
    timeout: float = 60.0
    bad_shown: Annotated[
        int,
        "Most rows with errors to list, a third of them for one reason.",
        Meta(ge=0),
    ] = 10

    @classmethod
    def from_words(cls, **given: Any) -> ImportOptions:
        """The options of a command line: POLICY=COLUMN if there are several policies."""
        if given.get("policies") or given.get("policy") is not None:
            for name in ("observation", "action", "final_observation"):
                given[name] = _by_policy(given.get(name, ()))
        return cls(**given)

    def __post_init__(self) -> None:
        for name in ("tags", "infos", "policies", "default", "types"):
            if not isinstance(given := getattr(self, name), Mapping):
                raise ImportFailed(f"{name}: expected a mapping, such as a dict, got {given!r:.80}")
        self._check_columns()
        propensities = [
            self.action_prob is not None,
            self.action_logp is not None,
            bool(self.uniform),
        ]
        if sum(propensities) > 1:
            raise ImportFailed("expected one of action_prob, action_logp and uniform, got several")
        if self.sample_prob is not None and self.sample_weight is not None:
            raise ImportFailed("expected one of sample_prob and sample_weight, got both")
        if self.sample_prob is not None and not isinstance(self.sample_prob, str):
            if not 0 < self.sample_prob <= 1:
                text = f"expected a column or a number in (0, 1], got {self.sample_prob}"
                raise ImportFailed(f"sample_prob: {text}")
            object.__setattr__(self, "sample_prob", float(self.sample_prob))  # of numpy too
        if isinstance(self.dedupe, str):
            raise ImportFailed(f"dedupe: expected a list of columns, got {self.dedupe!r}")
        if self.step is not None and self.episode is None and self.is_complete:
            raise ImportFailed("step: expected an episode column as well")
        if self.missing not in ("error", "drop", "value"):
            raise ImportFailed(f"missing: expected error, drop or value, got {self.missing!r}")
        if self.time_unit not in UNITS:
            raise ImportFailed(f"time_unit: expected {', '.join(UNITS)}, got {self.time_unit!r}")
        from zoneinfo import ZoneInfo  # noqa: PLC0415  slow to load, and --help loads this module

        try:
            ZoneInfo(self.timezone)
        except (ValueError, OSError, TypeError) as error:  # ZoneInfoNotFoundError is a KeyError
            raise ImportFailed(f"timezone: {error}") from error
        except KeyError as error:
            text = f"timezone: expected one such as Europe/Berlin, got {self.timezone!r}"
            raise ImportFailed(text) from error
        require_period(self.since, self.until)
        for name, usual in (
            ("time_unit", "us"),
            ("timezone", "UTC"),
            ("since", None),
            ("until", None),
        ):
            if self.time is None and getattr(self, name) != usual:
                raise ImportFailed(f"{name}: expected a time column as well")
        if self.sql is not None and self.query is not None:
            raise ImportFailed("expected one of query and sql, got both")
        if self.types and self.sql is None:
            raise ImportFailed("types: expected a statement (sql) that reads the columns")
        for column, kind in self.types.items():
            require_type(column, kind)
        unused = sorted(set(self.default) - set(self.columns))
        if unused and self.is_complete:
            raise ImportFailed(f"default: expected columns that are imported, got {unused}")

    def _check_columns(self) -> None:
        """Raise ImportFailed for columns, agents or policies that contradict each other."""
        seen = self.observation
        every = list(seen.values()) if isinstance(seen, Mapping) else [seen]
        if any(isinstance(one, str) for one in every):
            raise ImportFailed(f"observation: expected a list of columns, got {seen!r:.80}")
        given = {"observation": every and all(every), "action": self.action, "reward": self.reward}
        for what, columns in given.items():
            if self.is_complete and not columns:
                raise ImportFailed(
                    f"{what}: expected one or more columns (--{what}), or a format that has them"
                )
        for name in _keys(self.observation):
            finals = self.final_observation
            finals = finals.get(str(name), ()) if isinstance(finals, Mapping) else finals
            count = len(self.observations_of(name))
            if finals and (isinstance(finals, str) or len(finals) != count):
                columns = counted(count, "column")
                text = f"final_observation: expected {columns}, as many as observation has"
                raise ImportFailed(f"{text}, got {finals!r:.200}")
        mapped = [isinstance(x, Mapping) for x in (seen, self.action, self.final_observation)]
        if any(mapped) and not self.has_policies:
            raise ImportFailed("observation: columns by policy need policies or policy")
        if mapped[2] and not mapped[0]:
            raise ImportFailed("final_observation: columns by policy need an observation by policy")
        if self.has_policies and self.schema_id is not None:
            raise ImportFailed("schema_id: expected none with several policies")
        if self.policies and self.policy is not None:
            raise ImportFailed("expected one of policies and policy, got both")
        if self.policies and self.agent is None:
            raise ImportFailed("policies: expected an agent column as well")
        if self.agent is not None and (
            self.episode is None or (self.step is None and self.time is None)
        ):
            text = "agent: expected an episode column and a step or time column as well"
            raise ImportFailed(text)

    @property
    def is_complete(self) -> bool:
        """Whether all columns are named: without a format, or after `completed`."""
        return self.format is None or bool(self.observation and self.action and self.reward)

    def completed(self, found: Mapping[str, Any]) -> ImportOptions:
        """These options with those that a format found, except where some are given.

        Raises ImportFailed.
        """
        given = {name for name in found if self._has(name)}
        for group in _ALTERNATIVES:
            given |= {*group} if any(map(self._has, group)) else {*()}
        maps = {name: {**found[name], **getattr(self, name)} for name in found if name in _MAPS}
        taken = {name: value for name, value in found.items() if name not in given}
        return replace(self, **{**taken, **maps})

    @property
    def rewards(self) -> list[str]:
        """The columns that are added up, sorted: in another order the sum could be rounded to
        another number."""
        return [self.reward] if isinstance(self.reward, str) else sorted(self.reward)

    @property
    def reward_terms(self) -> list[tuple[str, float]]:
        """(column, 1 or -1) of each column that is added up."""
        return [(name.removeprefix("-"), -1.0 if name[:1] == "-" else 1.0) for name in self.rewards]

    @property
    def ends(self) -> list[str]:
        """The columns with the flags at which episodes end that have no key."""
        flags = [name for name in (self.terminated, self.truncated) if name is not None]
        return flags if self.episode is None else []

    def observations_of(self, policy_id: str | None) -> list[ColumnOption]:
        """The columns of a policy's observation."""
        return [
            ColumnOption.parse(text) for text in _of("observation", self.observation, policy_id)
        ]

    def actions_of(self, policy_id: str | None) -> list[ColumnOption]:
        """The columns of a policy's action."""
        return [ColumnOption.parse(text) for text in _of("action", self.action, policy_id)]

    def finals_of(self, policy_id: str | None) -> list[ColumnOption]:
        """The columns of final observations, in the order of observations; empty without them."""
        if isinstance(self.final_observation, Mapping) and policy_id not in self.final_observation:
            return []
        finals = _of("final_observation", self.final_observation, policy_id)
        pairs = zip(self.observations_of(policy_id), finals, strict=False)
        return [replace(seen, name=ColumnOption.parse(text).name) for seen, text in pairs]

    @property
    def observations(self) -> list[ColumnOption]:
        """The observation columns of all policies."""
        return [one for name in _keys(self.observation) for one in self.observations_of(name)]

    @property
    def actions(self) -> list[ColumnOption]:
        """The columns of the actions of all policies."""
        return [one for name in _keys(self.action) for one in self.actions_of(name)]

    @property
    def finals(self) -> list[ColumnOption]:
        """The columns of the final observations of all policies."""
        return [one for name in _keys(self.observation) for one in self.finals_of(name)]

    @property
    def has_period(self) -> bool:
        """Whether only the episodes of a period are imported."""
        return self.since is not None or self.until is not None

    @property
    def has_policies(self) -> bool:
        """Whether rows can have several policies, by their agents or by a column."""
        return bool(self.policies) or self.policy is not None

    @property
    def has_propensities(self) -> bool:
        """Whether an option gives the propensities; otherwise they are unknown."""
        return self.uniform or self.action_prob is not None or self.action_logp is not None

    @property
    def categorical(self) -> list[str]:
        """The columns of categories, each once."""
        every = [*self.observations, *self.actions]
        return list(dict.fromkeys(column.name for column in every if column.categorical))

    @property
    def categorical_finals(self) -> dict[str, str]:
        """Column of categories -> the column of final observations with the same categories."""
        return {column.part: column.name for column in self.finals if column.categorical}

    @property
    def columns(self) -> list[str]:
        """The columns to read, each once."""
        single = ("action_prob", "action_logp", "episode", "agent", "policy", "step", "time")
        named = [getattr(self, name) for name in (*single, "terminated", "truncated")]
        names = [column.name for column in (*self.observations, *self.actions)]
        named += [self.sample_prob if isinstance(self.sample_prob, str) else None]
        named += [self.sample_weight, *self.dedupe]
        names += [name for name, _ in self.reward_terms]
        names += [name for name in named if name is not None]
        names += [column.name for column in self.finals]
        names += SHARD_COLUMNS if self.shards else ()
        return list(dict.fromkeys([*names, *self.tags.values(), *self.infos.values()]))

    def named(self) -> dict[str, Any]:
        """The options that name columns and are given, as they were given or found."""
        own = (*_COLUMNS, *(name for group in _ALTERNATIVES for name in group))
        return {name: getattr(self, name) for name in own if self._has(name)}

    def _has(self, name: str) -> bool:
        """Whether an option has another value than an empty one or its default."""
        value = getattr(self, name)
        return bool(value) and value != self.__dataclass_fields__[name].default

    def meaning(self) -> dict[str, Any]:
        """The options that change what is imported, as a JSON object.

        `missing` and `default` count even without empty cells, which only reading could tell.
        Columns are names alone: whether their values are names depends on the policy's spaces too.
        """
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lists: dict[str, Any] = {"reward": self.rewards}
        for name in ("observation", "action", "final_observation"):
            given = getattr(self, name)
            lists[name] = {
                key: [ColumnOption.parse(text).name for text in _of(name, given, key)]
                for key in sorted(_keys(given), key=str)
            }
        maps = {
            name: dict(getattr(self, name))
            for name in ("tags", "infos", "default", "policies", "types")
        }
        lists["dedupe"] = list(self.dedupe)
        found = {**named, **lists, **maps}
        later = {name for name in _ADDED if not found[name]}
        return {name: value for name, value in found.items() if name not in {*_APART, *later}}


def require_type(column: str, kind: str) -> None:
    """Raise ImportFailed for anything but the name of a type of SQL."""
    if not _TYPE.fullmatch(kind):
        raise ImportFailed(f"type of {column}: expected a type such as DOUBLE, got {kind!r:.80}")


def _keys(given: Any) -> list[str | None]:
    """The policies that columns are given for; None stands for all policies."""
    return list(given) if isinstance(given, Mapping) else [None]


def _of(what: str, given: Any, policy_id: str | None) -> list[str]:
    """The columns of a policy. Raises ImportFailed if none are given for it."""
    if isinstance(given, Mapping):
        if policy_id not in given:
            text = f"expected columns for the policy {policy_id!r}, got some for {sorted(given)}"
            raise ImportFailed(f"{what}: {text}")
        given = given[policy_id]
    return [given] if isinstance(given, str) else list(given)


def _by_policy(words: Sequence[str]) -> Sequence[str] | dict[str, list[str]]:
    """The columns, by policy if all words are POLICY=COLUMN."""
    if not words or not all("=" in word for word in words):
        return words
    found: dict[str, list[str]] = {}
    for policy, _, column in (word.partition("=") for word in words):
        found.setdefault(policy, []).append(column)
    return found
