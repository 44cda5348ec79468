"""The laws of reading: each row once, in a known order, resumed exactly.

Also of `storage.reading.adapters`, `storage.reading.ledger`, `storage.reading.position`,
`storage.reading.sources` and `storage.reading.batching`.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from storage.errors import NewerFormat
from storage.experience.episode import Part
from storage.experience.interfaces import EndOfInput, MixedSchemas, ReaderError, ReaderState
from storage.experience.sample_batch import SampleBatch
from storage.reading.adapters import to_torch_dataset
from storage.reading.holdout import held_out
from storage.reading.ledger import Ledger
from storage.reading.listing import ShardFile
from storage.reading.shard_reader import ShardReader, read_position
from storage.shards.names import ShardInfo
from storage.shards.shard import ShardWriter
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, Dict, Discrete, Space, Text, canonical_json, schema_id
from tests.storage.reading.memory_source import MemorySource

OBS, ACTION = Box((2,)), Discrete(3)
COLLECTOR = "a" * 12
FROZEN = [0, 1, 5, 20]
"""The first held-out episodes of a stream at 10 %: they must never change."""
LONG = 30.0  # s; a limit that only a broken build reaches
MODES = ("transitions", "fragments", "episodes")


def stream_of(obs: Space = OBS, collector: str = COLLECTOR) -> str:
    return f"{collector}-{schema_id(obs, ACTION)}"


def value(episode: int, t: int) -> list[float]:
    """An observation that names its step."""
    return [float(episode), float(t)]


def part(
    ordinal: int,
    steps: int,
    *,
    episode: int | None = None,
    t0: int = 0,
    ended: Any = "terminated",
    final: bool = False,
    obs: Space = OBS,
    values: Any = value,
    **more: Any,
) -> Part:
    episode = ordinal if episode is None else episode
    codec = Codec(obs)
    encoded = [codec.encode(values(episode, t)) for t in range(t0, t0 + steps + 1)]
    return Part(
        episode_id=f"e{episode}",
        part=0 if t0 == 0 else 1,
        t0=t0,
        steps=steps,
        schema_id=schema_id(obs, ACTION),
        obs=b"".join(encoded[:-1]),
        obs_lengths=b""
        if codec.itemsize is not None
        else np.array([len(e) for e in encoded[:-1]], np.uint32).tobytes(),
        actions=np.full(steps, episode % 3).tobytes(),
        rewards=np.arange(t0, t0 + steps, dtype=np.float64).tobytes(),
        action_logp=np.full(steps, np.nan).tobytes(),
        policy_version=np.full(steps, 7).tobytes(),
        source=bytes(steps),
        pass_prob=np.ones(steps).tobytes(),
        ts=(1_000_000 * episode + np.arange(t0, t0 + steps)).tobytes(),
        received_ts=np.zeros(steps, np.int64).tobytes(),
        final_obs=encoded[-1] if final else None,
        ended=ended,
        ordinal=ordinal,
        episode_ordinal=episode,
        **more,
    )


def write(
    root: Path, parts: list[Part], *, obs: Space = OBS, collector: str = COLLECTOR
) -> ShardInfo:
    writer = ShardWriter(root / "shards", fsync=lambda descriptor: None)
    return writer.write(stream_of(obs, collector), canonical_json(obs, ACTION), parts)


def ids(batch: SampleBatch) -> list[tuple[str, int, int]]:
    return list(
        zip(batch["stream"].tolist(), batch["ordinal"].tolist(), batch["t"].tolist(), strict=True)
    )


def read_all(reader: ShardReader) -> list[tuple[str, int, int]]:
    with reader:
        return [row for batch in reader for row in ids(batch)]


def rows_of(parts: list[Part], stream: str | None = None) -> list[tuple[str, int, int]]:
    name = stream or stream_of()
    return [(name, p.ordinal, t) for p in parts for t in range(p.t0, p.t0 + p.steps)]


# --- layouts ---------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> list[list[Part]]:
    """Shards of parts of interleaved episodes, some of several parts, some never ended."""
    episodes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), max_size=8))
    order = draw(st.permutations([i for i, sizes in enumerate(episodes) for _ in sizes]))
    done: Counter[int] = Counter()
    t0: Counter[int] = Counter()
    first: dict[int, int] = {}
    parts = []
    for ordinal, i in enumerate(order):
        first.setdefault(i, ordinal)
        last = done[i] == len(episodes[i]) - 1
        steps = episodes[i][done[i]]
        ended = draw(st.sampled_from(["terminated", "truncated", None])) if last else None
        final = draw(st.booleans()) if last else True
        parts.append(part(ordinal, steps, episode=first[i], t0=t0[i], ended=ended, final=final))
        done[i] += 1
        t0[i] += steps
    shards, at = [], 0
    while at < len(parts):
        size = draw(st.integers(1, len(parts) - at))
        shards.append(parts[at : at + size])
        at += size
    return shards


class TestEachRowOnce:
    @settings(max_examples=40)
    @given(layouts(), st.sampled_from(MODES), st.integers(1, 7), st.sampled_from([0, 3, 12]))
    def test_every_row_comes_once_with_its_own_values(self, shards, mode, size, shuffle):
        """For any mode, batch size and window, each stored row is read once, with all of its own
        columns."""
        with tempfile.TemporaryDirectory() as folder:
            for parts in shards:
                write(Path(folder), parts)
            options: dict[str, Any] = {"mode": mode, "batch_size": size, "shuffle": shuffle}
            with ShardReader(folder, incomplete=True, **options) as reader:
                batches = list(reader)
        found = Counter(row for batch in batches for row in ids(batch))
        assert found == Counter(row for parts in shards for row in rows_of(parts))
        for batch in batches:
            expected = np.stack([batch["episode_ordinal"], batch["t"]], axis=1)
            assert (batch["obs"] == expected).all()
            assert (batch["rewards"] == batch["t"]).all()
            assert (batch["actions"] == batch["episode_ordinal"] % 3).all()
            assert batch["eps_id"].tolist() == [f"e{e}" for e in batch["episode_ordinal"]]
        if mode != "episodes":
            assert [b.count for b in batches[:-1]] == [size] * (len(batches) - 1)
        assert reader.stats.rows == sum(found.values())

    @settings(max_examples=40)
    @given(layouts(), st.integers(1, 6), st.sampled_from([0, 8]))
    def test_new_obs_is_the_next_obs_or_the_stored_final_one(self, shards, size, shuffle):
        """new_obs[t] = obs[t + 1] within a part, final_obs at its end, else zeros and a mark."""
        finals = {p.ordinal: p for parts in shards for p in parts}
        with tempfile.TemporaryDirectory() as folder:
            for parts in shards:
                write(Path(folder), parts)
            with ShardReader(folder, batch_size=size, shuffle=shuffle) as reader:
                rows = [row for batch in reader for row in batch.rows()]
        for row in rows:
            p = finals[row["ordinal"]]
            known = row["t"] < p.t0 + p.steps - 1 or p.final_obs is not None
            expected = value(p.episode_ordinal, row["t"] + 1) if known else [0.0, 0.0]
            assert row["new_obs"].tolist() == expected
            assert row["has_new_obs"] == (known or row["terminateds"])

    def test_several_streams_are_told_apart(self, tmp_path):
        """Two collectors count the same ordinals; rows of both come, with their stream."""
        parts = [part(0, 2), part(1, 3)]
        write(tmp_path / "a", parts)
        write(tmp_path / "b", parts, collector="b" * 12)
        found = read_all(ShardReader([tmp_path / "a", tmp_path / "b"], batch_size=3))
        assert found == rows_of(parts) + rows_of(parts, stream_of(collector="b" * 12))

    def test_a_merged_file_adds_nothing_twice(self, tmp_path):
        """Compaction briefly leaves new files next to old ones: ordinals decide."""
        parts = [part(i, i + 1) for i in range(6)]
        write(tmp_path, parts[:2])
        write(tmp_path, parts[2:4])
        write(tmp_path, parts)  # holds the four above, and two more
        write(tmp_path, [parts[0], parts[5]])  # a hole from 1 to 4
        reader = ShardReader(tmp_path, batch_size=4)
        assert Counter(read_all(reader)) == Counter(rows_of(parts))
        assert reader.stats.doubles > 0
        assert reader.ledger == {stream_of(): [[0, 5]]}

    def test_compaction_in_the_middle_of_reading_loses_and_doubles_nothing(self, tmp_path):
        """Old files vanish after some were read; from the merged one only the rest is read."""
        parts = [part(i, 3) for i in range(40)]
        old = [write(tmp_path, [p]) for p in parts]
        with ShardReader(tmp_path, batch_size=4, prefetch=1) as reader:
            found = ids(reader.next())
            write(tmp_path, parts)
            for info in old:
                info.path.unlink()
            found += [row for batch in reader for row in ids(batch)]
        assert Counter(found) == Counter(rows_of(parts))

    def test_a_shard_with_holes_leaves_the_holes_unread(self, tmp_path):
        """Erased ordinals stay out of the ledger: nobody read them."""
        parts = [part(0, 1), part(3, 1), part(4, 1)]
        write(tmp_path, parts)
        reader = ShardReader(tmp_path)
        assert read_all(reader) == rows_of(parts)
        assert reader.ledger == {stream_of(): [[0, 0], [3, 4]]}


class TestOrder:
    def test_unshuffled_rows_come_by_stream_ordinal_and_t(self, tmp_path):
        """The order at rest is the order read."""
        parts = [part(i, 1 + i % 4) for i in range(20)]
        for start in (10, 0, 15, 5):
            write(tmp_path, parts[start : start + 5])
        assert read_all(ShardReader(tmp_path, batch_size=3)) == rows_of(parts)

    def test_a_seed_fixes_the_order_and_a_window_mixes_episodes(self, tmp_path):
        """Same seed, same order; another seed, another order; and neighbours are separated."""
        parts = [part(i, 10) for i in range(30)]
        for start in range(0, 30, 5):
            write(tmp_path, parts[start : start + 5])
        orders = [
            read_all(ShardReader(tmp_path, batch_size=7, shuffle=100, seed=seed))
            for seed in (1, 1, 2)
        ]
        assert orders[0] == orders[1] != orders[2]
        neighbours = sum(b == (a[0], a[1], a[2] + 1) for a, b in pairwise(orders[0]))
        assert neighbours < 30
        distance = np.abs(np.array([o for _, o, _ in orders[0]]) - np.arange(300) // 10)
        assert distance.max() > 5

    @settings(max_examples=30)
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 6), st.data())
    def test_shuffled_fragments_stay_together(self, sizes, batch_size, data):
        """In mode fragments the window moves runs of at most batch_size rows, never rows."""
        window = data.draw(st.integers(1, 40))
        parts = [part(i, n) for i, n in enumerate(sizes)]
        with tempfile.TemporaryDirectory() as folder:
            for p in parts:
                write(Path(folder), [p])
            found = read_all(
                ShardReader(folder, mode="fragments", batch_size=batch_size, shuffle=window)
            )
        assert Counter(found) == Counter(rows_of(parts))
        for before, after in pairwise(found):
            follows = after == (before[0], before[1], before[2] + 1)
            assert follows or after[2] % batch_size == 0

    def test_a_run_longer_than_a_batch_is_cut_and_mixed_by_its_fragments(self, tmp_path):
        """One long part is fragments of batch_size rows, which the window moves one by one."""
        write(tmp_path, [part(0, 40)])
        with ShardReader(tmp_path, mode="fragments", batch_size=4, shuffle=40) as reader:
            firsts = [batch["t"].tolist() for batch in reader]
        assert sorted(firsts) == [list(range(t, t + 4)) for t in range(0, 40, 4)]
        assert firsts != sorted(firsts)


class TestPositions:
    @settings(max_examples=60)
    @given(
        layouts(),
        st.sampled_from(MODES),
        st.integers(1, 6),
        st.sampled_from([0, 2, 9, 30]),
        st.lists(st.integers(0, 4), min_size=1, max_size=3),
    )
    def test_a_restored_reader_goes_on_with_the_very_next_row(
        self, shards, mode, size, shuffle, stops
    ):
        """Stop, save as JSON, restore, go on: the sequence of a reader that never stopped."""
        options: dict[str, Any] = {
            "mode": mode,
            "batch_size": size,
            "shuffle": shuffle,
            "seed": 3,
            "incomplete": True,
        }
        with tempfile.TemporaryDirectory() as folder:
            for parts in shards:
                write(Path(folder), parts)
            whole = read_all(ShardReader(folder, **options))
            found, state = [], None
            for stop in stops:
                with ShardReader(folder, state=state, **options) as reader:
                    for _ in range(stop):
                        try:
                            found += ids(reader.next())
                        except EndOfInput:
                            break
                    state = json.loads(json.dumps(reader.state_dict()))
            self.check_ledger(state, found, shards)
            found += read_all(ShardReader(folder, state=state, **options))
        assert found == whole

    @staticmethod
    def check_ledger(state: Any, found: list[Any], shards: list[list[Part]]) -> None:
        """An ordinal is in the ledger exactly when all of its rows have been delivered."""
        delivered = Counter(ordinal for _, ordinal, _ in found)
        whole = {p.ordinal for parts in shards for p in parts if delivered[p.ordinal] == p.steps}
        ranges = state["ledger"].get(stream_of(), [])
        assert {n for first, last in ranges for n in range(first, last + 1)} == whole

    def test_a_position_survives_compaction(self, tmp_path):
        """Pending rows are found by ordinal, in whatever file holds them now."""
        parts = [part(i, 5) for i in range(8)]
        old = [write(tmp_path, [p]) for p in parts]
        with ShardReader(tmp_path, batch_size=3, shuffle=12) as reader:
            found = ids(reader.next()) + ids(reader.next())
            state = reader.state_dict()
        write(tmp_path, parts)
        for info in old:
            info.path.unlink()
        found += read_all(ShardReader(tmp_path, batch_size=3, shuffle=12, state=state))
        assert Counter(found) == Counter(rows_of(parts))

    def test_rows_that_were_erased_meanwhile_are_counted(self, tmp_path):
        """A pending row that no shard has is reported as lost, and reading continues."""
        parts = [part(i, 4) for i in range(3)]
        infos = [write(tmp_path, [p]) for p in parts]
        with ShardReader(tmp_path, batch_size=2) as reader:
            found = ids(reader.next())
            state = reader.state_dict()
        infos[0].path.unlink()
        later = ShardReader(tmp_path, batch_size=2, state=state)
        assert found + read_all(later) == rows_of(parts)[:2] + rows_of(parts[1:])
        assert later.stats.lost == 2

    def test_a_position_taken_right_after_restoring_is_the_same(self, tmp_path):
        """Saving before the first batch changes nothing."""
        write(tmp_path, [part(0, 5)])
        with ShardReader(tmp_path, batch_size=2) as reader:
            reader.next()
            state = reader.state_dict()
        with ShardReader(tmp_path, batch_size=2, state=state) as again:
            assert again.state_dict() == state

    def test_save_writes_a_copy_that_can_be_read_back(self, tmp_path):
        """readers/{name}.json is the position; a name is never a path."""
        write(tmp_path, [part(0, 5), part(1, 5)])
        with ShardReader(tmp_path, batch_size=7) as reader:
            found = ids(reader.next())
            path = reader.save("trainer-1")
            with pytest.raises(ReaderError, match="name: expected letters"):
                reader.save("../trainer")
        assert path == tmp_path / "readers" / "trainer-1.json"
        state = read_position(tmp_path, "trainer-1")
        found += read_all(ShardReader(tmp_path, state=state))
        assert found == rows_of([part(0, 5), part(1, 5)])

    def test_a_position_of_another_kind_is_refused(self, tmp_path):
        """The message gives the expected and the actual value."""
        state = ShardReader(tmp_path).state_dict()
        with pytest.raises(ReaderState, match="mode 'episodes', got 'transitions'"):
            ShardReader(tmp_path, mode="episodes", state=state)
        with pytest.raises(ReaderState, match="expected the keys"):
            ShardReader(tmp_path, state={"version": 1})
        with pytest.raises(NewerFormat, match="version: expected 1, got 9: a later release"):
            ShardReader(tmp_path, state={**state, "version": 9})
        with pytest.raises(ReaderState, match=r"runs\[0\]"):
            ShardReader(tmp_path, state={**state, "cutter": [[0, 0, 0, 1]]})
        with pytest.raises(ReaderState, match="ledger"):
            ShardReader(tmp_path, state={**state, "ledger": {"s": [[3, 1]]}})
        with pytest.raises(ReaderState, match="rng"):
            ShardReader(tmp_path, state={**state, "rng": {"bit_generator": "MT19937"}})


class VanishingSource(MemorySource):
    """Lists a shard that is gone by the time it is read, as compaction makes it happen."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.scans = 0

    def scan(self) -> list[ShardFile]:
        self.scans += 1
        return super().scan()

    def read(self, shard: ShardFile) -> bytes:
        if self.times:
            self.times -= 1
            raise FileNotFoundError(shard.place)
        return super().read(shard)


class FlakySource(MemorySource):
    """The first read of each shard brings a flipped byte."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[ShardFile] = set()

    def read(self, shard: ShardFile) -> bytes:
        content = super().read(shard)
        if shard in self.seen:
            return content
        self.seen.add(shard)
        return flipped(content, len(content) // 2)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def put(source: MemorySource, folder: Path, parts: list[Part]) -> ShardFile:
    info = write(folder, parts)
    return source.put(info.stream, info.path.name, info.path.read_bytes())


class TestBadFiles:
    @pytest.mark.parametrize("where", [0, 0.5, -1])
    def test_a_damaged_file_is_skipped_named_and_counted(self, tmp_path, where):
        """A shard with one flipped bit anywhere is not read; the other shards are."""
        parts = [part(i, 4) for i in range(3)]
        infos = [write(tmp_path, [p]) for p in parts]
        content = infos[1].path.read_bytes()
        at = int(where * len(content)) if where >= 0 else len(content) - 1
        infos[1].path.write_bytes(flipped(content, at))
        reader = ShardReader(tmp_path)
        assert read_all(reader) == rows_of([parts[0], parts[2]])
        assert list(reader.stats.excluded_shards) == [str(infos[1].path)]
        assert "expected digest" in reader.stats.excluded_shards[str(infos[1].path)]
        assert reader.ledger == {stream_of(): [[0, 0], [2, 2]]}

    def test_a_file_that_is_whole_at_the_second_try_is_read(self, tmp_path):
        """A bad read is tried again before anything is given up."""
        source = FlakySource()
        parts = [part(0, 2), part(1, 2)]
        for p in parts:
            put(source, tmp_path, [p])
        reader = ShardReader(source=source)
        assert read_all(reader) == rows_of(parts)
        assert reader.stats.excluded_shards == {}

    def test_a_foreign_file_under_a_right_name_is_skipped(self, tmp_path):
        """The digest fits, but it is no shard, or one of another stream."""
        info = write(tmp_path / "other", [part(0, 2)], collector="b" * 12)
        folder = tmp_path / "root" / "shards" / stream_of()
        folder.mkdir(parents=True)
        (folder / info.path.name).write_bytes(info.path.read_bytes())
        reader = ShardReader(tmp_path / "root")
        assert read_all(reader) == []
        assert "the footer says" in next(iter(reader.stats.excluded_shards.values()))

    def test_a_vanished_file_means_another_scan(self, tmp_path):
        """A file that is gone at reading is looked for again, under any name."""
        source = VanishingSource(times=1)
        put(source, tmp_path, [part(0, 2)])
        assert read_all(ShardReader(source=source)) == rows_of([part(0, 2)])
        assert source.scans == 2

    def test_a_name_without_a_file_ends_as_a_bad_file(self, tmp_path):
        """A broken link in the folder cannot keep a reader scanning for ever."""
        folder = tmp_path / "shards" / stream_of()
        folder.mkdir(parents=True)
        (folder / f"{0:012}-{0:012}-{'0' * 16}.parquet").symlink_to(tmp_path / "nowhere")
        reader = ShardReader(tmp_path)
        assert read_all(reader) == []
        assert len(reader.stats.excluded_shards) == 1


class TestFollow:
    def test_shards_that_appear_later_are_read(self, tmp_path):
        """A following reader waits; an empty batch means that nothing arrived in time."""
        with ShardReader(tmp_path, batch_size=3, follow=True, poll_interval=0.05) as reader:
            assert reader.next(timeout=0.01).count == 0
            write(tmp_path, [part(0, 2)])
            assert reader.next(timeout=0.3).count == 0  # two rows are not a batch of three
            write(tmp_path, [part(1, 1)])
            assert ids(reader.next(timeout=LONG)) == rows_of([part(0, 2), part(1, 1)])
            empty = reader.next(timeout=0.01)
            assert (empty.count, empty["obs"].shape) == (0, (0, 2))

    def test_an_event_brings_a_shard_without_waiting_for_the_poll(self, tmp_path):
        """The directory is watched: a poll interval of minutes does not delay a batch."""
        write(tmp_path, [part(0, 1)])
        with ShardReader(tmp_path, batch_size=1, follow=True, poll_interval=600.0) as reader:
            assert ids(reader.next(timeout=LONG)) == rows_of([part(0, 1)])
            write(tmp_path, [part(1, 1)])
            assert ids(reader.next(timeout=LONG)) == rows_of([part(1, 1)])

    def test_a_closed_reader_says_so(self, tmp_path):
        """Closing twice is fine, reading on is an error; nothing hangs."""
        reader = ShardReader(tmp_path, follow=True, poll_interval=600.0)
        reader.next(timeout=0.01)
        reader.close()
        reader.close()
        with pytest.raises(ReaderError, match="closed"):
            reader.next()


class TestChoosing:
    def write_some(self, root: Path) -> list[Part]:
        parts = [
            part(0, 2, training_enabled=False),
            part(1, 3, policy_id="other"),
            part(2, 4, tags='{"tenant":"a","user":"u"}'),
            part(3, 5, tags='{"tenant":"b"}'),
        ]
        write(root, parts)
        return parts

    @pytest.mark.parametrize(
        ("options", "kept", "excluded"),
        [
            ({}, [1, 2, 3], {"training_disabled": 2}),
            ({"training_disabled": True}, [0, 1, 2, 3], {}),
            ({"policy_id": "other"}, [1], {"training_disabled": 2, "other_policy": 9}),
            ({"tags": {"tenant": "a"}}, [2], {"training_disabled": 2, "tags": 8}),
            ({"since": 2_000_000}, [2, 3], {"training_disabled": 2, "time": 3}),
            ({"until": 2_000_000}, [1], {"training_disabled": 2, "time": 9}),
            ({"policy_id": "nobody"}, [], {"training_disabled": 2, "other_policy": 12}),
        ],
    )
    def test_filters_choose_parts_and_count_the_rest(self, tmp_path, options, kept, excluded):
        """Rows left out count as read, and are counted by reason."""
        parts = self.write_some(tmp_path)
        reader = ShardReader(tmp_path, **options)
        assert read_all(reader) == rows_of([parts[i] for i in kept])
        assert reader.stats.excluded == excluded
        assert reader.ledger == {stream_of(): [[0, 3]]}

    def test_a_manifest_names_all_that_is_read(self, tmp_path):
        """Ordinals outside stay unread, not excluded; files outside are not even opened."""
        parts = self.write_some(tmp_path)
        outside = write(tmp_path, [part(9, 1)])
        outside.path.write_bytes(b"damaged")
        reader = ShardReader(tmp_path, ordinals={stream_of(): [(1, 2)]})
        assert read_all(reader) == rows_of(parts[1:3])
        assert reader.ledger == {stream_of(): [[1, 2]]}
        assert reader.stats.excluded_shards == {}

    def test_select_gives_a_mask_over_rows(self, tmp_path):
        """A callable sees public columns; new_obs was derived before rows were left out."""
        write(tmp_path, [part(0, 6)])
        reader = ShardReader(tmp_path, select=lambda batch: batch["t"] % 2 == 0)
        with reader:
            batch = reader.next()
        assert batch["t"].tolist() == [0, 2, 4]
        assert batch["new_obs"][:, 1].tolist() == [1.0, 3.0, 5.0]
        assert reader.stats.excluded == {"select": 3}
        with (
            ShardReader(tmp_path, select=lambda batch: [1]) as wrong,
            pytest.raises(ReaderError, match=r"select: expected bool of shape \(6,\)"),
        ):
            wrong.next()

    def test_columns_choose_what_a_batch_holds(self, tmp_path):
        """The columns that identify a row are always included."""
        write(tmp_path, [part(0, 2, infos={1: '{"a":1}'})])
        with ShardReader(tmp_path, columns=["rewards", "infos"]) as reader:
            batch = reader.next()
        identity = {"stream", "ordinal", "episode_ordinal", "t"}
        assert set(batch) == {"rewards", "infos", *identity}
        assert batch["infos"].tolist() == [None, '{"a":1}']
        with (
            ShardReader(tmp_path, columns=["reward"]) as wrong,
            pytest.raises(ReaderError, match=r"expected columns of .*rewards.*, got \['reward'\]"),
        ):
            wrong.next()


class TestSchemas:
    OTHER = Box((3,))

    def write_two(self, root: Path) -> None:
        write(root, [part(0, 2)])
        odd = part(0, 3, obs=self.OTHER, values=lambda e, t: [e, t, 0], policy_id="other")
        write(root, [odd], obs=self.OTHER)

    def test_two_schemas_are_refused_and_listed(self, tmp_path):
        """One reader, one schema: the message names both and how to choose; it stays refused."""
        self.write_two(tmp_path)
        with ShardReader(tmp_path) as reader:
            for _ in range(2):
                with pytest.raises(
                    MixedSchemas, match=r"found 2 .* pass schema_id=.*, or "
                ) as caught:
                    reader.next()
                assert stream_of() in str(caught.value)
                assert stream_of(self.OTHER) in str(caught.value)

    @pytest.mark.parametrize(
        "options", [{"schema_id": schema_id(Box((3,)), ACTION)}, {"policy_id": "other"}]
    )
    def test_a_schema_or_a_policy_chooses(self, tmp_path, options):
        """Rows of the other schema are not returned, but its spaces are known."""
        self.write_two(tmp_path)
        with ShardReader(tmp_path, **options) as reader:
            batch = reader.next()
            assert batch["obs"].shape == (3, 3)
            assert reader.spaces == (self.OTHER, ACTION)

    def test_a_policy_that_changed_its_spaces_has_to_be_told_apart(self, tmp_path):
        """Two schemas under one policy id: schema_id decides."""
        write(tmp_path, [part(0, 2)])
        odd = part(0, 3, obs=self.OTHER, values=lambda e, t: [e, t, 0])
        write(tmp_path, [odd], obs=self.OTHER)
        with (
            ShardReader(tmp_path, policy_id="default") as reader,
            pytest.raises(MixedSchemas, match="pass schema_id="),
        ):
            reader.next()

    def test_leaves_of_nested_spaces_are_columns_of_their_own(self, tmp_path):
        """Dict and Text: obs.<path> and new_obs.<path>; an absent string is empty."""
        space = Dict((("image", Box((2, 2), np.dtype("uint8"))), ("word", Text(9))))

        def seen(episode: int, t: int) -> Any:
            return {"image": np.full((2, 2), t, np.uint8), "word": f"w{t}"}

        first = part(0, 2, obs=space, values=seen, ended="truncated")
        write(tmp_path, [first, part(1, 1, obs=space, values=seen, final=True)], obs=space)
        with ShardReader(tmp_path) as reader:
            batch = reader.next()
        assert batch["obs.word"].tolist() == ["w0", "w1", "w0"]
        assert batch["new_obs.word"].tolist() == ["w1", "", "w1"]
        assert batch["new_obs.image"][:, 0, 0].tolist() == [1, 0, 1]
        assert batch["obs.image"].dtype == np.uint8
        assert batch["has_new_obs"].tolist() == [True, False, True]

    def test_dist_inputs_of_two_widths_are_padded_with_nan(self, tmp_path):
        """Shards of policies with other distributions come in one batch; unknown is NaN."""
        wide = np.arange(4, dtype=np.float32).tobytes()
        lengths = np.array([8, 8], np.uint32).tobytes()
        write(tmp_path, [part(0, 2, dist_inputs=wide, dist_lengths=lengths)])
        write(tmp_path, [part(1, 1)])
        with ShardReader(tmp_path, columns=["action_dist_inputs"]) as reader:
            found = reader.next()["action_dist_inputs"]
        np.testing.assert_array_equal(found, [[0, 1], [2, 3], [np.nan, np.nan]])


class TestEpisodes:
    def test_parts_are_joined_across_shards_and_t_runs_on(self, tmp_path):
        """An episode waits for its parts; complete ones are returned in one piece."""
        long = [
            part(0, 3, ended=None, final=True, tags='{"k":"v"}'),
            part(2, 2, episode=0, t0=3, ended=None, final=True, tags='{"k":"v"}'),
            part(4, 1, episode=0, t0=5, ended="truncated", final=True, tags='{"k":"v"}'),
        ]
        short = [part(1, 2), part(3, 1, ended="abandoned")]
        write(tmp_path, [long[0], short[0]])
        write(tmp_path, [long[1], short[1]])
        write(tmp_path, [long[2]])
        with ShardReader(tmp_path, mode="episodes") as reader:
            found = {e.episode_id: e for e in reader.episodes()}
        assert list(found) == ["e1", "e3", "e0"]
        joined = found["e0"]
        assert joined.columns["t"].tolist() == list(range(6))
        assert joined.columns["new_obs"][:, 1].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert (joined.complete, joined.ended, joined.truncated) == (True, "truncated", True)
        assert joined.final_obs is not None
        assert joined.final_obs[""].tolist() == value(0, 6)
        assert joined.tags == {"k": "v"}
        assert (joined.stream, joined.episode_ordinal) == (stream_of(), 0)
        assert found["e1"].final_obs is None

    def test_an_episode_waits_for_a_part_in_its_middle(self, tmp_path):
        """First and last part alone are not an episode, whatever order the ordinals have."""
        write(tmp_path, [part(0, 3, ended=None, final=True), part(1, 1, episode=0, t0=5)])
        with ShardReader(tmp_path, mode="episodes") as reader:
            assert list(reader.episodes()) == []
        write(tmp_path, [part(2, 2, episode=0, t0=3, ended=None, final=True)])
        with ShardReader(tmp_path, mode="episodes") as reader:
            (whole,) = reader.episodes()
        assert whole.columns["t"].tolist() == list(range(6))

    def test_incomplete_episodes_are_counted_and_come_when_asked(self, tmp_path):
        """By default incomplete episodes wait in the position; `incomplete=True` returns and marks
        them."""
        parts = [part(0, 2, ended=None, final=True), part(1, 1)]
        write(tmp_path, parts)
        with ShardReader(tmp_path, mode="episodes") as reader:
            assert [e.episode_id for e in reader.episodes()] == ["e1"]
            assert reader.stats.incomplete == 1
            state = reader.state_dict()
        assert state["ledger"] == {stream_of(): [[1, 1]]}
        with ShardReader(tmp_path, mode="episodes", incomplete=True) as reader:
            assert [(e.episode_id, e.complete) for e in reader.episodes()] == [
                ("e1", True),
                ("e0", False),
            ]
        write(tmp_path, [part(2, 1, episode=0, t0=2)])
        with ShardReader(tmp_path, mode="episodes", state=state) as reader:
            (late,) = reader.episodes()
        assert late.columns["t"].tolist() == [0, 1, 2]
        assert late.complete

    def test_stopping_between_two_episodes_is_exact(self, tmp_path):
        """episodes() takes one at a time: what was not yielded is still in the position."""
        write(tmp_path, [part(i, 2) for i in range(4)])
        with ShardReader(tmp_path, mode="episodes") as reader:
            first = next(reader.episodes())
            state = reader.state_dict()
        with ShardReader(tmp_path, mode="episodes", state=state) as reader:
            rest = [e.episode_id for e in reader.episodes()]
        assert [first.episode_id, *rest] == ["e0", "e1", "e2", "e3"]
        with (
            ShardReader(tmp_path) as reader,
            pytest.raises(ReaderError, match="mode 'episodes'"),
        ):
            next(reader.episodes())

    def test_agents_of_one_episode_are_joined_apart(self, tmp_path):
        """Each agent of an episode is a run of its own."""
        both = [part(0, 2, agent_id="x"), replace(part(0, 3, agent_id="y"), rewards=bytes(24))]
        write(tmp_path, both)
        with ShardReader(tmp_path, mode="episodes") as reader:
            found = [(e.agent_id, len(e)) for e in reader.episodes()]
        assert found == [("x", 2), ("y", 3)]


class TestAround:
    def test_bad_arguments_are_refused_at_once(self, tmp_path):
        """The message names the argument, what was expected and what came."""
        for options, words in (
            ({"mode": "rows"}, "mode: expected one of transitions, fragments, episodes"),
            ({"batch_size": 0}, "batch_size: expected 1 or more, got 0"),
            ({"shuffle": -1}, "shuffle: expected 0 or more, got -1"),
        ):
            with pytest.raises(ReaderError, match=words):
                ShardReader(tmp_path, **options)  # type: ignore[arg-type]
        with pytest.raises(ReaderError, match="either roots or a source"):
            ShardReader()

    def test_an_empty_root_ends_at_once(self, tmp_path):
        """An empty input ends at once, at every call."""
        with ShardReader(tmp_path) as reader:
            for _ in range(2):
                with pytest.raises(EndOfInput):
                    reader.next()

    def test_the_held_out_split_is_frozen_uniform_and_nested(self, tmp_path):
        """An episode's id alone decides whether it is held out: the same for rows and episodes, and
        at any time."""
        ids = np.array([f"e{i}" for i in range(20_000)], object)
        batch = SampleBatch(eps_id=ids)
        small, large = held_out(batch, 0.1), held_out(batch, 0.3)
        assert abs(large.mean() - 0.3) < 0.02
        assert not (small & ~large).any()
        assert held_out(batch, 1.0).all()
        assert not held_out(batch, 0.0).any()
        assert np.flatnonzero(small)[:4].tolist() == FROZEN
        write(tmp_path, [part(i, 1) for i in range(40)])
        with ShardReader(tmp_path, mode="episodes") as reader:
            found = [held_out(e, 0.3) for e in reader.episodes()]
        assert found == large[:40].tolist()
        with pytest.raises(ValueError, match="fraction"):
            held_out(batch, 1.5)

    def test_a_reader_feeds_a_torch_loader(self, tmp_path):
        """Batches come as tensors, in order."""
        write(tmp_path, [part(0, 5)])
        with ShardReader(tmp_path, batch_size=2) as reader:
            loader = torch.utils.data.DataLoader(to_torch_dataset(reader), batch_size=None)
            found = [batch["t"].tolist() for batch in loader]
        assert found == [[0, 1], [2, 3], [4]]


# --- the ledger ------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=6), st.data())
def test_a_ledger_has_the_ordinals_that_were_added_and_no_others(
    added: list[list[int]], data: st.DataObject
) -> None:
    """Compared with a set, for each number up to the largest: a gap of a single ordinal stays."""
    ledger, known = Ledger(), set[int]()
    for ordinals in added:
        ledger.add("s", np.array(ordinals, np.int64))
        known |= set(ordinals)
    every = np.arange(33)
    other = data.draw(st.sets(st.integers(0, 30)))
    minus = Ledger()
    minus.add("s", np.array(sorted(other), np.int64))
    for found, expected in (
        (ledger, known),
        (Ledger.from_json(json.loads(json.dumps(ledger.to_json()))), known),
        (ledger.without(minus), known - other),
        (ledger.union(minus), known | other),
    ):
        assert set(every[found.contains("s", every)].tolist()) == expected
        assert all(bool(found.contains("s", every[n : n + 1])[0]) == (n in expected) for n in every)
        assert set(found.missing("s", 0, 32)) == set(range(33)) - expected
        assert len(found) == len(expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hole", range(1, 5))
@pytest.mark.parametrize("resumed", [False, True])
def test_one_missing_ordinal_is_read_when_it_comes(
    tmp_path: Path, hole: int, mode: Any, resumed: bool
) -> None:
    """One shard has the ordinals on both sides of it; a later one has it, alone or with others."""
    parts = [part(n, 2) for n in range(6)]
    others = [one for one in parts if one.ordinal != hole]
    write(tmp_path, others)
    reading: dict[str, Any] = {"mode": mode, "batch_size": 1, "follow": True}
    with ShardReader(tmp_path, **reading) as reader:
        found = [
            row for _ in range(10 if mode != "episodes" else 5) for row in ids(reader.next(LONG))
        ]
        assert sorted(found) == sorted(rows_of(others))
        assert reader.ledger == {stream_of(): [[0, hole - 1], [hole + 1, 5]]}
        state = json.loads(json.dumps(reader.state_dict()))
        write(tmp_path, parts[hole : hole + 1 + hole % 2])
        with ShardReader(tmp_path, state=state, **reading) if resumed else reader as after:
            steps = [
                row for _ in range(2 if mode != "episodes" else 1) for row in ids(after.next(LONG))
            ]
            assert sorted(steps) == rows_of([parts[hole]])
            assert after.ledger == {stream_of(): [[0, 5]]}
