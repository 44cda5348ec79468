"""Whose an episode is: the token that it was started with, and how many a token may have open;
and which arm of a canary's split it belongs to."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ingest.access.tokens import Caller
from ingest.episodes.journal_events import Started, encode_event
from ingest.protocol.errors import Refusal


def owned(
    started: Started,
    caller: Caller,
    open_of: Mapping[str, int],
    arm: str = "",
) -> tuple[Started, bytes]:
    """A start with its owner and its `arm`, and its encoding. `open_of`: token id -> its open
    episodes.

    Raises Refusal when the owner's open episodes are too many.
    """
    quota, there = caller.open_episodes, open_of[caller.token_id]
    if quota is not None and there >= quota:
        raise Refusal(
            "busy",
            f"token {caller.token_id} may have {quota} open episodes, and has {there}",
            None,
            started.episode_id,
            retry_after=1.0,
        )
    owned = msgspec.structs.replace(started, owner=caller.token_id, arm=arm)
    return owned, encode_event(owned)
