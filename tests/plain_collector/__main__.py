"""`python -m tests.plain_collector collect --root DIR`: a collector that loads no typer."""

from __future__ import annotations

import sys

from storage.system.startup import loading, use_one_blas_thread


def main(arguments: list[str] | None = None) -> int:
    """Run the collector; return the exit status."""
    use_one_blas_thread()
    with loading():
        # lazy: its imports, numpy above all, must come after the lines above
        from tests.plain_collector.command import run  # noqa: PLC0415
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
