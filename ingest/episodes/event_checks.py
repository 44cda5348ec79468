"""Checks of an event's content, and the journal event that it becomes.

Functions of an event and its episode without side effects. Every refusal names the field, and what
was expected and found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from ingest.episodes.infos import MAX_MERGED
from ingest.episodes.journal_events import UNKNOWN_LOGP, Acted, Rewarded
from ingest.episodes.open_episode import OpenEpisode
from ingest.episodes.policy_rules import PolicyRules
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, Whole, label, label_of, name_of
from ingest.protocol.errors import Refusal, completed
from storage.experience.episode import EpisodeError, encode_tags
from storage.experience.step_columns import ADDED_COLUMNS, LOGP_TOLERANCE, SOURCES, StepColumn
from storage.spaces.descriptors import SpaceError

CheckedValues: TypeAlias = tuple[PolicyRules, bytes, bytes]
"""(rules, observation, action): canonical bytes, and the rules that they were checked by."""

ON_POLICY, LOGGED, REPLAYED = range(len(SOURCES))


class _PolicyActions(msgspec.Struct, frozen=True):
    """Action events of one policy within a batch."""

    rules: PolicyRules
    indices: list[int] = msgspec.field(default_factory=list)
    obs: list[bytes] = msgspec.field(default_factory=list)
    actions: list[bytes] = msgspec.field(default_factory=list)

    def add(self, index: int, obs: bytes, action: bytes) -> None:
        self.indices.append(index)
        self.obs.append(obs)
        self.actions.append(action)

    def checked(self) -> Iterator[tuple[int, CheckedValues]]:
        """Return the values of all events if all are valid, otherwise none."""
        rules, count = self.rules, len(self.indices)
        observations, actions = b"".join(self.obs), b"".join(self.actions)
        if (
            rules.observation.find_invalid(observations, count) is None
            and rules.action.find_invalid(actions, count) is None
            and rules.all_allowed(observations, actions, count)
        ):
            for index, obs, action in zip(self.indices, self.obs, self.actions, strict=True):
                yield index, (rules, obs, action)


def check_values(
    batch: wire.Batch, rules_of: Callable[[Name, Mapping[Name, wire.Start]], PolicyRules | None]
) -> dict[int, CheckedValues]:
    """Validate the values of a batch's action events together: index -> (rules, obs, action).

    `rules_of(name, starting)` returns the rules of an episode, which may be started by the batch
    itself. Events that are missing from the result must be validated one by one, so that a refusal
    names the place. These include events of policies that redact, and of episodes that turn out to
    have other rules.
    """
    groups: dict[int, _PolicyActions] = {}
    starting: dict[Name, wire.Start] = {}
    for index, event in enumerate(batch.events):
        if isinstance(event, wire.Start):
            starting.setdefault(name_of(event), event)
        elif isinstance(event, wire.LogAction) and type(event.obs) is bytes:
            rules = rules_of(name_of(event), starting)
            if rules is None or rules.declaration.redact or type(event.action) is not bytes:
                continue
            if len(event.obs) == rules.observation.itemsize and (
                len(event.action) == rules.action.itemsize
            ):
                groups.setdefault(id(rules), _PolicyActions(rules)).add(
                    index, event.obs, event.action
                )
    found: dict[int, CheckedValues] = {}
    for group in groups.values():
        found.update(group.checked())
    return found


def judge_action(
    episode: OpenEpisode,
    event: wire.LogAction | wire.Decision,
    seq: int,
    values: CheckedValues | None,
) -> Acted:
    """Return the step that an action event opens. Raises Refusal, SpaceError."""
    decided = isinstance(event, wire.Decision)
    rules = episode.rules
    if values is None or values[0] is not rules:
        values = (
            rules,
            rules.observation.from_wire(event.obs, "obs"),
            rules.action.from_wire(event.action, "action", check_range=not decided),
        )
        if not decided:
            rules.require_allowed(*values[1:])
    reward = math.nan if event.reward is None else event.reward
    if event.reward is not None and not math.isfinite(reward):
        raise invalid(event, f"reward: expected a finite number, got {reward}")
    if isinstance(event, wire.Decision):
        logp, source = _finite_logp(event), ON_POLICY
        dist_inputs = event.action_dist_inputs or b""
        if len(dist_inputs) % 4:
            raise invalid(event, "action_dist_inputs: expected float32 bytes")
        if dist_inputs and not (np.frombuffer(dist_inputs, "<f4") < np.inf).all():
            text = "expected finite numbers, or minus infinity for masked actions"
            raise invalid(event, f"action_dist_inputs: {text}")
    else:
        logp, dist_inputs = _logged_logp(event), b""
        source = REPLAYED if event.replayed else LOGGED
    pass_prob = event.pass_prob
    if not 0.0 < pass_prob <= 1.0:
        raise invalid(event, f"pass_prob: expected a number in (0, 1], got {pass_prob}")
    if logp > LOGP_TOLERANCE and not episode.rules.has_densities:
        raise invalid(
            event, f"action_logp: expected the logarithm of a probability, at most 0, got {logp}"
        )
    return Acted(
        episode.started.key,
        seq,
        values[1],
        values[2],
        logp,
        source,
        event.policy_version,
        pass_prob,
        reward,
        info_of(event),
        dist_inputs,
        event.ts,
        _env_t(episode, event, seq),
        *(_added(event, column) for column in ADDED_COLUMNS),
    )


def _added(event: wire.LogAction | wire.Decision, column: StepColumn) -> float:
    """The value of a column that was added to the first ones; its default without one."""
    value: float | None = getattr(event, column.name, None)
    if value is None:
        return column.default
    if column.unfit(np.array([value])).any():
        raise invalid(event, f"{column.name}: expected {column.expected}, got {value}")
    return value


def _env_t(episode: OpenEpisode, event: wire.LogAction | wire.Decision, seq: int) -> int:
    """The environment's step of a track's action; -1 in an episode of one agent."""
    given = event.env_t
    if event.agent_id is None:
        if given is not None:
            raise invalid(event, f"env_t: expected none for an episode of one agent, got {given}")
        return -1
    if given is None:
        raise invalid(event, "env_t: expected the step of the environment, got none")
    last = episode.env_t[-1] if seq == episode.next_seq and episode.env_t else -1
    if given <= last:
        raise invalid(event, f"env_t: expected more than the last action's {last}, got {given}")
    return given


def _logged_logp(event: wire.LogAction) -> float:
    """The log-probability that the caller gave; NaN if it gave none."""
    prob = event.action_prob
    if prob is None:
        return _finite_logp(event)
    if event.action_logp is not None:
        raise invalid(event, "action_prob: expected action_prob or action_logp, got both")
    if not 0.0 < prob <= 1.0:
        text = f"action_prob: expected a number in (0, 1], got {prob}; a density's is action_logp"
        raise invalid(event, text)
    return math.log(prob)


def _finite_logp(event: wire.LogAction | wire.Decision) -> float:
    logp = event.action_logp
    if logp is None:
        return UNKNOWN_LOGP
    if not math.isfinite(logp):
        raise invalid(event, f"action_logp: expected a finite number, got {logp}")
    return logp


def judge_reward(episode: OpenEpisode, event: wire.LogReturns, seq: int) -> Rewarded:
    """Return a reward for the last action. Raises Refusal, SpaceError."""
    name, last = event.episode_id, episode.t_next - 1
    if last < 0:
        text = f"Episode {label_of(event)}: a reward came before any action"
        raise Refusal("no_action", text, "reward", name)
    latest = seq == episode.next_seq
    if latest and event.step is not None and event.step != last:
        if event.step > last:
            raise invalid(event, f"step: expected at most {last}, the last step, got {event.step}")
        text = (
            f"Episode {label_of(event)}: expected no seq with a reward for step {event.step}, "
            "because it is not the last step"
        )
        raise Refusal("window_closed", text, "step", name)
    if not math.isfinite(event.reward):
        raise invalid(event, f"reward: expected a finite number, got {event.reward}")
    if latest and not math.isfinite(episode.combined(event.reward)):
        raise invalid(event, f"reward: expected a finite sum, got {event.reward} in addition")
    info = info_of(event)
    if latest:
        require_info_room(episode, event, info)
    return Rewarded(episode.started.key, seq, event.reward, info)


def require_info_room(episode: OpenEpisode, event: Any, info: str, at: int = -1) -> None:
    """Raise Refusal if an info would make the merged info of a buffered step too long."""
    known = episode.info_size(at) if info else 0
    if known and known + len(info) > MAX_MERGED:
        text = f"expected at most {MAX_MERGED} characters in a step's separately logged infos"
        raise invalid(event, f"info: {text}, got {len(info)} in addition to {known}")


def check_rewarded_step(
    episode: OpenEpisode, event: wire.LogReturns, t: int, info: str, now: float
) -> None:
    """Check that a step accepts a reward by its number. Raises Refusal."""
    last = episode.t_next - 1
    if t > last:
        raise invalid(event, f"step: expected at most {last}, the last step, got {t}")
    if not math.isfinite(event.reward):
        raise invalid(event, f"reward: expected a finite number, got {event.reward}")
    if not episode.takes_reward(t, now):
        window = episode.rules.declaration.reward_window
        raise window_closed(event, t, f"reward_window is {window:g} seconds")
    if not math.isfinite(episode.combined(event.reward, t - episode.t0)):
        raise invalid(event, f"reward: expected a finite sum, got {event.reward} in addition")
    require_info_room(episode, event, info, t - episode.t0)


def window_closed(event: wire.LogReturns, t: int, why: str) -> Refusal:
    """The refusal of a reward that is too late; it names the setting."""
    named = f", reward {event.reward_id!r}" if event.reward_id else ""
    text = (
        f"Episode {label_of(event)}{named}: the reward window of step {t} has closed ({why}): "
        "expected a reward before the next action or the end, or within the policy's reward_window "
        "of the step's action"
    )
    return Refusal("window_closed", text, "step", event.episode_id)


def decision_unknown(episode: OpenEpisode) -> Refusal:
    """The refusal of an event that follows a decision other than the stored one."""
    name, acting = episode.started.episode_id, bool(episode.decision())
    subject = label(episode.started.name)
    expected = episode.open_seq if acting else episode.next_seq
    text = (
        f"Episode {subject}: the event follows a decision that is unknown here: first log the "
        f"decision that was acted on, as event {expected}"
    )
    return Refusal("decision_unknown", text, "decided", name, expected)


def other_schema(event: Any, rules: PolicyRules) -> Refusal:
    """The refusal of values that were encoded under another declaration than the episode's."""
    text = (
        f"Episode {label_of(event)}: expected values of policy {rules.declaration.policy_id!r} in "
        f"schema {rules.schema_id}, got {event.schema_id}: the client used another declaration (a "
        "policy_file, a cache_dir, or an earlier one). PolicyClient fetches the current one for "
        "its next episodes; give other clients the current policy file"
    )
    return Refusal("other_schema", text, "schema_id", event.episode_id)


def require_schema(event: Any, rules: PolicyRules) -> None:
    """Raise Refusal for an event that names a schema other than its episode's."""
    if event.schema_id is not None and event.schema_id != rules.schema_id:
        raise other_schema(event, rules)


def invalid(event: Any, text: str) -> Refusal:
    place, _, rest = text.partition(": ")
    return Refusal("invalid", f"Episode {label_of(event)}: {rest}", place, event.episode_id)


def agents_of(episode: OpenEpisode, event: wire.End) -> int:
    """The number of agents that an end gives for its whole episode, -1 for none. Raises Refusal."""
    number, whole = event.agents, episode.whole
    if number is None:
        return -1
    if whole is None:
        raise invalid(event, f"agents: expected none without agent_id, got {number}")
    problem = agents_problem(whole, number, len(whole.acted))
    if problem:
        raise invalid(event, problem)
    return number


def agents_problem(whole: Whole, number: int, acted: int) -> str:
    """Why an episode cannot have `number` agents, of which `acted` have acted; "" if it can."""
    if 0 <= whole.agents != number:
        return f"agents: expected {whole.agents}, as an earlier end gave, got {number}"
    if number < acted:
        return f"agents: expected at least {acted}, which have acted, got {number}"
    return ""


def require_part(episode: OpenEpisode, event: Any) -> None:
    """Raise Refusal for an agent's first action if as many agents as an end gave have acted."""
    if episode.whole is not None and not episode.t_next and episode.whole.has_all_acted:
        raise completed(event.episode_id, event.agent_id)


def info_of(event: Any) -> str:
    """An event's info as a JSON object, "" for none. Raises SpaceError for values JSON lacks."""
    return info_text(event.info)


def info_text(info: Mapping[str, Any] | None) -> str:
    """An info as a JSON object, "" for none. Raises SpaceError if JSON cannot represent it."""
    if not info:
        return ""
    try:
        wire.require_shallow(info)
        return json.dumps(info, ensure_ascii=False, allow_nan=False, default=_refuse_info)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, SpaceError):
            raise
        raise SpaceError(f"info: expected JSON values: {error}") from error


def _refuse_info(value: Any) -> Any:
    raise SpaceError(f"info: expected JSON values, got {type(value).__name__}")


def tags_of(event: wire.Start) -> str:
    try:
        return encode_tags(event.tags, label_of(event))
    except EpisodeError as error:
        raise Refusal("invalid", str(error), "tags", event.episode_id) from error
