"""`python -m tests.plain_collector collect --root DIR`: its options, and what they run.

It says `ready ADDRESS` when it serves. `headrace collect` is what users run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ingest.server.listening import WRONG, ServeError
from ingest.server.logs import LEVELS, configure
from ingest.server.options import Listening, ServeOptions
from ingest.server.process import serve
from ingest.web.limits import ServerLimits
from storage.errors import StorageError


def run(arguments: list[str] | None = None) -> int:
    """Run the collector; return the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}")
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect", help="run the collector until SIGTERM")
    collect.add_argument("--root", type=Path, required=True)
    collect.add_argument("--host", default="127.0.0.1")
    collect.add_argument("--port", type=int, default=8642)
    collect.add_argument("--compression", choices=("zstd", "lz4"), default="zstd")
    collect.add_argument("--compact", type=float, metavar="HOURS")
    collect.add_argument("--tls-cert", type=Path)
    collect.add_argument("--tls-key", type=Path)
    collect.add_argument("--allow-host", action="append", default=[])
    collect.add_argument("--insecure-no-tls", action="store_true")
    collect.add_argument("--supervise", action="store_true")
    collect.add_argument("--limit", action="append", default=[], metavar="NAME=NUMBER")
    collect.add_argument("--log-format", choices=("text", "json"), default="text")
    collect.add_argument("--log-level", choices=LEVELS, default="warning")
    given = parser.parse_args(arguments)
    configure(given.log_format, given.log_level)
    try:
        options = ServeOptions(
            root=given.root,
            listening=Listening(
                host=given.host,
                port=given.port,
                tls_cert=given.tls_cert,
                tls_key=given.tls_key,
                insecure=given.insecure_no_tls,
                allow_hosts=tuple(given.allow_host),
            ),
            compression=given.compression,
            compact_hours=given.compact,
            announce=lambda address, _: print(f"ready {address}", flush=True),
            limits=ServerLimits.of(given.limit),
            supervise=given.supervise,
        )
        return serve(options)
    except (ServeError, StorageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, ServeError) else WRONG
