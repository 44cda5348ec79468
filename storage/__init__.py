"""What experience is, in hand and at rest. Knows nobody.

Names are loaded when they are first used (PEP 562), so that a service that only logs never pays
for pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.episode import Episode as Episode

_ROOMS = {
    "Episode": "storage.episode",
}
__all__ = sorted(_ROOMS)
__headrace__ = True


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
