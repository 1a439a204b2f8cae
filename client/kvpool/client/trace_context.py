"""W3C trace contexts, as steps carry them."""

import re
from typing import Final

from kvpool.core.steps.columns import TRACE_CONTEXT_BYTES

NO_TRACE_CONTEXT: Final = bytes(TRACE_CONTEXT_BYTES)
_TRACE_PARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-|$)", re.ASCII)


def packed_trace_context(trace_parent: str) -> bytes:
    """Packs the trace id, span id and flags of a `traceparent`; returns no context for one that is malformed."""
    found = _TRACE_PARENT.match(trace_parent)
    return bytes.fromhex("".join(found.groups())) if found else NO_TRACE_CONTEXT
