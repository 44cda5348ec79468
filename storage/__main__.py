"""`python -m storage`: the child processes that write, read a second time, and join shards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from storage.errors import StorageError
from storage.system.process import die_with_parent
from storage.system.startup import leave_out, loading, use_one_blas_thread


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand, and return the exit status."""
    options = _parser().parse_args(arguments)
    if options.parent is not None:
        die_with_parent(options.parent)
    use_one_blas_thread()
    if options.command == "read-shards":
        # only this command needs fastparquet, and the pandas that it loads
        from storage.verify.second_reader_main import read_shards  # noqa: PLC0415

        read_shards()
        return 0
    # Arrow would load it if it is installed, which takes longer than everything else
    leave_out("pandas")
    if options.command == "compact":
        # here, because it needs readers, which the writer does without
        from storage.maintenance.background import compact_now  # noqa: PLC0415

        try:
            print(compact_now(options.root), end="")
        except (StorageError, OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    with loading():
        # here, as --help needs no Arrow, and so that the lines above run first
        from storage.shards.writer_main import write_shards  # noqa: PLC0415

    write_shards(
        options.directory,
        owner=options.owner,
        compression=options.compression,
        row_group_bytes=options.row_group_bytes,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser(
        "write-shards", help="write the shards that a collector sends over a pipe"
    )
    writer.add_argument("--directory", required=True, help="the shards/ folder")
    writer.add_argument("--owner", help="the collector whose leftovers are removed at start")
    writer.add_argument("--compression", choices=("zstd", "lz4"), default="zstd")
    writer.add_argument("--row-group-bytes", type=int, default=8_000_000, metavar="BYTES")
    reader = commands.add_parser(
        "read-shards", help="read the shards that `verify --second-reader` names over a pipe"
    )
    compaction = commands.add_parser("compact", help="join the small shards of a root")
    compaction.add_argument("--root", type=Path, required=True)
    for command in (writer, reader, compaction):
        command.add_argument("--parent", type=int, help="leave when this process ends")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
