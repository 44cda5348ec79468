"""The output of commands: tables and bars for people, one line of JSON for programs.

Imports rich and nothing of Headrace: results are passed as plain mappings.
"""

__all__ = ["console", "report_page", "results"]
