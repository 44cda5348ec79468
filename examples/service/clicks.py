"""The process that reads clicks, minutes after the decisions, and logs them as rewards.

Each line of its input is `{"request_id": ..., "click_id": ...}`. After each batch it prints the
number of finished lines, as a consumer of a queue commits its offset. Lines that are repeated after
a kill count once, because `reward_id` identifies the click.

A click may come before its decision, while that is in a worker's queue or spool. The consumer then
retries for HEADRACE_WAIT seconds. Clicks that the collector has not accepted by then (because the
decision was never logged, or the window has closed) are printed and skipped, so that they do not
hold up others.
"""

from __future__ import annotations

import json
import os
import sys
import time

from headrace import PolicyClient, Refusal

BATCH = 20
WAIT_SECONDS = float(os.environ.get("HEADRACE_WAIT", "60"))
PAUSE_SECONDS = 0.5


def read(line: str) -> tuple[str, str] | None:
    """Parse a click's request and its own id; for an invalid line, print it and return None."""
    try:
        click = json.loads(line)
        return str(click["request_id"]), str(click["click_id"])
    except (ValueError, KeyError, TypeError) as error:
        print(f"{line.strip()}: {error!r}", file=sys.stderr)
        return None


def deliver(client: PolicyClient, lines: list[str], refused: list[Refusal]) -> None:
    """Log the clicks of some lines, and wait until each is on disk or is printed as refused."""
    deadline = time.monotonic() + WAIT_SECONDS
    clicks = {click for line in lines if (click := read(line)) is not None}
    while clicks:
        for request_id, click_id in sorted(clicks):
            try:
                client.log_returns(request_id, 1.0, step=0, reward_id=click_id)
            except ValueError as error:
                print(error, file=sys.stderr)
        try:
            client.flush()
        except Refusal:
            if client.stats.waiting:  # the client itself is refused: its token, for example
                raise
        is_over = time.monotonic() >= deadline
        early = {one.episode_id for one in refused if one.code == "not_found" and not is_over}
        for refusal in refused:
            if refusal.episode_id not in early:
                print(refusal, file=sys.stderr)
        refused.clear()
        clicks = {click for click in clicks if click[0] in early}
        if clicks:
            time.sleep(PAUSE_SECONDS)


def main() -> None:
    refused: list[Refusal] = []  # since the last flush
    with PolicyClient(
        os.environ.get("HEADRACE_ADDRESS", "http://127.0.0.1:8642"),
        token=os.environ.get("HEADRACE_TOKEN"),
        ca=os.environ.get("HEADRACE_CA"),
        on_error=refused.append,
    ) as client:
        done, lines = 0, []
        for line in sys.stdin:
            lines.append(line)
            if len(lines) == BATCH:
                deliver(client, lines, refused)
                done, lines = done + BATCH, []
                print(done, flush=True)
        deliver(client, lines, refused)
        print(done + len(lines), flush=True)


if __name__ == "__main__":
    main()
