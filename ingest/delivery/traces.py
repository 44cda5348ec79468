"""The trace of the request in which a service acted, as an info of the step."""

from __future__ import annotations

from typing import Any

from ingest.delivery.events import encode_info, merge_infos

try:  # now, and not by a thread: a child that is forked meanwhile would have half of it
    from opentelemetry import trace
except ImportError:
    trace = None  # type: ignore[assignment]  # a module or nothing


def require_tracing() -> None:
    """Raise ModuleNotFoundError unless OpenTelemetry's API is installed."""
    if trace is None:
        text = "trace: expected OpenTelemetry's API: install headrace[otel]"
        raise ModuleNotFoundError(text, name="opentelemetry")


def with_trace(episode_id: str, info: Any = None) -> Any:
    """An encoded info with `{"traceparent": ...}` (W3C) of the current span, if there is one."""
    now = trace.get_current_span().get_span_context()
    if not now.is_valid:
        return info
    text = f"00-{now.trace_id:032x}-{now.span_id:016x}-{int(now.trace_flags):02x}"
    found = encode_info(episode_id, {"traceparent": text})
    return found if info is None else merge_infos(found, info)
