"""Raw bytes on a socket, for input that no HTTP client would send."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

PATIENCE = 60.0
"""Seconds for an answer; only a server that hangs takes as long."""
HOST = b"Host: localhost\r\n"
_LENGTH = re.compile(rb"content-length: (\d+)\r\n(?:[^\r]+\r\n)*\r\n")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")


@dataclass(frozen=True)
class Heard:
    """The bytes received, and whether the other side closed."""

    data: bytes
    closed: bool

    @property
    def statuses(self) -> list[int]:
        """The status of every answer, in order."""
        return [int(found) for found in _STATUS.findall(self.data)]


def connect(port: int, timeout: float = PATIENCE) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout)


def exchange(port: int, data: bytes, *, patience: float = PATIENCE, answers: int = 1) -> Heard:
    """Send bytes; read until the end, `answers` whole answers, or silence: `patience` seconds after
    an answer, `PATIENCE` before the first.
    """
    with connect(port) as connection:
        try:
            connection.sendall(data)
        except OSError:
            return Heard(b"", closed=True)
        return listen(connection, answers=answers, patience=patience)


def whole_answers(data: bytes) -> int:
    """Count the complete answers, by their Content-Length."""
    count = 0
    while (found := _LENGTH.search(data)) and len(data) >= found.end() + int(found[1]):
        data = data[found.end() + int(found[1]) :]
        count += 1
    return count


def listen(connection: socket.socket, *, answers: int = 1, patience: float | None = None) -> Heard:
    """Read until the end, `answers` whole answers, or the socket's time-out: `patience` from the
    first answer on.
    """
    data = b""
    try:
        while chunk := connection.recv(65_536):
            data += chunk
            found = whole_answers(data)
            if answers and found >= answers:
                return Heard(data, closed=False)
            if found and patience is not None:
                connection.settimeout(patience)
    except TimeoutError:
        return Heard(data, closed=False)
    except OSError:
        return Heard(data, closed=True)
    return Heard(data, closed=True)
