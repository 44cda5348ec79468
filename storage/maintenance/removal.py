"""`retain` and `erase`: which episodes leave the shards.

Both remove whole episodes, with all their parts in all streams. `retain` keeps the replaced shards
for the grace period, as `compact` does. `erase` deletes them at once, together with all earlier
copies in shards that were replaced or moved to quarantine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from storage.declarations.tombstones import Tombstones, episode_mark, tag_mark
from storage.errors import StorageError
from storage.experience.range_set import RangeSet
from storage.journal.copying import Recorded
from storage.maintenance.compaction import replaced_over
from storage.maintenance.episodes import Numbers, StoredEpisodes, ids_where
from storage.maintenance.plans import Discard, MaintenancePlan, Remove, load
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.shards.names import ShardName
from storage.shards.replacements import REPLACED, Replacements
from storage.verify.audit import JournalAccount, OnProgress, no_progress
from storage.verify.quarantine import QUARANTINE
from storage.weights.store import WeightFolder
from storage.wording import counted

DAY = 86_400.0


def plan_retention(
    root: Root,
    journal: Recorded | None,
    *,
    keep_days: float | None = None,
    max_bytes: int | None = None,
    where: str | None = None,
    cap_bytes: int | None = None,
    grace_seconds: float = DAY,
    now: float | None = None,
    on_progress: OnProgress = no_progress,
) -> MaintenancePlan:
    """Plan to remove the episodes that are too old, beyond a size, or chosen by SQL.

    `keep_days`: by their latest step; `max_bytes`: the oldest, until the shards have at most this
    size; `where`: those with a step for which the condition holds. Only episodes whose end is in a
    shard are removed, and with `cap_bytes` only the oldest of these, up to this size. `now`:
    seconds since the epoch. Raises ValueError, OSError.
    """
    now = time.time() if now is None else now
    found = StoredEpisodes.of(root, journal, on_progress=on_progress)
    episodes, times, nbytes = found.oldest()
    chosen = np.zeros(len(episodes), np.bool_)
    if keep_days is not None:
        chosen |= times < int((now - keep_days * DAY) * 1_000_000)
    if max_bytes is not None:
        over = sum(shard.nbytes for shard in found.shards) - max_bytes
        chosen |= np.concatenate(([0.0], np.cumsum(nbytes)))[:-1] < over
    if where is not None:
        named = found.named(ids_where(root, found, where))
        chosen |= np.isin(episodes, named)
    if cap_bytes is not None:
        chosen &= np.cumsum(np.where(chosen, nbytes, 0.0)) <= cap_bytes
    steps = found.steps(episodes[chosen])
    objects = objects_at(root)
    over_now = replaced_over(objects, Replacements.of(objects), now - grace_seconds)
    return MaintenancePlan("retain", (*steps, *over_now))


class Requests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whom to erase: ids of episodes, and values of tags, each of which is sufficient."""

    episodes: tuple[str, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()

    @property
    def texts(self) -> list[str]:
        """What must not be found anywhere afterwards, by request."""
        return [*self.episodes, *(value for _, value in self.tags)]

    def marks(self, key: bytes) -> Iterator[str]:
        """The mark of each request, episodes first."""
        yield from (episode_mark(key, one) for one in self.episodes)
        yield from (tag_mark(key, name, value) for name, value in self.tags)


def read_requests(lines: Iterable[str], where: str) -> Requests:
    """Requests from lines: an episode's id, or a tag as `tag:user=alice`. Raises ValueError."""
    episodes, tags = list[str](), list[tuple[str, str]]()
    for at, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if text.startswith("tag:"):
            tags.append(parse_tag(text.removeprefix("tag:"), f"{where}, line {at}"))
        elif text.strip():
            episodes.append(text)
    return Requests(tuple(episodes), tuple(tags))


def parse_tag(text: str, where: str) -> tuple[str, str]:
    """`user=alice` as a pair. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{where}: expected key=value, got {text!r:.80}")
    return name, value


@dataclass(frozen=True)
class Erasure:
    """A plan to erase, its size, and the versions that were trained on what it erases."""

    plan: MaintenancePlan
    rows: int
    episodes: int
    trained: dict[str, list[int]] = field(default_factory=dict)  # policy -> versions
    unmatched: frozenset[str] = frozenset()  # marks that no shard has


def plan_erasure(
    root: Root,
    account: JournalAccount | None,
    marks: Iterable[str],
    key: bytes,
    *,
    where: str | None = None,
    all_rows: bool = False,
    with_damaged: bool = False,
    on_progress: OnProgress = no_progress,
) -> Erasure:
    """Plan to erase the episodes with these tombstones from all shards.

    The plan names ordinals and tombstones only; it has one for each episode. `all_rows`: that may
    be all of them. `with_damaged`: also all shards that cannot be read and do not count. Raises
    ValueError, also for shards that cannot be searched.
    """
    marks = {*marks}
    known = Tombstones(key, marks)
    journal = None
    if account is not None:
        shards = frozenset((record.stream, record.name) for record in account.records)
        journal = Recorded(account.next_ordinals, shards)
    found = StoredEpisodes.of(
        root,
        journal,
        is_meant=known.hide,
        is_tagged=known.hide_tags,
        also_aside=True,
        on_progress=on_progress,
    )
    unread = found.damaged if with_damaged else found.damaged | found.damaged_aside
    for place, why in unread.items():
        raise ValueError(
            f"{counted(len(unread), 'shard')} cannot be searched, such as {place}: {why}. Move "
            "damaged shards away with `headrace verify --quarantine`; --with-damaged erases those "
            "in quarantine, and replaced ones"
        )
    chosen = found.named(set() if where is None else ids_where(root, found, where))
    steps = found.steps(chosen)
    rows = sum(step.rows for step in steps)
    elsewhere = 0 if account is None else account.waiting_steps + account.open_steps
    if rows and rows == found.rows and not elsewhere and not all_rows:
        raise ValueError(f"this erases all {rows:,} rows under {root}: expected --yes-all")
    episodes = {episode_mark(key, one) for one in found.ids(root, chosen)}
    plan = MaintenancePlan(
        "erase",
        (*steps, *_discards(found, chosen, account, objects_at(root))),
        tombstones=tuple(sorted({*marks, *episodes})),
    )
    unmatched = frozenset(marks - known.seen)
    return Erasure(plan, rows, len(episodes), trained_on(root, steps), unmatched)


def _discards(
    found: StoredEpisodes, chosen: Numbers, account: JournalAccount | None, root: Objects
) -> Iterator[Discard]:
    """Files that are deleted whole: shards in quarantine, and replaced ones.

    Also those that a shard in quarantine had replaced: its record removes all its ordinals.
    """
    rows = {} if account is None else {(r.stream, r.name): r.rows for r in account.records}
    rows |= {place: made.rows for place, made in Replacements.of(root).made.items()}
    places = {*found.damaged_aside, *(one.place for one in found.aside if one.has(chosen))}
    spans: dict[str, RangeSet] = {}
    for place in places:
        folder, stream, file = place.split("/")
        if folder == QUARANTINE and (known := ShardName.parse(file)):
            spans.setdefault(stream, RangeSet()).add_range(known.first, known.last)
    for one in found.aside:
        if spans.get(one.stream, RangeSet()).intersection(RangeSet.of_array(one.ordinals)):
            places.add(one.place)
    for place in sorted(places):
        folder, stream, file = place.split("/")
        name = file.removesuffix(REPLACED)
        yield Discard(
            stream, name, place, rows.get((stream, name), 0) if folder == QUARANTINE else 0
        )


def applied_erasures(root: Root) -> Iterator[MaintenancePlan]:
    """The plans of erasures that have removed rows. Raises as `load` and `Replacements.of` do."""
    objects = objects_at(root)
    shards = objects.under("shards")
    removals = Replacements.of(objects).removed(
        lambda stream, name: shards.status(f"{stream}/{name}") is not None
    )
    for digest in sorted({record.plan for record, _ in removals if record.command == "erase"}):
        yield load(root, digest, "erase")


def trained_on(root: Root, steps: Iterable[Remove]) -> dict[str, list[int]]:
    """Policy -> the versions that were trained on parts that a plan removes."""
    gone: dict[str, RangeSet] = {}
    for step in steps:
        gone.setdefault(step.stream, RangeSet()).update(step.ordinals)
    objects, found = objects_at(root), dict[str, list[int]]()
    unreadable = StorageError, ValueError, OSError  # `verify` reports it
    for place in objects.names("weights/"):
        policy = place.rstrip("/").rpartition("/")[2]
        with contextlib.suppress(*unreadable):
            store = WeightFolder(objects, policy)
            for version in store.versions():
                with contextlib.suppress(*unreadable):
                    known = store.lineage(version)
                    if any(known.get(name, RangeSet()).intersection(gone[name]) for name in gone):
                        found.setdefault(policy, []).append(version)
    return found
