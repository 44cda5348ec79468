"""The ledger of a loop, by row: acknowledged = trained once + excluded by name + unread.

The clients' notes are compared with the shards, and the shards with the trainer's checkpoint, the
lineage of its weights, its own counts, and the witness's record (trainer_witness.py).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq
import safetensors

from policy.training.checkpoint_files import CheckpointFiles
from storage.errors import WeightsNotFound
from storage.experience.range_set import RangeSet
from storage.reading.exclusion import SPOILED
from storage.reading.ledger import Ledger
from storage.weights.off_chain import off_chain
from storage.weights.store import WeightFolder
from tests.faults.account import is_whole
from tests.faults.loop.trainer_witness import Row, Testimony, digest
from tests.faults.scenario import Verdict

Place: TypeAlias = tuple[str, float]
"""An episode's id, and the number that identifies a row of it: t if acted, the reward if logged."""

_COLUMNS = ["eps_id", "t", "ordinal", "rewards", "source", "actions", "action_logp"]
CLOSE = 1e-9
NOTHING: Mapping[str, RangeSet] = {}
CHECKPOINTS = "weights/default/checkpoints"


@dataclass(frozen=True)
class Stored:
    """A row at rest."""

    row: Row
    place: Place
    mine: bool  # acted by the policy, so that flow control counts it
    action: Any
    logp: float | None
    shard: str


@dataclass
class Notes:
    """What the clients noted."""

    sent: set[Place] = field(default_factory=set)
    acknowledged: dict[Place, tuple[Any, ...]] = field(default_factory=dict)
    refused: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Notes:
        notes = cls()
        for path in sorted(folder.glob("*notes-*")):
            gone = path.name.startswith("gone-")  # acknowledged after the copy was made
            for line in path.read_text().splitlines():
                for what, rows in json.loads(line).items():
                    if gone and what != "sent":
                        continue
                    if what == "sent":
                        notes.sent |= {(name, place) for name, place in rows}
                    elif what == "acknowledged":
                        notes.acknowledged |= {
                            (n, place): tuple(answer) for n, place, *answer in rows
                        }
                    else:
                        notes.refused += rows
        return notes


def rows_at_rest(root: Path, originals: Path | None = None) -> list[Stored]:
    """Every row of every shard; for a damaged shard, of its `originals`."""
    found: list[Stored] = []
    for path in sorted(root.glob("shards/*/*.parquet")):
        kept = None if originals is None else originals / path.name
        file = kept if kept is not None and kept.exists() else path
        if not is_whole(file):
            raise ValueError(f"{file}: a shard is damaged, and nobody kept it")
        columns = pq.read_table(file, columns=_COLUMNS).to_pydict()
        for name, t, ordinal, reward, source, action, logp in zip(*columns.values(), strict=True):
            mine = source == "on_policy"
            found.append(
                Stored(
                    (path.parent.name, ordinal, t),
                    (name, t if mine else reward),
                    mine,
                    action,
                    logp,
                    path.name,
                )
            )
    return found


def judge_stored(notes: Notes, stored: list[Stored], verdict: Verdict) -> None:
    """Every acknowledged row is in the shards once, as it was answered."""
    counts = Counter(row.place for row in stored)
    lost = [place for place in notes.acknowledged if place not in counts]
    doubled = [place for place, number in counts.items() if number > 1]
    unknown = [place for place in counts if place not in notes.sent]
    wrong = [
        (row.place, (row.action, row.logp), answer)
        for row in stored
        if row.mine
        and (answer := notes.acknowledged.get(row.place))
        and (answer[0] != row.action or row.logp is None or abs(answer[1] - row.logp) > CLOSE)
    ]
    verdict.counts |= {"acknowledged": len(notes.acknowledged), "stored": len(stored)}
    verdict.counts |= {"lost": len(lost), "doubled": len(doubled)}
    verdict.require(bool(notes.acknowledged), "idle", "nothing was acknowledged")
    for kind, found in {
        "lost": lost,
        "doubled": doubled,
        "unknown": unknown,
        "propensity": wrong,
        "refused": notes.refused,
    }.items():
        verdict.require(not found, kind, f"{len(found)}, such as {found[:3]}")


# --- weights -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """A version as the checks first saw it."""

    number: int
    parent: int | None
    content: str  # of its manifest
    weights: str
    untrained: frozenset[tuple[str, int, int]]  # stream, ordinal, row within the part
    parts: frozenset[tuple[str, int]]  # of its lineage


@dataclass
class Watch:
    """The versions of a policy that were seen: a number has one content forever."""

    root: Path
    policy_id: str = "default"
    versions: dict[int, Version] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    reused: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)
    off_chain: set[int] = field(default_factory=set)  # whose checkpoint was lost
    _prints: dict[int, str] = field(default_factory=dict)

    def look(self) -> None:
        """Note what is there now."""
        store = WeightFolder(self.root, self.policy_id)
        for number in store.versions():
            try:
                self._note(store, number)
            except (WeightsNotFound, FileNotFoundError) as error:
                if number not in store.pruned():  # recorded before the removal
                    self.damaged.append(f"version {number}: {error!r}")
            except Exception as error:
                self.damaged.append(f"version {number}: {error!r}")
        try:
            live = store.live()
        except Exception as error:
            self.damaged.append(f"live: {error!r}")
            return
        if live is not None:
            known = self.generations.setdefault(live.generation, live.version)
            if known != live.version:
                text = f"generation {live.generation}: version {known}, then {live.version}"
                self.reused.append(text)

    def require_whole(self) -> None:
        """Every existing version is readable; called when nothing publishes or prunes any more."""
        store = WeightFolder(self.root, self.policy_id)
        for number in store.versions():
            try:
                store.load(number)
                store.lineage(number)
            except Exception as error:
                self.damaged.append(f"version {number}: {error!r}")

    def after_cut(self, last: int) -> None:
        """Check after a power cut. `last`: the last version reported live by a trainer, or 0.

        A version that was never live may be gone, and its number may be reused; a version that was
        live keeps its number, and the reported one is live.
        """
        store = WeightFolder(self.root, self.policy_id)
        there = set(store.versions())
        try:
            live = store.live()
        except Exception as error:
            self.damaged.append(f"live: {error!r}")
            return
        if last and (live is None or live.version < last):
            self.vanished.append(f"version {last} was told; after a cut {live} is live")
        was_live = set(self.generations.values())
        for number in set(self.versions) - there - was_live:
            del self.versions[number], self._prints[number]

    def restored(self) -> None:
        """Record a restore: numbers of lost versions stay known, but their rows are not checked."""
        there = set(WeightFolder(self.root, self.policy_id).versions())
        for number in set(self.versions) - there:
            del self.versions[number]

    def _note(self, store: WeightFolder, number: int) -> None:
        if number not in self.off_chain and off_chain(store.files, number) is not None:
            self.off_chain.add(number)
        path = store.directory / "versions" / str(number) / "manifest.json"
        content = path.read_text()
        if self._prints.setdefault(number, content) != content:
            self.reused.append(f"version {number} has two contents")
            self._prints[number] = content
            self.versions.pop(number, None)
        if number in self.versions:
            return
        manifest, weights = store.load(number)
        lineage, untrained = store.lineage(number), store.untrained(number)
        self.versions[number] = Version(
            number,
            manifest.parent,
            content,
            digest(weights),
            frozenset(
                (stream, ordinal, row)
                for stream, runs in untrained.items()
                for ordinal, first, count in runs
                for row in range(first, first + count)
            ),
            frozenset(
                (stream, ordinal)
                for stream, ranges in lineage.items()
                for first, last in ranges.ranges()
                for ordinal in range(first, last + 1)
            ),
        )


def _claimed(version: Version, parts: Mapping[tuple[str, int], list[Row]]) -> set[Row]:
    """The rows that a version says it was trained on."""
    claimed: set[Row] = set()
    for part in version.parts:
        claimed |= {
            row
            for index, row in enumerate(parts.get(part, [(*part, -1)]))
            if (*part, index) not in version.untrained
        }
    return claimed


def parts_of(stored: Iterable[Stored]) -> dict[tuple[str, int], list[Row]]:
    """(stream, ordinal) -> the rows of that part, in order."""
    parts: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for one in stored:
        parts[one.row[:2]].append(one.row)
    return {part: sorted(rows) for part, rows in parts.items()}


def _is_in(gone: Mapping[str, RangeSet], row: Row) -> bool:
    return row[1] in gone.get(row[0], ())


def judge_versions(
    watch: Watch,
    testimony: Testimony,
    stored: list[Stored],
    verdict: Verdict,
    *,
    goes_back: Iterable[int] = (),
    loses_checkpoints: bool = False,
    gone: Mapping[str, RangeSet] = NOTHING,
) -> None:
    """Each lineage lists the rows that the weights were trained on, once, and no version was
    trained on less than the previous live one. `goes_back`: exceptions (a rollback); with
    `loses_checkpoints` versions may come off the chain. `gone`: ordinals that are in no shard any
    more; which rows they had is not known."""
    parts, may = parts_of(stored), set(goes_back)
    seen: dict[int, set[Row]] = {}
    for number, version in sorted(watch.versions.items()):
        rows = testimony.rows_of(version.weights)
        twice = [row for row, count in rows.items() if count > 1]
        verdict.require(not twice, "trained_twice", f"version {number}: {len(twice)}: {twice[:3]}")
        claimed = {row for row in _claimed(version, parts) if not _is_in(gone, row)}
        trained = {row for row in rows if not _is_in(gone, row)}
        text = f"version {number} claims {len(claimed)} rows and was trained on {len(trained)}: "
        text += f"only claimed {sorted(claimed - trained)[:3]}, only trained on "
        text += f"{sorted(trained - claimed)[:3]}"
        verdict.require(claimed == trained, "lineage", text)
        seen[number] = set(rows)
        parent = version.parent or 0
        while parent in watch.off_chain and parent in watch.versions:
            parent = watch.versions[parent].parent or 0
        before = seen.get(parent, set())
        less = before - seen[number]
        text = f"version {number} after {version.parent}: without {len(less)} of its rows"
        verdict.require(not less or number in may, "went_back", text)
    verdict.counts |= {"versions": len(watch.versions), "updates_seen": testimony.lines}
    lost = sorted(watch.off_chain)
    text = f"versions {lost}: no checkpoint is behind them"
    verdict.require(loses_checkpoints or not lost, "off_chain", text)
    verdict.require(not watch.reused, "reused", watch.reused)
    verdict.require(not watch.damaged, "damaged_version", watch.damaged)
    verdict.require(not watch.vanished, "vanished", watch.vanished)


# --- the end -----------------------------------------------------------------------------------


def position_of(root: Path) -> dict[str, Any]:
    """The reader's position in the follower's latest checkpoint."""
    checkpoint = CheckpointFiles(root / CHECKPOINTS, 0).found()[0]
    with safetensors.safe_open(checkpoint, framework="numpy") as file:
        document = json.loads(file.metadata()["checkpoint"])
    state: dict[str, Any] = document["body"]["reader_state"]
    position: dict[str, Any] = state.get("position", state)
    return position


def unread_of(position: Mapping[str, Any], parts: Mapping[tuple[str, int], list[Row]]) -> set[Row]:
    """The rows that a reader continuing from this position has still to return."""
    behind = Ledger.from_json(position["ledger"])
    pending: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for stage in ("joiner", "window", "cutter"):
        for index, ordinal, first, count in position[stage]:
            part = position["streams"][index], ordinal
            pending[part] |= set(range(first, first + count))
    ranges = behind.streams()
    unread: set[Row] = set()
    for part, rows in parts.items():
        stream, ordinal = part
        taken = stream in ranges and not len(ranges[stream].missing(ordinal, ordinal))
        if part in pending:
            unread |= {row for index, row in enumerate(rows) if index in pending[part]}
        elif not taken:
            unread |= set(rows)
    return unread


def judge_end(
    root: Path,
    watch: Watch,
    testimony: Testimony,
    stored: list[Stored],
    result: Mapping[str, Any],
    verdict: Verdict,
    *,
    damaged: Iterable[str] = (),
    is_less: bool = False,
) -> None:
    """acknowledged = trained once + excluded by name + unread, once a trainer has read everything.

    `result` is the trainer's last output; `damaged` are shards that it cannot have read. `is_less`:
    shards had more rows earlier, which it may have excluded, too.
    """
    watch.look()
    watch.require_whole()
    store = WeightFolder(root, watch.policy_id)
    live, parts = store.live(), parts_of(stored)
    if live is None:
        verdict.require(False, "no_version", "nothing is live")
        return
    bad = set(damaged)
    trained = set(testimony.rows_of(watch.versions[live.version].weights))
    unread = unread_of(position_of(root), parts)
    spoiled = {one.row for one in stored if one.shard in bad}
    excluded = {one.row for one in stored} - trained - unread - spoiled
    counted = result["excluded"].items()  # no rows where a footer is unreadable
    named = sum(rows for why, rows in counted if not bad or why not in SPOILED)
    verdict.counts |= {
        "trained": len(trained),
        "excluded": len(excluded),
        "unread": len(unread - spoiled),
        "in_damaged_shards": len(spoiled),
    }
    both = trained & unread
    verdict.require(not both, "trained_twice", f"trained on and to be read: {sorted(both)[:3]}")
    touched = trained & spoiled
    verdict.require(not touched, "trained_damage", f"of damaged shards: {sorted(touched)[:3]}")
    mine = {one.row for one in stored if one.mine}
    left = (unread - spoiled) & mine
    verdict.require(not left, "unread", f"{len(left)} were never read: {sorted(left)[:3]}")
    text = f"{len(excluded)} rows are not trained on, {named} named: {result['excluded']}"
    fits = named >= len(excluded) if is_less else named == len(excluded)
    verdict.require(fits, "unnamed", text)
    text = f"{len(trained)} rows were trained on, the result says {result['rows_trained']}"
    verdict.require(result["rows_trained"] == len(trained), "counts", text)
    shards = {Path(path).name for path in result.get("excluded_shards", {})}
    verdict.require(bad <= shards, "unnamed", f"shards not named: {sorted(bad - shards)[:3]}")
