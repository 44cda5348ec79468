"""Fields that a policy's file redacts never reach the disk, a log or a message."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.access.key_files import redaction_key
from ingest.client.policy_client import PolicyClient
from ingest.episodes.redaction import Redaction, pseudonym
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    parse_space,
)
from tests.collector_process import CollectorProcess, shard_rows
from tests.headrace.command import headrace
from tests.storage.space_strategies import spaces, values

KEY = b"k" * 32
SECRET = "SECRET-alice@example.com"
USER = Text(max_length=64)
OBSERVATION = Dict((("age", Discrete(100)), ("user", USER), ("x", Box(shape=(2,)))))
REDACT = {
    "obs.user": "hash",
    "obs.age": "drop",
    "infos.email": "drop",
    "infos.account.name": "hash",
    "tags.user": "hash",
    "tags.note": "drop",
}
HASHED = pseudonym(KEY, "1")
AB = {"ab": 1, "b": {"a.b": 1}}
OBS = {"age": 42, "user": SECRET, "x": [0.5, 0.25]}


def redaction(redact: Mapping[str, str], space: Space = OBSERVATION) -> Redaction:
    PolicyDeclaration(observation=space, action=Discrete(2), redact=redact)
    return Redaction(redact, Codec(space), KEY)


def info_after(redact: Mapping[str, str], info: dict[str, Any]) -> Any:
    event = wire.LogReturns(episode_id="e", reward=1.0, info=info)
    return redaction(redact).event(event).info  # type: ignore[union-attr]


# --- rules ---------------------------------------------------------------------------------------


def test_dropped_and_hashed_fields_of_an_observation() -> None:
    """Other fields are unchanged; a hashed field becomes 32 hex digits, the same each time."""
    event = wire.LogAction(episode_id="e", seq=1, obs=OBS, action=1)
    found = redaction(REDACT).event(event)
    obs = Codec(OBSERVATION).decode(found.obs)  # type: ignore[union-attr]
    assert (obs["age"], obs["x"].tolist()) == (0, [0.5, 0.25])
    assert obs["user"] == pseudonym(KEY, SECRET)
    assert re.fullmatch("[0-9a-f]{32}", obs["user"])
    assert event.obs is OBS
    assert redaction(REDACT).event(event) == found


@pytest.mark.parametrize(
    ("space", "value", "rule", "expected"),
    [
        (Box(shape=(2,), low=1.0, high=2.0), [1.5, 2.0], "drop", [1.0, 1.0]),
        (Box(shape=(2,), low=-9.0, high=-3.0), [-5.0, -9.0], "drop", [-3.0, -3.0]),
        (Discrete(5, start=3), 6, "drop", 3),
        (Discrete(5, start=-9), -7, "drop", -5),
        (MultiDiscrete((3, 4), (1, 0)), [2, 3], "drop", [1, 0]),
        (MultiBinary((3,)), [1, 0, 1], "drop", [0, 0, 0]),
        (Text(8), "secret", "drop", ""),
        (Text(8, 3, "xyz"), "zzzz", "drop", "xxx"),
    ],
)
def test_a_dropped_leaf_is_the_legal_value_nearest_to_zero(
    space: Space, value: Any, rule: str, expected: Any
) -> None:
    codec = Codec(space)
    found = codec.decode(redaction({"obs": rule}, space).observation(codec.encode(value)))
    assert (found.tolist() if hasattr(found, "tolist") else found) == expected


@given(st.integers(-50, 49), st.integers(-50, 49))
def test_a_hashed_code_is_of_the_same_range(first: int, second: int) -> None:
    """Equal values get equal codes, within the space's range."""
    space = Discrete(100, start=-50)
    codec, rule = Codec(space), redaction({"obs": "hash"}, space)
    found = [codec.decode(rule.observation(codec.encode(value))) for value in (first, second)]
    assert all(-50 <= code <= 49 for code in found)
    assert first != second or found[0] == found[1]


@given(st.data())
def test_what_is_put_in_place_is_always_valid(data: st.DataObject) -> None:
    """In any space, the substitute for a dropped observation is valid, and stable when redacted
    again.
    """
    space = data.draw(spaces)
    codec, rule = Codec(space), redaction({"obs": "drop"}, space)
    encoded = codec.encode(data.draw(values(space)))
    found = rule.observation(encoded)
    codec.check(found)
    assert rule.observation(found) == found


@pytest.mark.parametrize(
    ("redact", "info", "expected"),
    [
        ({"infos.a": "drop"}, {"a": SECRET, "b": 1}, {"b": 1}),
        ({"infos.a.b": "drop"}, {"a": {"b": SECRET, "c": 1}}, {"a": {"c": 1}}),
        ({"infos.a.b": "drop"}, {"a": [{"b": SECRET}, {"c": 1}, 5]}, {"a": [{}, {"c": 1}, 5]}),
        ({"infos.a.b": "drop"}, {"a.b": SECRET, "a": {"c": 1}}, {"a": {"c": 1}}),
        ({"infos.a.b.c": "drop"}, {"a": {"b.c": SECRET}, "a.b": {"c": 1}}, {"a": {}, "a.b": {}}),
        ({"infos.a": "drop"}, {"a": {"b": SECRET}, "a.b": SECRET, "ab": 1, "b": {"a.b": 1}}, AB),
        ({"infos.a": "hash"}, {"a.b": SECRET}, {"a.b": pseudonym(KEY, SECRET)}),
        ({"infos.a": "drop", "infos.a.b": "hash"}, {"a.b": 1, "a.c": 2}, {"a.b": HASHED}),
        ({"infos.a": "hash", "infos.a.b": "hash"}, {"a.b": 1}, {"a.b": HASHED}),
        ({"infos.a.b": "drop"}, {"a": [{"b.c": SECRET}], "a.b.c": SECRET}, {"a": [{}]}),
        ({"infos.a.7": "drop"}, {"a": {7: SECRET, 8: 1}}, {"a": {8: 1}}),
        ({"infos.a.b": "drop"}, {"a": SECRET[:3]}, {"a": SECRET[:3]}),
        ({"infos": "drop"}, {"a": SECRET}, {}),
        ({"infos.a": "hash"}, {"a": {"deep": SECRET}}, {"a": pseudonym(KEY, {"deep": SECRET})}),
        ({"infos.a": "hash", "infos.a.b": "drop"}, {"a": {"b": 1}}, {"a": pseudonym(KEY, {})}),
        ({"infos.id": "hash"}, {"id": 42}, {"id": pseudonym(KEY, "42")}),
    ],
)
def test_infos_are_redacted_wherever_the_path_leads(
    redact: dict[str, str], info: dict[str, Any], expected: dict[str, Any]
) -> None:
    """A path leads into lists and through keys that contain dots: no named field escapes."""
    before = repr(info)
    assert info_after(redact, info) == expected
    assert repr(info) == before


@pytest.mark.parametrize(
    ("redact", "expected"),
    [
        ({"tags.user": "drop"}, {"users": "c"}),
        ({"tags.user": "drop", "tags.user.id": "hash"}, {"user.id": HASHED, "users": "c"}),
        (
            {"tags.user": "hash"},
            {"user": pseudonym(KEY, "a"), "user.id": HASHED, "users": "c"},
        ),
    ],
)
def test_tags_below_a_name_are_meant_too(redact: dict[str, str], expected: dict[str, str]) -> None:
    """A tag `user.id` lies below `tags.user`; a more specific rule takes precedence."""
    tags = {"user": "a", "user.id": "1", "users": "c"}
    event = wire.Start(episode_id="e", tags=tags)
    assert redaction(redact).event(event).tags == expected
    assert event.tags == {"user": "a", "user.id": "1", "users": "c"}


@pytest.mark.parametrize("value", [{b"key": SECRET}, float("nan"), [SECRET, b"\xff"], "\ud800"])
def test_what_json_cannot_say_is_hashed_all_the_same(value: Any) -> None:
    assert re.fullmatch("[0-9a-f]{32}", info_after({"infos.a": "hash"}, {"a": value})["a"])


def test_a_pseudonym_needs_the_key() -> None:
    """Another root has other pseudonyms: they can't be joined, or tried out for known values."""
    assert pseudonym(KEY, SECRET) == pseudonym(KEY, SECRET)
    assert pseudonym(KEY, SECRET) != pseudonym(b"j" * 32, SECRET)


def test_a_bad_observation_is_refused_without_showing_it() -> None:
    """Neither the refusal nor its cause holds a value that was to be redacted."""
    for bad in ({**OBS, "age": 1000}, {**OBS, "extra": 1}, SECRET, SECRET.encode(), [SECRET]):
        with pytest.raises(Refusal, match="redacted") as refused:
            redaction(REDACT).event(wire.End(episode_id="e", obs=bad))
        assert "SECRET" not in str(refused.value)
        assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("redact", "text"),
    [
        ({"actions": "drop"}, "expected a path in obs, infos or tags"),
        ({"infos.": "drop"}, "expected a path"),
        ({"infos.a": "mask"}, "expected drop or hash"),
        ({"obs.nobody": "drop"}, "expected one of obs.age, obs.user, obs.x"),
        ({"obs.x": "hash"}, "drop it"),
        ({"obs": "hash"}, "drop it"),
        ({"tags": "hash"}, "the name of a field"),
        (["infos.a"], "expected an object"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused_at_the_start(redact: Any, text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        PolicyDeclaration(observation=OBSERVATION, action=Discrete(2), redact=redact)


@pytest.mark.parametrize("space", [Text(8), Text(64, 40), Text(64, 0, "xyz"), MultiBinary((2,))])
def test_a_leaf_without_room_for_a_pseudonym_takes_none(space: Space) -> None:
    with pytest.raises(DeclarationError, match="drop it"):
        PolicyDeclaration(observation=space, action=Discrete(2), redact={"obs": "hash"})


def test_the_rules_survive_their_file(tmp_path: Path) -> None:
    """Written, read, and among the changes that `collect` reports."""
    declared = PolicyDeclaration(observation=OBSERVATION, action=Discrete(2), redact=REDACT)
    assert PolicyDeclaration.from_json(declared.to_json()) == declared
    old = declared.to_json()
    del old["redact"]
    assert PolicyDeclaration.from_json(old).redact == {}


# --- the key -------------------------------------------------------------------------------------


def test_the_key_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    key = redaction_key(tmp_path)
    assert redaction_key(tmp_path) == key
    path = tmp_path / "keys" / "redaction.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    path.write_text("short")
    with pytest.raises(DeclarationError, match="expected 64 hex digits"):
        redaction_key(tmp_path)


# --- a real collector ----------------------------------------------------------------------------


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("redacts", [True, False])
def test_no_secret_is_on_the_disk(tmp_path: Path, redacts: bool) -> None:
    """Before a kill and after a replay and a drain: not in the journal, shards or logs.

    Without rules, the same traffic does leave it there, so the search can find it.
    """
    root, log = tmp_path / "root", tmp_path / "log"
    save_declaration(
        root,
        PolicyDeclaration(
            observation=OBSERVATION,
            action=Discrete(2),
            redact=REDACT if redacts else {},
            seal_seconds=0.2,
        ),
    )
    tags, info = {"user": SECRET, "note": SECRET}, {"email": SECRET, "account": {"name": SECRET}}
    with CollectorProcess(root, log=log) as process:
        with PolicyClient(process.address) as client:
            for _ in range(40):  # enough that a batch is checked together
                episode = client.start_episode(tags=tags)
                client.log_action(episode, OBS, 1)
                client.log_returns(episode, 1.0, info=info)
                client.log_action(episode, OBS, 0)
                client.end_episode(episode, OBS)
        events: list[dict[str, Any]] = [
            {"type": "start", "episode_id": "broken", "tags": tags},
            {"type": "log_action", "episode_id": "broken", "obs": OBS, "action": 1, "info": info},
        ]
        events.append({**events[1], "obs": {**OBS, "age": SECRET}})
        status, reply = process.post("/v1/events", {"events": events})
        assert (status, len(reply["refused"])) == (200, 1)
        assert process.get("/v1/episodes/broken")[1]["state"] == "broken"
        process.kill()
        found = everything(tmp_path)
        process.restart()
        process.settle(81)
        assert process.stop() == 0
    found += everything(tmp_path)
    assert (SECRET.encode() in found) is not redacts
    rows = shard_rows(root)
    assert len(rows) == 81
    if redacts:
        stand_in = headrace("pseudonym", SECRET, "--root", root).stdout.strip()
        assert {row["obs__user"] for row in rows} == {stand_in}
        assert {row["obs__age"] for row in rows} == {0}
        assert [json.loads(tags) for tags in {row["tags"] for row in rows}] == [{"user": stand_in}]
        (text,) = {row["infos"] for row in rows if isinstance(row["infos"], str)}
        assert json.loads(text) == {"account": {"name": stand_in}}
    assert headrace("verify", "--root", root).returncode == 0


def test_no_pseudonym_is_made_up_without_a_key(tmp_path: Path) -> None:
    """Status 2, and no key is created: rows that were never hashed would be searched in vain."""
    save_declaration(
        tmp_path, PolicyDeclaration(observation=OBSERVATION, action=Discrete(2), redact=REDACT)
    )
    result = headrace("pseudonym", SECRET, "--root", tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "expected a key" in result.stderr
    assert not (tmp_path / "keys").exists()


def test_a_retry_of_a_redacted_event_is_still_a_retry(tmp_path: Path) -> None:
    """The same event gives the same content, also to a collector that was killed in between."""
    save_declaration(
        tmp_path,
        PolicyDeclaration(observation=OBSERVATION, action=Discrete(2), redact=REDACT),
    )
    with CollectorProcess(tmp_path) as process:
        instance = process.post("/v1/instances")[1]["instance"]
        batch = {
            "instance": instance,
            "events": [
                {"type": "start", "episode_id": "e", "start": 0, "tags": {"user": SECRET}},
                {"type": "log_action", "episode_id": "e", "seq": 1, "obs": OBS, "action": 1},
            ],
        }
        assert process.post("/v1/events", batch)[1]["accepted"] == 2
        process.kill()
        process.restart()
        assert process.post("/v1/events", batch)[1]["duplicates"] == 2


def test_a_policy_acts_on_what_was_sent_and_a_lost_answer_is_repeated(tmp_path: Path) -> None:
    """Redaction applies to stored data: the policy gets the observation, and a retry its answer."""
    space = parse_space("box:4")
    spec = PolicySpec(space, Discrete(2))
    save_declaration(
        tmp_path,
        PolicyDeclaration(observation=space, action=Discrete(2), redact={"obs": "drop"}),
    )
    store = WeightStore(tmp_path, "default")
    weights = Policy(spec, seed=0).get_weights()
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))
    with CollectorProcess(tmp_path) as process:
        instance = {"headrace-instance": process.post("/v1/instances")[1]["instance"]}
        process.post("/v1/episodes", {"episode_id": "e", "start": 0}, **instance)
        asked = {"seq": 1, "obs": [1.0, 2.0, 3.0, 4.0]}
        first = process.post("/v1/episodes/e/action", asked, **instance)
        assert first[0] == 200
        assert process.post("/v1/episodes/e/action", asked, **instance) == first
        assert process.get("/v1/episodes/e")[1]["steps"] == 1
        process.post("/v1/episodes/e/end", {"seq": 2}, **instance)
        process.settle(1)
        process.stop()
    assert [row["obs"].tolist() for row in shard_rows(tmp_path)] == [[0.0] * 4]


@pytest.mark.parametrize(("redact", "shown"), [({"obs.user": "hash"}, False), ({}, True)])
def test_a_call_for_an_action_shows_nothing_that_is_taken_out(
    tmp_path: Path, redact: dict[str, str], shown: bool
) -> None:
    """Invalid values are refused without showing them, alone or in a batch."""
    save_declaration(
        tmp_path, PolicyDeclaration(observation=OBSERVATION, action=Discrete(2), redact=redact)
    )
    bad = {**OBS, "user": SECRET * 9}
    with CollectorProcess(tmp_path) as process:
        process.post("/v1/episodes", {"episode_id": "e"})
        status, alone = process.post("/v1/episodes/e/action", {"obs": bad})
        assert status == 422
        asked = {"actions": [{"episode_id": "e", "obs": bad}]}
        status, many = process.post("/v1/actions", asked)
        assert (status, many["actions"][0]["error"]["code"]) == (200, "invalid")
    for heard in (alone, many):
        assert ("SECRET" in json.dumps(heard)) is shown
        assert ("is not shown" in json.dumps(heard)) is not shown
