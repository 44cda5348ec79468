"""`PolicyServerInput`: `next` returns ended episodes at once, each step exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3

from headrace import Policy, PolicyClient, PolicyServerInput, PolicySpec
from ingest.protocol.errors import CollectorFailed
from ingest.server.process import ServeError
from storage.declarations.declaration import PolicyDeclaration
from storage.errors import JournalFailed, JournalLocked
from storage.experience.conformance import InputReaderConformance
from storage.experience.interfaces import ReaderError, ReaderState
from storage.experience.sample_batch import SampleBatch
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import parse_space
from tests.ingest.simulated_collector import Fault, FaultyJournal

ROOT = Path(__file__).parents[3]
BOX = PolicyDeclaration(
    observation=parse_space("box:4"), action=parse_space("discrete:2"), seal_seconds=60.0
)
LONG = PolicyDeclaration(
    observation=parse_space("box:3"),
    action=parse_space("multi_discrete:3,2"),
    part_steps=3,
    seal_seconds=60.0,
)
OBS = np.arange(4, dtype=np.float32)
Open = Callable[..., PolicyServerInput]


@pytest.fixture
def serve() -> Iterator[Open]:
    """Opens inputs on free ports of this machine, and closes them."""
    with ExitStack() as stack:

        def opened(root: Path | None = None, **given: Any) -> PolicyServerInput:
            given = {"policies": BOX, "idle_timeout": 10.0, **given}
            made = PolicyServerInput(None, "127.0.0.1", 0, root=root, **given)
            return stack.enter_context(made)

        yield opened


def client_of(inputs: PolicyServerInput, **given: Any) -> PolicyClient:
    return PolicyClient(inputs.address, inference_mode="remote", linger=0.0, **given)


def log_episode(client: PolicyClient, rewards: list[float], name: str | None = None) -> str:
    episode = client.start_episode(name)
    for reward in rewards:
        client.log_action(episode, OBS, 1)
        client.log_returns(episode, reward)
    client.end_episode(episode, OBS)
    client.flush()
    return episode


def drain(inputs: PolicyServerInput, timeout: float = 1.0) -> list[float]:
    """The rewards of all steps until none arrives for `timeout` seconds."""
    found: list[float] = []
    while (batch := inputs.next(timeout)).count:
        found += batch["rewards"].tolist()
    return found


class TestProtocol(InputReaderConformance):
    """Six episodes wait; a batch has the rows of two."""

    ends = False

    @pytest.fixture(autouse=True)
    def _served(self, serve: Open) -> None:
        self.serve = serve

    def reader(self) -> PolicyServerInput:
        inputs = self.idle()
        with client_of(inputs) as client:
            for _ in range(6):
                log_episode(client, [1.0, 2.0])
        return inputs

    def idle(self) -> PolicyServerInput:
        return self.serve(mode="transitions", batch_size=4)


def same(found: SampleBatch, expected: SampleBatch) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype, name
        np.testing.assert_array_equal(found[name], expected[name], name)


ROOTS = pytest.mark.parametrize("rooted", [True, False], ids=["root", "memory"])


@ROOTS
def test_an_ended_episode_comes_out_before_its_shard(
    serve: Open, tmp_path: Path, rooted: bool
) -> None:
    """`next` waits for the journal alone: no shard is due for a minute.

    Row: PolicyServerInput(ioctx, address, port, idle_timeout=3.0, max_sample_queue_size=20), next()
    """
    inputs = serve(tmp_path if rooted else None)
    with client_of(inputs) as client:
        name = log_episode(client, [1.0, 2.0, 3.0])
        batch = inputs.next()
    assert batch["rewards"].tolist() == [1.0, 2.0, 3.0]
    assert batch["eps_id"].tolist() == [name] * 3
    assert batch["terminateds"].tolist() == [False, False, True]
    assert not list(tmp_path.glob("shards/*/*.parquet"))


@pytest.mark.parametrize("columns", [None, ("obs", "tags", "ended", "ts", "infos", "source")])
def test_batches_equal_those_of_the_shards(
    serve: Open, tmp_path: Path, columns: tuple[str, ...] | None
) -> None:
    """Equal by column, dtype and identity: long episodes, infos, tags, no final observation,
    training disabled."""
    inputs = serve(tmp_path, policies=LONG, columns=columns)
    with client_of(inputs) as client:
        for steps in (1, 2, 3, 7):
            tags = {"tenant": f"t{steps}"}
            episode = client.start_episode(training_enabled=steps != 2, tags=tags)
            for t in range(steps):
                obs = np.full(3, t, np.float32)
                client.log_action(episode, obs, np.array([t % 3, t % 2]), action_prob=0.25)
                client.log_returns(episode, t / 3, {"at": t} if t % 2 else None)
            last = None if steps == 3 else np.full(3, -1, np.float32)
            client.end_episode(episode, last, truncated=steps == 7)
        client.flush()
    batches = []
    while sum(batch.count for batch in batches) < 11:
        batches.append(inputs.next())
    inputs.close()
    assert inputs.stats.excluded == {"training_disabled": 2}
    with ShardReader(tmp_path, columns=columns) as reader:
        for batch in batches:
            reader.batch_size = batch.count
            same(batch, reader.next())


def test_what_was_sealed_before_comes_from_shards_once(serve: Open, tmp_path: Path) -> None:
    """An earlier run's shards, then new steps; a position continues after its last step."""
    inputs = serve(tmp_path)
    with client_of(inputs) as client:
        log_episode(client, [1.0, 2.0])
        log_episode(client, [3.0])
    inputs.close()
    again = serve(tmp_path)
    with client_of(again) as client:
        log_episode(client, [4.0])
    assert sorted(drain(again)) == [1.0, 2.0, 3.0, 4.0]
    position = again.state_dict()
    with client_of(again) as client:
        log_episode(client, [5.0])
    again.close()
    assert drain(serve(tmp_path, state=position)) == [5.0]


def test_a_full_queue_with_a_root_is_read_from_shards_later(serve: Open, tmp_path: Path) -> None:
    """Clients do not wait, and `next` returns what the queue dropped exactly once."""
    declared = PolicyDeclaration(
        observation=BOX.observation, action=BOX.action, seal_seconds=0.2, part_steps=2
    )
    inputs = serve(tmp_path, policies=declared, max_sample_queue_size=2)
    sent = []
    with client_of(inputs) as client:
        for number in range(12):
            sent += [number + 0.25, number + 0.5, number + 0.75]
            log_episode(client, sent[-3:])
    assert inputs.overflowed > 0
    found: list[float] = []
    while len(found) < len(sent):
        batch = inputs.next()
        assert batch.count, f"{len(sent) - len(found)} steps do not come"
        found += batch["rewards"].tolist()
    assert sorted(found) == sorted(sent)
    assert inputs.next(0.5).count == 0


def test_without_a_root_nothing_is_on_disk_and_everybody_is_told(
    serve: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`durable: false` in the spec and in each reply; the client warns once."""
    monkeypatch.chdir(tmp_path)
    inputs = serve()
    http = urllib3.PoolManager()

    def post(path: str, body: Any) -> Any:
        return http.request("POST", inputs.address + path, json=body).json()

    assert http.request("GET", f"{inputs.address}/v1/spec").json()["durable"] is False
    assert post("/v1/instances", {})["durable"] is False
    assert post("/v1/episodes", {"episode_id": "a"}) == {"episode_id": "a", "durable": False}
    step = {"obs": [0, 0, 0, 0], "action": 1}
    assert post("/v1/episodes/a/log_action", step)["durable"] is False
    inputs.publish(Policy(PolicySpec(BOX.observation, BOX.action)))
    assert post("/v1/episodes/a/action", {"obs": [0, 0, 0, 0]})["durable"] is False
    events = [{"type": "end", "episode_id": "a"}]
    assert post("/v1/events", {"events": events})["durable"] is False
    with client_of(inputs) as client:
        log_episode(client, [1.0])
        log_episode(client, [2.0])
    assert sum("durable: false" in record.getMessage() for record in caplog.records) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bound", [{"max_sample_queue_size": 2}, {"max_sample_queue_bytes": 100}])
def test_a_full_queue_in_memory_holds_the_clients(serve: Open, bound: dict[str, int]) -> None:
    """429 with Retry-After, and nothing is evicted; `next` frees space, and every step is read
    once.

    Row: PolicyServerInput(ioctx, address, port, idle_timeout=3.0, max_sample_queue_size=20), next()
    """
    inputs = serve(**bound)
    sent = [float(number) for number in range(8)]
    http = urllib3.PoolManager(retries=False)
    with client_of(inputs) as client:

        def send() -> None:
            for reward in sent:
                log_episode(client, [reward])

        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(6_000):
            answer = http.request("POST", f"{inputs.address}/v1/events", json={"events": []})
            if answer.status == 429:
                break
            threading.Event().wait(0.01)
        assert answer.json()["error"]["code"] == "busy"
        assert int(answer.headers["retry-after"]) >= 1
        found: list[float] = []
        while len(found) < len(sent):
            found += inputs.next()["rewards"].tolist()
        sender.join(60)
    assert found == sent


def test_idle_timeout_decides_when_an_idle_next_is_empty(serve: Open) -> None:
    """After `idle_timeout` without rows, next() returns an empty batch; no row is lost.

    Row: PolicyServerInput(ioctx, address, port, idle_timeout=3.0, max_sample_queue_size=20), next()
    """
    inputs = serve(idle_timeout=0.05)
    assert inputs.next().count == 0
    with client_of(inputs) as client:
        log_episode(client, [1.0])
    assert drain(inputs) == [1.0]


def test_several_inputs_clients_and_open_episodes(serve: Open, tmp_path: Path) -> None:
    """Two ports in one process, one of them with a root; two clients each, two episodes open."""
    for inputs in (serve(tmp_path), serve()):
        with client_of(inputs) as one, client_of(inputs) as other:
            episodes = [(client, client.start_episode()) for client in (one, other, one, other)]
            for t in range(3):
                for number, (client, episode) in enumerate(episodes):
                    client.log_action(episode, OBS, 0)
                    client.log_returns(episode, 10.0 * number + t)
            for client, episode in episodes:
                client.end_episode(episode)
                client.flush()
        expected = [10.0 * number + t for number in range(4) for t in range(3)]
        assert sorted(drain(inputs)) == expected


@ROOTS
@pytest.mark.parametrize("mode", ["local", "remote"])
def test_clients_act_with_what_is_published(
    serve: Open, tmp_path: Path, mode: str, rooted: bool
) -> None:
    """Each step has the version that acted, which rises with `publish`."""
    inputs = serve(tmp_path if rooted else None)
    policy = Policy(PolicySpec(BOX.observation, BOX.action), seed=1)
    assert inputs.publish(policy) == 1
    with PolicyClient(inputs.address, inference_mode=mode, update_interval=0) as client:
        for version in (1, 2):
            episode = client.start_episode()
            client.get_action(episode, OBS)
            client.log_returns(episode, 1.0)
            client.end_episode(episode, OBS)
            client.flush()
            batch = inputs.next()
            assert batch["policy_version"].tolist() == [version]
            assert np.isfinite(batch["action_logp"]).all()
            policy = Policy(PolicySpec(BOX.observation, BOX.action), seed=version + 1)
            assert inputs.publish(policy) == version + 1
            spec = urllib3.request("GET", f"{inputs.address}/v1/spec").json()
            assert spec["policies"]["default"]["live_version"] == version + 1


# --- what is refused -------------------------------------------------------------------------


def test_a_taken_port_raises_in_the_constructor(serve: Open, tmp_path: Path) -> None:
    """The constructor raises for a taken port, and leaves no thread and no journal."""
    inputs = serve()
    port = int(inputs.address.rpartition(":")[2])
    before = threading.active_count()
    with pytest.raises(ServeError, match=f"cannot bind 127.0.0.1:{port}"):
        PolicyServerInput(None, "127.0.0.1", port, root=tmp_path, policies=BOX)
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_served_raises_in_the_constructor(serve: Open, tmp_path: Path) -> None:
    """Foreign addresses, a root that is in use, no policy, policies of different spaces.

    Row: auto-wrap of real env, RandomEnv from spaces
    """
    other = PolicyDeclaration(
        policy_id="other", observation=parse_space("box:2"), action=BOX.action
    )
    with pytest.raises(ServeError, match="not loopback"):
        PolicyServerInput(None, "0.0.0.0", 0, policies=BOX)
    with pytest.raises(ValueError, match="one or more declarations"):
        serve(tmp_path, policies=())
    with pytest.raises(ValueError, match="pass policy_id="):
        serve(policies=[BOX, other])
    with pytest.raises(ValueError, match=r"expected one of \['default'\], got 'else'"):
        serve(policy_id="else")
    with pytest.raises(ValueError, match="max_parts: expected 1 or more, got 0"):
        serve(max_sample_queue_size=0)
    serve(tmp_path)
    with pytest.raises(JournalLocked, match="is open in process"):
        serve(tmp_path)


@ROOTS
def test_closed_it_leaves_no_thread_behind(serve: Open, tmp_path: Path, rooted: bool) -> None:
    """A program that opens inputs in sequence accumulates no threads."""
    before = set(threading.enumerate())
    serve(tmp_path / "root" if rooted else None).close()
    for left in set(threading.enumerate()) - before:
        left.join(timeout=60.0)
        assert not left.is_alive(), left.name


def test_one_of_several_policies_is_read(serve: Open) -> None:
    """Other policies' steps do not fill the queue."""
    other = PolicyDeclaration(
        policy_id="other", observation=parse_space("box:2"), action=BOX.action
    )
    inputs = serve(policies=[BOX, other], policy_id="default", max_sample_queue_size=1)
    with client_of(inputs, policy_id="other") as client:
        for _ in range(3):
            episode = client.start_episode()
            client.log_action(episode, [0.0, 0.0], 0)
            client.end_episode(episode)
            client.flush()
    with client_of(inputs, policy_id="default") as client:
        log_episode(client, [7.0])
    assert drain(inputs) == [7.0]


def test_a_position_that_is_ahead_of_the_journal_is_refused(serve: Open, tmp_path: Path) -> None:
    """The journal is from a backup: its next ordinals are not those that were read."""
    inputs = serve(tmp_path)
    with client_of(inputs) as client:
        log_episode(client, [1.0])
    inputs.next()
    position = inputs.state_dict()
    (ranges,) = position["ledger"].values()
    ranges[-1][1] += 1
    inputs.close()
    with pytest.raises(ReaderState, match="the journal is older than the position"):
        serve(tmp_path, state=position)
    inputs = serve(tmp_path)
    inputs.next(0.0)
    with pytest.raises(ReaderError, match="before the first next"):
        inputs.load_state_dict(inputs.state_dict())


# --- how it ends -----------------------------------------------------------------------------


def test_a_failed_journal_surfaces_in_next(serve: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure of the journal, next() returns the durable steps first, and then raises the
    cause."""
    from ingest.collector import stores  # noqa: PLC0415 - the names that are replaced
    from ingest.embedded import policy_server_input  # noqa: PLC0415 - the names that are replaced

    class Failing(FaultyJournal):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.fault = Fault(8, JournalFailed)

    monkeypatch.setattr(stores, "MemoryJournal", Failing)
    inputs = policy_server_input.PolicyServerInput(None, "127.0.0.1", 0, 20.0, policies=BOX)
    http = urllib3.PoolManager(retries=False)
    body = {
        "events": [
            {"type": "start", "episode_id": "e"},
            {"type": "log_action", "episode_id": "e", "obs": [0, 0, 0, 0], "action": 0},
            {"type": "end", "episode_id": "e"},
        ]
    }
    assert http.request("POST", f"{inputs.address}/v1/events", json=body).status == 200
    for number in range(8):
        body = {"events": [{"type": "start", "episode_id": f"open-{number}"}]}
        if http.request("POST", f"{inputs.address}/v1/events", json=body).status != 200:
            break
    assert inputs.next().count == 1
    with pytest.raises(CollectorFailed, match="commit 8 fails"):
        inputs.next()
    inputs.close()


def test_close_is_quick_complete_and_final(serve: Open, tmp_path: Path) -> None:
    """Ended episodes are in a shard, long polls are released, and a second close is allowed."""
    inputs = serve(tmp_path)
    inputs.publish(Policy(PolicySpec(BOX.observation, BOX.action)))
    client = PolicyClient(inputs.address)  # keeps a long poll open
    episode = client.start_episode()
    client.get_action(episode, OBS)
    client.end_episode(episode)
    client.flush()
    before = {thread.name for thread in threading.enumerate()}
    assert "headrace-server" in before
    inputs.close()
    inputs.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not {"headrace-server", "headrace-journal", "headrace-sealer"} & set(names)
    assert len(list(tmp_path.glob("shards/*/*.parquet"))) == 1
    with pytest.raises(ReaderError, match="closed"):
        inputs.next()
    client._transport.closing.set()
    client._actor.close()


PROGRAM = """
import sys
from pathlib import Path
from headrace import PolicyClient, PolicyServerInput
from storage.declarations.declaration import PolicyDeclaration
from storage.spaces.descriptors import parse_space

rules = PolicyDeclaration(observation=parse_space("box:4"), action=parse_space("discrete:2"))
inputs = PolicyServerInput(None, "127.0.0.1", 0, root=sys.argv[1], policies=rules)
with PolicyClient(inputs.address, inference_mode="remote") as client:
    episode = client.start_episode()
    client.log_action(episode, [0.0, 0.0, 0.0, 0.0], 1)
    client.end_episode(episode)
"""


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("raise KeyError", 1)])
def test_the_end_of_the_program_drains(tmp_path: Path, ending: str, code: int) -> None:
    """At interpreter exit without `close`, also after an exception, the shard is written."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + ending, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert ("Error" in done.stderr) == (code == 1), done.stderr
    with ShardReader(tmp_path) as reader:
        assert Counter(batch.count for batch in reader) == {1: 1}
