"""Compaction: each row once, before, during and after it, whoever reads and whatever is killed.

Also of `storage.maintenance.merging`, `storage.maintenance.plans` and
`storage.shards.replacements`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import NewerFormat
from storage.experience.episode import Part
from storage.journal.copying import Recorded
from storage.maintenance import merging, plans
from storage.maintenance.compaction import plan_compaction
from storage.maintenance.plans import Applied, Merge, apply, load, save
from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects
from storage.objects.memory import MemoryObjects
from storage.reading.listing import ShardFile
from storage.reading.position import Position
from storage.reading.shard_reader import ShardReader
from storage.reading.sources import DirectorySource
from storage.shards.digests import digest_of
from storage.shards.names import ShardName, ShardWriteError
from storage.shards.replacements import replaced_shards
from storage.shards.shard import ShardWriter, read_shard
from storage.spaces.descriptors import canonical_json
from storage.verify.audit import Trained, VerifyReport, verify
from storage.verify.inventory import list_streams
from tests.storage.reading.test_shard_reader import (
    ACTION,
    OBS,
    ids,
    part,
    read_all,
    rows_of,
    stream_of,
)

DAY = 86_400.0
SMALL = 20


def small_shards(root: Objects | Path, count: int = SMALL, steps: int = 3) -> list[Part]:
    """One part each; every other episode has a final observation."""
    parts = [part(n, steps, final=n % 2 == 0, ended="truncated") for n in range(count)]
    write_each(root, [[one] for one in parts])
    return parts


def write_each(root: Objects | Path, shards: list[list[Part]]) -> None:
    where = root / "shards" if isinstance(root, Path) else root.under("shards")
    writer = ShardWriter(where, fsync=lambda descriptor: None)
    for parts in shards:
        writer.write(stream_of(), canonical_json(OBS, ACTION), parts)


def compact(root: Any, now: float = 1e9, **options: Any) -> Applied:
    plan = plan_compaction(root, None, now=now, **options)
    return apply(root, plan, by="me", why="small", clock=lambda: now)


def shard_files(root: Path) -> list[Path]:
    return sorted((root / "shards").glob("*/*.parquet"))


def verified(root: Objects | Path) -> VerifyReport:
    return verify(root, None, Trained.of(root))


@pytest.mark.parametrize("mode", ["transitions", "fragments", "episodes"])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_saved_reader_goes_on_exactly_once(tmp_path: Path, mode: Any, forgotten: bool) -> None:
    """A reader that has delivered half of the small shards, and holds rows of others in its window
    and its joiner, delivers the other rows from the compacted shard."""
    parts = small_shards(tmp_path)
    options: dict[str, Any] = {"batch_size": 7, "shuffle": 16, "seed": 3, "mode": mode}
    options["columns"] = ["obs", "new_obs", "ordinal", "t", "stream"]
    with ShardReader(tmp_path, **options) as reader:
        first = [row for _ in range(4) for row in ids(reader.next())]
        state = reader.state_dict()
    assert compact(tmp_path).made
    if forgotten:
        compact(tmp_path, now=1e9 + 2 * DAY)
        assert not replaced_shards(tmp_path)
    again = ShardReader(tmp_path, **options)
    again.load_state_dict(state)
    rest = read_all(again)
    assert sorted([*first, *rest]) == sorted(rows_of(parts))
    assert again.stats.lost == 0


def test_the_compacted_shard_has_the_same_rows(tmp_path: Path) -> None:
    """One shard with every column of the small ones, sorted by ordinal; `ls` and `verify` agree."""
    small_shards(tmp_path)
    before = pa.concat_tables(read_shard(path) for path in shard_files(tmp_path))
    names = tuple(path.name for path in shard_files(tmp_path))
    (made,) = compact(tmp_path).made
    assert (made.old, made.rows, made.ordinals) == (names, before.num_rows, ((0, SMALL - 1),))
    (only,) = shard_files(tmp_path)
    assert read_shard(only, verify="digest").equals(before)
    report = verified(tmp_path)
    assert (report.findings, report.earlier + report.in_shards) == ((), before.num_rows)
    assert any("wait for the end of the grace period" in note for note in report.notes)
    (stream,) = list_streams(tmp_path, {}).streams
    assert (stream.shards, stream.parts, stream.rows) == (1, SMALL, before.num_rows)
    assert (stream.first_ts, stream.unreadable) == (before["ts"].to_numpy().min(), 0)
    assert compact(tmp_path) == Applied()  # nothing is left to do


def test_large_shards_are_written_by_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row groups have about the wanted size, and a shard what readers may decode."""
    small_shards(tmp_path, count=32, steps=40)
    monkeypatch.setattr(merging, "ROW_GROUP_BYTES", 20_000)
    monkeypatch.setattr(merging, "MOST_DECODED", 150_000)
    before = pa.concat_tables(read_shard(path) for path in shard_files(tmp_path))
    compact(tmp_path)
    files = shard_files(tmp_path)
    assert 2 <= len(files) < 15
    assert all(2 <= pq.ParquetFile(path).num_row_groups <= 16 for path in files)
    assert pa.concat_tables(read_shard(path) for path in files).equals(before)
    assert verified(tmp_path).ok


class Killed(BaseException):
    """The process ends here."""


class Mortal(Objects):
    """Its process ends before or after the n-th change, as after SIGKILL."""

    left = 10**9

    @classmethod
    def live(cls, changes: int) -> None:
        Mortal.left = changes

    @classmethod
    def count(cls) -> None:
        Mortal.left -= 1
        if Mortal.left < 0:
            raise Killed

    def replace(self, name: str, content: Any, *, durable: bool = True) -> None:
        self.count()
        super().replace(name, content, durable=durable)
        self.count()

    def delete(self, name: str) -> None:
        self.count()
        super().delete(name)
        self.count()


class MortalFolder(Mortal, FolderObjects):
    """Files, whose renames are changes too."""


class MortalMemory(Mortal, MemoryObjects):
    """Objects that are no files."""


@pytest.mark.parametrize("kind", ["folder", pytest.param("memory", marks=pytest.mark.long)])
def test_an_application_that_is_killed_at_any_step_is_finished_by_the_next(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every kill each row is read once and `verify` finds nothing; the same plan finishes."""
    monkeypatch.setattr(merging, "MOST_DECODED", 9_000)  # several shards
    rename = os.rename

    def renamed(before: Any, after: Any) -> None:
        Mortal.count()
        rename(before, after)

    for steps in itertools.count():
        root = MortalMemory() if kind == "memory" else MortalFolder(tmp_path / str(steps))
        parts = small_shards(root, count=7)
        plan = load(root, save(root, plan_compaction(root, None, now=1e9)), "compact")
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(plans.os, "rename", renamed)
            Mortal.live(steps)
            apply(root, plan, by="me", why="", clock=lambda: 1e9)
            break
        Mortal.live(10**9)
        check_each_row_once(root, parts)
        apply(root, plan, by="me", why="", clock=lambda: 1e9)
        check_each_row_once(root, parts)
        assert len(replaced_shards(root)) >= 6
        assert apply(root, plan, by="me", why="") == Applied()
        compact(root, now=1e9 + 2 * DAY)
        check_each_row_once(root, parts)
    Mortal.live(10**9)
    assert steps > 12


def check_each_row_once(root: Any, parts: list[Part]) -> None:
    assert sorted(read_all(reader_of(root))) == sorted(rows_of(parts))
    report = verified(root)
    assert report.findings == ()
    assert sum(stream.rows for stream in report.streams) == len(rows_of(parts))


def reader_of(root: Any) -> ShardReader:
    return ShardReader(root, batch_size=50, columns=["ordinal", "t", "stream"])


def test_a_replaced_shard_can_be_read_until_its_grace_period_is_over(tmp_path: Path) -> None:
    """A reader that listed the shards before they were replaced reads them, for a day."""
    parts = small_shards(tmp_path)
    with DirectorySource(tmp_path) as source:
        listed = source.scan()
        compact(tmp_path)
        compact(tmp_path, now=1e9 + DAY - 1)
        assert [ShardName.parse(s.name) for s in listed if source.read(s)] == [
            ShardName.parse(s.name) for s in listed
        ]
        assert source.open(listed[3]).whole() == source.read(listed[3])
        compact(tmp_path, now=1e9 + DAY + 1)
        with pytest.raises(FileNotFoundError, match=listed[0].name):
            source.read(listed[0])
    check_each_row_once(tmp_path, parts)


class LateSource(DirectorySource):
    """Everything happens between the listing and the first read."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def read(self, shard: ShardFile) -> bytes:
        self.then, then = lambda: None, self.then
        then()
        return super().read(shard)


def test_a_position_is_restored_from_shards_that_were_replaced_meanwhile(tmp_path: Path) -> None:
    """The rows that a reader held are found although its listing has only the small shards."""
    parts = small_shards(tmp_path)
    options: dict[str, Any] = {"batch_size": 7, "shuffle": 16, "seed": 3}
    with ShardReader(tmp_path, **options) as reader:
        first = reader.next().count
        state = reader.state_dict()
    source = LateSource(tmp_path)

    def happens() -> None:
        compact(tmp_path)
        compact(tmp_path, now=1e9 + 3600)

    source.then = happens
    with ShardReader(source=source, state=state, **options) as again:
        rest = sum(batch.count for batch in again)
    assert (first + rest, again.stats.lost) == (len(rows_of(parts)), 0)


def test_a_saved_reader_keeps_the_shards_that_it_holds_rows_of(tmp_path: Path) -> None:
    """A position under `readers/` that names rows of a replaced shard keeps it, also beside a plan
    that was made before it was saved."""
    small_shards(tmp_path)
    compact(tmp_path)
    late = plan_compaction(tmp_path, None, now=1e9 + 2 * DAY)
    with ShardReader(tmp_path, batch_size=29, shuffle=9) as reader:
        reader.next()
        position = reader.save("trainer")
        held = len(Position.from_json(reader.state_dict()).pending())
    applied = apply(tmp_path, late, by="", why="")
    assert 0 < applied.deleted < SMALL
    assert [*applied.left] == replaced_shards(tmp_path)
    assert len(replaced_shards(tmp_path)) == held
    assert not compact(tmp_path, now=1e9 + 9 * DAY).deleted
    position.write_text("{")  # nobody knows what it holds
    assert "readers/" in next(iter(compact(tmp_path, now=1e9 + 9 * DAY).left.values()))
    assert len(replaced_shards(tmp_path)) == held
    position.unlink()
    compact(tmp_path, now=1e9 + 9 * DAY)
    assert replaced_shards(tmp_path) == []


def test_a_replaced_shard_is_kept_unless_another_has_its_rows(tmp_path: Path) -> None:
    """If the new shard is lost, the old ones stay, and become shards again without their suffix."""
    parts = small_shards(tmp_path)
    compact(tmp_path)
    (only,) = shard_files(tmp_path)
    only.unlink()
    applied = compact(tmp_path, now=1e9 + 2 * DAY)
    assert (applied.deleted, set(applied.left.values())) == (0, {"no shard has its rows"})
    for name in replaced_shards(tmp_path):
        path = tmp_path / "shards" / name
        path.rename(path.with_suffix(""))
    check_each_row_once(tmp_path, parts)


def test_a_damaged_shard_is_left_as_it_is(tmp_path: Path) -> None:
    """Damage never gets into a new shard: neither changed bytes nor rows that no reader takes."""
    small_shards(tmp_path)
    files = shard_files(tmp_path)
    flipped = bytearray(files[4].read_bytes())
    flipped[20] ^= 1
    files[4].write_bytes(flipped)
    table = read_shard(files[12])
    doubled = table.set_column(table.column_names.index("t"), "t", pa.array([0, 0, 1]))
    pq.write_table(doubled.cast(table.schema), files[12])
    digest = digest_of(files[12].read_bytes())[:16]
    files[12] = files[12].rename(files[12].with_name(f"{files[12].name[:26]}{digest}.parquet"))
    applied = compact(tmp_path)
    assert sorted(Path(place).name for place in applied.left) == [files[4].name, files[12].name]
    assert [made.ordinals for made in applied.made] == [((0, 3),), ((5, 11),), ((13, 19),)]
    assert [Path(one.where).name for one in verified(tmp_path).findings if one.kind != "hole"] == [
        files[4].name,
        files[12].name,
    ]


def test_a_stale_or_unknown_plan_changes_nothing(tmp_path: Path) -> None:
    """A shard that is gone, not replaced, makes a plan stale; a digest has to be a plan's."""
    small_shards(tmp_path)
    plan = plan_compaction(tmp_path, None)
    digest = save(tmp_path, plan)
    assert load(tmp_path, digest, "compact") == plan
    shard_files(tmp_path)[7].unlink()
    with pytest.raises(match=r"is stale: .*is gone"):
        apply(tmp_path, plan, by="", why="")
    assert len(shard_files(tmp_path)) == SMALL - 1
    for unknown in ("", "0" * 16, "../../../etc/pass"):
        with pytest.raises(match="expected"):
            load(tmp_path, unknown, "compact")


def test_records_of_a_later_release_are_refused(tmp_path: Path) -> None:
    """Nothing is planned or applied beside a record that cannot be understood; `verify` names it,
    and one that is no record too."""
    small_shards(tmp_path)
    plan = plan_compaction(tmp_path, None)
    compact(tmp_path)
    (record,) = (tmp_path / "maintenance").glob("*/*/*.json")
    later = record.read_bytes().replace(b'"format":1', b'"format":2')
    for content, expected in ((later, NewerFormat), (b"[]", ValueError)):
        record.write_bytes(content)
        for act in (plan_compaction, lambda *_: apply(tmp_path, plan, by="", why="")):
            with pytest.raises(expected, match=record.name):
                act(tmp_path, None)
        (found,) = (one for one in verified(tmp_path).findings if one.where == "maintenance")
        assert record.name in found.text


def test_incomplete_files_of_a_killed_application_are_removed(tmp_path: Path) -> None:
    """Those of a process that lives stay."""
    small_shards(tmp_path)
    folder = tmp_path / "shards" / stream_of()
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, own = (folder / f".{0:012}-{1:012}-{pid}.tmp" for pid in (ended.pid, os.getpid()))
    dead.touch()
    own.touch()
    assert compact(tmp_path).made
    assert (dead.exists(), own.exists()) == (False, True)


def test_another_plan_may_come_first(tmp_path: Path) -> None:
    """A plan whose shards were replaced by another one has nothing left to do, and does nothing."""
    parts = small_shards(tmp_path)
    old = plan_compaction(tmp_path, None, aim_bytes=60_000)
    assert len(old.steps) > 1
    compact(tmp_path)
    assert apply(tmp_path, old, by="", why="") == Applied()
    check_each_row_once(tmp_path, parts)


def test_a_rewrite_that_loses_a_value_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is compared with the old ones before any of them is touched."""
    parts = small_shards(tmp_path)
    write = merging.parquet_writer

    def lossy(path: Any, first: pa.Table) -> Any:
        writer = write(path, first)
        keep = writer.write_table

        def write_table(table: pa.Table, **given: Any) -> None:
            at = table.column_names.index("final_obs")
            nothing = pa.nulls(len(table), table.schema.field(at).type)
            keep(table.set_column(at, table.schema.field(at), nothing), **given)

        writer.write_table = write_table
        return writer

    monkeypatch.setattr(merging, "parquet_writer", lossy)
    with pytest.raises(ShardWriteError, match="expected the rows of the shards that it replaces"):
        compact(tmp_path)
    assert len(shard_files(tmp_path)) == SMALL
    assert not list(tmp_path.rglob("*.tmp"))
    check_each_row_once(tmp_path, parts)


def test_shards_of_different_periods_stay_apart(tmp_path: Path) -> None:
    """The first step's time, in seconds of the client's clock, decides."""
    small_shards(tmp_path)  # an episode begins each second
    made = compact(tmp_path, period_seconds=5.0).made
    assert [one.ordinals for one in made] == [((0, 4),), ((5, 9),), ((10, 14),), ((15, 19),)]


def test_neighbours_are_joined_and_gaps_are_kept(tmp_path: Path) -> None:
    """Where an ordinal is missing, another shard begins: no name claims ordinals it lacks."""
    small_shards(tmp_path)
    shard_files(tmp_path)[9].unlink()
    made = compact(tmp_path).made
    assert [one.ordinals for one in made] == [((0, 8),), ((10, 19),)]
    (hole,) = verified(tmp_path).findings
    assert (hole.kind, "ordinals 9 " in hole.text) == ("hole", True)


def test_a_row_is_rewritten_a_few_times_however_often_it_runs(tmp_path: Path) -> None:
    """A shard goes only into one of twice its size, so the number grows with the logarithm."""
    rewritten = 0
    parts = [part(n, 3) for n in range(64)]
    for first in range(0, 64, 4):
        write_each(tmp_path, [[one] for one in parts[first : first + 4]])
        rewritten += sum(made.rows for made in compact(tmp_path, now=1e9 + first).made)
    assert len(shard_files(tmp_path)) <= 6
    assert rewritten <= 5 * 64 * 3
    check_each_row_once(tmp_path, parts)


def test_only_recorded_shards_of_a_journal_are_joined(tmp_path: Path) -> None:
    """A collector's next start looks for the shard of a plan that it has not recorded."""
    small_shards(tmp_path)
    names = [path.name for path in shard_files(tmp_path)]
    known = Recorded({stream_of(): 12}, frozenset((stream_of(), name) for name in names[:8]))
    (step,) = plan_compaction(tmp_path, known).steps
    assert isinstance(step, Merge)
    assert step.shards == tuple(names[:8])


def test_two_applications_exclude_each_other(tmp_path: Path) -> None:
    """The second one waits for the first, and then finds that nothing is left to do."""
    parts = small_shards(tmp_path)
    plan = plan_compaction(tmp_path, None)
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda n: apply(tmp_path, plan, by=str(n), why=""), range(2))
    assert sorted(len(one.made) for one in both) == [0, 1]
    check_each_row_once(tmp_path, parts)
