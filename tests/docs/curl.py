"""Stands in for curl where it is not installed: `-sS`, `--json BODY` and one URL."""

from __future__ import annotations

import sys

import urllib3

arguments = [word for word in sys.argv[1:] if word != "-sS"]
body = None
if "--json" in arguments:
    at = arguments.index("--json")
    body = arguments[at + 1]
    del arguments[at : at + 2]
(url,) = arguments
answer = urllib3.request(
    "GET" if body is None else "POST",
    url,
    body=body,
    headers={"content-type": "application/json"},
)
sys.stdout.write(answer.data.decode())
