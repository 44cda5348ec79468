"""Replay: log the rows of a file through a collector, each exactly once.

The rows of an episode may lie anywhere in the file. A first pass over its episode column counts
them, so that the second holds only the rows of episodes that are not complete yet; an episode is
sent when its last row has come. Its start number is its place in that order, the same in every
run. Without an episode column each row is an episode of one step, numbered by its row.

The import is named by the digest of the file and of the options that say what its rows mean. So
the collector knows, in a later run, which episodes it has, and these are skipped. Only an episode
of several steps can have arrived in part, and only where a run stopped: at the end of a range of
known starts. Such episodes are sent again whole; what is there already counts once.

A row that cannot be used is left out, with its episode, and reported. (A row that cannot even be
read names no episode, so it is left out alone.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ingest.client.import_client import ImportClient, StepError, declared_policy
from ingest.protocol.errors import (
    BufferFull,
    ClientError,
    CollectorUnavailable,
    Refusal,
    ReplayError,
)
from ingest.replay.categories import (
    Categories,
    category,
    known_categories,
    learn_categories,
)
from ingest.replay.layout import Layout, ReplayOptions, RowError, columns_of, without_names
from ingest.replay.record_files import Record, Table, open_table, require_columns
from ingest.replay.values import CellError, Range, extend, infer_space
from storage.experience.range_set import RangeSet
from storage.spaces.descriptors import Space, schema_id

__all__ = ["BadRow", "ReplayOptions", "ReplayReport", "import_name", "infer_spaces", "replay"]

WINDOW = 5_000
"""Episodes that are sent before their acknowledgement is awaited (a client remembers 10,000)."""

_WINDOW_STEPS = 20_000
_PROGRESS_ROWS = 1_000
_ID_CHARACTERS = 200

Progress: TypeAlias = Callable[[str, int, int | None], None]


class BadRow(NamedTuple):
    """A row that was left out: its number from 1, its line in a text file, and why.

    With its episode, if that has more rows: they are all left out.
    """

    row: int
    line: int | None
    reason: str
    episode: str | None = None


@dataclass
class ReplayReport:
    """What became of each row: rows == steps + rows_known + rows_left_out.

    `steps` were acknowledged to this run, of `episodes` episodes; `skipped_known` episodes were
    there already. `bad` holds the first rows that were at fault, `bad_counts` counts all by reason.
    """

    name: str = ""
    rows: int = 0
    episodes: int = 0
    steps: int = 0
    skipped_known: int = 0
    rows_known: int = 0
    rows_left_out: int = 0
    bad: list[BadRow] = field(default_factory=list)
    bad_counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bad": [row._asdict() for row in self.bad]}


def replay(options: ReplayOptions, *, on_progress: Progress | None = None) -> ReplayReport:
    """Log a file's rows; running it twice, or after it was killed, adds what is missing.

    Raises ReplayError for a file or columns that cannot be used; CollectorUnavailable when the
    collector stays away for `timeout` seconds (run it again to go on); Refusal when it refuses the
    client (a wrong token); ValueError for a policy that it does not have.
    """
    table = open_table(options.path)
    require_columns(options.path, table, columns_of(options))
    where: dict[str, Any] = {"token": options.token, "ca": options.ca, "timeout": options.timeout}
    policy = declared_policy(options.address, options.policy_id, **where)
    spaces = policy.observation.space, policy.action.space
    if options.schema_id not in (None, schema_id(*spaces)):
        raise ReplayError(
            f"policy {policy.policy_id}: expected spaces of schema {options.schema_id}, the "
            f"collector declares {schema_id(*spaces)}"
        )
    unnamed = without_names(options, *spaces)
    categories = known_categories(options.path, unnamed, options.categories_path)
    name = import_name(options, categories)
    client = ImportClient(options.address, name=name, policy_id=policy.policy_id, **where)
    try:
        layout = Layout(options, *spaces, categories)
        return _Replay(options, table, layout, client, name, on_progress).run()
    except (BufferFull, TimeoutError) as error:
        raise CollectorUnavailable(f"{error}; run the same replay again to go on") from error
    finally:
        with contextlib.suppress(ClientError, TimeoutError, Refusal):  # all of it was awaited
            client.close(0.0)


def import_name(options: ReplayOptions, categories: Categories) -> str:
    """`import-` and a digest of the file and of what its columns mean. Raises ReplayError."""
    try:
        with options.path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ReplayError(f"{options.path}: cannot be read: {error.strerror}") from error
    document = {"file": content, "categories": categories, **options.meaning()}
    text = json.dumps(document, sort_keys=True)
    return f"import-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def infer_spaces(options: ReplayOptions) -> tuple[Space, Space]:
    """(observation space, action space) that fit every usable row. Raises ReplayError.

    Categories become names, sorted, or in the order of a given file of categories; whole numbers
    of few values become choices, other numbers float32 (see `infer_space`). The action's whole
    numbers are choices however many there are.
    """
    table = open_table(options.path)
    require_columns(options.path, table, columns_of(options))
    if options.categories is None:
        found = learn_categories([options.path], options.categorical)
    else:
        found = known_categories(options.path, options.categorical, options.categories)
    every = [*options.observations, *options.actions]
    names = list(dict.fromkeys(column.name for column in every if not column.categorical))
    ranges = {name: Range() for name in names}
    for record in table.records(names):
        for name, cell in zip(names, record.cells, strict=not record.problem):
            numbers: list[Any] = []
            with contextlib.suppress(CellError):
                extend(numbers, name, cell)
                ranges[name].add(numbers)
    return (
        infer_space(options.observations, ranges, found, exact=False),
        infer_space(options.actions, ranges, found, exact=True),
    )


class _Sent(NamedTuple):
    record: Record  # its first
    rows: int
    known: int  # rows that the collector had already


class _Replay:
    """One run: reads, sends, and keeps the report."""

    def __init__(
        self,
        options: ReplayOptions,
        table: Table,
        layout: Layout,
        client: ImportClient,
        name: str,
        on_progress: Progress | None,
    ) -> None:
        self._options = options
        self._table = table
        self._layout = layout
        self._client = client
        self._on_progress = on_progress
        self._prefix = name.removeprefix("import-")[:12]
        self._report = ReplayReport(name)
        self._counts: Counter[str] = Counter()
        self._window: dict[str, _Sent] = {}
        self._window_steps = 0
        self._known = RangeSet()
        self._in_doubt: frozenset[int] = frozenset()

    def run(self) -> ReplayReport:
        began = time.monotonic()
        self._known = RangeSet(self._client.known_starts)
        if self._options.episode is not None:
            self._in_doubt = frozenset(last for _, last in self._known.ranges())
        episodes = self._single() if self._options.episode is None else self._grouped()
        try:
            for number, key, records in episodes:
                self._send(number, key, records)
        except ReplayError:
            self._deliver()  # of a file that is damaged half-way, what came before
            raise
        self._deliver()
        report = self._report
        if report.rows == 0:
            raise ReplayError(f"{self._options.path} has no rows")
        report.bad_counts = dict(self._counts.most_common())
        report.seconds = time.monotonic() - began
        self._tell()
        return report

    # --- episodes ------------------------------------------------------------------------------

    def _read(self) -> Iterator[Record]:
        """The records that can be read."""
        report = self._report
        for record in self._table.records(self._layout.columns):
            report.rows += 1
            if report.rows % _PROGRESS_ROWS == 0:
                self._tell()
            if record.problem:
                self._leave_out(record, record.problem, 1)
            else:
                yield record

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress("replay", self._report.rows, self._table.rows)

    def _single(self) -> Iterator[tuple[int, str, list[Record]]]:
        for record in self._read():
            yield record.number - 1, str(record.number), [record]

    def _grouped(self) -> Iterator[tuple[int, str, list[Record]]]:
        """Episodes in the order of their last rows."""
        missing = self._count_rows()
        waiting: dict[str, list[Record]] = {}
        number = 0
        for record in self._read():
            try:
                key = self._layout.key(record.cells)
            except CellError as error:
                self._leave_out(record, str(error), 1)
                continue
            waiting.setdefault(key, []).append(record)
            missing[key] -= 1
            if missing[key] == 0:
                del missing[key]
                yield number, key, waiting.pop(key)
                number += 1

    def _count_rows(self) -> Counter[str]:
        name = self._options.episode or ""
        return Counter(
            category(record.cells[0])
            for record in self._table.records([name])
            if not record.problem and not isinstance(record.cells[0], (list, dict, type(None)))
        )

    # --- sending -------------------------------------------------------------------------------

    def _send(self, number: int, key: str, records: list[Record]) -> None:
        name = self._episode_id(key)
        episode = None if self._options.episode is None else name
        known = 0
        if number in self._known:
            state = self._client.state_of(name) if number in self._in_doubt else None
            if state is None or state.state in ("terminated", "truncated", "unknown"):
                self._report.skipped_known += 1
                self._report.rows_known += len(records)
                return
            if state.state != "open":
                reason = f"episode: expected it open from an earlier run, got {state.state}"
                self._leave_out(records[0], f"{reason} {state.cause}".rstrip(), len(records), name)
                return
            known = state.steps
        try:
            self._log(number, name, records)
        except RowError as error:
            reason = str(error).removeprefix(f"Episode {name}: ")
            self._leave_out(error.record, reason, len(records), episode)
            return
        self._window[name] = _Sent(records[0], len(records), known)
        self._window_steps += len(records)
        if len(self._window) >= WINDOW or self._window_steps >= _WINDOW_STEPS:
            self._deliver()

    def _log(self, number: int, name: str, records: list[Record]) -> None:
        """Queue an episode. Raises RowError."""
        layout = self._layout
        if len(records) > 1 and self._options.time is not None:
            records = self._by_time(records)
        steps = []
        for record in records:
            try:
                steps.append(layout.step(record.cells))
            except CellError as error:
                raise RowError(record, str(error)) from error
        cut = layout.is_truncated(records)
        tags = layout.tags(records[0].cells)
        try:
            self._client.log_episode(name, steps, start_number=number, truncated=cut, tags=tags)
        except StepError as error:
            raise RowError(records[error.index], str(error)) from error
        except BufferFull:
            raise
        except ValueError as error:
            raise RowError(records[0], str(error)) from error

    def _by_time(self, records: list[Record]) -> list[Record]:
        times = []
        for record in records:
            try:
                times.append(self._layout.micros(record.cells) or 0)
            except CellError as error:
                raise RowError(record, str(error)) from error
        order = sorted(range(len(records)), key=times.__getitem__)
        return [records[place] for place in order]

    def _episode_id(self, key: str) -> str:
        """The episode's id: the import's own, so that two files may use the same names."""
        if "/" in key or len(key) > _ID_CHARACTERS or not key.isprintable():
            key = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]
        return f"{self._prefix}-{key}"

    def _deliver(self) -> None:
        """Wait until all that was sent is acknowledged or refused."""
        complete = self._client.deliver()
        for name, sent in self._window.items():
            refusal = None if complete else self._client.refusal(name)
            if refusal is None:
                self._report.episodes += 1
                self._report.steps += sent.rows - sent.known
                self._report.rows_known += sent.known
            else:
                reason = refusal.message.removeprefix(f"Episode {name}: ").replace(name, "of it")
                self._leave_out(sent.record, f"{refusal.code}: {reason}", sent.rows, name)
        self._window.clear()
        self._window_steps = 0

    def _leave_out(
        self, record: Record, reason: str, rows: int, episode: str | None = None
    ) -> None:
        report = self._report
        report.rows_left_out += rows
        self._counts[reason.partition(", got")[0]] += 1
        if len(report.bad) < self._options.bad_shown:
            report.bad.append(BadRow(record.number, record.line, reason, episode))
