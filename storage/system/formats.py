"""The number that says how a document is laid out.

A document says it as `format`, some as `version`; one that does not is of format 1. A build reads
the formats that it knows. A later one is no damage, which would be set aside or replaced: it is
refused, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage.errors import NewerFormat


def require_format(
    document: Mapping[str, Any], known: int, where: object, key: str = "format"
) -> None:
    """Raise NewerFormat, which names `where`, for a format after `known`.

    Raises ValueError for a number that no build gives.
    """
    number = document.get(key, 1)
    text = f"{where}: {key}: expected {known}, got {number!r:.40}"
    if type(number) is not int or number < 1:
        raise ValueError(text)
    if number > known:
        raise NewerFormat(
            f"{text}: a later release of Headrace wrote it; use that release or a later one"
        )
