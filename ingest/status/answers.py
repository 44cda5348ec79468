"""The document of a collector's state: five answers, and for each policy its rewards over time.

    document = status_document(facts)
    document["answers"]["needs"]        # [{"text", "kind"}]: empty if nothing needs attention

Which version is live and which is served; is it better than the previous one, or than the rule
before the first one; does data arrive; does training continue; what needs an operator. `GET
/v1/status` and `headrace status --json` give it, the page at `/` draws it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self, TypeAlias

from ingest.status.decision_words import decided
from ingest.status.rewards import (
    FEWEST,
    SURE,
    UNITS,
    chart,
    difference,
    fell,
    interval,
    level_of,
    measure_of,
    since,
)
from storage.experience.reward_history import BEFORE, OTHERS, Measure, RewardHistory
from storage.wording import counted

NOTHING = "nothing"
QUESTIONS = {
    "needs": "What needs attention?",
    "live": "What is live?",
    "better": "Is it better than the previous one?",
    "data": "Does data arrive?",
    "learning": "Is training running?",
}
STOPPED_SECONDS = 600.0
FULL_SOON_HOURS = 24.0
STALLED_SECONDS = 10.0
MOST_DECISIONS = 40
DROP, DRIFT = 0.1, 0.2
"""Shares of the earlier mean by which a reward has to fall, and a propensity to move."""

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PolicyFacts:
    """The facts about one policy. `roles`: live, previous, canary -> version."""

    name: str
    served: str  # "version 7", NOTHING
    wanted: str
    why: str | None = None  # why the wanted version is not served
    held: str | None = None  # who prevents others from publishing, and why
    share: float = 0.0  # the canary's
    roles: Mapping[str, int | None] = field(default_factory=dict)
    trainer: bool | None = None  # None: never seen
    rows_trained: float = 0.0
    retrying: float = 0.0
    stalled: float = 0.0  # seconds that clients have waited for weights
    hint: str = ""  # the trainer's, if learning does not go on
    history: RewardHistory = field(default_factory=RewardHistory)
    decisions: Sequence[Mapping[str, Any]] = ()  # oldest first

    @classmethod
    def at_rest(
        cls,
        name: str,
        live: Mapping[str, Any] | None,
        previous: int | None,
        history: RewardHistory,
        decisions: Sequence[Mapping[str, Any]],
    ) -> Self:
        """The facts from a root's files: its live.json, and the version that was live before."""
        found = live or {}
        version, pin = found.get("version"), found.get("pinned")
        return cls(
            name=name,
            served=NOTHING,
            wanted=NOTHING if version is None else named(version),
            why=None if version is None else "no collector serves it",
            held=pin and f"{pin['by']}: {pin['why']}",
            share=found.get("canary_share") or 0.0,
            roles={"live": version, "previous": previous, "canary": found.get("canary_version")},
            history=history,
            decisions=decisions,
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a collector.

    `needs`: conditions of the collector for an operator; `counts`: the time that counts cover ->
    name -> value.
    """

    policies: Sequence[PolicyFacts]
    made: int  # microseconds since the epoch
    steps: int = 0
    in_shards: int = 0
    open: int = 0
    awaiting: int = 0  # ended episodes that wait for late rewards
    silent: float | None = None  # seconds since the last accepted event; None: since the start
    running: float = 0.0  # seconds since the start
    refused: int = 0
    full: bool = False  # whether events are refused because the disk has no space
    hours_left: Mapping[str, float] = field(default_factory=dict)  # folder -> until it is full
    needs: Sequence[str] = ()
    counts: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    root: str = ""
    down: str = ""  # why no collector could be asked: these are facts from files


def status_document(facts: Facts, *, chosen: str | None = None, level: int | None = None) -> Json:
    """The document. `chosen` is the policy whose rewards come first; `level` of its history."""
    policies = sorted(facts.policies, key=lambda one: one.name != chosen)
    needs = [*_collectors(facts), *(text for one in policies for text in _needs(one, facts.root))]
    return {
        "format": 1,
        "made": facts.made,
        "root": facts.root,
        "answers": {
            "needs": [_line(text, "bad") for text in needs],
            "live": [_live(one) for one in policies] or [_line("No policy.")],
            "better": [line for one in policies for line in _better(one)],
            "data": [_data(facts)],
            "learning": [_learning(one) for one in policies],
        },
        "policies": [
            policy_document(one, level if one.name == chosen else None, root=facts.root)
            for one in policies
        ],
        "counts": {title: dict(counts) for title, counts in facts.counts.items()},
    }


def policy_document(one: PolicyFacts, level: int | None = None, *, root: str) -> Json:
    """The rewards of a policy over time, its versions in their roles, and its decisions."""
    history, measure = one.history, measure_of(one.history)
    at = level_of(history, one.roles.get("live")) if level is None else level
    roles = {"before": BEFORE, **one.roles}
    name, counts = UNITS[measure]
    return {
        "name": one.name,
        "measure": name,
        "counts": counts,
        "share": one.share,
        "levels": [each for each in range(at + 1) if history.levels[each]] if level is None else [],
        "versions": {
            role: {
                "version": version,
                "since": since(history, version),
                **interval(history.total(version, measure)),
                "against": _against(one, measure, role),
            }
            for role, version in roles.items()
            if version is not None and (version >= 0 or history.total(version, measure).n)
        },
        "chart": chart(history, measure, at, one.roles.get("canary")),
        "decisions": [_brief(each) for each in one.decisions[-MOST_DECISIONS:]],
        "go_back": _rollback(one, root) if one.roles.get("previous") is not None else None,
    }


def _rollback(one: PolicyFacts, root: str) -> str:
    """The command that ends a canary, or goes back to the version before."""
    return f"headrace rollback --root {shlex.quote(root)} --policy-id {one.name} --why TEXT"


def _pairs(one: PolicyFacts, measure: Measure) -> Iterator[tuple[str, int, int]]:
    """(role, version, bar): the canary and the live version with those that they have to beat."""
    live, previous, canary = (one.roles.get(role) for role in ("live", "previous", "canary"))
    pairs = (("canary", canary, live), ("live", live, previous), ("live", live, BEFORE))
    for role, version, bar in pairs:
        if version is not None and bar is not None and one.history.total(bar, measure).n:
            yield role, version, bar


def _against(one: PolicyFacts, measure: Measure, role: str) -> Json | None:
    """How far the version in a role is from what it has to beat first; None if that is unknown."""
    pair = next((pair for pair in _pairs(one, measure) if pair[0] == role), None)
    if pair is None:
        return None
    _, version, bar = pair
    apart = difference(one.history.total(version, measure), one.history.total(bar, measure))
    if apart is None:
        return None
    return {"version": bar, "value": apart.value, "low": apart.low, "high": apart.high}


def named(version: int) -> str:
    """A version in words, also those that are none."""
    return {BEFORE: "the rule before", OTHERS: "other versions"}.get(version, f"version {version}")


def moment(seconds: float) -> str:
    """A time in UTC, to the minute; one outside the calendar as its number."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f} s"


def _brief(one: Mapping[str, Any]) -> Json:
    command, outcome, reasons = decided(one)
    return {
        "decided": one["decided"],
        "command": command,
        "candidate": str(one["candidate"])[:12],
        "outcome": outcome,
        "reasons": reasons[:3],
    }


def _line(text: str, kind: str = "") -> Json:
    return {"text": text, "kind": kind}


def _live(one: PolicyFacts) -> Json:
    same = one.wanted == one.served and one.why is None
    nothing = same and one.served == NOTHING
    served = "nothing is published" if nothing else f"{one.served} is served"
    text = f"{one.name}: {served}"
    text += "" if nothing else ", as wanted" if same else f"; {one.wanted} is wanted"
    text += f" ({one.why})" if one.why else ""
    canary = one.roles.get("canary")
    if canary is not None:
        text += f"; canary: version {canary} in {one.share:.3g} of the episodes"
    text += f"; pinned by {one.held}" if one.held else ""
    return _line(text, "ok" if same else "bad")


def _better(one: PolicyFacts) -> list[Json]:
    """The differences of means with their 95 % intervals, for information only."""
    measure = measure_of(one.history)
    if one.roles.get("live") is None:
        return [_line(f"{one.name}: there is no version to compare")]
    lines = [_compared(one, measure, *pair) for pair in _pairs(one, measure)]
    return lines or [_line(f"{one.name}: there is nothing earlier to compare with")]


def _compared(one: PolicyFacts, measure: Measure, role: str, version: int, bar: int) -> Json:
    mine, other = one.history.total(version, measure), one.history.total(bar, measure)
    name, unit = UNITS[measure]
    counts = f"n = {mine.n:,} and {counted(other.n, unit)}"
    which = "the rule before it" if bar == BEFORE else f"version {bar}"
    pair = f"{one.name}: version {version} minus {which}"
    apart = difference(mine, other)
    if apart is None:
        few = f"fewer than {FEWEST} {unit}s of one of the two"
        return _line(f"{pair}: cannot tell, {few} ({counts})")
    word, kind = "no clear difference", ""
    if apart.low > 0 or apart.high < 0:
        word, kind = ("it looks better", "ok") if apart.low > 0 else ("it looks worse", "bad")
    note = (
        "`headrace canary` gives the verdict"
        if role == "canary"
        else "one came after the other, so changes over time contribute"
    )
    means = f"{mine.mean:.3g} against {other.mean:.3g} {name}"
    return _line(f"{pair}: {word}, {means}, {apart}, {counts}; {note}", kind)


def _data(facts: Facts) -> Json:
    if facts.down:
        return _line(f"Unknown: {facts.down}", "bad")
    arrives = facts.silent is not None and facts.silent < 60 and not facts.full
    when = "no event since the start" if facts.silent is None else _ago(facts.silent)
    waiting = f", {facts.awaiting:,} more waiting for late rewards" if facts.awaiting else ""
    rest = (
        f"{counted(facts.open, 'open episode')}{waiting}. "
        f"Since this collector started: {counted(facts.refused, 'event')} refused. "
        f"Over the journal's whole life: {counted(facts.steps, 'step')} taken, "
        f"{facts.in_shards:,} of them in shards"
    )
    yes = "Yes" if arrives else "No, the disk is full" if facts.full else "Not now"
    return _line(f"{yes}: {when}. {rest}.", "ok" if arrives else "")


def _ago(seconds: float) -> str:
    if seconds < 2:
        return "the last event came just now"
    return f"the last event came {_long(seconds)} ago"


def _long(seconds: float) -> str:
    """A time in its largest unit."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            return counted(int(seconds // size), unit)
    return counted(int(seconds), "second")


def _learning(one: PolicyFacts) -> Json:
    if one.trainer is None:
        return _line(f"{one.name}: no trainer follows it")
    retrying = f", retrying {counted(one.retrying, 'shard')}" if one.retrying else ""
    stalled = f"; clients have waited {one.stalled:.0f} s for weights" if one.stalled else ""
    if one.trainer:
        hint = f"; {one.hint}" if one.hint else ""
        rest = f"{counted(one.rows_trained, 'row')} trained on{retrying}{stalled}{hint}"
        return _line(
            f"{one.name}: yes, {rest}", "bad" if one.stalled > STALLED_SECONDS or hint else "ok"
        )
    return _line(f"{one.name}: its trainer has stopped{stalled}", "bad")


# --- what needs attention -----------------------------------------------------------------------


def _collectors(facts: Facts) -> Iterator[str]:
    """Conditions of the collector."""
    yield from facts.needs
    if facts.down:
        yield facts.down
    for name, hours in facts.hours_left.items():
        if hours < FULL_SOON_HOURS:
            yield f"The disk of {name}/ will be full in {hours:.1f} hours at the present rate."
    silent = facts.running if facts.silent is None else facts.silent
    if silent > STOPPED_SECONDS and facts.steps:
        yield f"Data has stopped: no event for {_long(silent)}"


def _needs(one: PolicyFacts, root: str) -> Iterator[str]:
    """Conditions of one policy."""
    if one.why is not None:
        yield f"{one.name}: {one.wanted} is wanted and not served: {one.why}"
    yield from _losses(one, root)
    yield from _drifts(one)
    if one.roles.get("canary") is not None:
        yield f"{one.name}: a canary is on; `headrace canary` says when to promote or roll back"
    elif one.held is not None:
        yield f"{one.name}: pinned by {one.held}; `headrace resume` ends that"
    if one.trainer is False:
        yield f"{one.name}: its trainer has stopped"
    if one.stalled > STALLED_SECONDS:
        yield f"{one.name}: clients have waited {one.stalled:.0f} s for weights"


def _losses(one: PolicyFacts, root: str) -> Iterator[str]:
    """Versions that earn less than what was there before them, and what to do."""
    history, measure = one.history, measure_of(one.history)
    back = _rollback(one, root)
    what = {"canary": f"`{back}` ends the canary", "live": f"`{back}` goes back"}
    if one.roles.get("previous") is None:
        what["live"] = (
            "there is no earlier version to go back to: publish another candidate, or let services "
            "act by their own rule"
        )
    for role, version, bar in _pairs(one, measure):
        mine, other = history.total(version, measure), history.total(bar, measure)
        apart = difference(mine, other)
        if apart is None or apart.errors > -SURE:
            continue
        which = "the rule before it" if bar == BEFORE else f"version {bar}"
        began = since(history, version)
        yield (
            f"{one.name}: version {version} earns less than {which}, {mine.mean:.3g} against "
            f"{other.mean:.3g} {UNITS[measure][0]}: {apart}"
            f"{'' if began is None else f', since {moment(began)} UTC'}; {what[role]}"
        )


def _drifts(one: PolicyFacts) -> Iterator[str]:
    """A reward that fell and a propensity that moved, within what acts now."""
    history = one.history
    live = one.roles.get("live")
    acting = BEFORE if live is None else live
    at = level_of(history, live)
    measures: tuple[tuple[Measure, str], ...] = (
        (measure_of(history), f"the {UNITS[measure_of(history)][0]}"),
        ("propensities", "the mean propensity"),
    )
    for measure, words in measures:
        found = fell(history, measure, acting, at)
        if found is None:
            continue
        earlier, later, apart = found["earlier"], found["later"], found["difference"]
        share = DRIFT if measure == "propensities" else DROP
        moved = abs(apart.value) >= share * abs(earlier.mean)
        if moved and (apart.value < 0 or measure == "propensities"):
            of = "what has no version" if acting == BEFORE else named(acting)
            word = "drifted" if measure == "propensities" else "fell"
            yield (
                f"{one.name}: {words} of {of} {word} from {earlier.mean:.3g} to {later.mean:.3g}, "
                f"{apart}, since {moment(found['since'])} UTC"
            )
