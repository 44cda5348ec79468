"""The process that reads clicks, minutes after the decisions, and logs them as rewards.

Each line on its input is `{"request_id": ..., "click_id": ...}`; the number of lines that are on
disk is printed after each batch, as a consumer of a queue commits its offset. Lines that come again
after a kill count once: `reward_id` names the click.
"""

from __future__ import annotations

import json
import os
import sys

from headrace import PolicyClient, Refusal

BATCH = 20


def flush(client: PolicyClient) -> None:
    """Wait until all is on disk. A click that came too late is told, and never comes in time: it
    must not keep the consumer from the others."""
    try:
        client.flush()
    except Refusal as refusal:
        if refusal.code != "window_closed":
            raise
        print(refusal, file=sys.stderr)


def main() -> None:
    with PolicyClient(
        os.environ.get("HEADRACE_ADDRESS", "http://127.0.0.1:8642"),
        token=os.environ.get("HEADRACE_TOKEN"),
        ca=os.environ.get("HEADRACE_CA"),
    ) as client:
        done = 0
        for line in sys.stdin:
            click = json.loads(line)
            client.log_returns(click["request_id"], 1.0, step=0, reward_id=click["click_id"])
            done += 1
            if done % BATCH == 0:
                flush(client)
                print(done, flush=True)
        flush(client)
        print(done, flush=True)


if __name__ == "__main__":
    main()
