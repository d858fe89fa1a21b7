"""W3C trace context: a message published inside a span of OpenTelemetry carries it to its consumer.

Promise: headers the publisher gave win, and who does not use OpenTelemetry pays nothing for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

__all__ = ["with_trace_context"]

NAMES = ("traceparent", "tracestate")


def with_trace_context(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers, with those of the current span if there is one and they name none."""
    # Whoever has a span has imported this, so it is never imported for the sake of looking.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return headers
    if any(name.lower() in NAMES for name in headers):
        return headers
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {**carrier, **headers}
