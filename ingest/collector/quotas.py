"""The owner (a token) and the canary arm of an episode that starts, and quotas of open episodes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ingest.access.tokens import Caller
from ingest.episodes.journal_events import Started, encode_event
from ingest.protocol.errors import Refusal
from storage.wording import counted


def owned(
    started: Started,
    caller: Caller,
    open_of: Mapping[str, int],
    arm: str = "",
) -> tuple[Started, bytes]:
    """Add owner and `arm` to a start; return it and its encoding.

    `open_of` maps token ids to their numbers of open episodes. Raises Refusal (429) if the owner
    has too many.
    """
    quota, there = caller.open_episodes, open_of[caller.token_id]
    if quota is not None and there >= quota:
        raise Refusal(
            "busy",
            f"token {caller.token_id}: expected at most {counted(quota, 'open episode')}, "
            f"got {there} and another one",
            None,
            started.episode_id,
            retry_after=1.0,
        )
    owned = msgspec.structs.replace(started, owner=caller.token_id, arm=arm)
    return owned, encode_event(owned)
