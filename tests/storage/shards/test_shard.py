"""Shards: what is put in comes out, whole or not at all.

Also of `storage.shards.arrow_arrays` and `storage.shards.tables`.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.experience.endings import ENDINGS
from storage.experience.episode import EpisodeError, Part
from storage.experience.step_columns import SOURCES
from storage.shards.arrow_arrays import decode_column, present
from storage.shards.names import (
    ShardDamaged,
    ShardError,
    ShardName,
    ShardWriteError,
    remove_leftovers,
)
from storage.shards.part_block import PartBlock, frames_of
from storage.shards.schema import CODED
from storage.shards.shard import ShardWriter, find_shard, read_shard, shard_metadata, to_pandas
from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    BOX_DTYPES,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    canonical_json,
    schema_id,
)
from storage.spaces.leaves import Leaf, leaves
from tests.storage.space_strategies import ragged

OBS, ACT = Box((4,)), Discrete(2)
CANONICAL = canonical_json(OBS, ACT)
SCHEMA = schema_id(OBS, ACT)
STREAM = f"0123456789ab-{SCHEMA}"


def make_part(ordinal: int, steps: int = 3, **changes: Any) -> Part:
    """A CartPole-like part whose values tell their place."""
    first = ordinal * 1000
    obs = np.arange(first, first + 4 * steps, dtype="<f4")
    values: dict[str, Any] = {
        "episode_id": f"episode-{ordinal}",
        "part": 0,
        "t0": 0,
        "steps": steps,
        "schema_id": SCHEMA,
        "obs": obs.tobytes(),
        "actions": (np.arange(steps, dtype="<i8") % 2).tobytes(),
        "rewards": np.arange(first, first + steps, dtype="<f8").tobytes(),
        "action_logp": np.full(steps, -0.5).tobytes(),
        "policy_version": np.full(steps, -1, "<i8").tobytes(),
        "source": bytes([1]) * steps,
        "pass_prob": np.ones(steps).tobytes(),
        "ts": np.arange(first, first + steps, dtype="<i8").tobytes(),
        "received_ts": np.arange(first, first + steps, dtype="<i8").tobytes(),
        "ordinal": ordinal,
        "episode_ordinal": ordinal,
    }
    return Part(**(values | changes))


def parts_of(count: int, steps: int = 3) -> list[Part]:
    return [make_part(i, steps) for i in range(count)]


# --- what is written -------------------------------------------------------------------------


def test_a_shards_name_is_its_proof(tmp_path: Path) -> None:
    """The name has the ordinals and the first 16 hex digits of the file's BLAKE3."""
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts_of(4))
    digest = blake3(info.path.read_bytes()).hexdigest()
    assert info.path == tmp_path / STREAM / f"000000000000-000000000003-{digest[:16]}.parquet"
    assert (info.digest, info.nbytes) == (digest, info.path.stat().st_size)
    assert (info.first, info.last, info.rows, info.parts) == (0, 3, 12, 4)
    assert ShardName.parse(info.path.name) == ShardName(0, 3, digest[:16])


def test_the_same_parts_give_the_same_file(tmp_path: Path) -> None:
    """Writing again after an unknown outcome duplicates nothing."""
    writer = ShardWriter(tmp_path)
    infos = {writer.write(STREAM, CANONICAL, parts_of(3)) for _ in range(2)}
    assert len(infos) == 1
    assert len(list((tmp_path / STREAM).iterdir())) == 1


def test_rows_say_where_they_stand(tmp_path: Path) -> None:
    """`t` counts from t0; part, ordinals and ids repeat; only the last row has `ended`."""
    parts = [
        make_part(5, 2, episode_id="a", episode_ordinal=5, tags='{"tenant":"x"}'),
        make_part(6, 3, episode_id="a", part=1, t0=2, episode_ordinal=5, ended="truncated"),
        make_part(9, 1, episode_id="b", ended="terminated", continues="a", training_enabled=False),
    ]
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts)
    table = read_shard(info.path, verify="digest")
    rows = table.to_pydict()
    assert rows["eps_id"] == ["a"] * 5 + ["b"]
    assert rows["t"] == [0, 1, 2, 3, 4, 0]
    assert rows["part"] == [0, 0, 1, 1, 1, 0]
    assert rows["ordinal"] == [5, 5, 6, 6, 6, 9]
    assert rows["episode_ordinal"] == [5, 5, 5, 5, 5, 9]
    assert rows["ended"] == [None, None, None, None, "truncated", "terminated"]
    assert rows["terminateds"] == [False] * 5 + [True]
    assert rows["truncateds"] == [False] * 4 + [True, False]
    assert rows["continues"] == [None] * 5 + ["a"]
    assert rows["training_enabled"] == [True] * 5 + [False]
    assert rows["tags"] == ['{"tenant":"x"}'] * 2 + ["{}"] * 4
    assert shard_metadata(info.path).ranges == ((5, 6), (9, 9))


def test_tracks_say_their_place_in_the_environments_time(tmp_path: Path) -> None:
    """Each row of a track has `env_t`, and its last row `agents`; elsewhere both are null."""
    steps = np.array([3, 7], "<i8").tobytes()
    parts = [
        make_part(0, 2),
        make_part(1, 2, agent_id="a", env_t=steps, ended="terminated", agents=2),
        make_part(2, 2, agent_id="b", env_t=steps, ended="truncated"),
    ]
    table = read_shard(ShardWriter(tmp_path).write(STREAM, CANONICAL, parts).path)
    rows = table.to_pydict()
    assert rows["env_t"] == [None, None, 3, 7, 3, 7]
    assert rows["agents"] == [None, None, None, 2, None, None]
    assert decode_column(table, "env_t").tolist() == [-1, -1, 3, 7, 3, 7]
    assert decode_column(table, "agents").dtype == np.int32


@pytest.mark.parametrize("ended", ENDINGS)
def test_every_ending_but_terminated_is_truncated(tmp_path: Path, ended: Any) -> None:
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, [make_part(0, ended=ended)])
    last = read_shard(info.path).slice(2).to_pylist()[0]
    assert (last["terminateds"], last["truncateds"]) == (
        ended == "terminated",
        ended != "terminated",
    )


def test_what_is_unknown_is_null(tmp_path: Path) -> None:
    """An unknown logp, absent infos, dist inputs and final observation are null, not zero."""
    logp = np.array([np.nan, -1.0, np.nan])
    inputs = np.array([1.5, 2.5], "<f4").tobytes()
    part = make_part(
        0,
        action_logp=logp.tobytes(),
        dist_inputs=inputs,
        dist_lengths=np.array([0, 8, 0], "<u4").tobytes(),
        infos={1: '{"a":1}'},
    )
    final = np.array([9, 8, 7, 6], "<f4").tobytes()
    table = read_shard(
        ShardWriter(tmp_path).write(STREAM, CANONICAL, [part, make_part(1, final_obs=final)]).path
    )
    rows = table.to_pydict()
    assert rows["action_logp"] == [None, -1.0, None, -0.5, -0.5, -0.5]
    assert rows["action_dist_inputs"] == [None, [1.5, 2.5], None, None, None, None]
    assert rows["infos"] == [None, '{"a":1}', None, None, None, None]
    assert rows["final_obs"] == [None] * 5 + [[9.0, 8.0, 7.0, 6.0]]
    assert (
        np.isnan(decode_column(table, "action_logp")).tolist() == [True, False, True] + [False] * 3
    )
    dist = decode_column(table, "action_dist_inputs")
    assert dist.shape == (6, 2)
    assert dist[1].tolist() == [1.5, 2.5]
    assert np.isnan(dist[0]).all()
    assert decode_column(table, "final_obs")[5].tolist() == [9, 8, 7, 6]
    assert present(table, "final_obs").tolist() == [False] * 5 + [True]


def test_the_file_is_as_every_tool_reads_it(tmp_path: Path) -> None:
    """Pages are V1, without byte-stream split, with checksums; row groups are cut.

    Dictionaries are only for ids and for values that repeat often or come in few parts.
    """
    info = ShardWriter(tmp_path, row_group_bytes=2000).write(STREAM, CANONICAL, parts_of(30))
    file = pq.ParquetFile(info.path)
    assert file.metadata.num_row_groups > 3
    ids = {"eps_id", "agent_id", "ended", "policy_id", "source", "continues", "tags"}
    ids |= {"t", "ordinal", "episode_ordinal"}
    for index in range(file.metadata.num_columns):
        column = file.metadata.row_group(0).column(index)
        name = column.path_in_schema.split(".")[0]
        assert column.compression == "ZSTD"
        assert "BYTE_STREAM_SPLIT" not in column.encodings
        assert (column.dictionary_page_offset is not None) == (name in ids), name
        assert column.is_stats_set == (name in {"t", "ts", "ordinal", "episode_ordinal"}), name
        assert column.physical_type != "FIXED_LEN_BYTE_ARRAY"


def test_the_file_says_nothing_of_how_texts_were_handed_over(tmp_path: Path) -> None:
    """Texts that repeat are plain texts to every reader, and null where they were."""
    parts = [
        make_part(0, tags='{"a": "b"}', ended="terminated"),
        make_part(1, continues="before", ended=None),
    ]
    path = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts).path
    schema = pq.read_schema(path)
    assert {schema.field(name).type for name in CODED} == {pa.string()}
    table = pq.read_table(path)
    assert table["continues"].to_pylist() == [None] * 3 + ["before"] * 3
    assert table["ended"].to_pylist() == [None, None, "terminated", None, None, None]
    assert table["tags"].to_pylist() == ['{"a": "b"}'] * 3 + [parts[1].tags] * 3


def test_a_row_group_has_the_texts_of_its_own_rows_only(tmp_path: Path) -> None:
    """Otherwise each of many row groups would repeat the ids of all episodes of the shard."""
    ids = [f"{n:032d}" for n in range(4000)]
    parts = [make_part(n, steps=1, episode_id=name) for n, name in enumerate(ids)]
    whole, cut = (
        pq.ParquetFile(writer.write(STREAM, CANONICAL, parts).path).metadata
        for writer in (
            ShardWriter(tmp_path / "whole"),
            ShardWriter(tmp_path / "cut", row_group_bytes=20_000),
        )
    )
    assert cut.num_row_groups > 10

    def size(metadata: Any) -> int:
        groups = (metadata.row_group(n) for n in range(metadata.num_row_groups))
        return sum(group.column(0).total_uncompressed_size for group in groups)

    assert size(cut) < 1.2 * size(whole)


def test_texts_beyond_a_dictionary_are_written_all_the_same(tmp_path: Path) -> None:
    """Parquet leaves dictionaries of more than a megabyte; no text is lost or changed by that."""
    ids = [f"{n:0200d}" for n in range(8000)]
    parts = [make_part(n, steps=1, episode_id=name) for n, name in enumerate(ids)]
    path = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts).path
    assert pq.read_table(path, columns=["eps_id"])["eps_id"].to_pylist() == ids


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_noise_is_stored_as_it_is(tmp_path: Path, compression: Any) -> None:
    """Compressing what gets no smaller costs the writer and each reader; what does is compressed.

    A column of long values without any is neither.
    """
    pixels = Box((64, 64, 3), "uint8", 0, 255)
    canonical, schema = canonical_json(pixels, ACT), schema_id(pixels, ACT)
    rng = np.random.default_rng(7)
    for ordinal, obs in enumerate((rng.bytes(40 * 12_288), bytes(40 * 12_288))):
        part = make_part(ordinal, 40, obs=obs, schema_id=schema)
        writer = ShardWriter(tmp_path, compression=compression)
        info = writer.write(f"0123456789ab-{schema}", canonical, [part])
        group = pq.ParquetFile(info.path).metadata.row_group(0)
        chunks = [group.column(i) for i in range(group.num_columns)]
        codecs = {chunk.path_in_schema: chunk.compression for chunk in chunks}
        plain = {name for name, codec in codecs.items() if codec == "UNCOMPRESSED"}
        assert plain == ({"obs"} if ordinal == 0 else set())
        found = decode_column(read_shard(info.path, verify="digest"), "obs")
        assert found.tobytes() == obs


def test_lz4_when_asked(tmp_path: Path) -> None:
    info = ShardWriter(tmp_path, compression="lz4").write(STREAM, CANONICAL, parts_of(2))
    assert pq.ParquetFile(info.path).metadata.row_group(0).column(0).compression == "LZ4"
    assert len(read_shard(info.path, verify="pages")) == 6


# --- whole or not at all ---------------------------------------------------------------------


def visible(directory: Path) -> list[str]:
    return [p.name for p in directory.rglob("*") if p.is_file()]


def test_the_name_appears_after_the_content_is_synced(tmp_path: Path) -> None:
    """The file is synced, then renamed, and then the directory is synced."""
    seen: list[tuple[bool, list[bool]]] = []

    def watch(descriptor: int) -> None:
        names = visible(tmp_path)
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        seen.append((is_folder, [ShardName.parse(name) is not None for name in names]))
        os.fsync(descriptor)

    ShardWriter(tmp_path, fsync=watch).write(STREAM, CANONICAL, parts_of(2))
    assert seen == [(False, [False]), (True, [True])]


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failed_sync_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ShardWriteError, match="No space left") as caught:
        ShardWriter(tmp_path, fsync=full_disk).write(STREAM, CANONICAL, parts_of(2))
    assert caught.value.errno == errno.ENOSPC
    assert visible(tmp_path) == []


def folders_fail(descriptor: int) -> None:
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failed_sync_of_the_folder_leaves_nothing(tmp_path: Path) -> None:
    """A name that may not be durable is removed before the next attempt."""
    with pytest.raises(ShardWriteError, match="Input/output error"):
        ShardWriter(tmp_path, fsync=folders_fail).write(STREAM, CANONICAL, parts_of(2))
    assert visible(tmp_path) == []


def test_an_adopted_shard_is_made_durable(tmp_path: Path) -> None:
    """Its writer may have been killed between the rename and the sync of the folder."""
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts_of(2))
    synced: list[str] = []
    adopting = ShardWriter(
        tmp_path, fsync=lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    assert adopting.adopt(STREAM, 0, 1) == info
    assert synced == [str(info.path.parent)]
    assert adopting.adopt(STREAM, 0, 7) is None
    with pytest.raises(ShardWriteError, match="Input/output error"):
        ShardWriter(tmp_path, fsync=folders_fail).adopt(STREAM, 0, 1)
    assert info.path.exists()


def damage(change: Callable[[Path], object], folder: Path) -> Callable[[int], None]:
    def fsync(descriptor: int) -> None:
        for path in folder.glob("*/.*.tmp"):
            change(path)
        os.fsync(descriptor)

    return fsync


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_file_that_reads_back_otherwise_is_not_published(tmp_path: Path, keep: int) -> None:
    """A file that the disk does not return unchanged never gets a final name."""
    cut = damage(lambda path: path.write_bytes(path.read_bytes()[:keep]), tmp_path)
    with pytest.raises(ShardWriteError, match="expected to read back the written bytes"):
        ShardWriter(tmp_path, fsync=cut).write(STREAM, CANONICAL, parts_of(2))
    assert visible(tmp_path) == []


def flip(path: Path, position: int, bits: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(bytes(data))


def test_a_flipped_byte_anywhere_is_found(tmp_path: Path) -> None:
    """With `verify="digest"` a changed byte is detected at any position."""
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts_of(2))
    assert len(read_shard(info.path, verify="digest")) == 6
    for position in range(0, info.nbytes, 7):
        flip(info.path, position)
        with pytest.raises(ShardDamaged, match=r"expected digest .*, found"):
            read_shard(info.path, verify="digest")
        flip(info.path, position)
    assert len(read_shard(info.path, verify="digest")) == 6


def test_page_checksums_find_a_byte_that_plain_reading_misses(tmp_path: Path) -> None:
    """The plain read shows that the damage is silent, so that this test can fail."""
    info = ShardWriter(tmp_path, compression="lz4").write(STREAM, CANONICAL, parts_of(20))
    before = read_shard(info.path)
    column = next(
        c
        for i in range(pq.ParquetFile(info.path).metadata.num_columns)
        if (c := pq.ParquetFile(info.path).metadata.row_group(0).column(i)).path_in_schema
        == "obs.list.element"
    )
    flip(info.path, column.data_page_offset + column.total_compressed_size - 3, 0x01)
    assert not read_shard(info.path).equals(before)
    with pytest.raises(ShardDamaged, match="CRC"):
        read_shard(info.path, verify="pages")


@pytest.mark.parametrize("verify", ["digest", "pages", None])
def test_what_is_no_shard_is_damage(tmp_path: Path, verify: Any) -> None:
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts_of(2))
    info.path.write_bytes(info.path.read_bytes()[:200])
    with pytest.raises(ShardDamaged, match=info.path.name):
        read_shard(info.path, verify=verify)


def test_a_foreign_parquet_file_is_damage_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ShardDamaged, match="expected the footer of a shard"):
        shard_metadata(tmp_path / "a.parquet")
    with pytest.raises(ShardDamaged, match="expected a shard's name"):
        read_shard(tmp_path / "a.parquet", verify="digest")
    with pytest.raises(FileNotFoundError):
        read_shard(tmp_path / "b.parquet")


def test_a_restart_finds_the_whole_shard_of_its_range(tmp_path: Path) -> None:
    """A plan without a record adopts a valid file of exactly its range, and no other."""
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts_of(3))
    assert find_shard(tmp_path, STREAM, 0, 2) == info
    assert find_shard(tmp_path, STREAM, 0, 1) is None
    assert find_shard(tmp_path, "fedcba987654-000000000000", 0, 2) is None
    flip(info.path, info.nbytes // 2)
    assert find_shard(tmp_path, STREAM, 0, 2) is None


def test_a_shard_of_another_stream_is_not_adopted(tmp_path: Path) -> None:
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts_of(3))
    other = tmp_path / f"fedcba987654-{SCHEMA}"
    info.path.parent.rename(other)
    assert find_shard(tmp_path, other.name, 0, 2) is None


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(dead, 0)
    names = {
        "mine": f"{STREAM}/.000000000000-000000000004-{dead}.tmp",
        "at work": f"{STREAM}/.000000000000-000000000005-{os.getppid()}.tmp",
        "another's": f"fedcba987654-{SCHEMA}/.000000000000-000000000004-{dead}.tmp",
        "unknown": f"{STREAM}/.notes.tmp",
    }
    for name in names.values():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert remove_leftovers(tmp_path, "0123456789ab") == [tmp_path / names["mine"]]
    assert {k for k, name in names.items() if (tmp_path / name).exists()} == set(names) - {"mine"}


# --- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["", "../up", "a/b", ".hidden", "a.b", "x" * 200])
def test_a_stream_is_never_a_path(tmp_path: Path, stream: str) -> None:
    with pytest.raises(ShardError, match="stream: expected letters"):
        ShardWriter(tmp_path).write(stream, CANONICAL, parts_of(1))
    with pytest.raises(ShardError, match="stream: expected letters"):
        find_shard(tmp_path, stream, 0, 0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "expected one or more parts"),
        ([make_part(0, episode_ordinal=-1)], "episode episode-0: expected ordinals, got none"),
        ([make_part(0), make_part(1, schema_id="other")], "got other for episode episode-1"),
        ([make_part(0, schema_id="other")], "expected parts of schema .*, got other"),
        ([make_part(0, obs=b"1234")], "obs: expected 48 bytes for 3 values, got 4"),
        ([make_part(0, actions=b"")], "actions: expected 24 bytes for 3 values, got 0"),
        ([make_part(0, final_obs=b"123")], "final_obs: expected 16 bytes for 1 values, got 3"),
        ([make_part(0, source=b"\x09" * 3)], "source: expected an integer of 0..2"),
        ([make_part(0, dist_inputs=b"1234")], "dist_inputs: expected 0 bytes, got 4"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, parts: list[Part], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        ShardWriter(tmp_path).write(STREAM, CANONICAL, parts)
    assert visible(tmp_path) == []


def test_lengths_that_do_not_fit_name_the_episode() -> None:
    with pytest.raises(EpisodeError, match="episode episode-1: dist_lengths: expected 12 bytes"):
        PartBlock.of([make_part(0), make_part(1, dist_lengths=b"1234")])


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="expected zstd or lz4, got 'gzip'"):
        ShardWriter(tmp_path, compression="gzip")  # type: ignore[arg-type]
    with pytest.raises(ShardError, match="expected 1 or more, got 0"):
        ShardWriter(tmp_path, row_group_bytes=0)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts_of(1))
    with pytest.raises(ShardError, match=r"got \['speed'\]"):
        read_shard(info.path, columns=["obs", "speed"])
    table = read_shard(info.path, columns=["obs", "t"])
    assert table.column_names == ["obs", "t"]
    with pytest.raises(ShardError, match="expected a column of obs, t, got 'rewards'"):
        decode_column(table, "rewards")


def test_dist_inputs_of_different_lengths_are_refused_as_one_array(tmp_path: Path) -> None:
    part = make_part(0, 2, dist_inputs=bytes(12), dist_lengths=np.array([4, 8], "<u4").tobytes())
    table = read_shard(ShardWriter(tmp_path).write(STREAM, CANONICAL, [part]).path)
    with pytest.raises(ShardError, match="expected 1 numbers in each row, got 2"):
        decode_column(table, "action_dist_inputs")


def test_pandas_gives_people_arrays(tmp_path: Path) -> None:
    final = np.arange(4, dtype="<f4").tobytes()
    info = ShardWriter(tmp_path).write(STREAM, CANONICAL, [make_part(0, 2, final_obs=final)])
    frame = to_pandas(info.path)
    assert frame["obs"][1].tolist() == [4, 5, 6, 7]
    assert frame["final_obs"][0] is None
    assert frame["final_obs"][1].tolist() == [0, 1, 2, 3]
    assert frame["action_dist_inputs"].tolist() == [None, None]
    assert frame["rewards"].tolist() == [0.0, 1.0]


# --- for any space, any parts, any settings --------------------------------------------------

small = st.integers(1, 3)
boxes = st.builds(
    lambda shape, dtype: Box(tuple(shape), np.dtype(dtype)),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(BOX_DTYPES),
)
leaf_spaces: st.SearchStrategy[Space] = st.one_of(
    boxes,
    ragged,
    st.builds(Discrete, st.integers(1, 5), st.integers(-3, 3)),
    st.builds(lambda n: MultiDiscrete(tuple(n)), st.lists(small, min_size=1, max_size=3)),
    st.builds(lambda n: MultiBinary(tuple(n)), st.lists(small, min_size=1, max_size=2)),
    st.just(Text(6)),
)
any_space: st.SearchStrategy[Space] = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.builds(lambda s: Tuple(tuple(s)), st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda d: Dict(tuple(d.items())),
            st.dictionaries(st.sampled_from(["a", "b", "\N{SNOWMAN}"]), inner, min_size=1),
        ),
    ),
    max_leaves=4,
)


def leaf_values(leaf: Leaf, count: int, random: np.random.Generator) -> Any:
    """Random values of a leaf: an array (count, *shape), or a list of strings."""
    space = leaf.space
    if isinstance(space, Text):
        letters = np.array(list("ab\N{BULLET}\N{SNOWMAN}"))
        return ["".join(random.choice(letters, random.integers(0, 7))) for _ in range(count)]
    if isinstance(space, Discrete):
        return random.integers(space.start, space.start + space.n, count)
    if isinstance(space, MultiDiscrete):
        return random.integers(0, space.nvec, (count, len(space.nvec)))
    shape = (count, *leaf.shape)
    if isinstance(space, MultiBinary):
        return random.integers(0, 2, shape).astype(np.int8)
    return random.integers(0, 2 if leaf.dtype.kind == "b" else 100, shape).astype(leaf.dtype)


class Values:
    """Random values of a space as columns, and as the encodings that a part holds."""

    def __init__(self, space: Space, count: int, random: np.random.Generator) -> None:
        codec = Codec(space)
        self.columns = {leaf.path: leaf_values(leaf, count, random) for leaf in leaves(space)}
        self.encoded = codec.encode_columns(self.columns, count)
        sizes = np.array([len(e) for e in self.encoded], "<u4")
        self.lengths = b"" if codec.itemsize is not None else sizes.tobytes()


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Space, Space, list[Part], list[tuple[Values, Values]], Any]:
    """Spaces, parts, their (observations with the final one, actions), and the final flags."""
    observation, action = draw(any_space), draw(any_space)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    schema, parts, values, finals = schema_id(observation, action), [], [], []
    ordinal = 0
    for _ in range(draw(st.integers(1, 6))):
        ordinal += draw(st.integers(1, 3))
        steps, has_final = draw(st.integers(1, 5)), draw(st.booleans())
        obs, act = Values(observation, steps + 1, random), Values(action, steps, random)
        dist = random.integers(0, 2, steps).astype("<u4") * 8
        parts.append(
            make_part(
                ordinal,
                steps,
                episode_id=draw(st.sampled_from(["a", "b", "\N{SNOWMAN}"])),
                schema_id=schema,
                obs=b"".join(obs.encoded[:-1]),
                obs_lengths=obs.lengths[:-4],
                actions=b"".join(act.encoded),
                actions_lengths=act.lengths,
                final_obs=obs.encoded[-1] if has_final else None,
                action_logp=random.choice([np.nan, -0.25, -3.0], steps).tobytes(),
                source=random.integers(0, 3, steps).astype(np.uint8).tobytes(),
                dist_inputs=random.random(int(dist.sum()) // 4, np.float32).tobytes(),
                dist_lengths=dist.tobytes() if draw(st.booleans()) or dist.any() else b"",
                infos={
                    t: json.dumps({"t": t})
                    for t in draw(st.sets(st.integers(0, steps - 1), max_size=2))
                },
                ended=draw(st.sampled_from([None, *ENDINGS])),
            )
        )
        values.append((obs, act))
        finals.append(has_final)
    return observation, action, parts, values, finals


def same(found: Any, expected: list[Any]) -> None:
    """The decoded column against the leaf values of the parts, joined."""
    if isinstance(expected[0], list):
        assert list(found) == [text for piece in expected for text in piece]
    else:
        joined = np.concatenate(expected)
        assert found.dtype == joined.dtype
        assert found.shape == joined.shape
        assert (found == joined).all()


def check_finals(table: pa.Table, leaf: Leaf, values: list[Any], finals: list[bool]) -> None:
    name = leaf.column("final_obs")
    ends = np.cumsum([len(actions.encoded) for _, actions in values]) - 1
    expected = np.zeros(len(table), np.bool_)
    expected[ends[np.array(finals)]] = True
    assert present(table, name).tolist() == expected.tolist()
    found = decode_column(table, name)[expected]
    last = [
        obs.columns[leaf.path][-1:] for (obs, _), final in zip(values, finals, strict=True) if final
    ]
    if last:
        same(found, last)


@settings(max_examples=60)
@given(
    episodes(),
    st.sampled_from(["zstd", "lz4"]),
    st.sampled_from([1, 300, 1000, 4_000_000]),
    st.sampled_from(["block", "frames", "pieces"]),
)
def test_what_is_put_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory,
    episode: Any,
    compression: Any,
    row_group_bytes: int,
    travels_as: str,
) -> None:
    """The rows on disk are the given steps, and every column decodes to the given values."""
    observation, action, parts, values, finals = episode
    block = PartBlock.of(parts)
    if travels_as == "frames":
        block = PartBlock.from_frames(block.to_frames())
    elif travels_as == "pieces":
        block = PartBlock.from_frames([b"".join(pieces) for pieces in frames_of(parts)])
    writer = ShardWriter(
        tmp_path_factory.mktemp("shards"), compression=compression, row_group_bytes=row_group_bytes
    )
    info = writer.write("s", canonical_json(observation, action), block)
    table = read_shard(info.path, verify="digest")
    table.validate(full=True)
    assert len(table) == info.rows == sum(p.steps for p in parts)
    for leaf in leaves(observation):
        same(
            decode_column(table, leaf.column("obs")),
            [obs.columns[leaf.path][:-1] for obs, _ in values],
        )
        check_finals(table, leaf, values, finals)
    for leaf in leaves(action):
        same(
            decode_column(table, leaf.column("actions")),
            [act.columns[leaf.path] for _, act in values],
        )
    check_plain_columns(table, parts)
    # a slice that starts inside a row group decodes like the rows themselves
    for name in table.column_names:
        whole, piece = decode_column(table, name), decode_column(table.slice(1), name)
        if name != "action_dist_inputs":
            np.testing.assert_array_equal(piece, whole[1:])


def check_plain_columns(table: pa.Table, parts: list[Part]) -> None:
    rows = table.to_pydict()
    for name, dtype in (("rewards", "<f8"), ("ts", "<i8"), ("policy_version", "<i8")):
        joined = np.frombuffer(b"".join(getattr(p, name) for p in parts), dtype)
        assert rows[name] == joined.tolist()
    logp = np.frombuffer(b"".join(p.action_logp for p in parts))
    assert rows["action_logp"] == [None if math.isnan(x) else x for x in logp.tolist()]
    assert rows["source"] == [SOURCES[i] for p in parts for i in p.source]
    assert rows["infos"] == [p.infos.get(t) for p in parts for t in range(p.steps)]
    assert rows["eps_id"] == [p.episode_id for p in parts for _ in range(p.steps)]
    assert rows["ended"] == [
        p.ended if t == p.steps - 1 else None for p in parts for t in range(p.steps)
    ]
    inputs = [row for row in rows["action_dist_inputs"] if row is not None]
    joined = np.frombuffer(b"".join(p.dist_inputs for p in parts), "<f4")
    assert [number for row in inputs for number in row] == joined.tolist()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_the_footer_lists_the_ordinals_inside(
    tmp_path_factory: pytest.TempPathFactory, ordinals: list[int]
) -> None:
    """The ranges have each ordinal once, for any order of the parts, and no others."""
    parts = [make_part(0, 1).with_ordinals(o, o) for o in ordinals]
    info = ShardWriter(tmp_path_factory.mktemp("s")).write(STREAM, CANONICAL, parts)
    ranges = shard_metadata(info.path).ranges
    assert [n for a, b in ranges for n in range(a, b + 1)] == sorted(set(ordinals))
    assert all(b + 1 < c for (_, b), (c, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("count", [0, 3, 14, 16])
def test_frames_that_are_no_block_are_refused(count: int) -> None:
    with pytest.raises(ShardError, match=f"expected 15 frames, got {count}"):
        PartBlock.from_frames([b""] * count)


def test_a_frame_that_is_no_msgpack_is_refused() -> None:
    frames = PartBlock.of(parts_of(1)).to_frames()
    with pytest.raises(ShardError, match="expected per-part values as msgpack"):
        PartBlock.from_frames([b"\xc1", *frames[1:]])
