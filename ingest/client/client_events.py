"""Events that more than one kind of client makes, of values that are checked here."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from time import time_ns
from typing import Any

from ingest.client.events import check_id, check_tags
from ingest.protocol.messages import LogReturns, Start

ID_BYTES = 13
"""Of an episode's id, which travels with each of its events: 104 random bits in 26 hex digits."""


def now_or(ts: int | None) -> int:
    """The caller's time, or this moment; microseconds since the epoch."""
    return time_ns() // 1000 if ts is None else ts


def start_event(
    episode_id: str | None,
    policy_id: str | None,
    training_enabled: bool,
    tags: Mapping[str, str] | None,
    continues: str | None,
    ts: int | None,
    *,
    start_number: int | None = None,
) -> Start:
    """A start, with an id that is made up if there is none. Raises ValueError."""
    if episode_id is not None:
        check_id("episode_id", episode_id)
    if continues is not None:
        check_id("continues", continues)
    return Start(
        episode_id=secrets.token_hex(ID_BYTES) if episode_id is None else episode_id,
        start=start_number,
        policy_id=policy_id,
        training_enabled=bool(training_enabled),
        tags=check_tags(tags) if tags else None,
        continues=continues,
        ts=now_or(ts),
    )


def late_reward(
    episode_id: str,
    reward: float,
    info: Any,
    step: int | None,
    reward_id: str | None,
    ts: int | None,
    agent_id: str | None = None,
) -> LogReturns:
    """A reward for a named step: an event of its own, outside the sequence. Raises ValueError."""
    if step is None or step < 0:
        raise ValueError(f"Episode {episode_id}: step: expected >= 0, got {step!r}")
    check_id("episode_id", episode_id)
    if reward_id is not None:
        check_id("reward_id", reward_id)
    if agent_id is not None:
        check_id("agent_id", agent_id)
    return LogReturns(
        episode_id=episode_id,
        agent_id=agent_id,
        reward=reward,
        info=info,
        step=int(step),
        reward_id=uuid.uuid4().hex if reward_id is None else reward_id,
        ts=now_or(ts),
    )
