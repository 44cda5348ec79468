"""Bulk imports: Arrow in, rows out; refusals name column and row."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from ingest.access.tokens import LOCAL, Allowance, Caller
from ingest.bulk_import.acceptance import GROUP_WHOLE, Acceptance
from ingest.bulk_import.handler import MANY_ROWS, Importer
from ingest.bulk_import.step_columns import BLOCK_ROWS
from ingest.collector.adoption import adopt
from ingest.collector.collector import Collector
from ingest.collector.recovery import recover
from ingest.episodes.idempotency import STATE
from ingest.episodes.journal_events import Keyed, Stored, encode_event, encode_row
from ingest.episodes.sealed_parts import Limits
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from ingest.web.asgi import Request
from ingest.web.cost_limits import Penalties, Requester
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import JournalBehind, JournalFull
from storage.experience.part_columns import each_part
from storage.journal.memory_journal import MemoryJournal
from storage.shards.shard import read_shard
from storage.spaces.descriptors import Box, Dict, Discrete, parse_space
from tests.collector_process import CollectorProcess, shard_rows
from tests.ingest.collector.test_collector import running
from tests.ingest.simulated_collector import MemoryShelf, MemoryWriter

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
    """Episodes of box:2 and discrete:3, with the row number as reward."""
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
    """Every value of the import is in the shards once, including images and nested spaces."""
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
    assert mine[2]["final_obs"].tolist() == [7, 8]
    assert mine[1]["infos"] == '{"k": 1}'
    assert {r["source"] for r in mine} == {"replayed"}
    assert {r["tags"] for r in mine} == {'{"user":"u1"}'}
    (nested,) = (r for r in rows if r["policy_id"] == "mixed")
    assert nested["obs__image"] == bytes([1, 2, 3, 4])
    assert nested["obs__place"] == 3
    assert nested["obs__x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert list(nested["actions"]) == [0.5, -0.5]


def test_the_columns_of_a_shard_come_back_with_their_endings(tmp_path: Path) -> None:
    """An episode that was abandoned or broken is so after a second import, for every estimator."""
    ended = ["terminated", None, "truncated", "abandoned", "broken"]
    columns = {
        "ended": ended,
        "policy_id": ["default"] * 5,
        "final_obs": [None] * 4 + [b"12345678"],
    }
    sent = steps({"a": 1, "b": 2, "c": 1, "d": 1}, **columns)
    found = []
    for root in (tmp_path / "first", tmp_path / "second"):
        with _collector(root) as collector:
            assert post(collector, sent) == (200, {"durable": True, "accepted": 13})
            states = [collector.get(f"/v1/episodes/{name}")[1]["state"] for name in "abcd"]
            assert states == [how for how in ended if how]
            again = steps({"d": 1})
            (item,) = post(collector, again)[1]["refused"]
            assert item["error"]["message"] == "Episode d is broken: it was imported as broken"
            assert collector.stop() == 0
        (path,) = (root / "shards").glob("*/*.parquet")
        shard = read_shard(path)
        known = {*sent.column_names, "terminateds", "truncateds", "t", "tags", "ts", "agent_id"}
        sent = shard.select([name for name in shard.column_names if name in known])
        found.append(sent.drop_columns("ts").to_pylist())
    assert found[0] == found[1]
    assert [row["ended"] for row in found[1]] == ended
    assert [row["terminateds"] for row in found[1]] == [True, False, False, False, False]
    assert [row["truncateds"] for row in found[1]] == [False, False, True, True, True]


def test_every_episode_keeps_its_own_tags(tmp_path: Path) -> None:
    """Also if a request has thousands of different ones; an invalid one is named among them."""
    count = 3_000
    tags = [f'{{"user":"u{number}"}}' for number in range(count)]
    lengths = {f"e{number:05d}": 1 for number in range(count)}
    with _collector(tmp_path) as collector:
        odd = [*tags[:7], '{"user":7}', *tags[8:]]
        status, answer = post(collector, steps(lengths, tags=odd))
        assert (status, [item["index"] for item in answer["refused"]]) == (200, [7])
        assert post(collector, steps({"e00007": 1}, tags=tags[7:8]))[0] == 200
        assert collector.stop() == 0
    assert sorted((row["eps_id"], row["tags"]) for row in shard_rows(tmp_path)) == [
        *zip(lengths, tags, strict=True)
    ]


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
    (steps({"x": 2}, policy_id=["default", "mixed"]), 422, "one policy"),
    (steps({"x": 2}, policy_id=["default", None]), 422, "one policy"),
    (steps({"x": 2}, policy_id=["nobody"] * 2), 422, "nobody"),
    (steps({"x": 2}, agent_id=["a", "b"]), 422, "agent"),
    (steps({"x": 2}, eps_id=[1, 2]), 422, "$.eps_id"),
    (steps({"x": 2}, actions=[0.0, 1.0]), 422, "$.actions"),
    (steps({"x": 2}, obs=[[[0.0, 0.0]]] * 2), 422, "$.obs"),
    (steps({"x": 2}, infos=[1, 2]), 422, "$.infos"),
    (steps({"x": 2}, truncateds=["no", "yes"]), 422, "$.truncateds"),
    (steps({"x": 2}, ts=["now", "then"]), 422, "$.ts"),
    (steps({"x": 2}, ended=[None, "done"]), 422, "terminated, truncated, abandoned, broken, or"),
    (steps({"x": 2}, ended=["", "Truncated"]), 422, "['', 'Truncated']$.ended"),
    (steps({"x": 1}, agent_id=["a"], env_t=[0], ended=["abandoned"]), 422, "$.ended"),
    (pa.table([[1], [2]], names=["eps_id", "eps_id"]), 422, "repeated"),
    (b"nonsense", 400, "Arrow stream"),
    (b"", 400, "Arrow stream"),
    (body(steps({"x": 2}))[:-60], 400, "Arrow stream"),
]


@pytest.mark.parametrize(("table", "status", "text"), BAD)
def test_a_form_that_does_not_fit_is_refused_as_a_whole(
    collector: CollectorProcess, table: pa.Table | bytes, status: int, text: str
) -> None:
    """The answer names the column and the row; nothing of the body is accepted."""
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
        ({"obs": [[0, 0], [0, 0], [0], [0, 0], [0, 0], [0, 0]]}, "$.obs[2]"),
        ({"obs": [[0, 0], None, [0], [0, 0], [0, 0], [0, 0]]}, "$.obs[1]"),
        ({"t": [0, 1, 3, 3, 0, 1]}, "$.t[2]"),
        ({"rewards": pa.array([0.0, 1.0, 2.0, None, 4.0, 5.0])}, "$.rewards[3]"),
        ({"infos": [None, "", "[", None, "{}", None]}, "$.infos[2]"),
        ({"infos": [None, '{"a": NaN}', None, None, None, None]}, "$.infos[1]"),
        ({"policy_version": [0, 0, -2, 0, 0, 0]}, "$.policy_version[2]"),
        ({"ts": [0, 0, 2**62 + 1, 0, 0, 0]}, "$.ts[2]"),
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
    ((reason, _),) = answer["refused_by"].items()
    assert reason.startswith(path[2:-3])
    assert collector.get(f"/v1/episodes/{bad}")[1]["state"] == "broken"
    assert collector.get(f"/v1/episodes/{good}")[1]["state"] == "terminated"


@pytest.mark.parametrize(
    ("columns", "path"),
    [
        ({"actions": [9, 1, 2, 0, 1, 2]}, "$.actions[0]"),
        ({"tags": ["[]", *[None] * 5]}, "$.tags[0]"),
        ({"tags": ['{"a": 1}', *[None] * 5]}, "$.tags[0]"),
        ({"tags": ["[" * 100_000, *["{}"] * 5]}, "$.tags[0]"),
        ({"continues": ["x" * 257, *[None] * 5]}, "$.continues[0]"),
        ({"eps_id": [*[""] * 4, "%", "%"]}, "$.eps_id[0]"),
        ({"eps_id": pa.array([*[None] * 4, "%", "%"])}, "$.eps_id[0]"),
        ({"eps_id": [*["x" * 257] * 4, "%", "%"]}, "$.eps_id[0]"),
    ],
)
def test_an_episode_without_a_good_step_is_not_begun(
    collector: CollectorProcess, columns: dict[str, Any], path: str, request: Any
) -> None:
    """The id of an episode without a good step stays free, so that corrected rows may be sent; the
    next episode is whole."""
    bad, good = (f"{request.node.name}-{which}"[:200] for which in ("bad", "good"))
    if "eps_id" in columns:
        names = pa.array(columns["eps_id"]).to_pylist()
        columns = {"eps_id": [good if name == "%" else name for name in names]}
    status, answer = post(collector, steps({bad: 4, good: 2}, **columns))
    assert (status, answer["accepted"]) == (200, 4)
    assert [item["error"]["path"] for item in answer["refused"]] == [path]
    assert collector.get(f"/v1/episodes/{bad}")[0] == 404
    assert collector.get(f"/v1/episodes/{good}")[1]["state"] == "terminated"
    assert post(collector, steps({bad: 4}))[1]["accepted"] == 6


def test_an_id_in_two_places_is_no_episode_in_either(collector: CollectorProcess) -> None:
    """Half an episode is never taken for a whole one."""
    status, answer = post(
        collector, steps({"_": 5}, eps_id=[*["twice"] * 2, "between", "twice", "after"])
    )
    assert (status, answer["accepted"]) == (200, 6)
    assert [item["index"] for item in answer["refused"]] == [0, 3]
    assert collector.get("/v1/episodes/twice")[0] == 404


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
    """Each leaf of a nested space is checked; no bad value ends in a 500."""
    status, answer = post(collector, _mixed(eps_id=[f"leaf-{columns!r:.40}"], **columns))
    assert status == 200
    assert answer["refused"][0]["error"]["code"] == "invalid"


def request(given: pa.Table | bytes, key: str = "", caller: Caller = LOCAL) -> Request:
    data = given if isinstance(given, bytes) else body(given)
    headers = {
        b"content-type": ARROW.encode(),
        b"headrace-crc32": f"{zlib.crc32(data):08x}".encode(),
        **({b"idempotency-key": key.encode()} if key else {}),
    }
    return Request("POST", "/v1/steps", headers, data, caller=caller)


PATIENT = replace(POLICIES[0], seal_bytes=10**9, seal_seconds=10**6)
"""A policy of which nothing is sealed before the collector's drain."""

Told = tuple[int, int, list[tuple[int, str]]]  # accepted, duplicates, refused rows and reasons
Send = Callable[..., Awaitable[Told]]


@asynccontextmanager
async def importing(
    journal: MemoryJournal, policy: PolicyDeclaration = PATIENT, **given: Any
) -> AsyncIterator[tuple[Collector, Send]]:
    """A collector, and a function that sends it an import: (table, key, caller) -> the answer."""
    async with running(journal, policy=policy, **given) as collector:
        imports = Importer(collector)

        async def send(table: pa.Table | bytes, key: str = "", caller: Caller = LOCAL) -> Told:
            try:
                reply, _ = await imports.take(request(table, key, caller))
            except Refusal as refusal:
                return 0, 0, [(-1, refusal.code)]
            refused = [(item.index, item.error["code"]) for item in reply.refused]
            return reply.accepted, reply.duplicates, refused

        yield collector, send


@pytest.mark.parametrize("rows", [1, MANY_ROWS + 1])
def test_an_import_of_many_rows_waits_for_the_penalty_to_be_over(rows: int) -> None:
    """An import of many rows is expensive however short its body: it is not read before the penalty
    is over, a small one is."""

    async def main() -> None:
        penalties = Penalties()
        sender = Requester(penalties, "account", "connection")
        sent = msgspec.structs.replace(request(steps({"e": rows})), sender=sender)
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            imports = Importer(collector)
            await imports.take(request(steps({"first": 1})))  # loads Arrow
            penalties.charge("account", 0.003, time.monotonic())
            assert (await imports.take(sent))[0].accepted == rows + 2
        assert sender.is_costly == (rows > MANY_ROWS)
        assert not (sender.is_costly and sender.penalty)

    asyncio.run(main())


def rows_of(journal: MemoryJournal, policy: PolicyDeclaration = PATIENT) -> list[tuple[str, int]]:
    """(episode, t) of every row that a collector finds in a journal, with repetitions."""

    async def main() -> list[tuple[str, int]]:
        async with running(journal.crash(), policy=policy) as collector:
            ready = collector.sealing._ready.values()
            parts = [
                one.part for found in ready for sealed in found.parts for one in sealed.split()
            ]
            return [
                (p.episode_id, p.t0 + t) for p in parts if p is not None for t in range(p.steps)
            ]

    return asyncio.run(main())


def test_a_key_with_other_rows_is_a_conflict() -> None:
    """Rows appended to the earlier ones are accepted, other rows are not; also after a kill."""
    journal = MemoryJournal()
    first, longer = steps({"a": 3, "b": 2}), steps({"a": 3, "b": 2, "d": 1})
    others = (steps({"a": 3}), steps({"a": 3, "c": 2}), steps({"x": 3, "b": 2, "c": 1}))

    async def main() -> None:
        async with importing(journal) as (_, send):
            assert await send(first, "k") == (9, 0, [])
            for other in others:
                assert await send(other, "k") == (0, 0, [(-1, "conflict")])
            crashed = journal.crash()
        async with importing(crashed) as (_, send):
            for other in others:
                assert await send(other, "k") == (0, 0, [(-1, "conflict")])
            assert await send(first, "k") == (0, 9, [])
            assert await send(steps({"c": 1}), "other") == (3, 0, [])
            assert await send(longer, "k") == (3, 9, [])
            assert await send(first, "k") == (0, 0, [(-1, "conflict")])

    asyncio.run(main())


def test_repeating_an_import_adds_nothing() -> None:
    """Under its Idempotency-Key an import counts once, also after a kill and in a longer file."""
    journal, longer = MemoryJournal(), steps({"a": 3, "b": 2, "c": 1})

    async def main() -> MemoryJournal:
        async with importing(journal) as (_, send):
            assert await send(steps({"a": 3, "b": 2}), "k") == (9, 0, [])
            assert await send(steps({"a": 3, "b": 2}), "k") == (0, 9, [])
            crashed = journal.crash()
        async with importing(crashed) as (_, send):
            assert await send(longer, "k") == (3, 9, [])
            assert await send(longer, "x" * 201) == (0, 0, [(-1, "invalid")])
            assert {code for _, code in (await send(longer))[2]} == {"completed"}
            return crashed.crash()

    assert sorted(rows_of(asyncio.run(main()))) == [*zip("aaabbc", [0, 1, 2, 0, 1, 0], strict=True)]


def test_what_did_not_fit_is_told_again_and_never_taken() -> None:
    """A retry under the same key gets the first answer."""
    actions = pa.array([0, 9, 0, 9, 0])
    table = steps({"broken": 3, "none": 1, "good": 1}, actions=actions)

    async def main() -> None:
        journal = MemoryJournal()
        async with importing(journal) as (collector, send):
            assert await send(table, "k") == (5, 0, [(1, "invalid"), (3, "invalid")])
            assert await send(table, "k") == (0, 3, [(1, "invalid"), (3, "invalid")])
            (known,) = (collector.assembler.instances.get(i) for i in collector.assembler.instances)
            assert known is not None
            assert known.starts.ranges() == [(0, 2)]  # refused starts use up numbers
            crashed = journal.crash()
        async with importing(crashed) as (_, send):
            assert await send(table, "k") == (0, 3, [(1, "invalid"), (3, "invalid")])

    asyncio.run(main())


def test_no_one_else_takes_an_imports_key_or_name(collector: CollectorProcess) -> None:
    """An import answered with 200 is on disk, whatever another token does with its key."""
    status, answer = collector.request("POST", "/v1/instances", {"name": "bulk:k"})
    assert (status, answer["error"]["path"]) == (422, "$.name")
    web, two = Caller("w"), Caller("t")
    first, other = steps({"a": 3, "b": 2}), steps({"x": 1})

    async def main() -> None:
        journal = MemoryJournal()
        async with importing(journal) as (_, send):
            assert await send(first, "k", web) == (9, 0, [])
            assert await send(other, "k", two) == (3, 0, [])
            crashed = journal.crash()
        async with importing(crashed) as (_, send):
            assert await send(first, "k", web) == (0, 9, [])
            assert await send(other, "k", two) == (0, 3, [])
            assert await send(other, "k", web) == (0, 0, [(-1, "conflict")])

    asyncio.run(main())


def test_keys_of_single_calls_push_no_import_out() -> None:
    """An import's key is kept as long as the start numbers of its episodes."""
    limits = Limits(keys=3)

    async def main() -> None:
        journal = MemoryJournal()
        async with importing(journal, limits=limits) as (_, send):
            assert await send(steps({"a": 3}), "k") == (5, 0, [])
            keys = [Keyed(9 + n, "e", str(n), b"", 1) for n in range(4)]
            crashed = journal.crash()
        crashed.commit(put={f"{STATE}{9:016}": msgspec.msgpack.encode(keys)})
        async with importing(crashed, limits=limits) as (collector, send):
            assert len(collector.keys) == 3
            assert await send(steps({"b": 3}), "k") == (0, 0, [(-1, "conflict")])
            assert await send(steps({"a": 3}), "k") == (0, 5, [])
            assert await send(steps({"a": 3, "b": 1}), "k") == (3, 5, [])

    asyncio.run(main())


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


def test_an_import_leaves_the_loop_and_the_disk_to_others_between_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many short episodes make several journal rows, each on disk before the next is submitted."""
    waits: list[tuple[int, int]] = []

    async def main() -> None:
        count = 4 * GROUP_WHOLE + 200
        async with importing(MemoryJournal()) as (collector, send):
            journal = collector.journal
            durable = journal.durable

            async def waited(row: int) -> None:
                waits.append((row, journal.submitted_row))
                await durable(row)

            monkeypatch.setattr(journal, "durable", waited)
            assert await send(steps({f"short-{n}": 1 for n in range(count)})) == (3 * count, 0, [])
            assert waits == [(row, row) for row in range(1, 6)]

    asyncio.run(main())


def test_a_bad_row_leaves_the_other_episodes_in_columns() -> None:
    """They are one journal row; the broken episode has its own. A repeated import knows all."""
    rewards = [float(row) for row in range(600)]
    rewards[301] = float("nan")  # the second row of episode 150
    table = steps({f"e{n}": 2 for n in range(300)}, rewards=rewards)

    async def main() -> MemoryJournal:
        async with importing(journal := MemoryJournal()) as (_, send):
            assert await send(table, "k") == (299 * 4 + 2, 0, [(301, "invalid")])
            assert journal.last_row == 3  # the key's, and these two
            crashed = journal.crash()
        async with importing(crashed) as (_, send):
            assert await send(table, "k") == (0, 299 * 4, [(301, "invalid")])
            return crashed.crash()

    found = rows_of(asyncio.run(main()))
    assert len({*found}) == len(found) == 599


class FullOnce(MemoryJournal):
    """A journal whose disk is full at one commit of rows."""

    commits = 12

    def commit(self, rows: Any = (), **change: Any) -> None:
        self.commits -= bool(rows)
        if rows and not self.commits:
            raise JournalFull("no space")
        super().commit(rows, **change)


class LateImporter(Importer):
    """Simulates a wait for the shard writer between two turns, as long as a rebuild takes."""

    async def _room(self, taking: Acceptance, caller: Caller) -> None:
        for _ in range(50 if taking.has_begun else 0):
            await asyncio.sleep(0.001)
        await super()._room(taking, caller)


@pytest.mark.parametrize("importer", [Importer, LateImporter])
def test_what_a_full_disk_takes_back_is_not_acknowledged(importer: type[Importer]) -> None:
    """Turns whose rows are lost are refused, whenever that is noticed; a retry adds the rest.

    Some episodes are abandoned, whose groups are not columns.
    """
    count = 10 * GROUP_WHOLE
    ended = ["abandoned"] * (count // 10) + ["terminated"] * (count - count // 10)
    table = steps({f"e{n}": 1 for n in range(count)}, ended=ended)
    journal = FullOnce()

    async def main() -> MemoryJournal:
        async with importing(journal) as (collector, send):
            with pytest.raises(Refusal) as refused:
                await importer(collector).take(request(table, "k"))
            assert refused.value.code in ("busy", "disk_full")
            while collector.journal.rebuilding is not None:
                await asyncio.sleep(0.001)
            accepted, known, left_out = await send(table, "k")
            assert (accepted + known, left_out) == (3 * table.num_rows, [])
            assert accepted > 0
            return journal.crash()

    found = rows_of(asyncio.run(main()))
    assert len(found) == len({*found}) == table.num_rows


def test_an_import_waits_for_the_writer_between_its_rows(tmp_path: Path) -> None:
    """With more episodes than may wait for their shards, an import is not refused half-way."""
    save_declaration(tmp_path, POLICIES[0])
    with CollectorProcess(tmp_path, options=["--limit", "max_pending=300000"]) as collector:
        lengths = {f"one-{n}": 1 for n in range(4_000)}
        assert post(collector, steps(lengths))[1] == {"durable": True, "accepted": 12_000}
        collector.settle(4_000)
    assert len(shard_rows(tmp_path)) == 4_000


def test_known_and_refused_episodes_leave_the_others_whole() -> None:
    """One event holds exactly the accepted rows; a kill and a replay change nothing."""

    async def main() -> MemoryJournal:
        journal = MemoryJournal()
        async with importing(journal) as (_, send):
            assert (await send(steps({"b": 2})))[0] == 4
            assert await send(steps({"a": 3, "b": 1, "c": 2})) == (9, 0, [(3, "completed")])
            assert await send(steps({"d": 1}), "k") == (3, 0, [])
            assert await send(steps({"d": 1, "e": 2}), "k") == (4, 3, [])
            return journal.crash()

    found = sorted(rows_of(asyncio.run(main())))
    assert found == [*((name, t) for name, n in (("a", 3), ("b", 2), ("c", 2), ("d", 1), ("e", 2))
                       for t in range(n))]  # fmt: skip


def test_a_rate_is_charged_before_anything_is_waited_for() -> None:
    """A request sent together with a large import finds the allowance used."""

    async def main() -> None:
        allowance = Allowance(rate=100.0, since=0.0)
        caller = Caller("t", allowance=allowance)
        async with importing(MemoryJournal()) as (_, send):
            call = asyncio.ensure_future(send(steps({"a": 300}), caller=caller))
            await asyncio.sleep(0)
            assert not call.done()
            assert allowance.wait(0.0) == pytest.approx(2.0)
            assert (await call)[0] == 302
            assert allowance.wait(0.0) == pytest.approx(2.0)  # once, not twice

    asyncio.run(main())


# --- long episodes ------------------------------------------------------------------------------

ROWS = 2 * BLOCK_ROWS + 300
LENGTHS = {"before": 2, "long": ROWS, "behind": 2}


def test_a_long_episode_is_stored_as_one() -> None:
    """A long episode takes several journal rows and parts, which readers join; a repetition adds
    nothing."""
    table = steps(LENGTHS, infos=["", '{"k": 1}'] * (ROWS // 2 + 2))

    async def main() -> MemoryJournal:
        journal = MemoryJournal()
        async with importing(journal) as (collector, send):
            assert await send(table, "k") == (ROWS + 4 + 6, 0, [])
            assert journal.last_row >= 4
            (ready,) = collector.sealing._ready.values()
            split = [one.part for item in ready.parts for one in item.split()]
            parts = [part for part in split if part and part.episode_id == "long"]
            rewards = np.concatenate([np.frombuffer(part.rewards) for part in parts])
            assert rewards.tolist() == [float(row) for row in range(2, ROWS + 2)]
            assert [part.part for part in parts] == [*range(len(parts))]
            assert {part.steps for part in parts[:-2]} == {PATIENT.part_steps}
            for part, after in pairwise(parts):
                assert part.t0 + part.steps == after.t0
                assert (part.ended, part.final_obs) == (None, after.obs[:8])
                assert part.episode_ordinal == after.episode_ordinal
            assert (parts[-1].ended, parts[-1].final_obs) == ("terminated", None)
            assert sum(len(part.infos) for part in parts) == ROWS // 2
            assert await send(table, "k") == (0, ROWS + 4 + 6, [])
            return journal.crash()

    found = rows_of(asyncio.run(main()))
    assert len(found) == len({*found}) == ROWS + 4


@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_an_import_that_stops_in_a_long_episode_begins_it_anew(how: str) -> None:
    """Earlier episodes are neither lost nor doubled, and nothing of the long one was accepted."""
    table, caller = steps(LENGTHS), Caller("w")

    async def main() -> MemoryJournal:
        journal = MemoryJournal()
        async with importing(journal) as (collector, send):
            call = asyncio.ensure_future(send(table, "k", caller))
            while not collector.assembler.staged:
                await asyncio.sleep(0)
            if how != "killed":
                call.cancel()
                await asyncio.wait([call])
                assert not collector.assembler.staged
                assert collector.assembler.steps == 2
                assert await send(steps({"long": 1}), "", Caller("x")) == (3, 0, [])
                assert (await send(table, "k", caller))[:2] == (ROWS + 8 - 4 - ROWS, 4)
                return journal.crash()
            crashed = journal.crash()
            call.cancel()
            await asyncio.wait([call])
        async with importing(crashed) as (collector, send):
            assert collector.assembler.steps == 2
            assert collector.sealing.idle_rows
            assert await send(table, "k", caller) == (ROWS + 2 + 4, 4, [])
            return crashed.crash()

    found = rows_of(asyncio.run(main()))
    assert len(found) == len({*found}) == (ROWS + 4 if how == "killed" else 5)


def test_a_bad_row_of_a_long_episode_is_named_once() -> None:
    """Whichever piece of the episode has the bad row, the earlier steps are kept and the next
    episode is accepted."""

    async def main(bad: int) -> MemoryJournal:
        actions = np.zeros(ROWS + 4, np.int64)
        actions[[bad, min(bad + 2, ROWS + 1)]] = 9
        journal = MemoryJournal()
        async with importing(journal) as (_, send):
            table = steps(LENGTHS, actions=actions)
            accepted, _, refused = await send(table, "k")
            assert refused == [(bad, "invalid")]
            assert accepted == 8 + (bad - 1 if bad > 2 else 0)
            assert await send(table, "k") == (0, 8, [(bad, "invalid")])
            return journal.crash()

    for bad in (2, 3, 2 + BLOCK_ROWS, ROWS + 1):
        found = rows_of(asyncio.run(main(bad)))
        assert sum(name == "long" for name, _ in found) == bad - 2


def test_whoever_takes_the_id_meanwhile_has_it() -> None:
    """The last piece is checked again: two episodes are never mixed under one id."""

    async def main() -> None:
        async with importing(MemoryJournal()) as (collector, send):
            call = asyncio.ensure_future(send(steps(LENGTHS)))
            while not collector.assembler.staged:
                await asyncio.sleep(0)
            collector.accept(wire.Batch(events=[wire.Start(episode_id="long")]))
            assert await call == (8, 0, [(2, "already_started")])
            assert not collector.assembler.staged

    asyncio.run(main())


def test_late_rewards_reach_an_imported_step() -> None:
    """An imported episode waits for its policy's reward window, long or short, also over a kill."""
    windowed, now = replace(PATIENT, reward_window=5.0), 0.0
    late = [wire.LogReturns(episode_id=name, step=1, reward=0.5) for name in LENGTHS]

    async def main() -> list[float]:
        nonlocal now
        journal = MemoryJournal()
        async with importing(journal, windowed, clock=lambda: now) as (_, send):
            assert await send(steps(LENGTHS), "k") == (ROWS + 10, 0, [])
            crashed = journal.crash()
        async with importing(crashed, windowed, clock=lambda: now) as (collector, send):
            assert await send(steps(LENGTHS), "k") == (0, ROWS + 10, [])
            reply, _ = collector.accept(wire.Batch(events=late))
            assert (reply.accepted, reply.refused) == (3, [])
            now += 6.0
            collector.tick()
            reply, _ = collector.accept(wire.Batch(events=late))
            assert {item.error["code"] for item in reply.refused} == {"window_closed"}
            (ready,) = collector.sealing._ready.values()
            parts = [
                one.part for item in ready.parts for one in item.split() if one.part is not None
            ]
            assert sum(part.steps for part in parts) == ROWS + 4
            return [float(np.frombuffer(part.rewards)[1]) for part in parts]

    assert sorted(asyncio.run(main())) == [1.5, 3.5, ROWS + 3.5]


def test_blocks_of_episodes_are_recorded_and_replayed_whole() -> None:
    """Each episode has an ordinal of its own; a crash before the plan gives the same ones again."""
    count = 2 * GROUP_WHOLE + 500
    table = steps({f"e{n}": 1 + n % 2 for n in range(count)})

    async def main(*, planned: bool) -> tuple[MemoryJournal, list[tuple[str, int]]]:
        journal = MemoryJournal()
        async with importing(journal) as (collector, send):
            await send(table, "k")
            if planned:
                collector.sealing.plan_all()
                while collector.sealing.in_flight:
                    await asyncio.sleep(0.001)
                assert collector.assembler.done.ranges() == [(0, count - 1)]
                assert collector.assembler.needed == {}
                assert collector.sealing.totals.parts == count
                assert collector.sealing.totals.episodes == count
            return journal.crash(), numbered(collector)

    def numbered(collector: Collector) -> list[tuple[str, int]]:
        ready = [item for found in collector.sealing._ready.values() for item in found.parts]
        parts = each_part(item.part for item in ready if item.part is not None)
        return [(part.episode_id, part.ordinal) for part in parts]

    async def again(journal: MemoryJournal) -> list[tuple[str, int]]:
        async with importing(journal) as (collector, send):
            found = numbered(collector)
            assert await send(table, "k") == (0, table.num_rows + 2 * count, [])
            assert numbered(collector) == found
            return found

    journal, before = asyncio.run(main(planned=False))
    assert before == [(f"e{n}", n) for n in range(count)]
    assert asyncio.run(again(journal)) == before
    journal, _ = asyncio.run(main(planned=True))
    assert asyncio.run(again(journal)) == []


def test_a_block_found_partly_in_shards_is_split() -> None:
    """A journal says which parts are stored; `adopt` splits the block, and writes the others."""
    table = steps({f"e{n}": 1 for n in range(4)})

    async def main() -> MemoryJournal:
        journal = MemoryJournal()
        async with importing(journal) as (_, send):
            await send(table, "k")
            return journal.crash()

    journal = asyncio.run(main())
    row = encode_row(0, 4, [encode_event(Stored(key, 0)) for key in (1, 2)])
    journal.commit([(journal.last_row + 1, row)])
    policies, writer = {"default": PATIENT}, MemoryWriter()
    with pytest.raises(JournalBehind, match="headrace adopt"):
        recover(journal, policies)
    shelf = MemoryShelf(writer)
    done = adopt(journal, policies, shelf.ends, shelf.later, writer.write, received=0)
    assert (done.written, done.kept_back, done.closed) == (2, 0, 0)  # 0.1.0 had counted two
    assert [part.episode_id for part in writer.parts] == ["e0", "e3"]
    assert list(journal.replay()) == []
    found = recover(journal, policies)
    assert found.assembler.done.ranges() == [(0, 3)]
    assert {*found.assembler.finished} == {f"e{n}" for n in range(4)}
