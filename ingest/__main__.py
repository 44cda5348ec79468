"""`python -m ingest collect --root DIR`: run the collector without loading typer."""

from __future__ import annotations

import sys

from storage.system.startup import loading, use_one_blas_thread


def main(arguments: list[str] | None = None) -> int:
    """Run the collector; return the exit status."""
    use_one_blas_thread()
    with loading():
        # lazy: its imports, numpy above all, must come after the lines above
        from ingest.server.collect import run  # noqa: PLC0415
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
