"""Redaction over an episode's life: late, under new rules, by other clients, with odd content."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ingest.bulk_import.forms import Form
from ingest.bulk_import.step_columns import StepColumns
from ingest.collector.collector import Collector
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.journal_events import Acted, Rewarded, RewardedStep, decode_row
from ingest.episodes.judge import Judge
from ingest.episodes.policy_rules import PolicyRules
from ingest.episodes.redaction import Redactor
from ingest.protocol import messages as wire
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.redaction_rules import rules_for_earlier
from storage.journal.memory_journal import MemoryJournal
from storage.spaces.descriptors import Box, Dict, Discrete, Text, parse_space
from tests.ingest.bulk_import.test_handler import steps
from tests.ingest.simulated_collector import MemoryWriter

SECRET = "SECRET-alice@example.com"
INFO = {"email": SECRET}
OBS, ACTION = [0.0, 1.0], 1
EMAIL = {"infos.email": "drop"}


def declared(observation: str = "box:2", **rules: Any) -> PolicyDeclaration:
    space = parse_space(observation)
    return PolicyDeclaration(observation=space, action=parse_space("discrete:2"), **rules)


class KeptJournal(MemoryJournal):
    """All rows that were ever committed."""

    def __init__(self) -> None:
        super().__init__()
        self.blobs: list[bytes] = []

    def commit(self, rows: Sequence[tuple[int, bytes]] = (), **change: Any) -> None:
        self.blobs += [blob for _, blob in rows]
        super().commit(rows, **change)

    @property
    def infos(self) -> list[str]:
        """The infos of the events of all rows."""
        events = [event for blob in self.blobs for event in decode_row(blob).events]
        return [one.info for one in events if isinstance(one, (Acted, Rewarded, RewardedStep))]


def during(
    body: Callable[[Collector], Awaitable[None]],
    policy: PolicyDeclaration,
    journal: MemoryJournal | None = None,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            collector = Collector(
                journal or MemoryJournal(),
                MemoryWriter(),
                {"default": policy},
                redaction_key=b"k" * 32,
            )
            collector.start()
            try:
                await body(collector)
            finally:
                await collector.drain()

    asyncio.run(main())


async def sent(collector: Collector, *events: wire.Event, instance: str | None = None) -> list[Any]:
    """(code, message) of each refused event, once the rest is durable."""
    reply, row = collector.accept(wire.Batch(instance=instance, events=list(events)))
    await collector.journal.durable(row)
    return [(item.error["code"], item.error["message"]) for item in reply.refused]


def action(seq: int | None = None, **given: Any) -> wire.LogAction:
    return wire.LogAction(episode_id="e", seq=seq, **{"obs": OBS, "action": ACTION, **given})


def named_reward(**given: Any) -> wire.LogReturns:
    return wire.LogReturns(episode_id="e", reward=1.0, step=0, **given)


# --- late --------------------------------------------------------------------------------------


def test_a_reward_after_the_end_is_redacted() -> None:
    """An ended episode keeps its redaction rules within its reward window."""
    journal = KeptJournal()

    async def body(collector: Collector) -> None:
        events = [wire.Start(episode_id="e"), action(info=INFO), wire.End(episode_id="e")]
        assert await sent(collector, *events) == []
        assert await sent(collector, named_reward(reward_id="a", info={**INFO, "n": 1})) == []

    during(body, declared(redact=EMAIL, reward_window=60.0), journal)
    assert journal.infos == ["", '{"n": 1}']


def test_without_a_redactor_nothing_with_rules_is_judged() -> None:
    """An assembler without a redactor refuses the event instead of storing it."""
    assembler = EpisodeAssembler({"default": declared(redact=EMAIL)})
    with pytest.raises(TypeError, match="expected a redactor"):
        Judge(assembler).judge(None, wire.Start(episode_id="e"))
    plain = EpisodeAssembler({"default": declared()})
    assert Judge(plain).judge(None, wire.Start(episode_id="e"))


# --- under new rules ---------------------------------------------------------------------------


def test_new_rules_hold_for_an_open_episode_of_an_earlier_space() -> None:
    """The space changed with the rules: the episode keeps its space, and follows the new rules."""
    journal = KeptJournal()

    async def before(collector: Collector) -> None:
        events = [wire.Start(episode_id="e"), action(obs=[*OBS, 2.0], info={"old": 1, **INFO})]
        assert await sent(collector, *events) == []

    async def after(collector: Collector) -> None:
        late = wire.LogReturns(episode_id="e", reward=1.0, info={"new": 1, **INFO})
        assert await sent(collector, late, action(obs=[*OBS, 3.0], info=INFO)) == []

    during(before, declared("box:3", redact={"infos.old": "drop"}), journal)
    assert journal.infos == [f'{{"email": "{SECRET}"}}']
    during(after, declared("box:2", redact=EMAIL), journal)
    assert journal.infos[1:] == ['{"new": 1}', ""]


def test_what_rules_mean_in_an_earlier_space() -> None:
    """Earlier rules stay, except below a path that is dropped today. Today's rules apply if the
    field exists; one that cannot be hashed is dropped."""
    space = Dict((("user", Text(8)), ("age", Discrete(9)), ("x", Box(shape=(2,)))))
    earlier = {"obs.x": "drop", "infos.a": "drop", "tags.t": "hash"}
    today = {
        "obs.user": "hash",  # too short for a pseudonym
        "obs.age": "hash",
        "obs.elsewhere": "drop",
        "infos.a": "hash",
        "tags": "drop",
    }
    found = rules_for_earlier(earlier, today, space)
    assert found == {
        "obs.x": "drop",
        "obs.user": "drop",
        "obs.age": "hash",
        "infos.a": "hash",
        "tags": "drop",
    }
    PolicyDeclaration(observation=space, action=Discrete(2), redact=found)


# --- other clients -------------------------------------------------------------------------------

BAD_OBS = {"obs": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize("redact", [{}, {"obs": "drop", **EMAIL}])
@pytest.mark.parametrize(
    ("event", "code"),
    [
        (action(2, **BAD_OBS), "conflict"),
        (wire.End(episode_id="e", seq=2, obs=[0.0]), "conflict"),
        (wire.LogReturns(episode_id="e", seq=2, reward=float("nan")), "conflict"),
        (named_reward(reward_id="r", info={"x": float("nan")}), "invalid"),
        (wire.LogReturns(episode_id="e", reward=1.0, step=7), "invalid"),
    ],
)
def test_nobody_breaks_the_episode_of_another_client(
    redact: dict[str, str], event: wire.Event, code: str
) -> None:
    """Another client's events never break it; the owner's own bad event does."""

    async def body(collector: Collector) -> None:
        mine, other = [collector.register(wire.Register())[0].instance for _ in range(2)]
        started = wire.Start(episode_id="e", start=0)
        assert await sent(collector, started, action(1), instance=mine) == []
        for stranger in (other, None):
            ((heard, text),) = await sent(collector, event, instance=stranger)
            assert heard == code
            assert ("another client" in text) is (code == "conflict")
        assert (collector.stats.broken, "e" in collector.assembler.episodes) == (0, True)
        assert await sent(collector, action(2, env_t=1), instance=mine) != []
        assert (collector.stats.broken, "e" in collector.assembler.episodes) == (1, False)

    during(body, declared(redact=redact))


# --- starts again ---


DROP, HASH, ALL = {"tags.user": "drop"}, {"tags.user": "hash"}, {"tags": "drop"}


@pytest.mark.parametrize(
    ("first", "then", "answer"),
    [
        *(({}, rules, []) for rules in (DROP, HASH, ALL)),
        *((rules, rules, []) for rules in (DROP, HASH, ALL)),
        (HASH, DROP, []),
        (HASH, {**HASH, "tags.experiment": "hash"}, []),
        ({**HASH, "tags.experiment": "hash"}, {**DROP, "tags.experiment": "hash"}, []),
        (DROP, ALL, []),
        (DROP, HASH, ["conflict"]),
        (ALL, DROP, ["conflict"]),
        (DROP, {}, ["conflict"]),
    ],
)
def test_a_start_again_is_compared_by_what_the_rules_leave_of_it(
    first: dict[str, str], then: dict[str, str], answer: list[str]
) -> None:
    """A repeated start is compared after redaction by the rules of its first arrival, and by
    today's where these redact more."""
    journal, mine = KeptJournal(), list[str]()

    def start(experiment: str) -> wire.Start:
        tags = {"user": "alice@example.com", "experiment": experiment}
        return wire.Start(episode_id="e", start=0, tags=tags)

    async def before(collector: Collector) -> None:
        mine.append(collector.register(wire.Register())[0].instance)
        assert await sent(collector, start("b"), start("b"), instance=mine[0]) == []

    async def after(collector: Collector) -> None:
        refusals = await sent(collector, start("b"), instance=mine[0])
        assert [code for code, _ in refusals] == answer
        other = await sent(collector, start("c"), instance=mine[0])
        assert [code for code, _ in other] == ([] if then == ALL else ["conflict"])
        assert not any("alice" in text for _, text in refusals + other)

    during(before, declared(redact=first), journal)
    during(after, declared(redact=then), journal)


# --- odd content -------------------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("redact", [{}, {"infos.user.email": "drop"}, {"infos.user": "hash"}])
@pytest.mark.parametrize(
    "event",
    [
        action(info={"user": nested(490)}),
        wire.LogReturns(episode_id="e", reward=1.0, info={"user": nested(490)}),
        named_reward(info={"user": nested(490)}),
    ],
)
def test_a_deep_info_is_refused_as_such(redact: dict[str, str], event: wire.Event) -> None:
    """The depth is checked before the content, so the state need not be rebuilt."""

    async def body(collector: Collector) -> None:
        assert await sent(collector, wire.Start(episode_id="e"), action()) == []
        ((code, text),) = await sent(collector, event)
        assert (code, collector.journal.rebuilds) == ("invalid", 0)
        assert "lists and objects nested at most 32 deep" in text

    during(body, declared(redact=redact))


def test_rules_over_a_change_of_the_file_alone() -> None:
    """With the same space, only today's rules apply to open episodes."""
    journal = KeptJournal()

    async def before(collector: Collector) -> None:
        assert (
            await sent(collector, wire.Start(episode_id="e"), action(info={"a": 1, "b": 2})) == []
        )

    async def after(collector: Collector) -> None:
        assert await sent(collector, action(info={"a": 1, "b": 2})) == []

    policy = declared(redact={"infos.a": "drop"})
    during(before, policy, journal)
    during(after, replace(policy, redact={"infos.b": "drop"}), journal)
    assert journal.infos == ['{"b": 2}', '{"a": 1}']


@pytest.mark.parametrize("column", ["infos", "tags"])
@pytest.mark.parametrize("path", ["infos.email", "infos", "tags.email", "obs", None])
def test_a_bad_cell_of_an_import_is_not_shown_where_it_is_redacted(
    column: str, path: str | None
) -> None:
    """No rule can be applied to a cell that is not JSON, and it might hold redacted fields."""
    policy = declared(redact={} if path is None else {path: "drop"})
    cells = [f'{{"email":"{SECRET}","n":NaN}}', None]
    table, rules = steps({"e": 2}, **{column: cells}), PolicyRules.of(policy)
    redaction = Redactor(b"").of(rules)
    found = StepColumns(table, Form(table.schema, rules), redaction, numbered=True)
    error = found.block(0, 2).error(0, "e")
    assert error["message"].startswith("Episode e: expected a JSON object")
    assert error["path"] == f"$.{column}[0]"
    assert (SECRET in error["message"]) is not (path or "").startswith(column)
