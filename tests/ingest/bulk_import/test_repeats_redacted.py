"""The key of an import stands for its content as it is stored: after redaction, by column."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ingest.access.tokens import LOCAL
from ingest.bulk_import.repeats import digest_rows
from ingest.collector.collector import Collector
from ingest.episodes.client_instances import IMPORT
from ingest.protocol import messages as wire
from storage.declarations.declaration import PolicyDeclaration
from storage.journal.memory_journal import MemoryJournal
from storage.spaces.descriptors import Box, Dict, Discrete, MultiDiscrete, Text
from tests.ingest.bulk_import.test_handler import PATIENT, importing

OBSERVATION = Dict(
    (
        ("code", Discrete(1_000)),
        ("image", Box((2,), np.dtype(np.uint8))),
        ("many", MultiDiscrete((900, 900))),
        ("place", Discrete(5)),
        ("who", Text(40)),
    )
)
REDACT = {
    "obs.code": "hash",
    "obs.image": "drop",
    "obs.many": "hash",
    "obs.who": "hash",
    "infos.email": "drop",
    "tags.user": "hash",
}
POLICY: PolicyDeclaration = replace(PATIENT, observation=OBSERVATION, redact=REDACT)
COLUMNS: dict[str, list[Any]] = {
    "eps_id": ["a", "a", "b"],
    "obs.code": [7, 8, 9],
    "obs.image": [b"\x01\x02", b"\x03\x04", b"\x05\x06"],
    "obs.many": [[1, 2], [3, 4], [5, 6]],
    "obs.place": [0, 1, 2],
    "obs.who": ["ann", "bob", "cat"],
    "final_obs.code": [None, 1, 2],
    "final_obs.image": [None, b"\x07\x08", b"\x09\x0a"],
    "final_obs.many": [None, [7, 8], [9, 10]],
    "final_obs.place": [None, 3, 4],
    "final_obs.who": [None, "dan", "eve"],
    "actions": [0, 1, 2],
    "rewards": [0.5, 1.5, 2.5],
    "infos": ['{"email": "a@x", "price": 1, "tax": 0}', None, '{"price": 2, "email": "c@x"}'],
    "tags": ['{"user": "u1", "city": "Bonn"}', None, '{"user": "u2", "city": "Ulm"}'],
    "action_logp": [-0.25, -0.5, -1.0],
}
EVENTS = 7


def table(**changes: Any) -> pa.Table:
    columns = {**COLUMNS, **changes}
    return pa.table({name: column for name, column in columns.items() if column is not None})


def with_another(given: pa.Table) -> pa.Table:
    """The table, with its last episode once more as another one."""
    return pa.concat_tables([given, given.slice(2).set_column(0, "eps_id", [["c"]])])


SAME: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dropped leaf": {"obs.image": [b"\x01\x02", b"\xff\x04", b"\x05\x06"]},
    "dropped final leaf": {"final_obs.image": [None, b"\x07\x08", b"\xff\x0a"]},
    "dropped info": {"infos": ['{"email": "z@x", "price": 1, "tax": 0}', None, '{"price": 2}']},
    "form of JSON": {
        "infos": ['{"tax":0,"price":1,"email":"a@x"}', "", '{"email":"c@x", "price":2}']
    },
    "cut": {"infos": pa.chunked_array([COLUMNS["infos"][:1], COLUMNS["infos"][1:]], pa.string())},
}
OTHER: dict[str, dict[str, Any]] = {
    "another info": {"infos": [COLUMNS["infos"][0].replace("1", "9"), None, COLUMNS["infos"][2]]},
    "no infos": {"infos": None},
    "invalid info": {"infos": ['{"email": "a@x"', None, COLUMNS["infos"][2]]},
    "another leaf": {"obs.place": [0, 1, 3]},
    "another final leaf": {"final_obs.place": [None, 3, 2]},
    "no final leaf": {f"final_obs.{name}": [None, None, COLUMNS[f"final_obs.{name}"][2]]
                      for name in ("code", "image", "many", "place", "who")},
    "hashed text": {"obs.who": ["ann", "bob", "dan"]},
    "hashed code": {"obs.code": [7, 8, 10]},
    "hashed codes": {"obs.many": [[1, 2], [3, 4], [5, 7]]},
    "hashed final text": {"final_obs.who": [None, "dan", "fay"]},
    "another tag": {"tags": ['{"user": "u1", "city": "Kiel"}', None, COLUMNS["tags"][2]]},
    "hashed tag": {"tags": ['{"user": "u9", "city": "Bonn"}', None, COLUMNS["tags"][2]]},
    "reward": {"rewards": [0.5, 1.5, 3.5]},
    "another column": {"action_logp": None, "pass_prob": [-0.25, -0.5, -1.0]},
}  # fmt: skip


def receipt(collector: Collector) -> bytes:
    instances = collector.assembler.instances
    (known,) = (instances.get(name) for name in instances)
    assert known is not None
    assert known.receipt is not None
    return known.receipt.digest


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_content_that_is_stored_alike_is_a_retry_and_no_other(name: str) -> None:
    """As of single calls: also after a kill, and in a longer table."""
    journal = MemoryJournal()
    changed = table(**{**SAME, **OTHER}[name])
    expected = (0, EVENTS, []) if name in SAME else (0, 0, [(-1, "conflict")])
    more = with_another(changed)
    longer = (3, EVENTS, []) if name in SAME else (0, 0, [(-1, "conflict")])

    async def main() -> None:
        async with importing(journal, POLICY, redaction_key=b"key") as (_, send):
            assert await send(table(), "k") == (EVENTS, 0, [])
            assert await send(changed, "k") == expected
            crashed = journal.crash()
        async with importing(crashed, POLICY, redaction_key=b"key") as (_, send):
            assert await send(changed, "k") == expected
            assert await send(more, "k") == longer

    asyncio.run(main())


def test_values_that_do_not_fit_are_not_remembered_either() -> None:
    """They are left out with their episodes; what they were does not matter."""
    odd = table(infos=["[", None, "{}"], **{"obs.who": ["x" * 41, "bob", "cat"]})
    also = table(infos=["no", None, "{}"], **{"obs.who": ["y" * 99, "bob", "cat"]})

    async def main() -> None:
        async with importing(MemoryJournal(), POLICY, redaction_key=b"key") as (_, send):
            first = await send(odd, "k")
            assert first == (3, 0, [(0, "invalid")])
            assert await send(also, "k") == (0, 3, [(0, "invalid")])

    asyncio.run(main())


def test_a_final_observation_that_does_not_fit_is_not_an_absent_one() -> None:
    """With the one the episode is broken, with the other it is whole."""
    odd = table(**{"final_obs.who": [None, "dan", "x" * 41]})
    absent = table(**{"final_obs.who": [None, "dan", None]})

    async def main() -> None:
        async with importing(MemoryJournal(), POLICY, redaction_key=b"key") as (_, send):
            assert await send(odd, "k") == (EVENTS - 1, 0, [(2, "invalid")])
            assert await send(absent, "k") == (0, 0, [(-1, "conflict")])

    asyncio.run(main())


def test_the_digest_depends_on_the_root_s_key() -> None:
    """Without the key nobody can find hashed values by trial; dropped values are not in it."""

    async def digest(given: pa.Table, key: bytes) -> bytes:
        async with importing(MemoryJournal(), POLICY, redaction_key=key) as (collector, send):
            await send(given, "k")
            return receipt(collector)

    async def main() -> None:
        first = await digest(table(), b"key")
        assert first == await digest(table(**SAME["dropped leaf"]), b"key")
        assert first != await digest(table(), b"other")

    asyncio.run(main())


HIDDEN = {path.partition(".")[0] for path in REDACT}


def test_a_key_of_release_0_1_0_is_continued() -> None:
    """That release left whole columns out of the digest. Its keys accept what it would accept, and
    the digest of the whole content replaces it with the first longer import."""
    first = table()
    more = with_another(first)

    async def main() -> None:
        async with importing(MemoryJournal(), POLICY, redaction_key=b"key") as (collector, send):
            old = digest_rows(first, 3, HIDDEN), 3
            collector.register(wire.Register(name=f"{IMPORT}k"), LOCAL.token_id, old)
            assert await send(first, "k") == (EVENTS, 0, [])
            assert await send(table(**OTHER["another info"]), "k") == (0, EVENTS, [])
            assert await send(table(**OTHER["reward"]), "k") == (0, 0, [(-1, "conflict")])
            assert receipt(collector) == old[0]
            assert await send(more, "k") == (3, EVENTS, [])
            assert await send(more, "k") == (0, EVENTS + 3, [])
            infos = [*OTHER["another info"]["infos"], COLUMNS["infos"][2]]
            other = more.set_column(more.column_names.index("infos"), "infos", [infos])
            assert await send(other, "k") == (0, 0, [(-1, "conflict")])

    asyncio.run(main())


def test_a_key_of_this_release_accepts_no_digest_of_the_last() -> None:
    """Content without the redacted columns has the same digest in both, for which that release
    would also take content that has them."""
    bare, policy = table(infos=None), replace(POLICY, redact={"infos.email": "drop"})

    async def main() -> None:
        async with importing(MemoryJournal(), policy) as (_, send):
            assert await send(bare, "k") == (EVENTS, 0, [])
            assert await send(table(), "k") == (0, 0, [(-1, "conflict")])
            assert await send(bare, "k") == (0, EVENTS, [])

    asyncio.run(main())
