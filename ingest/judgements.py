"""What an event may say: the checks of one event's content, and the journal event it becomes.

Pure functions of an event and its episode. Every refusal names the field, what was expected and
what came.
"""

from __future__ import annotations

import json
import math
from typing import Any

from ingest import wire
from ingest.errors import Refusal
from ingest.events import UNKNOWN_LOGP, Acted
from ingest.open_episode import OpenEpisode
from storage.episode import SOURCES, EpisodeError, encode_tags
from storage.spaces import SpaceError

ON_POLICY, LOGGED, REPLAYED = range(len(SOURCES))


def judge_action(
    episode: OpenEpisode,
    event: wire.LogAction | wire.Decision,
    seq: int,
    values: tuple[bytes, bytes] | None,
) -> Acted:
    decided = isinstance(event, wire.Decision)
    if values is None:
        rules = episode.rules
        values = (
            rules.observation.from_wire(event.obs, "obs"),
            rules.action.from_wire(event.action, "action", check_range=not decided),
        )
    if not math.isfinite(event.reward):
        raise invalid(event, f"reward: expected a finite number, got {event.reward}")
    if isinstance(event, wire.Decision):
        logp, source, pass_prob = event.action_logp, ON_POLICY, 1.0
        dist_inputs = event.action_dist_inputs or b""
        if len(dist_inputs) % 4:
            raise invalid(event, "action_dist_inputs: expected float32 bytes")
    else:
        logp, dist_inputs, pass_prob = _logged_logp(event), b"", event.pass_prob
        source = REPLAYED if event.replayed else LOGGED
        if not 0.0 < pass_prob <= 1.0:
            raise invalid(event, f"pass_prob: expected a number in (0, 1], got {pass_prob}")
    if decided and not math.isfinite(logp):
        raise invalid(event, f"action_logp: expected a finite number, got {logp}")
    return Acted(
        episode.started.key,
        seq,
        values[0],
        values[1],
        logp,
        source,
        event.policy_version,
        pass_prob,
        event.reward,
        info_of(event),
        dist_inputs,
        event.ts,
    )


def _logged_logp(event: wire.LogAction) -> float:
    """The log-probability that the caller knows, NaN when it knows none; never invented."""
    prob, logp = event.action_prob, event.action_logp
    if prob is None:
        if logp is None:
            return UNKNOWN_LOGP
        if not math.isfinite(logp):
            raise invalid(event, f"action_logp: expected a finite number, got {logp}")
        return logp
    if logp is not None:
        raise invalid(event, "action_prob: expected action_prob or action_logp, got both")
    if not 0.0 < prob <= 1.0:
        raise invalid(event, f"action_prob: expected a number in (0, 1], got {prob}")
    return math.log(prob)


def check_step(episode: OpenEpisode, event: wire.LogReturns) -> None:
    """Only the open step takes rewards while the policy's reward_window is 0."""
    last = episode.t_next - 1
    step = event.step
    if step is None or step == last:
        return
    if step > last:
        raise invalid(event, f"step: expected at most {last}, the last step, got {step}")
    raise Refusal(
        "window_closed",
        f"Episode {event.episode_id}: step {step} is closed, only step {last} takes rewards: "
        "the policy's reward_window is 0 seconds",
        "step",
        event.episode_id,
    )


def invalid(event: Any, text: str) -> Refusal:
    place, _, rest = text.partition(": ")
    return Refusal("invalid", f"Episode {event.episode_id}: {rest}", place, event.episode_id)


def info_of(event: Any) -> str:
    if not event.info:
        return ""
    return json.dumps(event.info, ensure_ascii=False, default=_refuse_info)


def _refuse_info(value: Any) -> Any:
    raise SpaceError(f"info: expected JSON values, got {type(value).__name__}")


def tags_of(event: wire.Start) -> str:
    try:
        return encode_tags(event.tags, event.episode_id)
    except EpisodeError as error:
        raise Refusal("invalid", str(error), "tags", event.episode_id) from error
