"""Canaries: a candidate acts in a share of the episodes, and the returns of both arms are compared.

    start = start_canary(root, "default", digest, 0.1)   # how many episodes a verdict needs
    found = judge_canary(root, "default")                # may be repeated at any time
    promote(root, "default")                             # if the canary is better

The collector assigns an episode to an arm when it starts, and stores the arm in the tags of its
rows. Only episodes are compared that started while both arms were open, with the same share. Each
counts at the same age, with its return up to then; an abandoned or broken one counts with the
policy's default reward. If the policy acts for several agents of an episode, the episode's return
is the sum over these agents, and it failed if the track of one of them failed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from policy.inference.weight_store import WeightStore
from policy.judging.settings import CanarySettings
from policy.ope.arms import LARGEST_RETURN, ArmsComparison, compare_arms, episodes_needed
from policy.ope.comparison import BETTER, CANNOT_TELL
from policy.ope.margins import Margin
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations
from storage.errors import WeightsNotFound
from storage.experience.endings import UNOBSERVED
from storage.experience.hashed import ARM
from storage.experience.sample_batch import (
    AGENT_ID,
    EPS_ID,
    REWARDS,
    STREAM,
    SampleBatch,
    T,
)
from storage.experience.step_columns import UNKNOWN_VERSION
from storage.objects.opening import Root
from storage.reading.shard_reader import ShardReader
from storage.weights.decisions import record
from storage.weights.manifest import Live
from storage.wording import counted

log = logging.getLogger("headrace.canary")

Document: TypeAlias = dict[str, Any]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

RECEIVED, VERSION, ENDED = "received_ts", "policy_version", "ended"
_COLUMNS = (EPS_ID, REWARDS, AGENT_ID, ENDED, RECEIVED, VERSION)
RELATIVE_EFFECT = 0.1
"""The difference that the planned number of episodes can show, as a share of the mean return."""
ERROR = 0.05
RECENT = 10_000
"""The number of latest episodes from which the mean return is taken."""
_SEVERAL = -2  # instead of a version: several versions acted in first steps of one episode


@dataclass(frozen=True, eq=False)
class Arms:
    """The episodes of a canary's generation that are old enough, in the order of their starts."""

    returns: FloatArray  # (n,) at the age
    in_canary: BoolArray  # (n,) as assigned
    failed: BoolArray  # (n,) abandoned or broken
    steps: IntArray  # (n,) up to the age
    crossed: int  # episodes in which another version than the assigned one acted first
    unacted: int  # episodes in which none did: the program logged its own action
    young: int  # episodes that do not count yet
    waiting: int  # those of them that have reached the age, and wait for later steps in the shards
    incomplete: int  # episodes without a first step: it was erased, or its shard is damaged
    open: int  # episodes that have reached the age and not ended
    # collector's stream -> (the canary's, all) episodes whose first step is in a shard by now,
    # whatever their age
    started: Mapping[str, tuple[int, int]]


def read_arms(
    root: Root,
    declaration: PolicyDeclaration,
    live: Live,
    *,
    age: float,
    now: float,
    cap: float = math.inf,
) -> Arms:
    """Read the episodes that started in the generation of `live`; rewards count up to `cap`.

    They are compared at `age` seconds after their first step. An episode counts once a step that
    arrived `shown_after(declaration, age)` seconds after its first one is in a shard: then all that
    it earned by its age is there, too. Such a step is in a shard a reward window later. Episodes
    that are older by the clock (`now`, seconds since the epoch) and still wait are `waiting`.
    """
    sources = _NameNumbers()
    found = [
        _episodes(root, declaration, f"{live.generation}:{version}", cap, sources)
        for version in (live.canary_version, live.version)
    ]
    newest = max((int(one.received.max()) for one in found if one.received.size), default=0)
    shown_by = shown_after(declaration, age)
    arms = [_aged(one, declaration, newest, age, shown_by, now) for one in found]
    starts = np.concatenate([one["starts"] for one in arms])
    order = np.argsort(starts, kind="stable")

    def joined(name: str) -> Any:
        return np.concatenate([one[name] for one in arms])[order]

    in_canary = np.repeat([True, False], [len(one["starts"]) for one in arms])[order]
    assigned = np.where(in_canary, live.canary_version or -1, live.version)
    versions = joined("versions")
    unacted = versions == UNKNOWN_VERSION
    return Arms(
        returns=joined("returns"),
        in_canary=in_canary,
        failed=joined("failed"),
        steps=joined("steps"),
        crossed=int(((versions != assigned) & ~unacted).sum()),
        unacted=int(unacted.sum()),
        young=sum(one["young"] for one in arms),
        waiting=sum(one["waiting"] for one in arms),
        incomplete=sum(one["incomplete"] for one in arms),
        open=int(joined("open").sum()),
        started=_started(found, sources, newest - int(shown_after(declaration, 0.0) * 1e6)),
    )


def _started(
    arms: Sequence[_ArmSteps], sources: _NameNumbers, until: int
) -> dict[str, tuple[int, int]]:
    """The field of `Arms`, of episodes that started by `until` (microseconds)."""
    counts = []
    for rows in arms:
        if not rows.t.size:
            counts.append(np.zeros(len(sources.names), np.int64))
            continue
        begins = _firsts(rows.episode)
        early = np.minimum.reduceat(rows.received, begins) <= until
        counts.append(np.bincount(rows.source[begins][early], minlength=len(sources.names)))
    canary, live = counts
    return {
        name: (int(own), int(own + other))
        for name, own, other in zip(sources.names, canary, live, strict=True)
        if own + other
    }


def shown_after(declaration: PolicyDeclaration, age: float) -> float:
    """Seconds after its first step in which all that an episode earned by `age` reaches a shard.

    A step that arrived later, and is in a shard, shows that it did.
    """
    rules = declaration
    return age + rules.reward_window + rules.part_seconds + rules.seal_seconds


@dataclass(frozen=True, eq=False)
class _ArmSteps:
    """Columns (S,) of steps, sorted by episode, agent and t."""

    episode: IntArray  # numbered from 0
    agent: IntArray
    t: IntArray
    rewards: FloatArray
    received: IntArray
    versions: IntArray
    ended: IntArray  # an index of `_ENDINGS`
    source: IntArray  # the stream of its rows, numbered


_ENDINGS = ("None", *UNOBSERVED)  # "None": the track goes on; other endings have the next number
_GOES_ON, _OVER = 0, len(_ENDINGS)


def _batches(root: Root, declaration: PolicyDeclaration, arm: str | None) -> Iterator[SampleBatch]:
    """The rows of one arm; those of all episodes if `arm` is None."""
    with ShardReader(
        root,
        policy_id=declaration.policy_id,
        schema_id=declaration.schema_id,
        tags=None if arm is None else {ARM: arm},
        training_disabled=True,
        columns=_COLUMNS,
    ) as reader:
        yield from reader


def _episodes(
    root: Root, declaration: PolicyDeclaration, arm: str, cap: float, sources: _NameNumbers
) -> _ArmSteps:
    """The rows of one arm as numbers, about 70 bytes per step."""
    episodes, agents = _NameNumbers(), _NameNumbers()
    found: list[tuple[npt.NDArray[Any], ...]] = [(np.empty(0, np.int64),) * 8]
    for batch in _batches(root, declaration, arm):
        words = batch[ENDED].astype(str)  # "None": the episode goes on
        ended = np.full(len(words), _OVER)
        for number, word in enumerate(_ENDINGS):
            ended[words == word] = number
        found.append(
            (
                episodes.of(_names(batch)),
                agents.of(batch[AGENT_ID].astype(str)),
                batch[T],
                np.minimum(batch[REWARDS].astype(np.float64), cap),
                batch[RECEIVED],
                batch[VERSION],
                ended,
                sources.of(batch[STREAM].astype(str)),
            )
        )
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.lexsort((columns[2], columns[1], columns[0]))
    return _ArmSteps(*(column[order] for column in columns))


def _names(batch: SampleBatch) -> npt.NDArray[np.str_]:
    """(rows,) the name of each row's episode, which all tracks of an episode share."""
    return np.char.add(batch[STREAM].astype(str), batch[EPS_ID].astype(str))


class _NameNumbers:
    """Numbers names from 0, in the order of their first occurrence."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """All names, by their numbers."""
        return list(self._known)

    def of(self, names: npt.NDArray[np.str_]) -> IntArray:
        found, places = np.unique(names, return_inverse=True)
        known = self._known
        return np.array([known.setdefault(str(name), len(known)) for name in found])[places]


def _firsts(*keys: IntArray) -> IntArray:
    """The indices at which runs of equal keys begin."""
    first = np.ones(len(keys[0]), np.bool_)
    first[1:] = np.any([np.diff(key) != 0 for key in keys], axis=0)
    return np.flatnonzero(first)


def _aged(
    rows: _ArmSteps,
    declaration: PolicyDeclaration,
    newest: int,
    age: float,
    shown_by: float,
    now: float,
) -> dict[str, Any]:
    """The fields of `Arms` for the episodes of one arm, and the number of those too young."""
    if not rows.t.size:
        none, no = np.empty(0, np.int64), np.empty(0, np.bool_)
        numbers = dict.fromkeys(("starts", "returns", "steps", "versions"), none)
        return {**numbers, "failed": no, "open": no, "young": 0, "waiting": 0, "incomplete": 0}
    begins, tracks = _firsts(rows.episode), _firsts(rows.episode, rows.agent)
    of_episode = np.searchsorted(tracks, begins)  # the first track of each
    starts = np.minimum.reduceat(rows.received, begins)
    whole = np.logical_and.reduceat(rows.t[tracks] == 0, of_episode)
    old = starts + shown_by * 1e6 <= newest
    limits = starts + age * 1e6
    counts = rows.received <= np.repeat(limits, np.diff(np.append(begins, len(rows.t))))
    with np.errstate(over="ignore", invalid="ignore"):  # `compare_arms` names such returns
        returns = np.add.reduceat(np.where(counts, rows.rewards, 0.0), begins)
    steps = np.add.reduceat(counts.astype(np.int64), begins)
    last = np.append(tracks[1:], len(rows.t)) - 1
    ended = rows.ended[last]
    silent = np.where(ended == _ENDINGS.index("abandoned"), declaration.episode_timeout, 0.0)
    by_then = np.repeat(limits, np.diff(np.append(of_episode, len(tracks))))
    over = (ended != _GOES_ON) & (rows.received[last] + silent * 1e6 <= by_then)
    failed = np.logical_or.reduceat(over & (ended != _OVER), of_episode)
    over = np.logical_and.reduceat(over, of_episode)
    returns = np.where(failed, declaration.reward_default, returns)
    acted = rows.versions[tracks]
    lowest, highest = (which.reduceat(acted, of_episode) for which in (np.minimum, np.maximum))
    kept, young = whole & old, whole & ~old
    counts_after = shown_by + declaration.reward_window
    return {
        "starts": starts[kept],
        "returns": returns[kept],
        "failed": failed[kept],
        "steps": steps[kept],
        "versions": np.where(lowest == highest, lowest, _SEVERAL)[kept],
        "open": ~(over | failed)[kept],
        "young": int(young.sum()),
        "waiting": int((young & (starts + counts_after * 1e6 <= now * 1e6)).sum()),
        "incomplete": int((~whole).sum()),
    }


def judge_canary(
    root: Root,
    policy_id: str,
    settings: CanarySettings | None = None,
    *,
    clock: Callable[[], float] = time.time,
) -> Document:
    """Compare the running canary with the live version, by their episodes.

    An equal canary is called better or worse with a probability of at most `ERROR`. `clock`:
    seconds since the epoch.

    Returns a dict with the fields of `ArmsComparison.to_dict` (`verdict`, ...), `state` (the
    verdict, or "too young" while no episode of an arm counts yet), the canary's `candidate`, the
    two versions, and the numbers of episodes that were left out: `young` ones, of which `waiting`
    are old enough by the clock. Raises WeightsNotFound if no canary is running, and ValueError for
    an age that is not above the reward window.
    """
    settings = settings or CanarySettings()
    store = WeightStore(root, policy_id)
    live = store.live()
    if live is None or live.canary_version is None:
        text = "expected a running canary, got none; `headrace publish --canary SHARE` starts one"
        raise WeightsNotFound(f"{policy_id}: {text}")
    declaration = _declared(root, policy_id)
    window = declaration.reward_window
    age, reward_cap = settings.age, settings.reward_cap
    if age is None:
        age = 2 * declaration.episode_timeout + window
    if not age > window or not math.isfinite(age):
        raise ValueError(f"age: expected more than the reward window of {window:.6g} s, got {age}")
    if reward_cap is not None and not math.isfinite(reward_cap):
        raise ValueError(f"reward_cap: expected a finite number, got {reward_cap}")
    wanted, cap = Margin.parse(settings.margin), math.inf if reward_cap is None else reward_cap
    arms = read_arms(root, declaration, live, age=age - window, now=clock(), cap=cap)
    found = compare_arms(
        arms.returns,
        arms.in_canary,
        arms.failed,
        share=live.canary_share,
        limits=_limits(declaration, arms.steps, cap),
        error=ERROR,
        margin=wanted,
        started=arms.started,
    )
    if found.verdict == CANNOT_TELL:
        left = _left_out(arms, age, shown_after(declaration, age - window), window)
        found = replace(found, reasons=(*found.reasons, *left))
    return {
        "policy_id": policy_id,
        "state": "too young" if _too_young(found) else found.verdict,
        "candidate": store.manifest(live.canary_version).candidate,
        "generation": live.generation,
        "canary": live.canary_version,
        "live": live.version,
        "age": age,
        "reward_cap": reward_cap,
        **found.to_dict(),
        "crossed": arms.crossed,
        "unacted": arms.unacted,
        "young": arms.young,
        "waiting": arms.waiting,
        "incomplete": arms.incomplete,
        "open": arms.open,
    }


def _too_young(found: ArmsComparison) -> bool:
    """Whether an arm has no episode that counts so far."""
    return found.verdict == CANNOT_TELL and not found.mismatch and min(found.n) == 0


def _left_out(arms: Arms, age: float, shown_by: float, window: float) -> Iterator[str]:
    """Why episodes do not count yet."""
    recent = arms.young - arms.waiting
    if recent:
        yield (
            f"{counted(recent, 'episode is', 'episodes are')} too recent: one counts about "
            f"{shown_by + window:g} s after its start, the age of {age:g} s and the time in which "
            "a later step reaches a shard"
        )
    if arms.waiting:
        yield (
            f"{counted(arms.waiting, 'episode is', 'episodes are')} old enough, but counted once a "
            f"step that arrived {shown_by:g} s after the start is in a shard"
        )


def _limits(
    declaration: PolicyDeclaration, steps: IntArray, cap: float = math.inf
) -> tuple[float, float] | None:
    """The limits of a return. Known if a step's limits are declared and episodes have one step."""
    known, default = declaration.reward_range, declaration.reward_default
    if known is None or not (steps <= 1).all():
        return None
    return min(known[0], default, cap), max(min(known[1], cap), default)


def _declared(root: Root, policy_id: str) -> PolicyDeclaration:
    declaration = load_declarations(root).get(policy_id)
    if declaration is None:
        raise ValueError(f"{root}: expected a file policies/{policy_id}.json, got none")
    return declaration


def start_canary(root: Root, policy_id: str, candidate: str, share: float) -> Document:
    """Let a candidate (a digest) act in a `share` (0 to 1) of the episodes.

    Returns a dict. `started` is false if it acted in this share already; `needed` is the estimated
    number of episodes, of both arms, that can show a difference of `effect`: a tenth of the mean
    return of the `recent` latest episodes. They are the live version's, or all versions' if it has
    fewer than 30; with fewer than 30 of all, both are None.

    Raises ValueError if the policy is not declared, and the errors of `WeightStore.start_canary`.
    """
    store, declaration = WeightStore(root, policy_id), _declared(root, policy_id)
    digest = store.candidate(candidate).digest
    before = store.live()
    needed = _needed(root, declaration, before, share) if before is not None else {}
    live = store.start_canary(digest, share)
    started = before is None or live.generation != before.generation
    if started:
        acts = f"version {live.canary_version} acts in {live.canary_share:.3g} of the episodes"
        document = {"policy_id": policy_id, "kind": "canary start", "candidate": digest}
        try:
            record(root, {**document, "published": False, "version": None, "reasons": [acts]})
        except OSError as problem:  # the canary is on: that stands
            log.error("policy %s: %s; this is not recorded: %s", policy_id, acts, problem)
    return {
        "policy_id": policy_id,
        "candidate": digest,
        "started": started,
        "canary": live.canary_version,
        "share": live.canary_share,
        "version": live.version,
        "generation": live.generation,
        **needed,
    }


def _needed(
    root: Root, declaration: PolicyDeclaration, live: Live, share: float
) -> Mapping[str, Any]:
    known = {"needed": None, "effect": None, "recent": 0}
    recent, lengths = _recent(root, declaration, live.version)
    if len(recent) < 30:  # it is new: use the returns of earlier versions
        recent, lengths = _recent(root, declaration, None)
    if len(recent) < 30 or not recent.std() > 0:
        return {**known, "recent": len(recent)}
    effect = RELATIVE_EFFECT * abs(float(recent.mean())) or RELATIVE_EFFECT * float(recent.std())
    limits = _limits(declaration, lengths)
    width = None if limits is None else limits[1] - limits[0]
    number = episodes_needed(float(recent.std()), effect, share, ERROR / 3, width=width)
    return {"needed": number, "effect": effect, "recent": len(recent)}


def _recent(
    root: Root, declaration: PolicyDeclaration, version: int | None
) -> tuple[FloatArray, IntArray]:
    """(returns, steps) of the latest `RECENT` episodes, of one version or of all (None).

    Those with returns too large to compare are left out. At most twice as many are in memory.
    """
    held: dict[str, list[float]] = {}  # name -> start, return, steps
    for batch in _batches(root, declaration, None):
        names, places = np.unique(_names(batch), return_inverse=True)
        mine = batch[T] == 0
        if version is not None:
            mine &= batch[VERSION] == version
        none = np.iinfo(np.int64).max
        starts = np.full(len(names), none)
        np.minimum.at(starts, places[mine], batch[RECEIVED][mine])
        returns = np.bincount(places, batch[REWARDS], len(names))
        steps = np.bincount(places, minlength=len(names))
        for name, start, value, count in zip(
            names.tolist(), starts.tolist(), returns.tolist(), steps.tolist(), strict=True
        ):
            if start != none or name in held:  # else another version acted at its start
                one = held.setdefault(name, [start, 0.0, 0])
                one[1], one[2] = one[1] + value, one[2] + count
        if len(held) > 2 * RECENT:
            held = dict(_latest(held))
    latest = [values for _, values in _latest(held)]
    table = np.array(latest, np.float64).reshape(-1, 3)
    table = table[np.abs(table[:, 1]) <= LARGEST_RETURN]
    return table[:, 1], table[:, 2].astype(np.int64)


def _latest(held: Mapping[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(held.items(), key=lambda item: item[1][0])[-RECENT:]


def promote(
    root: Root,
    policy_id: str,
    settings: CanarySettings | None = None,
    *,
    gated: bool = True,
    expected_generation: int | None = None,
) -> Document:
    """Make the canary the live version if `judge_canary` finds it better, and record the decision.

    With `gated=False` the verdict is recorded, but does not decide. Returns the result of
    `judge_canary` with `promoted`, `version`, `generation` and `decision` (a file). Raises the
    errors of `judge_canary`, and GenerationConflict if another publication was first, or is live
    instead of `expected_generation`.
    """
    store = WeightStore(root, policy_id)
    found = judge_canary(root, policy_id, settings)
    passed = not gated or found["verdict"] == BETTER
    expected = found["generation"] if expected_generation is None else expected_generation
    live = store.promote_canary(expected_generation=expected) if passed else None
    done = {
        "promoted": passed,
        "reasons": [*([] if gated else ["without a gate"]), *found["reasons"]],
        "version": live.version if live else found["canary"],
        "generation": live.generation if live else found["generation"],
    }
    path = record(
        root,
        {
            **found,
            **done,
            "kind": "canary",
            "candidate": store.manifest(found["canary"]).candidate,
            "published": passed,
            "version": live and live.version,
            "rows": {},
        },
    )
    return {**found, **done, "decision": path}
