"""An evaluation as one HTML file that opens offline: the tables that a terminal shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from headrace.output.results import (
    Document,
    Table,
    estimated,
    judgements,
    not_used,
    verdicts,
)

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #8886; padding: 0.3rem 0.8rem 0.3rem 0; text-align: left; }
"""


def page(logs: Sequence[Document]) -> str:
    """Of `evaluate`: verdicts, what decides, checks, estimates."""
    title, *_ = estimated(logs)
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f"<p>{escape(line)}</p>" for line in verdicts(logs)]
    parts += [_table(one) for one in (*judgements(logs), estimated(logs))]
    parts += [f"<p>{escape(line)}</p>" for line in not_used(logs)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{chr(10).join(parts)}</body>\n"


def _table(given: Table) -> str:
    title, columns, rows = given
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in columns)
    lines = ["".join(f"<td>{_cell(value)}</td>" for value in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<h2>{escape(title)}</h2><div><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
