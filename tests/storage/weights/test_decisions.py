"""The records: listed in order, none skipped, counted by candidate and rows."""

import json
from pathlib import Path

import pytest

from storage.declarations.declaration import DeclarationError
from storage.weights.decisions import Earlier, earlier_of, load_decisions, record, without_texts

SETTINGS = {"reward_range": [0, 1], "gamma": 1.0}


def decision(candidate="a" * 64, episodes=10, rows=(0, 9), policy_id="default"):
    return {
        **SETTINGS,
        "policy_id": policy_id,
        "candidate": candidate,
        "episodes": episodes,
        "rows": {"s": list(rows)} if rows else {},
        "verdict": "cannot tell",
    }


def test_decisions_are_listed_in_their_order(tmp_path):
    """What was written is read, by policy; the time is the clock's."""
    for seconds, candidate in ((2.0, "b" * 64), (1.0, "a" * 64)):
        record(tmp_path, decision(candidate), clock=lambda now=seconds: now)
    record(tmp_path, decision(policy_id="other"))
    found = load_decisions(tmp_path, "default")
    assert [(one["decided"], one["candidate"][0]) for one in found.known] == [
        (1_000_000, "a"),
        (2_000_000, "b"),
    ]
    assert load_decisions(tmp_path, "none").known == ()


def test_what_cannot_be_read_is_named(tmp_path):
    """A record that cannot be read is named, and the other records are read."""
    path = Path(record(tmp_path, decision(), clock=lambda: 1.0))
    record(tmp_path, decision("c" * 64), clock=lambda: 2.0)
    for text in ("{", "[]", json.dumps({"format": 1}), json.dumps({"format": 0})):
        path.write_text(text)
        found = load_decisions(tmp_path, "default")
        assert [one["candidate"][0] for one in found.known] == ["c"]
        assert list(found.damaged) == [str(path)]
    with pytest.raises(DeclarationError):
        load_decisions(tmp_path, "../elsewhere")


def test_looks_and_others_are_those_on_overlapping_rows():
    """Decisions with the same number of episodes and settings are one look, the one before the
    next; decisions on rows that do not overlap belong to another log."""
    known = [
        decision("a" * 64, 10, (0, 9)),
        decision("a" * 64, 10, (0, 9)),
        decision("a" * 64, 15, (0, 14)),
        decision("b" * 64, 10, (0, 9)),
        decision("b" * 64, 12, (0, 11)),
        decision("c" * 64, 10, (50, 90)),
        decision("d" * 64, 0, None),
        {**decision("a" * 64, 11, (0, 10)), "comparisons": []},  # it computed no interval
        {**decision("f" * 64, 11, (0, 10)), "comparisons": []},
    ]

    def earlier(candidate, rows, episodes, **other):
        return earlier_of(known, candidate * 64, rows, episodes, {**SETTINGS, **other})

    assert earlier("a", {"s": [0, 20]}, 20) == Earlier(2, 1)
    assert earlier("a", {"s": [0, 14]}, 15) == Earlier(1, 1)
    assert earlier("e", {"s": [9, 60]}, 15) == Earlier(0, 3)
    assert earlier("e", {"t": [0, 9]}, 15) == Earlier(0, 0)
    for other in ({"reward_range": None}, {"since": 5}, {"cluster": "tag:user"}):
        assert earlier("a", {"s": [0, 14]}, 15, **other) == Earlier(2, 1, alike=False)
    same = {"reward_range": (0.0, 1.0)}
    assert earlier("a", {"s": [0, 14]}, 15, **same) == Earlier(1, 1)


def test_texts_are_erased_from_decisions(tmp_path):
    """In reasons and in names of fields, in both forms of Unicode; all can still be read."""
    record(tmp_path, decision() | {"why": "asked by Zoe\u0308", "by_tag": {"Zo\u00eb": 0.5}})
    other = record(tmp_path, decision(policy_id="b") | {"why": "asked by Bob"})
    before = Path(other).read_bytes()
    assert without_texts(tmp_path, ["Zo\u00eb"]) == 1
    (found,) = load_decisions(tmp_path, "default").known
    assert (found["why"], found["by_tag"]) == ("asked by [erased]", {"[erased]": 0.5})
    assert load_decisions(tmp_path, "default").damaged == {}
    assert Path(other).read_bytes() == before
    assert without_texts(tmp_path, ["Zo\u00eb"]) == 0
    damaged = Path(other).with_name("0-damaged.json")
    damaged.write_text("{")
    assert without_texts(tmp_path, ["Bob", "0", "a" * 64, "default", "cannot tell"]) == 1
    (found,) = load_decisions(tmp_path, "b").known
    assert found | {"why": "asked by Bob", "sha256": ""} == json.loads(before) | {"sha256": ""}
    assert damaged.read_text() == "{"
