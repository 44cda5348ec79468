"""Callbacks for failures and missed deadlines: a line in a file, or a post to an address.

    headrace_dags(..., on_failure=[to_file("/var/log/headrace.jsonl")],
                  on_deadline=deadline(url="https://chat.example.com/hook"))

A file gets one JSON object per alert; an address the same object as the body.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

from airflow.sdk import AsyncCallback


def to_file(path: str) -> Callable[[Any], None]:
    """A callback that appends to a file."""
    return partial(_failed, file=path, url=None)


def to_address(url: str) -> Callable[[Any], None]:
    """A callback that posts to an address."""
    return partial(_failed, file=None, url=url)


def deadline(*, file: str | None = None, url: str | None = None) -> AsyncCallback:
    """A callback for a missed deadline, which the triggerer runs."""
    return AsyncCallback(missed, kwargs={"file": file, "url": url})


async def missed(file: str | None = None, url: str | None = None, context: Any = None) -> None:
    """Tell that a run is not done in time."""
    run = (context or {}).get("dag_run") or {}
    alert = {"what": "deadline", "dag": run.get("dag_id"), "run": run.get("dag_run_id")}
    await asyncio.to_thread(_tell, alert, file, url)


def _failed(context: Any, file: str | None, url: str | None) -> None:
    ti, why = context.get("ti"), context.get("exception") or context.get("reason")
    names = {"dag": "dag_id", "run": "run_id", "task": "task_id"}
    alert = {name: getattr(ti, attribute, None) for name, attribute in names.items()}
    _tell({"what": "failure", **alert, "why": str(why)}, file, url)


def _tell(alert: dict[str, Any], file: str | None, url: str | None) -> None:
    text = json.dumps(alert)
    if file is not None:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        with open(descriptor, "a", encoding="utf-8") as lines:
            lines.write(f"{text}\n")
    if url is not None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, text.encode(), headers)
        urllib.request.urlopen(request, timeout=10).close()
