"""`collect --on-seal`: a program is posted the ordinals at rest, again after it was away."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3

from ingest.server.seal_events import SealEvents
from storage.objects.opening import objects_at
from storage.shards.names import shard_names, streams
from tests.collector_process import declare
from tests.headrace.command import Collect


class Hook(HTTPServer):
    """Keeps what is posted; answers with the status `status`."""

    def __init__(self) -> None:
        self.status, self.posted = 200, list[tuple[str, str | None, Any]]()
        self.news = threading.Semaphore(0)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.posted.append((self.path, self.headers["Authorization"], body))
                self.send_response(outer.status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                outer.news.release()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api/v2/assets/events"


def log(collector: Collect, name: str) -> None:
    """An episode of one step."""
    act = {"type": "log_action", "episode_id": name, "obs": [0.5] * 4, "action": 1}
    ends = [{"type": kind, "episode_id": name} for kind in ("start", "end")]
    address = json.loads(collector.first_line)["address"]
    answer = urllib3.request(
        "POST", f"{address}/v1/events", json={"events": [ends[0], act, ends[1]]}
    )
    assert answer.status == 200, answer.data


def test_each_new_shard_is_posted_until_it_has_arrived(tmp_path: Path) -> None:
    """A refused post is repeated; a start posts what an earlier process could not."""
    root = tmp_path / "root"
    declare(root, seal_seconds=0.01)
    with Hook() as hook:
        options = ["--on-seal", f"{hook.url}#7", "--on-seal-token", "secret"]
        hook.status = 503
        with Collect(root, "--json", *options) as collector:
            log(collector, "one")
            assert hook.news.acquire(timeout=60)
            assert hook.news.acquire(timeout=60), "a refused post was not repeated"
        hook.status = 200
        hook.posted.clear()
        with Collect(root, "--json", *options) as collector:
            while not hook.posted:
                assert hook.news.acquire(timeout=60)
            log(collector, "two")
            while len(hook.posted) < 2:
                assert hook.news.acquire(timeout=60)
        hook.shutdown()
    shards = objects_at(root).under("shards")
    (stream,) = streams(shards)
    last = shard_names(shards, stream)[-1].last
    marks = [
        (path, token, body["asset_id"], body["extra"]["streams"][stream])
        for path, token, body in hook.posted
    ]
    where = ("/api/v2/assets/events", "Bearer secret", 7)
    assert marks == [(*where, 0), (*where, last)]


@pytest.mark.parametrize(
    ("url", "token", "named"),
    [
        ("http://127.0.0.1/#shards", None, "--on-seal: "),
        ("127.0.0.1:8080/events", None, "--on-seal: "),
        ("http://127.0.0.1/#7", "secret\n", "--on-seal-token: "),
    ],
)
def test_what_can_never_be_posted_is_refused_at_the_start(
    tmp_path: Path, url: str, token: str | None, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        SealEvents(tmp_path, url, token, lambda: 0)
