"""`collect --on-seal URL`: posts the ordinals at rest, each time a shard has been written.

The body is an asset event of Airflow: `{"asset_id": 7, "extra": {"streams": {stream: last}}}`, with
the id that the address names as `#7`. A mark covers all earlier ones, so the next post makes up for
one that failed; the present marks are also posted at the start.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urldefrag

import urllib3

from ingest.collector.trainer_watch import look_in_thread
from storage.objects.opening import objects_at
from storage.shards.names import shard_names, streams

log = logging.getLogger("headrace.collector")

LOOK_SECONDS = 1.0
POST_SECONDS = 10.0


class SealEvents:
    """Posts the streams' last ordinals when the number of shards has changed.

    `count` returns that number. A thread posts, so that the event loop never waits.
    """

    def __init__(self, root: Path, url: str, token: str | None, count: Callable[[], int]) -> None:
        self._root, self._count = root, count
        self._url, self._asset = urldefrag(url)
        if self._asset and not self._asset.isdecimal():
            raise ValueError(
                f"--on-seal: expected the number of an asset after #, got {url!r:.200}"
            )
        if not re.fullmatch(r"https?://[!-~]+", self._url):
            raise ValueError(f"--on-seal: expected http://HOST or https://HOST, got {url!r:.200}")
        if token is not None and not re.fullmatch(r"[!-~]+", token):  # such as a line with its end
            raise ValueError("--on-seal-token: expected printable ASCII without spaces")
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        self._posted, self._why = -1, ""
        self._pool = urllib3.PoolManager(timeout=POST_SECONDS, retries=False)

    async def follow(self) -> None:
        """Look until cancelled."""
        await look_in_thread(self.look, LOOK_SECONDS, "headrace-seal-events")

    def look(self) -> None:
        """Post the marks if there are new shards; a failure is logged once, and tried again."""
        count = self._count()
        if count == self._posted:
            return
        why = self._post()
        if why is None:
            self._posted = count
        elif why != self._why:
            log.warning("--on-seal: %s: %s; it will be tried again", self._url, why)
        self._why = why or ""

    def _post(self) -> str | None:
        """Post the marks; why that failed."""
        shards = objects_at(self._root).under("shards")
        try:
            names = {stream: shard_names(shards, stream) for stream in streams(shards)}
            marks = {name: max(one.last for one in found) for name, found in names.items() if found}
            if not marks:
                return None
            body = {"asset_id": int(self._asset)} if self._asset else {}
            text = json.dumps({**body, "extra": {"streams": marks}}).encode()
            answer = self._pool.request("POST", self._url, body=text, headers=self._headers)
        except (OSError, urllib3.exceptions.HTTPError) as error:
            return str(error)
        return None if answer.status < 300 else f"it answered {answer.status}"
