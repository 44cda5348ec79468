"""What commands print: tables and bars for people, one line of JSON for programs.

Knows rich, and nothing of ours: results come as plain mappings. `evaluation_page` draws one
judgement and is apart from `report_page`, which draws a root.
"""

__all__ = ["console", "report_page", "results"]
