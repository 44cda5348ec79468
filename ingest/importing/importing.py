"""Import: the rows of a source through a collector's bulk route, each exactly once.

The data flow: units (`sources`) are read as blocks of columns (`readers`), grouped by episode
(`grouping`), converted to the route's columns (`episodes`, `values`, `cells`), split into requests
between episodes, and posted (`posting`).

An import is named by a digest of its content and of the options that give its rows a meaning. A
request's key is that name and the request's number, so that an interrupted import can be repeated
without duplicates. Without a column of episodes, each file of a folder has its own name, so that
files added to the folder are imported alone. The option `name` replaces the digest (together with
the period and a file's path in its folder): the collector then refuses other rows under the name,
also those that other options make of the same source.

Before the first row is sent, files whose format has an end are read to it, so that a file that
breaks off is not stored in part. A source that breaks while it is sent is reported with what is
stored.

A row that cannot be used is left out with its episode, and reported. A row that cannot be read is
left out alone, because its episode is unknown.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import pyarrow as pa

from ingest.delivery.declarations import CollectorSpec
from ingest.delivery.transport import Transport
from ingest.importing.categories import (
    Categories,
    category,
    known_categories,
    learn_categories,
    spelled_as,
)
from ingest.importing.cells import RAW
from ingest.importing.engine import FILE, ROW, Workspace
from ingest.importing.episodes import Layout, WholeEpisodes
from ingest.importing.grouping import (
    Chunk,
    all_rows,
    by_episode,
    by_flags,
    within,
    without_repeated,
)
from ingest.importing.inference import (
    declared_categories,
    opened_units,
    several_passes,
    spaces_of,
)
from ingest.importing.options import ImportArguments, ImportOptions
from ingest.importing.posting import RequestCutter, RequestSender
from ingest.importing.report import Account, ImportReport
from ingest.importing.sources import Unit, place_of
from ingest.importing.values import named_spaces
from ingest.protocol.errors import CollectorUnavailable, ImportFailed
from storage.errors import NothingYet
from storage.experience.episode import DEFAULT_POLICY
from storage.spaces.descriptors import Discrete, Space, schema_id
from storage.wording import counted

log = logging.getLogger("headrace.import")

_WITH_CANDIDATES = ("dsjson", "cb_json")
"""Formats that are read by the columns of candidates that the policy declares."""

PROMPT_SECONDS = 2.0
"""Seconds without an answer until the log says why the import waits."""
_FORMAT = 1
"""The version of the conversion; a new version makes every import a new one."""

OnProgress: TypeAlias = Callable[[str, int, int | None], None]
OnReport: TypeAlias = Callable[[ImportReport], None]
OnActions: TypeAlias = Callable[[str, Space, pa.Table], None]
"""Called with a policy, its action space, and steps with `actions` and `action_logp`."""


def import_table(
    source: Any,
    *,
    check: bool = False,
    on_progress: OnProgress | None = None,
    **meaning: Unpack[ImportArguments],
) -> ImportReport:
    """Log a source's rows; repeating it after an interruption adds what is missing.

    `source` and `meaning` are those of `ImportOptions`. With `check` nothing is sent: the report
    says what the import understood, and which rows it would leave out. A collector that does not
    answer is then no error, and the spaces are inferred from the columns.

    Raises ImportFailed for a source or columns that cannot be used, and ValueError for a policy
    that the collector does not have, NothingYet if no episode began in a period. Raises
    CollectorUnavailable if the collector does not answer for `timeout` seconds (run it again to
    continue), and Refusal if it refuses the client (a wrong token). Raises TypeError for an unknown
    argument.
    """
    for name in meaning:
        if name not in ImportArguments.__annotations__:
            near = difflib.get_close_matches(name, ImportArguments.__annotations__, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"import_table() got an unexpected argument {name!r}{hint}")

    def tell(report: ImportReport) -> None:
        if on_progress is not None:
            on_progress("import", report.rows, None)

    options = ImportOptions(source=source, **meaning)
    return run_import(options, check=check, on_report=tell)


def run_import(
    options: ImportOptions,
    *,
    check: bool = False,
    on_report: OnReport | None = None,
    on_actions: OnActions | None = None,
) -> ImportReport:
    """`import_table` for existing options.

    `on_report` gets the report in progress, `on_actions` the steps of usable episodes.
    """
    began = time.monotonic()
    transport = Transport(
        options.address, token=options.token, ca=options.ca, timeout=options.timeout
    )
    with Workspace() as space, contextlib.closing(transport):
        spec, (options, units, notes) = _opened(options, space, transport, patient=not check)
        if not options.has_policies:  # omitted or not, it is the same import
            options = replace(options, policy_id=_policy_id(spec, options))
        if spec is None or options.policy is not None:
            units = several_passes(units, options, space)
        spaces, document = _spaces(spec, units, options)
        every = [
            named
            for policy, pair in spaces.items()
            for named in named_spaces(
                pair, options.observations_of(policy), options.actions_of(policy)
            )
        ]
        unnamed = [column.name for column, names in every if column.categorical and names is None]
        unnamed = list(dict.fromkeys(unnamed))
        account = Account(options.bad_shown)
        for note in notes:
            account.note(note)
        if spec is not None:
            account.report.policies = [str(name) for name in spaces]
            _describe(account.report, spec.document, options.address)
        with _naming(account.report):
            categories: Categories = {}
            if unnamed:
                path = _file_of_codes(unnamed, options)
                units = several_passes(units, options, space)
                also = options.categorical_finals
                categories = known_categories(units, unnamed, also, path, save=not check)
        # with a space's names, NAME and NAME:categories mean the same
        read_as = [
            (column.name, column.categorical if names is None else names.to_json())
            for column, names in every
        ]
        meant = {"categories": categories, "columns": read_as}
        names = _names(units, options, meant, list(spaces))
        told = (account, on_report, on_actions)
        with _naming(account.report):
            run = _ImportRun(units, options, spaces, categories, names, *told, space)
        if check or spec is None:
            run.check()
        else:
            sender = RequestSender(
                transport, options.timeout, [unit.label for unit in units], account
            )
            run.send(sender, spec.document.get("limits", {}).get("max_bulk", 64_000_000))
        report = account.finish()
        if report.rows == 0 and options.has_period:
            raise NothingYet(f"no episode of {units[0].label:.200} began in the period")
        if report.rows == 0:
            raise ImportFailed(f"{', '.join(unit.label for unit in units):.200} has no rows")
        report.checked, report.name = check, _name(*itertools.chain(*names.values()))
        report.understood["spaces"] = document
        if options.format is not None:
            report.understood["format"] = {"name": options.format, **options.named()}
        if options.types:
            report.understood["types"] = dict(options.types)
        if unnamed or (options.categories is not None and spec is not None):
            counts = {column: len(values) for column, values in categories.items()}
            report.understood["codes"] = {"file": str(options.categories), "names": counts}
        report.seconds = time.monotonic() - began
        return report


@contextlib.contextmanager
def _naming(report: ImportReport) -> Iterator[None]:
    """Name collector and policies in an error: it may be another collector than was meant."""
    try:
        yield
    except ImportFailed as error:
        if not report.address:
            raise
        raise ImportFailed(
            f"{error} (policy {', '.join(report.policies)} of {report.address})"
        ) from error


def _spec(transport: Transport, *, patient: bool) -> CollectorSpec | None:
    """The collector's declarations; None if it does not answer, unless `patient`."""
    try:
        return CollectorSpec.fetch(transport, min(PROMPT_SECONDS, transport.timeout))
    except CollectorUnavailable as error:
        if not patient:
            return None
        log.warning("%s; trying for %.0f s more", error, transport.timeout)
    return CollectorSpec.fetch(transport)


def _opened(
    options: ImportOptions, space: Workspace, transport: Transport, *, patient: bool
) -> tuple[CollectorSpec | None, tuple[ImportOptions, list[Unit], Sequence[str]]]:
    """The collector's declarations, and `opened_units`.

    Raises ImportFailed, also for a log with candidates of which the policy declares no features.
    """
    if options.format not in _WITH_CANDIDATES:  # a wrong source is named without a collector
        opened = opened_units(options, space)
        return _spec(transport, patient=patient), opened
    spec = _spec(transport, patient=patient)
    declared = _declared_candidates(spec, options)
    opened = opened_units(replace(options, **declared), space)
    if spec is not None and opened[0].candidate_features and not declared:
        text = "expected a policy with candidate_features for candidates, got one without"
        raise ImportFailed(f"{text}: declare the log's with --declare")
    return spec, opened


def _policy_id(spec: CollectorSpec | None, options: ImportOptions) -> str | None:
    """The policy of an import into one; without a collector, the one that `--declare` declares."""
    if spec is None:
        return options.policy_id or DEFAULT_POLICY
    return spec.policy(options.policy_id).policy_id


def _declared_candidates(spec: CollectorSpec | None, options: ImportOptions) -> dict[str, Any]:
    """The options of candidates by which a format has to read its log; none without candidates."""
    if spec is None or options.has_policies:
        return {}
    policy = spec.policy(options.policy_id)
    names = spec.document["policies"][policy.policy_id].get("candidate_features")
    if not names or not isinstance(policy.action.space, Discrete):
        return {}
    return {"candidate_features": tuple(names), "most_candidates": policy.action.space.n}


def _spaces(
    spec: CollectorSpec | None,
    units: Sequence[Unit],
    options: ImportOptions,
) -> tuple[dict[str | None, tuple[Space, Space]], dict[str, Any]]:
    """(the spaces to fill by policy, the same as shown in the report).

    Raises ImportFailed for a schema other than the expected one.
    """
    if spec is None and options.has_policies:
        raise ImportFailed(
            f"check: expected a collector at {options.address}, which has the spaces of several "
            f"policies, but none answers"
        )
    if spec is None:
        pair = spaces_of(units, options, declared_categories(units, options))
        found: dict[str | None, tuple[Space, Space]] = {options.policy_id: pair}
    else:
        policies = {name: spec.policy(name) for name in _policies(spec, units, options)}
        found = {name: (one.observation.space, one.action.space) for name, one in policies.items()}
    by = "the columns" if spec is None else "the collector"
    documents = {
        name: {"by": by, "observation": observation.to_json(), "action": action.to_json()}
        for name, (observation, action) in found.items()
    }
    if options.has_policies:
        return found, {"by": by, "policies": documents}
    (schema,) = (schema_id(*pair) for pair in found.values())
    if options.schema_id not in (None, schema):
        raise ImportFailed(f"expected spaces of schema {options.schema_id}, got {schema}")
    return found, documents[options.policy_id]


def _describe(report: ImportReport, document: Mapping[str, Any], address: str) -> None:
    """Add the collector's address, and the policies' streams and reward windows by its document."""
    report.address = address
    for name in report.policies:
        policy = document["policies"][name]
        report.streams[name] = f"{document['collector_id']}-{policy['schema_id']}"
        if policy.get("reward_window", 0):
            report.reward_windows[name] = policy["reward_window"]


def _file_of_codes(columns: Sequence[str], options: ImportOptions) -> Path | str:
    """The file with the codes of columns whose names the policy does not declare.

    A source's own numbering would give its values other codes than the next source does. Raises
    ImportFailed.
    """
    if options.categories is None:
        raise ImportFailed(
            f"column {columns[0]}: expected names in the policy's space, got none; declare them "
            f"(--declare with {columns[0]}:categories, or the policy's file), or give every import "
            f"of this policy the same file of codes (--categories FILE)"
        )
    return options.categories


def _policies(
    spec: CollectorSpec, units: Sequence[Unit], options: ImportOptions
) -> list[str | None]:
    """The policies that rows may have. Raises ImportFailed if the collector has none of them."""
    if options.policy is None:
        default = [] if options.policies and options.policy_id is None else [options.policy_id]
        return [*dict.fromkeys([*sorted(options.policies.values()), *default])]
    values = learn_categories(units, [options.policy], {})[options.policy]
    names = {*map(category, values), options.default.get(options.policy, "")}
    texts = pa.array(sorted(names), pa.string())
    known = [
        name for name in sorted(spec.policies) if name in spelled_as([name], texts).to_pylist()
    ]
    if not known:
        text = (
            f"expected policies of {sorted(spec.policies)}, got {sorted(map(str, values))!r:.200}"
        )
        raise ImportFailed(f"column {options.policy}: {text}")
    return [*known]


def _names(
    units: Sequence[Unit],
    options: ImportOptions,
    meant: Mapping[str, Any],
    policies: Sequence[str | None],
) -> dict[str | None, list[str]]:
    """Policy -> the import name of each unit; the same for all units with a column of episodes.

    It is `import-` and a digest of the content and of the options that give it meaning, including
    what its columns are read as; or of the option `name`, of a file's path in the folder and,
    unless policies share the name, of the policy. Raises ImportFailed.
    """
    if options.name is not None:
        share = _share_name(options)
        part = [f"{options.since} {options.until}"] if options.has_period else []
        # rows count from 1 in each file, so without an episode's key a folder's file has its own
        places = [None if options.episode is not None else place_of(unit) for unit in units]
        return {
            policy: [
                _named(options.name, [*part, *([] if share else [policy])], place)
                for place in places
            ]
            for policy in policies
        }
    digests = [unit.digest() for unit in units]
    if None in digests:
        raise ImportFailed("name: expected one for a source that can be read only once")
    conversion = _FORMAT if options.format is None else f"{_FORMAT} {options.format}"
    meaning = {"format": conversion, **meant, **options.meaning()}
    if options.episode is not None:
        digests = [json.dumps(digests)] * len(units)
    names = [_name(str(digest), json.dumps(meaning, sort_keys=True)) for digest in digests]
    return dict.fromkeys(policies, names)


def _named(name: str, part: Sequence[str | None], place: str | None) -> str:
    """The import name of an import, or of a folder's file in it, whose name is given."""
    return _name(name, json.dumps([_FORMAT, part, *([] if place is None else [place])]))


def _share_name(options: ImportOptions) -> bool:
    """Whether several policies have one import name, and their own keys of requests.

    An episode's id begins like the name, so agents of different policies in one episode need it.
    """
    return options.has_policies and (options.name is None or options.agent is not None)


def _name(*parts: str) -> str:
    if len(set(parts)) == 1:
        return parts[0]
    return f"import-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"


def _prefix(name: str) -> str:
    """What the ids of an import's episodes begin with."""
    return name.removeprefix("import-")[:12]


class _Lane:
    """The requests of one policy, because a request's rows have one policy."""

    def __init__(
        self,
        sender: RequestSender,
        max_bulk: int,
        names: Sequence[str],
        suffix: str,
        *,
        apart: bool,
    ) -> None:
        """`names` by unit; `apart`: whether rows count, and so requests begin, anew in each."""
        self._sender, self._cutter = sender, RequestCutter(max_bulk)
        self._names, self._suffix, self._apart = names, suffix, apart
        self._unit = 0

    def send(self, episodes: WholeEpisodes) -> None:
        if self._apart and len(episodes.units) and int(episodes.units[0]) != self._unit:
            self.finish()
            self._unit = int(episodes.units[0])
        for request in self._cutter.add(episodes):
            self._sender.send(request, self._names[self._unit] + self._suffix)

    def finish(self) -> None:
        """Send the rest of a unit's episodes."""
        for request in self._cutter.finish():
            self._sender.send(request, self._names[self._unit] + self._suffix)


class _ImportRun:
    """One run over all rows."""

    def __init__(
        self,
        units: Sequence[Unit],
        options: ImportOptions,
        spaces: Mapping[str | None, tuple[Space, Space]],
        categories: Categories,
        names: Mapping[str | None, Sequence[str]],
        account: Account,
        on_report: OnReport | None,
        on_actions: OnActions | None,
        space: Workspace,
    ) -> None:
        self._options, self._names = options, names
        self._on_actions, self._spaces = on_actions, spaces
        self._account, self._on_report = account, on_report
        self._broken: ImportFailed | None = None
        prefixes = [[_prefix(name) for name in names[policy]] for policy in spaces]
        labels = [unit.label for unit in units]
        self._layout = Layout(options, spaces, categories, prefixes, labels)
        columns = [*options.columns, *(RAW + name for name in options.infos.values())]
        if options.sql is not None or options.format is not None:
            columns += [name for name in (FILE, ROW) if name in units[0].names()]
        columns = list(dict.fromkeys(columns))
        self._chunks = all_rows(units, columns)
        if options.dedupe:
            self._chunks = without_repeated(self._chunks, options.dedupe, space, account)
        if options.episode is not None:
            key = options.episode
            self._chunks = by_episode(self._chunks, key, options.default.get(key), space)
        elif options.ends:
            self._chunks = by_flags(self._chunks, options, labels, account)
        if options.has_period:
            self._chunks = within(self._chunks, options)

    def check(self) -> None:
        """Read everything without sending."""
        report = self._account.report
        for chunk in self._chunks:
            for policy, episodes in self._layout.episodes(chunk, self._account):
                self._show(policy, episodes)
                report.episodes += len(episodes.begins)
                report.steps += len(episodes.numbers)
            self._tell()

    def send(self, sender: RequestSender, max_bulk: int) -> None:
        """Send everything; for a source that breaks, the rows before that.

        An interrupt ends it after the request that is under way, with the count in a note.
        """
        lanes: dict[str | None, _Lane] = {}
        try:
            try:
                for chunk in self._read():
                    for policy, episodes in self._layout.episodes(chunk, self._account):
                        if policy not in lanes:
                            suffix = f":{policy}" if _share_name(self._options) else ""
                            names, apart = self._names[policy], self._options.episode is None
                            lanes[policy] = _Lane(sender, max_bulk, names, suffix, apart=apart)
                        lanes[policy].send(episodes)
                        self._show(policy, episodes)
                    self._tell()
            except KeyboardInterrupt:
                lanes.clear()
                sender.abandon()
                raise
            finally:
                for lane in lanes.values():
                    lane.finish()
                sender.wait()
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(self._acknowledged())
            raise
        except CollectorUnavailable as error:
            raise CollectorUnavailable(
                f"{error}; {self._acknowledged()}",
                maybe_applied=error.maybe_applied,
                retry_after=error.retry_after,
            ) from error
        except ImportFailed as error:
            if error is not self._broken:
                raise
            raise ImportFailed(f"{error}; {self._stored()}") from error
        finally:
            sender.close()

    def _read(self) -> Iterator[Chunk]:
        try:
            yield from self._chunks
        except ImportFailed as error:
            self._broken = error
            raise

    def _acknowledged(self) -> str:
        """How much has arrived of an import that stopped, and how to go on."""
        report = self._account.report
        rows = counted(report.steps + report.rows_known, "row is", "rows are")
        return (
            f"{rows} acknowledged, more may be stored; "
            f"the same command continues and adds none twice"
        )

    def _stored(self) -> str:
        """What is stored of a source that broke, and how to go on."""
        report, name = self._account.report, self._options.name
        rows = report.steps + report.rows_known
        if not rows:
            return "nothing of it was stored"
        before = f"{counted(rows, 'row')} before that are stored"
        if name is not None:
            return f"{before}: import all of it under the name {name!r} again to add the rest"
        if self._options.query is not None:
            return f"{before}: import the same query again to add the rest"
        return (
            f"{before}: import it again as it was to add the rest; with other content it is "
            "another import, which stores all of its rows"
        )

    def _show(self, policy: str | None, episodes: WholeEpisodes) -> None:
        if self._on_actions is not None and "action_logp" in episodes.table.column_names:
            space = self._spaces[policy][1]
            self._on_actions(policy or DEFAULT_POLICY, space, episodes.table)

    def _tell(self) -> None:
        if self._on_report is not None:
            self._on_report(self._account.report)
