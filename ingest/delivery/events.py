"""Checks of a caller's values, their encodings for the wire, events made of them and their sizes.

Every error is a ValueError that names the episode, what was expected and what came.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import secrets
import uuid
from collections.abc import Mapping
from time import time_ns
from typing import Any

import msgspec
import numpy as np

from ingest.protocol import messages as wire
from ingest.protocol.agent_names import UNSAMPLED
from ingest.protocol.messages import Cause, Decision, End, Event, LogAction, LogReturns, Start
from storage.experience.episode import EpisodeError, encode_tags
from storage.experience.step_columns import LOGP_TOLERANCE

ID_BYTES = 12
"""The size of a generated episode id, which is sent with each event as 24 hex digits. Two of 10^12
ids are equal with a probability of 6e-6; then the second start is refused."""


ID_CHARACTERS = 256
"""The maximum length of an id."""


EVENT_BYTES = 256
"""What an event counts as without its observation, action and info."""


def is_late(event: Event) -> bool:
    """Whether an event is a reward for a named step, which may be of any client's episode."""
    return isinstance(event, LogReturns) and event.seq is None


def number(episode_id: str, name: str, value: Any) -> float:
    """A Python or numpy number as a finite float. Raises ValueError."""
    if type(value) is not float:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            raise ValueError(f"Episode {episode_id}: {name}: expected a number, got {value!r:.80}")
        try:
            value = float(value)
        except Exception as error:  # any that its own __float__ raises
            raise ValueError(
                f"Episode {episode_id}: {name}: expected one number, got {value!r:.80}"
            ) from error
    if not math.isfinite(value):
        raise ValueError(f"Episode {episode_id}: {name}: expected a finite number, got {value}")
    return float(value)


def propensity(
    episode_id: str, prob: Any, logp: Any, *, has_densities: bool = True
) -> tuple[float | None, float | None]:
    """(action_prob, action_logp) as floats, one of them at most.

    A probability is in (0, 1]; a logarithm is finite, and above 0 only for a density.
    """
    if prob is None:
        logp = number(episode_id, "action_logp", logp)
        if logp > LOGP_TOLERANCE and not has_densities:
            raise ValueError(
                f"Episode {episode_id}: action_logp: expected the logarithm of a probability, "
                f"at most 0, got {logp}"
            )
        return None, logp
    if logp is not None:
        raise ValueError(f"Episode {episode_id}: expected action_prob or action_logp, got both")
    prob = number(episode_id, "action_prob", prob)
    if not 0.0 < prob <= 1.0:
        raise ValueError(
            f"Episode {episode_id}: action_prob: expected a number in (0, 1], got {prob}; of a "
            f"density, which may be larger, give the logarithm as action_logp"
        )
    return prob, None


def whole(where: str, value: Any, least: int, most: int) -> int:
    """A whole number of Python or numpy within these bounds. Raises ValueError."""
    if not isinstance(value, (bool, np.bool_)):
        with contextlib.suppress(TypeError):
            found = operator.index(value)
            if least <= found <= most:
                return found
    raise ValueError(f"{where}: expected a whole number from {least} to {most}, got {value!r:.80}")


def version(episode_id: str, value: Any) -> int:
    """The number of the version that acted, checked. Raises ValueError."""
    return whole(f"Episode {episode_id}: policy_version", value, -1, 2**53)


def flag(name: str, value: Any) -> bool:
    """A truth value of Python or numpy, or 0 or 1. Raises ValueError."""
    if isinstance(value, (bool, np.bool_, int)) and value in (0, 1):
        return bool(value)
    raise ValueError(f"{name}: expected True or False, got {value!r:.80}")


def encode_info(episode_id: str, info: Mapping[str, Any]) -> Any:
    """Encode an info at once, so that the caller may change the dict afterwards.

    numpy numbers and arrays become numbers and lists, keys become strings. Raises ValueError.
    """
    if not isinstance(info, Mapping):
        raise ValueError(f"Episode {episode_id}: info: expected a mapping, got {info!r:.80}")
    try:
        plain = msgspec.to_builtins(dict(info), str_keys=True, enc_hook=_plain)
        wire.require_shallow(plain)
        json.dumps(plain, allow_nan=False)
        return msgspec.Raw(msgspec.msgpack.encode(plain))
    except Exception as error:  # any that a value of it raises
        raise ValueError(f"Episode {episode_id}: info: expected JSON values: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"got {type(value).__name__}")


def merge_infos(first: Any, second: Any) -> Any:
    """Merge two encoded infos of one step; later keys win, as in the collector."""
    merged = msgspec.msgpack.decode(first) | msgspec.msgpack.decode(second)
    return msgspec.Raw(msgspec.msgpack.encode(merged))


def check_id(name: str, value: Any) -> None:
    """Raise ValueError unless `value` can name an episode or a reward."""
    fits = isinstance(value, str) and 1 <= len(value) <= ID_CHARACTERS and _is_unicode(value)
    if not fits:
        raise ValueError(
            f"{name}: expected a string of 1 to {ID_CHARACTERS} characters, got {value!r:.80}"
        )


def check_pass_prob(value: float) -> float:
    """The value as a probability in (0, 1]. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise ValueError(f"pass_prob: expected a number in (0, 1], got {value!r:.80}")
    return float(value)


def check_sample_rate(value: float) -> float:
    """The value as a share in (0, 1]. Raises ValueError."""
    try:
        return check_pass_prob(value)
    except ValueError as error:
        raise ValueError(f"sample_rate: {str(error).partition(': ')[2]}") from None


def unsampled_names(episode_id: str) -> tuple[str, str]:
    """Both ids of an episode that is not sampled: the caller's, and the one with the prefix."""
    own = episode_id.removeprefix(UNSAMPLED)
    return own, UNSAMPLED + own


def check_tags(tags: Mapping[str, str], episode_id: str) -> dict[str, str]:
    """A copy of the tags. Raises ValueError unless they are a mapping of a few short strings."""
    if not isinstance(tags, Mapping):
        raise ValueError(f"tags: expected a mapping of strings, got {tags!r:.80}")
    for pair in tags.items():
        if not all(isinstance(text, str) and _is_unicode(text) for text in pair):
            raise ValueError(f"tags: expected strings, got {pair!r:.80}")
    try:
        encode_tags(tags, episode_id)
    except EpisodeError as error:
        raise ValueError(f"tags: {error}") from error
    return dict(tags)


def _is_unicode(text: str) -> bool:
    """Whether a string can be sent, which half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def weight(event: Any) -> int:
    """The bytes that an event counts as."""
    kind = type(event)
    if kind is Start:
        return EVENT_BYTES
    if kind is LogAction or kind is Decision:
        total = EVENT_BYTES + len(event.obs) + len(event.action)
    elif kind is End:
        return EVENT_BYTES if event.obs is None else EVENT_BYTES + len(event.obs)
    else:
        total = EVENT_BYTES
    return total if event.info is None else total + memoryview(event.info).nbytes


def size_of(value: Any) -> int:
    """The bytes of an encoded value; 0 for None."""
    return 0 if value is None else memoryview(value).nbytes


def too_large(episode_id: str, size: int, largest: int) -> ValueError:
    """The error for an event that is larger than any request may be."""
    return ValueError(
        f"Episode {episode_id}: expected an event of at most {largest} bytes, got {size}"
    )


def now_or(ts: int | None) -> int:
    """The caller's time or the current one, in microseconds since the epoch. Raises ValueError."""
    if ts is None:
        return time_ns() // 1000
    return whole("ts, microseconds since the epoch", ts, -(2**62), 2**62)


def start_event(
    episode_id: str | None,
    training_enabled: bool,
    tags: Mapping[str, str] | None,
    continues: str | None,
    ts: int | None,
) -> Start:
    """A start event, with a generated id if none is given. Raises ValueError."""
    if episode_id is not None:
        check_id("episode_id", episode_id)
    if continues is not None:
        check_id("continues", continues)
    name = secrets.token_hex(ID_BYTES) if episode_id is None else episode_id
    return Start(
        episode_id=name,
        training_enabled=flag("training_enabled", training_enabled),
        tags=check_tags(tags, name) if tags else None,
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
    """A reward event for a named step, without a sequence number. Raises ValueError."""
    if step is None:
        raise ValueError(f"Episode {episode_id}: step: expected one with a reward_id, got none")
    t = whole(f"Episode {episode_id}: step", step, 0, 2**53)
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
        step=t,
        reward_id=uuid.uuid4().hex if reward_id is None else reward_id,
        ts=now_or(ts),
    )


def broken_end(event: Any, cause: Cause) -> End:
    """The `broken` end in place of an event, which ends its episode at its last valid step."""
    return End(
        episode_id=event.episode_id,
        agent_id=event.agent_id,
        seq=event.seq,
        ts=event.ts,
        decided=event.decided,
        broken=cause,
    )
