"""Worker classes as Ray actors. Needs the [ray] extra."""

from __future__ import annotations

from typing import Any


def ray_module() -> Any:
    """Import Ray; raises ImportError that names the extra."""
    try:
        import ray  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise ImportError(
            "remote workers need the [ray] extra: pip install headrace[ray]"
        ) from error
    return ray


def remote_class(cls: type[Any], **options: Any) -> Any:
    """The class as a Ray actor class, with the options that are not None."""
    given = {name: value for name, value in options.items() if value is not None}
    ray = ray_module()
    return ray.remote(**given)(cls) if given else ray.remote(cls)
