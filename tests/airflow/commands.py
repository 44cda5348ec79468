"""Headrace's commands, in their own environment."""

import json
import os
import subprocess


def headrace(root, *words):
    """The JSON of a command that succeeds."""
    result = subprocess.run(
        [os.environ["HEADRACE_COMMAND"], *words, "--root", root, "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(result.stdout)
