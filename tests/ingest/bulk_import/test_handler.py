"""Bulk imports: Arrow in, rows out; what is refused is named by column and row."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import urllib3

from ingest.access.key_files import create_token
from ingest.bulk_import.column_path import runs_of
from ingest.bulk_import.repeats import digest_rows
from ingest.collector.recovery import COUNTERS, INSTANCE
from ingest.episodes.idempotency import MAX_KEYS, STATE
from ingest.episodes.journal_events import Keyed, encode_event, encode_row
from ingest.episodes.open_episode import PolicyRules
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.journal.sqlite_journal import SqliteJournal
from storage.spaces.descriptors import Box, Dict, Discrete, parse_space
from tests.collector_process import CollectorProcess, shard_rows

ARROW = "application/vnd.apache.arrow.stream"
POLICIES = [
    PolicyDeclaration(
        observation=parse_space("box:2"), action=parse_space("discrete:3"), seal_seconds=0.2
    ),
    PolicyDeclaration(
        policy_id="mixed",
        observation=Dict(
            (("image", Box((2, 2), np.dtype(np.uint8))), ("place", Discrete(5)), ("x", Box((2, 3))))
        ),
        action=Box((2,), np.dtype(np.float32), np.full(2, -1.0), np.full(2, 1.0)),
        seal_seconds=0.2,
    ),
]


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("root")
    with _collector(root) as process:
        yield process


def _collector(root: Path) -> CollectorProcess:
    for policy in POLICIES:
        save_declaration(root, policy)
    return CollectorProcess(root)


def body(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def steps(lengths: dict[str, int], **columns: Any) -> pa.Table:
    """Episodes of box:2 and discrete:3, the step's number in the table as reward."""
    count = sum(lengths.values())
    names = [name for name, length in lengths.items() for _ in range(length)]
    obs = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * count), pa.float32()), 2)
    given = {
        "eps_id": names,
        "obs": obs,
        "actions": pa.array(np.arange(count) % 3),
        "rewards": pa.array(np.arange(count), pa.float64()),
        **columns,
    }
    return pa.table({name: column for name, column in given.items() if column is not None})


def post(
    collector: CollectorProcess, table: pa.Table | bytes, **headers: str
) -> tuple[int, dict[str, Any]]:
    data = table if isinstance(table, bytes) else body(table)
    given = {
        "content-type": ARROW,
        "headrace-crc32": f"{zlib.crc32(data):08x}",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return collector.request("POST", "/v1/steps", data, given)


def test_columns_become_rows(tmp_path: Path) -> None:
    """Every value of the import is in the shards, once, also of an image and a nested space."""
    lengths = {"a": 3, "b": 1, "c": 2}
    table = steps(
        lengths,
        t=[0, 1, 2, 0, 0, 1],
        truncateds=[False, False, True, False, False, False],
        final_obs=[None, None, np.array([7, 8], np.float32).tobytes(), None, None, None],
        action_logp=[-0.5, None, -1.5, -2.0, -2.5, -3.0],
        infos=[None, '{"k": 1}', None, "", None, None],
        tags=['{"user": "u1"}'] * 6,
        ts=pa.array(range(6)),
    )
    with _collector(tmp_path) as collector:
        status, answer = post(collector, table)
        assert (status, answer) == (200, {"durable": True, "accepted": 12})
        assert post(collector, _mixed(), policy="x")[0] == 200
        assert collector.stop() == 0
    rows = shard_rows(tmp_path)
    mine = sorted((r for r in rows if r["policy_id"] == "default"), key=lambda r: r["ts"])
    assert [(r["eps_id"], r["t"]) for r in mine] == [
        (name, t) for name, length in lengths.items() for t in range(length)
    ]
    assert [r["rewards"] for r in mine] == [0, 1, 2, 3, 4, 5]
    assert [r["actions"] for r in mine] == [0, 1, 2, 0, 1, 2]
    assert [list(r["obs"]) for r in mine] == [[2 * i, 2 * i + 1] for i in range(6)]
    np.testing.assert_array_equal(
        [r["action_logp"] for r in mine], [-0.5, np.nan, -1.5, -2.0, -2.5, -3.0]
    )
    assert [r["truncateds"] for r in mine] == [False, False, True, False, False, False]
    assert [r["terminateds"] for r in mine] == [False, False, False, True, False, True]
    assert mine[2]["final_obs"] == np.array([7, 8], np.float32).tobytes()
    assert mine[1]["infos"] == '{"k": 1}'
    assert {r["source"] for r in mine} == {"replayed"}
    assert {r["tags"] for r in mine} == {'{"user":"u1"}'}
    (nested,) = (r for r in rows if r["policy_id"] == "mixed")
    assert nested["obs.image"] == bytes([1, 2, 3, 4])
    assert nested["obs.place"] == 3
    assert nested["obs.x"] == np.arange(6, dtype=np.float32).tobytes()
    assert list(nested["actions"]) == [0.5, -0.5]


def _mixed(**columns: Any) -> pa.Table:
    given = {
        "eps_id": ["m"],
        "policy_id": ["mixed"],
        "obs.image": [bytes([1, 2, 3, 4])],
        "obs.place": [3],
        "obs.x": pa.FixedSizeListArray.from_arrays(pa.array(range(6), pa.float32()), 6),
        "actions": [[0.5, -0.5]],
        "rewards": [1.0],
        **columns,
    }
    return pa.table(given)


BAD: list[tuple[Any, int, str]] = [
    (steps({"x": 2}, extra=[1, 2]), 422, "extra"),
    (steps({"x": 2}, rewards=None), 422, "rewards"),
    (steps({"x": 2}, t=[0, 2]), 422, "$.t[1]"),
    (steps({"x": 2}, policy_id=["default", "mixed"]), 422, "one policy"),
    (steps({"x": 2}, policy_id=["default", None]), 422, "one policy"),
    (steps({"x": 2}, policy_id=["nobody"] * 2), 422, "nobody"),
    (steps({"x": 2}, agent_id=["a", "b"]), 422, "agent"),
    (steps({"x": 2}, eps_id=[1, 2]), 422, "$.eps_id[0]"),
    (steps({"x": 3}, eps_id=["x", "y", "x"]), 422, "$.eps_id[2]"),
    (steps({"x": 2}, infos=["{", None]), 422, "$.infos[0]"),
    (steps({"x": 2}, tags=["[]", None]), 422, "$.tags[0]"),
    (steps({"x": 2}, rewards=[1.0, None]), 422, "$.rewards[1]"),
    (steps({"x": 2}, truncateds=["no", "yes"]), 422, "$.truncateds[1]"),
    (steps({"x": 2}, ts=["now", "then"]), 422, "$.ts[0]"),
    (pa.table([[1], [2]], names=["eps_id", "eps_id"]), 422, "repeated"),
    (b"nonsense", 400, "Arrow stream"),
    (b"", 400, "Arrow stream"),
    (body(steps({"x": 2}))[:-60], 400, "Arrow stream"),
]


@pytest.mark.parametrize(("table", "status", "text"), BAD)
def test_a_form_that_does_not_fit_is_refused_as_a_whole(
    collector: CollectorProcess, table: pa.Table | bytes, status: int, text: str
) -> None:
    """The answer names the column and the row; nothing of the body is taken."""
    found, answer = post(collector, table)
    assert found == status, answer
    assert text in answer["error"]["message"] + answer["error"].get("path", "")
    assert collector.get("/v1/episodes/x")[0] == 404


@pytest.mark.parametrize("crc", [None, "00000000", "nonsense"])
def test_a_body_needs_its_checksum(collector: CollectorProcess, crc: str | None) -> None:
    """Arrow has no checksum: flipped bits would be wrong numbers."""
    headers = {"content-type": ARROW} | ({} if crc is None else {"headrace-crc32": crc})
    status, answer = collector.request("POST", "/v1/steps", body(steps({"x": 1})), headers)
    assert status == 400
    assert "Headrace-CRC32" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("columns", "path"),
    [
        ({"actions": [0, 1, 9, 1, 0, 1]}, "$.actions[2]"),
        ({"rewards": [0.0, 1.0, float("nan"), 3.0, 4.0, 5.0]}, "$.rewards[2]"),
        ({"action_logp": [None, None, float("inf"), None, None, None]}, "$.action_logp[2]"),
        ({"pass_prob": [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]}, "$.pass_prob[2]"),
        ({"final_obs": [None, None, None, b"short", None, None]}, "$.final_obs[3]"),
        ({"obs": [[0, 0], [0, 0], [0, None], [0, 0], [0, 0], [0, 0]]}, "$.obs[2]"),
    ],
)
def test_a_bad_row_closes_its_own_episode_only(
    collector: CollectorProcess, columns: dict[str, Any], path: str, request: Any
) -> None:
    """The bad row is named; the episode is broken at its last good step, the next one is whole."""
    bad, good = (f"{request.node.name}-{which}" for which in ("bad", "good"))
    status, answer = post(collector, steps({bad: 4, good: 2}, **columns))
    assert status == 200
    (refused,) = answer["refused"]
    assert refused["error"]["path"] == path
    assert refused["index"] == int(path[-2])
    assert collector.get(f"/v1/episodes/{bad}")[1]["state"] == "broken"
    assert collector.get(f"/v1/episodes/{good}")[1]["state"] == "terminated"


@pytest.mark.parametrize(
    "columns",
    [
        {"obs.image": [b"123"]},
        {"obs.place": [5]},
        {"obs.x": [[0.0] * 5]},
        {"obs.x": [[0.0] * 5 + [None]]},
        {"actions": [[0.5, 7.0]]},
    ],
)
def test_a_bad_leaf_is_refused(collector: CollectorProcess, columns: dict[str, Any]) -> None:
    """Each leaf of a nested space is checked; nothing of it ends in a 500."""
    status, answer = post(collector, _mixed(eps_id=[f"leaf-{columns!r:.40}"], **columns))
    assert status == 200
    assert answer["refused"][0]["error"]["code"] == "invalid"


def test_a_key_with_other_rows_is_a_conflict(tmp_path: Path) -> None:
    """What comes behind the rows of before is taken, other rows are not; over a kill too."""
    save_declaration(tmp_path, POLICIES[0])
    with CollectorProcess(tmp_path) as collector:
        first = steps({"a": 3, "b": 2})
        assert post(collector, first, idempotency_key="k")[1]["accepted"] == 9
        collector.settle(5)
        for _ in range(2):
            for other in (
                steps({"a": 3}),
                steps({"a": 3, "c": 2}),
                steps({"x": 3, "b": 2, "c": 1}),
            ):
                status, answer = post(collector, other, idempotency_key="k")
                assert (status, answer["error"]["code"]) == (409, "conflict")
                assert "5 rows" in answer["error"]["message"]
            assert post(collector, first, idempotency_key="k")[1]["accepted"] == 0
            collector.kill()
            collector.restart()
        assert post(collector, steps({"c": 1}), idempotency_key="other")[1]["accepted"] == 3
        longer = steps({"a": 3, "b": 2, "d": 1})
        assert post(collector, longer, idempotency_key="k")[1]["accepted"] == 3
        assert post(collector, first, idempotency_key="k")[0] == 409


def test_repeating_an_import_adds_nothing(tmp_path: Path) -> None:
    """Under its Idempotency-Key an import is taken once, also over a kill and for a longer file."""
    with _collector(tmp_path) as collector:
        assert post(collector, steps({"a": 3, "b": 2}), idempotency_key="k")[1]["accepted"] == 9
        assert post(collector, steps({"a": 3, "b": 2}), idempotency_key="k")[1]["accepted"] == 0
        collector.kill()
        collector.restart()
        longer = steps({"a": 3, "b": 2, "c": 1})
        assert post(collector, longer, idempotency_key="k")[1]["accepted"] == 3
        status, answer = post(collector, longer, idempotency_key="x" * 201)
        assert (status, answer["error"]["code"]) == (422, "invalid")
        refused = post(collector, longer)[1]["refused"]
        assert {item["error"]["code"] for item in refused} == {"completed"}
        assert collector.stop() == 0
    assert sorted((r["eps_id"], r["t"]) for r in shard_rows(tmp_path)) == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 0),
        ("b", 1),
        ("c", 0),
    ]


def test_no_one_else_takes_an_imports_key_or_name(tmp_path: Path) -> None:
    """Law: an import answered with 200 is on disk, whatever another token does with its key."""
    save_declaration(tmp_path, POLICIES[0])
    web, two = ({"authorization": f"Bearer {create_token(tmp_path, n, ['log'])[1]}"} for n in "wt")
    with CollectorProcess(tmp_path) as collector:

        def register(name: str, token: dict[str, str]) -> tuple[int, Any]:
            return collector.request("POST", "/v1/instances", {"name": name}, token)

        status, answer = register("bulk:k", two)
        assert (status, answer["error"]["path"]) == (422, "$.name")
        first, other = steps({"a": 3, "b": 2}), steps({"x": 1})
        assert post(collector, first, idempotency_key="k", **web)[1]["accepted"] == 9
        assert post(collector, other, idempotency_key="k", **two)[1]["accepted"] == 3
        ids = {register("n", token)[1]["instance"] for token in (web, two, web)}
        assert len(ids) == 2
        for _ in range(2):
            again = {"durable": True, "accepted": 0}
            assert post(collector, first, idempotency_key="k", **web) == (
                200,
                {**again, "duplicates": 9},
            )
            assert post(collector, other, idempotency_key="k", **two) == (
                200,
                {**again, "duplicates": 3},
            )
            assert {register("n", token)[1]["instance"] for token in (web, two)} == ids
            collector.settle(6, **web)
            collector.kill()
            collector.restart()
    assert sorted(r["eps_id"] for r in shard_rows(tmp_path)) == [*"aaabbx"]


def test_keys_of_single_calls_push_no_import_out(tmp_path: Path) -> None:
    """Law: what an import's key stands for is known as long as the numbers of its episodes."""
    save_declaration(tmp_path, POLICIES[0])
    with CollectorProcess(tmp_path) as collector:
        assert post(collector, steps({"a": 3}), idempotency_key="k")[1]["accepted"] == 5
        collector.settle(3)
        assert collector.stop() == 0
        journal = SqliteJournal.open(tmp_path / "journal")
        keys = [Keyed(9 + n, "e", str(n), b"", 1) for n in range(MAX_KEYS)]
        journal.commit(put={f"{STATE}{9:016}": msgspec.msgpack.encode(keys)})
        journal.close()
        collector.restart()
        assert post(collector, steps({"b": 3}), idempotency_key="k")[0] == 409
        assert post(collector, steps({"a": 3}), idempotency_key="k")[1]["duplicates"] == 5
        assert post(collector, steps({"a": 3, "b": 1}), idempotency_key="k")[1]["accepted"] == 3


@pytest.mark.parametrize("kept", [True, False])
def test_an_import_of_an_earlier_release_goes_on(tmp_path: Path, kept: bool) -> None:
    """Its name has no token, its receipt lies among the keys; one without a receipt is refused."""
    save_declaration(tmp_path, POLICIES[0])
    table = steps({"a": 3, "b": 2})
    receipt = Keyed(0, "", "bulk:k", digest_rows(table, 3), 3)
    journal = SqliteJournal.open(tmp_path / "journal")
    put = {
        f"{INSTANCE}{n}-abc": msgspec.json.encode(
            {"number": n, "name": name, "starts": [[0, 0]], "used": n}
        )
        for n, name in enumerate(("bulk:k", "import-abc"))
    }
    journal.commit(
        rows=[(1, encode_row(0, 0, [encode_event(receipt)] if kept else []))],
        put={**put, COUNTERS: b'{"instances": 2}'},
    )
    journal.close()
    with CollectorProcess(tmp_path) as collector:
        named = collector.post("/v1/instances", {"name": "import-abc"})[1]
        assert named == {"instance": "1-abc", "starts": [[0, 0]]}
        assert post(collector, steps({"x": 3}), idempotency_key="k")[0] == 409
        status, answer = post(collector, table, idempotency_key="k")
        if kept:
            assert answer == {"durable": True, "accepted": 4, "duplicates": 5}
        else:
            assert (status, answer["error"]["path"]) == (409, "Idempotency-Key")


def test_many_episodes_make_many_batches(collector: CollectorProcess) -> None:
    """More events than one batch may hold; the answer counts all, and names rows of the table."""
    lengths = {f"many-{n}": 20 for n in range(600)}
    actions = np.zeros(12_000, np.int64)
    actions[11_999] = 3
    status, answer = post(collector, steps(lengths, actions=pa.array(actions)))
    assert status == 200
    assert answer["accepted"] == 600 * 22 - 2
    assert [item["index"] for item in answer["refused"]] == [11_999]
    assert msgspec.json.decode(msgspec.json.encode(answer)) == answer


def test_an_import_leaves_the_loop_to_others_between_its_rows(tmp_path: Path) -> None:
    """Many short episodes are several journal rows, each durable before the next is begun."""
    save_declaration(tmp_path, replace(POLICIES[0], seal_seconds=3600.0))
    with CollectorProcess(tmp_path) as collector:
        lengths = {f"short-{n}": 1 for n in range(1_200)}
        assert post(collector, steps(lengths))[1] == {"durable": True, "accepted": 3_600}
        with urllib3.PoolManager() as pool:
            text = pool.request("GET", collector.address + "/metrics").data.decode()
    (rows,) = (line for line in text.splitlines() if line.startswith("headrace_journal_rows "))
    assert float(rows.split()[1]) == 3.0


@pytest.mark.parametrize("quickly", [True, False])
def test_an_import_waits_for_the_writer_between_its_rows(tmp_path: Path, quickly: bool) -> None:
    """More episodes than may wait for their shards: what has begun is not refused half way."""
    save_declaration(tmp_path, POLICIES[0])
    slow = {} if quickly else {"infos": [""] * 4_000}
    with CollectorProcess(tmp_path, options=["--limit", "max_pending=300000"]) as collector:
        lengths = {f"one-{n}": 1 for n in range(4_000)}
        assert post(collector, steps(lengths, **slow))[1] == {"durable": True, "accepted": 12_000}
        collector.settle(4_000)
    assert len(shard_rows(tmp_path)) == 4_000


# --- the quick way, where steps stay columns ----------------------------------------------------


def obs_with(value: float) -> pa.Array:
    """Observations of box:2 for six steps, one of them with this number."""
    flat = np.arange(12, dtype=np.float32)
    flat[5] = value
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), 2)


PLAIN = PolicyRules.of(POLICIES[0])
SOME = {"a": 3, "b": 1, "c": 2}
CLOSER: dict[str, dict[str, Any]] = {
    "infos": {"infos": [""] * 6},
    "a null": {"rewards": pa.array([1.0, None, 1.0, 1.0, 1.0, 1.0])},
    "a reward that is not finite": {"rewards": pa.array([1.0, np.inf, 1.0, 1.0, 1.0, 1.0])},
    "an action out of range": {"actions": pa.array([0, 1, 2, 3, 0, 1])},
    "another dtype": {"actions": pa.array([0, 1, 2, 0, 1, 2], pa.int32())},
    "an observation that is not finite": {"obs": obs_with(np.nan)},
    "a log-probability above 0": {"action_logp": [-1.0, 0.5, -1.0, -1.0, -1.0, -1.0]},
    "a gap in t": {"t": [0, 2, 3, 0, 0, 1]},
    "an id in two places": {"eps_id": ["a", "b", "a", "c", "d", "d"]},
    "an unknown column": {"colour": ["red"] * 6},
    "tags that are no object": {"tags": ["[]"] * 6},
    "tags without end": {"tags": ["[" * 100_000] + ["{}"] * 5},
}


def test_plain_columns_go_the_quick_way() -> None:
    """Whole episodes, as the rows say."""
    given = {"t": [0, 1, 2, 0, 0, 1], "truncateds": [False] * 5 + [True], "ts": [7] * 6}
    runs = runs_of(steps(SOME, **given), PLAIN, numbered=True)
    assert runs is not None
    assert [(r.start.episode_id, r.steps, r.how) for r in runs.episodes] == [
        ("a", 3, "terminated"),
        ("b", 1, "terminated"),
        ("c", 2, "truncated"),
    ]
    assert runs.columns["rewards"] == np.arange(6.0).tobytes()
    assert runs.columns["logp"] == b""
    assert [(r.start.start, r.start.ts) for r in runs.episodes] == [(0, 7), (1, 7), (2, 7)]


@pytest.mark.parametrize("some", [[0], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
def test_the_columns_of_some_episodes_are_theirs(some: list[int]) -> None:
    """What is known already is left out, wherever it stands."""
    runs = runs_of(steps(SOME, ts=list(range(6))), PLAIN, numbered=True)
    assert runs is not None
    rows = np.concatenate([[[0, 1, 2], [3], [4, 5]][n] for n in some])
    columns = runs.columns_of([runs.episodes[n] for n in some])
    assert np.frombuffer(columns["rewards"]).tolist() == rows.tolist()
    assert np.frombuffer(columns["ts"], np.int64).tolist() == rows.tolist()
    values = np.frombuffer(columns["obs"], np.float32).reshape(-1, 2)
    assert values[:, 0].tolist() == (2 * rows).tolist()
    assert columns["versions"] == b""


def test_ids_by_a_dictionary_are_their_own() -> None:
    """Whatever order a dictionary has, and whatever else is in it."""
    ids = pa.DictionaryArray.from_arrays(pa.array([2, 2, 1]), pa.array(["x", "late", "early"]))
    runs = runs_of(steps({"_": 3}, eps_id=ids), PLAIN, numbered=False)
    assert runs is not None
    assert [(r.start.episode_id, r.steps) for r in runs.episodes] == [("early", 2), ("late", 1)]


def test_late_rewards_need_the_way_row_by_row() -> None:
    """There the steps stay in memory for as long as they take rewards."""
    windowed = PolicyRules.of(replace(POLICIES[0], reward_window=5.0))
    assert runs_of(steps(SOME), windowed, numbered=True) is None


@pytest.mark.parametrize("columns", CLOSER.values(), ids=CLOSER.keys())
def test_what_asks_for_a_closer_look_is_not_taken_quickly(columns: dict[str, Any]) -> None:
    """Row by row the import says what is wrong and where."""
    assert runs_of(steps(SOME, **columns), PLAIN, numbered=True) is None


def test_known_and_refused_episodes_leave_the_others_whole(tmp_path: Path) -> None:
    """One event holds exactly what was taken; a kill and a replay change nothing."""
    save_declaration(tmp_path, replace(POLICIES[0], seal_seconds=3600.0))
    with CollectorProcess(tmp_path) as collector:
        assert post(collector, steps({"b": 2}))[1]["accepted"] == 4
        status, answer = post(collector, steps({"a": 3, "b": 1, "c": 2}))
        assert (status, answer["accepted"]) == (200, 9)
        (refused,) = answer["refused"]
        assert (refused["error"]["code"], refused["error"]["path"]) == ("completed", "$.eps_id[3]")
        assert post(collector, steps({"d": 1}), idempotency_key="k")[1]["accepted"] == 3
        assert post(collector, steps({"d": 1, "e": 2}), idempotency_key="k")[1]["accepted"] == 4
        collector.kill()
        collector.restart()
        assert post(collector, steps({"d": 1, "e": 2}), idempotency_key="k")[1]["accepted"] == 0
        assert collector.stop() == 0
    found = sorted((r["eps_id"], r["t"], r["rewards"]) for r in shard_rows(tmp_path))
    assert found == [
        *(("a", t, float(t)) for t in range(3)),
        *(("b", t, float(t)) for t in range(2)),
        *(("c", t, t + 4.0) for t in range(2)),
        ("d", 0, 0.0),
        *(("e", t, t + 1.0) for t in range(2)),
    ]


def test_both_ways_store_the_same_and_a_kill_changes_nothing(tmp_path: Path) -> None:
    """An empty info sends the same rows the other way; both are read back from the journal."""
    given = {
        "action_logp": pa.array([-0.5, -1.0, -1.5, -2.0, -2.5, -3.0]),
        "policy_version": [4] * 6,
        "pass_prob": [0.5] * 6,
        "ts": list(range(6)),
        "ended": [None, None, "terminated", "truncated", None, None],
        "tags": ['{"user": "u"}'] * 6,
    }
    save_declaration(tmp_path, replace(POLICIES[0], seal_seconds=3600.0))
    with CollectorProcess(tmp_path) as collector:
        assert post(collector, steps(SOME, **given))[0] == 200
        slow = {name + "-slow": length for name, length in SOME.items()}
        assert post(collector, steps(slow, **given, infos=[""] * 6))[0] == 200
        collector.kill()
        collector.restart()
        assert collector.stop() == 0
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for row in sorted(shard_rows(tmp_path), key=lambda row: (row["eps_id"], row["t"])):
        name, _, way = row["eps_id"].partition("-")
        own = ("eps_id", "received_ts", "ordinal", "episode_ordinal")
        values = {k: np.asarray(v).tolist() for k, v in row.items() if k not in own}
        found[bool(way)].append(values | {"eps_id": name})
    assert len(found[False]) == 6
    assert str(found[False]) == str(found[True])  # as text: a null reads as NaN here
