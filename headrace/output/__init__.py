"""What commands print: tables and bars for people, one line of JSON for programs."""

__all__ = ["console", "results"]
