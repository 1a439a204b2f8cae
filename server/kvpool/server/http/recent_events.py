"""The newest events of the server's log, for the status page."""

import logging
from collections import deque
from typing import Any, Final

from kvpool.wire.log_fields import fields_of

KEPT_EVENTS: Final = 200
_ORDINARY: Final = frozenset({"session opened", "session closed", "metrics listening"})
"""Events that would displace the others."""
_MAX_VALUE_LENGTH: Final = 300


class RecentEvents(logging.Handler):
    """Keeps the newest events at or above the level of the log. Their fields hold no secrets, as those of the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self._logger = logging.getLogger("kvpool.server")

    def start(self) -> None:
        """Keeps the events from now on."""
        self._logger.addHandler(self)

    def stop(self) -> None:
        """Keeps no more events."""
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps an event."""
        if record.msg not in _ORDINARY:
            fields = {name: _shown(value) for name, value in fields_of(record)}
            level = record.levelname.lower()
            event = {"time_seconds": round(record.created, 3), "level": level, "event": record.msg, "fields": fields}
            self._kept.append(event)

    def as_json(self) -> list[dict[str, Any]]:
        """The events, the newest first."""
        return list(reversed(self._kept))


def _shown(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}…"
