"""Log lines: one line per event, for people or for machines.

A message may contain text from clients, such as an episode id. Control characters are escaped, so
that nobody can forge a line, and tokens in the text are masked.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from ingest.access.tokens import masked

LogFormat: TypeAlias = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
_ESCAPES = {
    code: f"\\x{code:02x}" for code in (*range(32), 127, *range(0x80, 0xA0), 0x2028, 0x2029)
}


def configure(kind: LogFormat = "text", level: str = "warning") -> None:
    """Send the process's log to stderr. Raises ValueError for an unknown format or level."""
    if kind not in ("text", "json"):
        raise ValueError(f"log format: expected text or json, got {kind!r}")
    if level not in LEVELS:
        raise ValueError(f"log level: expected one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # uvicorn logs a line for every request that is not HTTP; the metrics count these instead.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.123+00:00 WARNING headrace.collector: text`; a traceback follows."""

    def format(self, record: logging.LogRecord) -> str:
        message = masked(record.getMessage()).translate(_ESCAPES)
        line = f"{_time(record)} {record.levelname} {record.name}: {message}"
        if record.exc_info:
            line += "\n" + masked(self.formatException(record.exc_info))
        return line


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the traceback as `error`."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": masked(record.getMessage()),
        }
        if record.exc_info:
            document["error"] = masked(self.formatException(record.exc_info))
        return json.dumps(document)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
