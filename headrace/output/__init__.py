"""What commands print: tables and bars for people, one line of JSON for programs.

Knows rich, and nothing of ours: results come as plain mappings.
"""

__all__ = ["console", "report_page", "results"]
