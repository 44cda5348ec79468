"""`verify`: is every acknowledged step in the shards or the journal, exactly once?

    trained = Trained.of(root)               # before the account, which then covers all of it
    report = verify(root, account, trained)  # account: the contents of the journal, or None
    for finding in report.findings: ...

It checks:
* every shard: SHA-256 against its name and its record, page checksums, rows against footer and
  record, the ordinals inside against footer and name, each part's `t` for gaps;
* every stream: the ordinals run from 0 without gaps, none is in two files, every record has its
  file, and every file its record;
* the sum: steps acknowledged == rows in shards + steps in the journal + rows that records of
  maintenance say were erased or retained out, none of which is in a shard;
* weights: the digests of all versions; that there is a live version if there was one before; that
  the ordinals which the live version and a canary were trained on are in shards or the journal;
* quarantine: that its files have not changed since they were moved there;
* with a second reader: that it finds the same rows and values in every intact shard.

Nothing is changed, except that `quarantine` moves damaged shards to where readers do not look.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from storage.declarations.declaration import DeclarationError
from storage.errors import StorageError
from storage.experience.range_set import RangeSet
from storage.journal.records import Plan, ShardRecord
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.objects.ranged import RangedFile
from storage.shards.names import SUFFIX, ShardDamaged, ShardName, is_shard
from storage.shards.replacements import FOLDER, REPLACED, Replacements
from storage.shards.shard import shard_metadata
from storage.verify.quarantine import QUARANTINE, changed_since, set_aside
from storage.verify.second_reader import SecondReader
from storage.verify.shard_check import check_shard, entries, reason
from storage.weights.manifest import Live
from storage.weights.off_chain import off_chain
from storage.weights.store import WeightFolder
from storage.wording import counted

OnProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with (what is being done, how many are done, how many there are or None)."""

Kind: TypeAlias = Literal[
    "damaged",  # bytes or content of a shard, also in quarantine, are not those that were written
    "missing",  # a recorded shard is not there
    "doubled",  # the same ordinals in two files
    "unrecorded",  # a shard that is not in the journal
    "erased",  # rows that a record says were removed are in a shard
    "stray",  # a Parquet file that is not a shard, but that other tools would read
    "hole",  # ordinals that are in no shard
    "count",  # the acknowledged steps do not add up
    "journal",  # the journal itself is damaged, or its database is gone
    "weights",  # a version is damaged, or the live pointer does not lead to a version
    "differs",  # a second reader finds other values in a shard
    "unreadable",  # a second reader cannot read a shard that our reader reads
    "crashed",  # the process of a second reader died while it read a shard
]


@dataclass(frozen=True, kw_only=True)
class JournalAccount:
    """The contents of a journal. Counts are steps; `accepted` counts since its creation."""

    collector_id: str
    accepted: int
    records: tuple[ShardRecord, ...]
    plans: Mapping[Plan, int]  # not recorded yet -> steps in the journal for it
    next_ordinals: Mapping[str, int]  # of every stream that the journal ever had
    waiting_steps: int  # in closed parts that have no plan yet
    open_steps: int  # in episodes that have not ended
    open_episodes: Mapping[str, int]  # policy -> episodes that have not ended
    damage: tuple[str, ...] = ()
    # where the ordinals of those parts end
    waiting_ordinals: Mapping[str, int] = field(default_factory=dict)
    live: bool = False  # a snapshot of a running collector, which may have written more since

    def is_behind(self, stream: str, first: int) -> bool:
        """Whether a shard of this collector's stream was planned after the account was taken."""
        ours = stream.startswith(f"{self.collector_id}-")
        return ours and first >= self.next_ordinals.get(stream, 0)

    def in_journal(self, stream: str) -> RangeSet:
        """The ordinals of parts that are durable and have no recorded shard yet."""
        found = RangeSet((plan.first, plan.last) for plan in self.plans if plan.stream == stream)
        first, end = self.next_ordinals.get(stream, 0), self.waiting_ordinals.get(stream, 0)
        if end > first:
            found.add_range(first, end - 1)
        return found


@dataclass(frozen=True)
class Finding:
    """Something that is wrong; `where` is a path under the root, or a stream."""

    kind: Kind
    where: str
    text: str


@dataclass(frozen=True, kw_only=True)
class StreamReport:
    """The counts of one stream. `known`: the given journal is the one that made it."""

    stream: str
    shards: int
    parts: int
    rows: int
    known: bool


@dataclass(kw_only=True)
class SecondReading:
    """How many intact shards, and rows in them, a second reader has read."""

    reader: str  # its name and version
    shards: int = 0
    rows: int = 0


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of `verify`. Counts are steps.

    `acknowledged` is None without a journal; without findings it equals in_shards + in_journal +
    in_quarantine + erased + retained_out. `earlier` counts rows of streams that an earlier journal
    made.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    streams: tuple[StreamReport, ...]
    acknowledged: int | None
    in_shards: int
    in_journal: int
    earlier: int
    in_quarantine: int = 0
    erased: int = 0
    retained_out: int = 0
    quarantined: tuple[str, ...] = ()
    second_reader: SecondReading | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return {"ok": self.ok, **asdict(self)}


@dataclass
class Trained:
    """What live versions and canaries were trained on, and what is wrong with the live pointers.

    Taken before a collector's account, so that the account covers everything trained on.
    """

    lineages: list[tuple[str, int, Mapping[str, RangeSet]]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Root) -> Trained:
        """Read the weights of all policies of a root."""
        found, objects = cls(), objects_at(root)
        for policy in _folders(objects, "weights"):
            found._note(objects, policy)
        return found

    def _note(self, root: Objects, policy: str) -> None:
        where = f"weights/{policy}/live.json"
        try:
            store = WeightFolder(root, policy)
            live = store.live()
            for name, text in store.pointer_damage().items():
                self._find(f"weights/{policy}/{name}", f"{text}; {_MENDED}")
            if live is None:
                self._ask_for_live(where, store)
                return
            self.notes += [f"{where}: {text}" for text in _standing(store, live)]
            for version, role in ((live.version, "live"), (live.canary_version, "the canary")):
                if version is not None and version not in store.versions():
                    self._find(where, f"version {version} is {role}, but not there")
                elif version is not None:
                    self.lineages.append((where, version, store.lineage(version)))
        except DeclarationError:
            return  # not a policy's folder: check_weights notes it
        except (StorageError, ValueError, OSError) as error:
            self._find(where, str(error))

    def _ask_for_live(self, where: str, store: WeightFolder) -> None:
        """Report a missing live.json if an earlier version must have been live.

        A version with a parent, or a copy, shows that one was live. A first version may not be live
        yet.
        """
        versions = store.versions()
        if not versions:
            return
        known = RangeSet.of(versions)
        text = f"expected a file that names the live one of versions {known}, got no file"
        manifests = [store.manifest(version) for version in versions]
        if any(m.parent is not None or m.copy_of is not None for m in manifests):
            self._find(where, text)
        else:
            self.notes.append(f"{where}: {text}: none was live yet")

    def _find(self, where: str, text: str) -> None:
        self.findings.append(Finding("weights", where, text))


_MENDED = "a collector, a trainer, publish, rollback and resume write it anew"


def _standing(store: WeightFolder, live: Live) -> Iterator[str]:
    """Notes on a policy's weights: a pin, a restore, collectors that serve another version."""
    if live.pinned is not None:
        yield f"version {live.version} is pinned by {live.pinned.by}: {live.pinned.why}"
    if (text := store.restored) is not None:
        yield text
    known = RangeSet.of([*store.versions(), *store.pruned()])
    if gone := known.missing(1, known.last or 0):
        yield (
            f"versions {gone} were published and are missing here: the weights were "
            "restored from a backup"
        )
    for one in store.served.registered(time.time()):
        if not one.serves(live):
            serves = "nothing" if one.version < 0 else f"version {one.version}"
            why = one.why or "it has not read live.json yet"
            yield f"wanted: version {live.version}; {one.collector_id} serves {serves}: {why}"


def _folders(root: Objects, name: str) -> list[str]:
    """What is in a folder of a root, by name."""
    return [one.rstrip("/").rpartition("/")[2] for one in root.names(f"{name}/")]


def _aside(root: Objects) -> Iterator[str]:
    """The shards in quarantine."""
    for place in root.names(f"{QUARANTINE}/"):
        for name in root.names(place) if place.endswith("/") else ():
            if ShardName.parse(name.rpartition("/")[2]):
                yield name.removeprefix(f"{QUARANTINE}/")


def no_progress(what: str, done: int, total: int | None) -> None:
    """A `OnProgress` that does nothing."""


def verify(
    root: Root,
    account: JournalAccount | None,
    trained: Trained,
    *,
    quarantine: bool = False,
    second: SecondReader | None = None,
    on_progress: OnProgress = no_progress,
) -> VerifyReport:
    """Check everything stored under `root`, except what a running collector writes meanwhile.

    `trained` was taken before the account. `quarantine` moves damaged shards to
    `quarantine/{stream}/`; `second` reads the intact ones again. Raises OSError for errors that are
    not findings, such as a folder that may not be listed.
    """
    audit = _Audit(objects_at(root), account, trained, second)
    found = list(entries(audit.root))
    audit.listed = {name for name, _ in found}
    audit.aside = set(_aside(audit.root))
    for done, (name, is_folder) in enumerate(found, 1):
        audit.look_at(name, is_folder=is_folder)
        on_progress("verifying", done, len(found))
    audit.compare_removals()
    audit.compare_records()
    audit.find_holes()
    audit.add_up()
    audit.check_weights()
    audit.check_lineage()
    moved = tuple(audit.quarantine()) if quarantine else ()
    return audit.report(moved)


@dataclass
class _AuditedStream:
    covered: RangeSet = field(default_factory=RangeSet)  # by intact shards
    claimed: RangeSet = field(default_factory=RangeSet)  # by names, including damaged shards
    names: dict[str, tuple[str, int]] = field(default_factory=dict)  # file -> (digest, rows)
    shards: int = 0
    parts: int = 0
    rows: int = 0


class _Audit:
    """Collects findings; one method per check."""

    def __init__(
        self,
        root: Objects,
        account: JournalAccount | None,
        trained: Trained,
        second: SecondReader | None,
    ) -> None:
        self.root, self.shards = root, root.under("shards")
        self._second = second
        self.second_reading = None if second is None else SecondReading(reader=second.name)
        self.account = account
        self.findings = list(trained.findings)
        self.notes = list(trained.notes)
        self.streams: dict[str, _AuditedStream] = {}
        self.damaged: list[tuple[str, str]] = []  # stream, file
        self.in_journal = 0
        self.in_quarantine = 0
        self.newer = 0
        self.lineages = trained.lineages
        self.listed: set[str] = set()  # everything under shards/
        self.aside: set[str] = set()  # shards in quarantine, as STREAM/NAME
        self.parts_aside: dict[str, RangeSet] = {}  # stream -> their ordinals, by their names
        self.replaced: list[tuple[str, str]] = []  # shards that do not count, and their streams
        self.removed: dict[str, RangeSet] = {}  # stream -> ordinals that are in no shard any more
        self.removed_rows: Counter[str] = Counter()  # by the command that removed them
        try:
            self.replacements = Replacements.of(self.root)
        except (StorageError, ValueError, OSError) as error:
            self.replacements = Replacements()
            self._find("damaged", FOLDER, str(error))

    # shards, one by one

    def look_at(self, place: str, *, is_folder: bool) -> None:
        """Check one entry of a stream's folder, or anything that is not where shards are."""
        stream, _, file = place.removeprefix("shards/").partition("/")
        name = ShardName.parse(file)
        if stream.startswith(".") or not file or "/" in file or (name is None and is_folder):
            self._look_astray(place, is_folder=is_folder)
            return
        if name is not None:
            self._check(place, stream, name)
            return
        self.streams.setdefault(stream, _AuditedStream())
        if self._is_replaced(stream, file.removesuffix(REPLACED)):
            self.replaced.append((place, stream))
        elif file.startswith("."):
            self.notes.append(f"{place}: left half-written, of no meaning")
        elif file.endswith(SUFFIX):
            self._find("stray", place, "no shard's name, but other tools would read its rows")
        else:
            self.notes.append(f"{place}: not a file of ours")

    def _check(self, place: str, stream: str, name: ShardName) -> None:
        """Check a shard, and count it, unless it is newer than the account, or was replaced."""
        if self._is_replaced(stream, str(name)):
            self.replaced.append((place, stream))
            return
        account = self.account
        newer = account is not None and account.live and account.is_behind(stream, name.first)
        known = _AuditedStream() if newer else self.streams.setdefault(stream, _AuditedStream())
        if is_shard(self.shards, stream, name):
            known.claimed.add_range(name.first, max(name.first, name.last))
        try:
            digest, metadata = check_shard(RangedFile(self.root, place), name)[:2]
        except (ShardDamaged, OSError) as error:
            if not newer:
                self.damaged.append((stream, str(name)))
            self._find("damaged", place, reason(f"{self.root}/{place}", error))
            return
        self.newer += newer
        inside = RangeSet(metadata.ranges)
        if twice := inside.intersection(known.covered):
            self._find("doubled", place, f"ordinals {twice} are in another shard too")
        known.covered.update(inside)
        known.names[str(name)] = (digest, metadata.rows)
        known.shards += 1
        known.parts += metadata.parts
        known.rows += metadata.rows
        self._read_again(place, metadata.rows)

    def _is_replaced(self, stream: str, file: str) -> bool:
        """Whether another shard that is there has the rows of this one, as a record says."""
        return self.replacements.by(stream, file, self._is_listed) is not None

    def _is_listed(self, stream: str, file: str) -> bool:
        name = f"{stream}/{file}"
        return f"shards/{name}" in self.listed or name in self.aside

    def _look_astray(self, place: str, *, is_folder: bool) -> None:
        """Check an entry outside of the streams' folders.

        Other tools, which read `shards/**/*.parquet`, would find it; our readers do not.
        """
        if is_folder:
            self._find("stray", place, "a link to a folder, in which other tools would read")
        elif place.endswith(SUFFIX):
            text = "in no stream's folder, but other tools would read its rows"
            self._find("stray", place, text)
        else:
            self.notes.append(f"{place}: not a file of ours")

    def _read_again(self, place: str, rows: int) -> None:
        """Compare an intact shard with what a second reader finds."""
        if self._second is None or self.second_reading is None:
            return
        self.second_reading.shards += 1
        self.second_reading.rows += rows
        for wrong in self._second.compare(RangedFile(self.root, place)):
            self._find(wrong.kind, place, wrong.text)

    # shards against the records of maintenance and the journal

    def compare_removals(self) -> None:
        """Count the rows that were removed, and check that none of them is in a shard."""
        erased: dict[str, RangeSet] = {}
        for record, ordinals in self.replacements.removed(self._is_listed):
            if record.command == "erase":
                erased.setdefault(record.stream, RangeSet()).update(ordinals)
            if self._known(record.stream):
                self.removed_rows[record.command] += record.removed_rows
            self.removed.setdefault(record.stream, RangeSet()).update(ordinals)
            found = self.streams.get(record.stream, _AuditedStream()).covered
            if there := found.intersection(ordinals):
                text = f"ordinals {there} were removed by {record.command}, and are in a shard"
                self._find("erased", record.place, text)
        for place, stream in self.replaced:
            gone = erased if place.endswith(REPLACED) else self.removed
            self._look_for_removed(place, gone.get(stream, RangeSet()))

    def _look_for_removed(self, place: str, gone: RangeSet) -> None:
        """Report a replaced shard that has removed ordinals: its removal is not finished.

        Those that `retain` has removed may be there during the grace period.
        """
        if not gone:
            return
        try:
            found = RangeSet(shard_metadata(RangedFile(self.root, place)).ranges)
        except (ShardDamaged, OSError) as error:
            self.notes.append(f"{place}: replaced, and cannot be read: {error}")
            return
        if there := found.intersection(gone):
            text = f"ordinals {there} were removed, and this file has them: apply the plan again"
            self._find("erased", place, text)

    def compare_records(self) -> None:
        """Check that every record has its file, and every file its record or its plan."""
        for made in self.replacements.made.values():
            place = f"{made.stream}/{made.new}"
            self._compare_rows(made.stream, made.new, made.rows)
            if f"shards/{place}" not in self.listed and place in self.aside:
                self._look_aside(f"{QUARANTINE}/{place}", made.rows)
        if self.account is None:
            return
        recorded = set(self.replacements.made)
        for record in self.account.records:
            recorded.add((record.stream, record.name))
            self._compare(record)
        planned = {(plan.stream, plan.first, plan.last) for plan in self.account.plans}
        for stream in self.account.next_ordinals:
            for file in self.streams.get(stream, _AuditedStream()).names:
                name = ShardName.parse(file)
                range_ = (stream, name.first, name.last) if name else None
                if (stream, file) not in recorded and range_ not in planned:
                    place = f"shards/{stream}/{file}"
                    self._find("unrecorded", place, "the journal wrote no such shard")

    def _compare(self, record: ShardRecord) -> None:
        name = f"{record.stream}/{record.name}"
        place, recorded = f"shards/{name}", counted(record.rows, "row")
        found = self.streams.get(record.stream, _AuditedStream()).names.get(record.name)
        if found is None and self._is_replaced(record.stream, record.name):
            return  # the sum shows whether the other shard has its rows
        if found is None:
            status = self.root.status(f"{QUARANTINE}/{name}")
            if status is not None and status.is_object:
                self._look_aside(f"{QUARANTINE}/{name}", record.rows)
            elif (record.stream, record.name) not in self.damaged:
                self._find("missing", place, f"recorded with {recorded}, but not there")
            return
        if found[0] != record.digest:
            self._find("damaged", place, f"recorded as {record.digest}, found {found[0]}")
            self.damaged.append((record.stream, record.name))
        if (record.stream, record.name) not in self.replacements.made:
            self._compare_rows(record.stream, record.name, record.rows)

    def _compare_rows(self, stream: str, file: str, recorded: int) -> None:
        found = self.streams.get(stream, _AuditedStream()).names.get(file)
        if found is not None and found[1] != recorded:
            text = f"recorded with {counted(recorded, 'row')}, found {found[1]}"
            self._find("damaged", f"shards/{stream}/{file}", text)

    def _look_aside(self, name: str, rows: int) -> None:
        """Check a shard in quarantine: its rows count in the sum if it has not changed since."""
        _, stream, file = name.split("/")
        try:
            why = changed_since(self.root, name)
        except OSError as error:
            why = reason(f"{self.root}/{name}", error)
        if why:
            self._find("damaged", name, why)
        else:
            self.in_quarantine += rows
            if known := ShardName.parse(file):
                parts = self.parts_aside.setdefault(stream, RangeSet())
                parts.add_range(known.first, known.last)
            self.notes.append(f"{name}: {counted(rows, 'row')} set aside")

    def find_holes(self) -> None:
        """Check that ordinals run from 0 without gaps, except for plans without a file."""
        ends = dict(self.account.next_ordinals) if self.account else {}
        for name in sorted({*self.streams, *ends}):
            claimed = self.streams.get(name, _AuditedStream()).claimed
            end = ends.get(name, (claimed.last if claimed.last is not None else -1) + 1)
            beyond = claimed.difference(RangeSet([(0, end - 1)] if end else []))
            if beyond:
                self._find("unrecorded", name, f"ordinals {beyond} were never given")
            missing = claimed.missing(0, end - 1)
            for plan in self.account.plans if self.account else ():
                if plan.stream == name and missing:
                    missing.discard_range(plan.first, plan.last)
            recorded = RangeSet(
                (record.first, record.last)
                for record in (self.account.records if self.account else ())
                if record.stream == name
            )
            missing = missing.difference(recorded)  # reported as a missing shard already
            missing = missing.difference(self.removed.get(name, RangeSet()))
            if missing:
                self._find("hole", name, f"ordinals {missing} are in no shard")

    def add_up(self) -> None:
        """Check that acknowledged == rows in shards + steps in the journal (+ in quarantine)."""
        if self.account is None:
            self.notes.append("no journal here: shards are checked by themselves alone")
            self._look_for_lost_journal()
            return
        for text in self.account.damage:
            self._find("journal", "journal", text)
        self.in_journal = self.account.waiting_steps + self.account.open_steps
        for plan, steps in self.account.plans.items():
            covered = self.streams.get(plan.stream, _AuditedStream()).covered
            if not covered.contains_range(plan.first, plan.last):
                self.in_journal += steps
        removed = self.removed_rows.total()
        found = self._rows(known=True) + self.in_journal + self.in_quarantine + removed
        difference = found - self.account.accepted
        if difference:
            word = "doubled or unknown" if difference > 0 else "lost"
            self._find(
                "count",
                f"collector {self.account.collector_id}",
                f"expected {counted(self.account.accepted, 'acknowledged step')}, found "
                f"{self._rows(known=True):,} in shards and {self.in_journal:,} in the journal"
                f"{f', {self.in_quarantine:,} in quarantine' if self.in_quarantine else ''}"
                f"{f', {removed:,} erased or retained out' if removed else ''}: "
                f"{abs(difference):,} {word}",
            )

    def _look_for_lost_journal(self) -> None:
        """Report a database that is gone: its first commit marks a row in the high-water file."""
        name = "journal/high-water"
        status = self.root.status(name)
        if status is not None and status.is_object and status.size:
            text = (
                "expected the journal's database, which this file belongs to, got none: what it "
                "held is lost, and acknowledged steps may be in no shard"
            )
            self._find("journal", name, text)

    def _rows(self, *, known: bool) -> int:
        return sum(s.rows for name, s in self.streams.items() if self._known(name) is known)

    def _known(self, stream: str) -> bool:
        return self.account is None or stream in self.account.next_ordinals

    # weights

    def check_weights(self) -> None:
        """Check that all versions are intact."""
        for policy in _folders(self.root, "weights"):
            try:
                store = WeightFolder(self.root, policy)
            except DeclarationError as error:
                self.notes.append(f"weights/{policy}: {error}")
                continue
            for version in store.versions():
                self._try(f"weights/{policy}/versions/{version}", store, version)

    def _try(self, where: str, store: WeightFolder, version: int) -> None:
        try:
            store.read(version)
            store.lineage(version)
            if why := off_chain(store.files, version):
                self.notes.append(f"{where} is off the chain: {why}")
        except (StorageError, ValueError, OSError) as error:
            pruned = self.account is not None and self.account.live
            is_reported = any(found.text == str(error) for found in self.findings)
            if not is_reported and not (pruned and version not in store.versions()):
                self._find("weights", where, str(error))

    def check_lineage(self) -> None:
        """Check that everything live versions were trained on is accounted for.

        A trainer in the collector's process reads parts before their shard is written. Ordinals of
        other roots' collectors are only noted.
        """
        ours = self._collectors()
        for where, version, lineage in self.lineages:
            for stream, ordinals in lineage.items():
                absent = ordinals.difference(self.streams.get(stream, _AuditedStream()).covered)
                text = f"version {version} was trained on ordinals {{}} of {stream}, which {{}}"
                waiting = RangeSet() if self.account is None else self.account.in_journal(stream)
                for known, where_else in (
                    (self.removed.get(stream, RangeSet()), "were erased or retained out"),
                    (self.parts_aside.get(stream, RangeSet()), "are in quarantine"),
                    (waiting, "are in the journal, in no shard yet"),
                ):
                    if there := absent.intersection(known):
                        self.notes.append(f"{where}: {text.format(there, where_else)}")
                        absent = absent.difference(there)
                if absent and stream.rpartition("-")[0] in ours:
                    self._find("weights", where, text.format(absent, "are in no whole shard"))
                elif absent:
                    self.notes.append(f"{where}: {text.format(absent, 'this root never had')}")

    def _collectors(self) -> set[str]:
        """The ids of the collectors that this root is known to have had."""
        aside = _folders(self.root, QUARANTINE)
        known = self.account
        counted = [] if known is None else [*known.next_ordinals, f"{known.collector_id}-"]
        return {stream.rpartition("-")[0] for stream in (*self.streams, *aside, *counted)}

    # results

    def quarantine(self) -> Iterator[str]:
        """Move damaged shards to where readers do not look, and yield their new names."""
        for stream, file in self.damaged:
            yield set_aside(self.root, stream, file)

    def report(self, quarantined: tuple[str, ...]) -> VerifyReport:
        if self.newer:
            newer = counted(self.newer, "shard is", "shards are")
            self.notes.append(f"{newer} newer than the account, and whole")
        if self.replaced:
            kept = counted(len(self.replaced), "replaced shard waits", "replaced shards wait")
            self.notes.append(f"{kept} for the end of the grace period; `headrace compact` deletes")
        streams = [
            StreamReport(
                stream=name, shards=s.shards, parts=s.parts, rows=s.rows, known=self._known(name)
            )
            for name, s in sorted(self.streams.items())
        ]
        return VerifyReport(
            findings=tuple(self.findings),
            notes=tuple(self.notes),
            streams=tuple(streams),
            acknowledged=None if self.account is None else self.account.accepted,
            in_shards=self._rows(known=True),
            in_journal=self.in_journal,
            in_quarantine=self.in_quarantine,
            erased=self.removed_rows["erase"],
            retained_out=self.removed_rows["retain"],
            earlier=self._rows(known=False),
            quarantined=quarantined,
            second_reader=self.second_reading,
        )

    def _find(self, kind: Kind, where: str, text: str) -> None:
        self.findings.append(Finding(kind, where, text))
