"""Remote actions whose reply runs ahead of the disk: what is stored is what was acted on.

The collector is killed between a reply and the event that follows it, on a disk that is slower than
the reply; a request that was still on its way reaches the restarted collector first and is decided
anew. No step may be lost, and each stored action must be the one that the client was given.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest import wire
from ingest.client import PolicyClient
from ingest.errors import Refusal
from ingest.kept import Kept
from ingest.recovery import recover
from policy.policy import Policy
from policy.spec import PolicySpec
from storage.spaces import parse_space
from storage.weights import WeightStore
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.test_assembler import Shell, picture

ACTIONS = 1000  # two draws agree once in so many times
KILLS = 8


def publish(root: Path) -> None:
    spec = PolicySpec(parse_space("box:4"), parse_space(f"discrete:{ACTIONS}"))
    store = WeightStore(root, "default")
    weights = Policy(spec, seed=1).get_weights()
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))


@dataclass
class Acting:
    """Episodes of one remote client, with a kill within each."""

    root: Path
    program: tuple[str, ...]
    seed: int
    acted: dict[tuple[str, int], int] = field(default_factory=dict)
    lost: int = 0  # kills that cost the collector a decision

    def run(self, kills: int) -> None:
        declare(self.root, action=f"discrete:{ACTIONS}", seal_seconds=60.0)
        publish(self.root)
        chance = random.Random(self.seed)
        with CollectorProcess(self.root, program=self.program) as collector:
            with PolicyClient(collector.address, "remote", timeout=20.0) as client:
                for _ in range(kills):
                    self._episode(collector, client, chance)
            assert collector.stop() == 0

    def _episode(
        self, collector: CollectorProcess, client: PolicyClient, chance: random.Random
    ) -> None:
        steps, again = chance.randint(1, 4), chance.random() < 0.5
        fatal = chance.randrange(steps)
        name = client.start_episode(f"e{len(self.acted)}" if chance.random() < 0.5 else None)
        for t in range(steps):
            obs = [chance.random() for _ in range(4)]
            seq = client._book.open[name].seq
            self.acted[name, t] = client.get_action(name, obs)
            if t == fatal:
                self._kill(collector, client, wire.GetAction(episode_id=name, seq=seq, obs=obs))
                self.lost += self._next_seq(collector, name) <= seq
                if again:  # the same request, delayed on its way, arrives only now
                    self._ask(collector, client, wire.GetAction(episode_id=name, seq=seq, obs=obs))
            if chance.random() < 0.5:
                client.log_returns(name, 1.0, {"t": t} if chance.random() < 0.5 else None)
        client.end_episode(name)

    def _kill(self, collector: CollectorProcess, client: PolicyClient, ask: wire.GetAction) -> None:
        collector.kill()
        collector.restart()

    def _next_seq(self, collector: CollectorProcess, name: str) -> int:
        return int(collector.get(f"/v1/episodes/{name}")[1].get("next_seq", 0))

    def _ask(self, collector: CollectorProcess, client: PolicyClient, ask: wire.GetAction) -> None:
        instance = client._outbox.instance
        batch = msgspec.to_builtins(wire.ActionBatch(instance=instance, actions=[ask]))
        assert collector.post("/v1/actions", batch)[0] == 200

    def faults(self) -> list[str]:
        """What differs between what was acted and what is stored."""
        rows = shard_rows(self.root)
        stored = {(row["eps_id"], row["t"]): row["actions"] for row in rows}
        found = [f"{step} is lost" for step in self.acted if step not in stored]
        found += [f"{step} is unknown" for step in stored if step not in self.acted]
        both = self.acted.keys() & stored.keys()
        found += [f"{step} differs" for step in both if self.acted[step] != stored[step]]
        count = Counter((row["eps_id"], row["t"]) for row in rows)
        return found + [f"{step} is doubled" for step in count if count[step] > 1]


def program(name: str) -> tuple[str, ...]:
    return ("-m", "tests.ingest.broken_collector", name)


def test_kills_between_a_reply_and_the_next_event_change_nothing(tmp_path: Path) -> None:
    """Every step is stored once, with the action that the client was given."""
    acting = Acting(tmp_path, program("slow-disk"), seed=3)
    acting.run(KILLS)
    assert acting.faults() == []
    assert acting.lost > 0, "no kill came before its commit: nothing was tested"


def test_a_collector_that_ignores_decisions_is_found_out(tmp_path: Path) -> None:
    """A build that does not compare decisions stores an action that nobody took."""
    acting = Acting(tmp_path, program("ignore-decisions"), seed=3)
    acting.run(KILLS)
    assert any("differs" in fault for fault in acting.faults())


def test_a_client_that_keeps_nothing_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of the client that takes a reply for an acknowledgement cannot go on."""
    monkeypatch.setattr(Kept, "keep", lambda *_: None)
    acting = Acting(tmp_path, program("slow-disk"), seed=3)
    with pytest.raises(Refusal, match=r"expected seq|not found|decision"):
        acting.run(KILLS)


def test_flush_waits_until_the_decisions_are_durable(tmp_path: Path) -> None:
    """After flush a kill costs nothing, although no event followed the last decision."""
    declare(tmp_path, action=f"discrete:{ACTIONS}")
    publish(tmp_path)
    with (
        CollectorProcess(tmp_path, program=program("slow-disk")) as collector,
        PolicyClient(collector.address, "remote") as client,
    ):
        name = client.start_episode()
        client.get_action(name, [0.0] * 4)
        assert client.stats.pending == 2  # the start and the decision
        client.flush(20.0)
        assert client.stats.pending == 0
        assert client.stats.acknowledged == 2
        collector.kill()
        collector.restart()
        assert collector.get(f"/v1/episodes/{name}")[1]["next_seq"] == 2
        client.end_episode(name)


# --- the assembler's side ---------------------------------------------------------------------


def decision(seq: int, action: int, **given: object) -> wire.Decision:
    values = {"obs": [0.5, 0.5], "action_logp": -1.0, "policy_version": 4, **given}
    return wire.Decision(episode_id="e", seq=seq, action=action, **values)  # type: ignore[arg-type]


def reward(seq: int, decided: bytes | None) -> wire.LogReturns:
    return wire.LogReturns(episode_id="e", seq=seq, reward=1.0, decided=decided)


def started() -> Shell:
    shell = Shell()
    shell.send(wire.Start(episode_id="e", start=0, policy_id="default"))
    return shell


def name_of(shell: Shell) -> bytes:
    return shell.assembler.episodes["e"].decision()


def test_an_event_that_follows_another_decision_is_refused() -> None:
    """The collector that decided anew learns of it at the next event, which changes nothing."""
    shell = started()
    shell.send(decision(1, 1))
    acted_on = name_of(shell)
    other = started()
    other.send(decision(1, 2))
    assert other.send(reward(2, acted_on)) == ["decision_unknown"]
    assert other.assembler.episodes["e"].next_seq == 2
    assert shell.send(reward(2, acted_on)) == ["accepted"]


def test_the_decision_that_was_acted_on_takes_the_others_place() -> None:
    """It wins once, and only over the open step; then it is a retry like any other."""
    shell = started()
    shell.send(decision(1, 2), decision(2, 2, obs=[0.1, 0.2]))
    assert shell.send(decision(2, 0)) == ["conflict"]
    assert shell.send(decision(2, 0, answered=True)) == ["accepted"]
    assert shell.send(decision(2, 0, answered=True)) == ["retry"]
    assert shell.send(decision(1, 0, answered=True)) == ["conflict"]
    shell.send(reward(3, name_of(shell)))
    assert shell.send(decision(2, 1, answered=True)) == ["conflict"]
    assert shell.send(wire.End(episode_id="e", seq=4)) == ["accepted"]
    assert list(bytes(shell.assembler.sealed[-1].part.actions)[::8]) == [2, 0]


def test_the_same_decision_has_the_same_name_everywhere() -> None:
    """Neither the episode's number in the journal nor a time is in the name."""
    first, second = started(), Shell()
    second.send(wire.Start(episode_id="other", start=0, policy_id="default"))
    second.send(wire.Start(episode_id="e", start=1, policy_id="default"))
    first.send(decision(1, 1, ts=1))
    second.send(decision(1, 1, ts=2))
    assert name_of(first) == name_of(second) != b""


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=12))
def test_a_replay_knows_the_decisions_that_won(
    steps: list[tuple[int, bool, bool]],
) -> None:
    """Reading the journal back gives the same state, whichever steps were decided twice."""
    shell, seq, acted = started(), 1, []
    for action, twice, cut in steps:
        first = (action + 1) % 3 if twice else action
        shell.send(decision(seq, first))
        if twice:
            assert shell.send(decision(seq, action, answered=True)) == ["accepted"]
        acted.append(action)
        seq += 1
        if cut:
            shell.tick(shell.now + 61.0)
    found = recover(shell.journal.crash(), shell.policies)
    found.assembler.sealed = found.waiting
    assert picture(found.assembler) == picture(shell.assembler)
    shell.send(wire.End(episode_id="e", seq=seq))
    stored = b"".join(part.actions for part in shell.parts("e"))
    assert list(stored[::8]) == acted
