"""Ranges of the durations that callers give. A server checks its own again."""

from typing import Final

from kvpool.core.errors import InvalidArgumentError

_MAX_DEADLINE_SECONDS: Final = 86400.0
MAX_WAIT_SECONDS: Final = 3600.0
MAX_LEASE_SECONDS: Final = 86400.0
MAX_DRAIN_SECONDS: Final = 86400.0
_MIN_HEARTBEAT_SECONDS: Final = 0.1
_MAX_HEARTBEAT_SECONDS: Final = 3600.0


def check_deadline(deadline_seconds: float) -> None:
    """Raises ValueError unless `deadline_seconds` is in (0, 86400]."""
    if not 0 < deadline_seconds <= _MAX_DEADLINE_SECONDS:
        raise ValueError(f"deadline_seconds: {deadline_seconds} is not in (0, {_MAX_DEADLINE_SECONDS:g}]")


def check_heartbeat(heartbeat_seconds: float) -> None:
    """Raises InvalidArgumentError unless `heartbeat_seconds` is 0 or in [0.1, 3600]."""
    if heartbeat_seconds and not _MIN_HEARTBEAT_SECONDS <= heartbeat_seconds <= _MAX_HEARTBEAT_SECONDS:
        bounds = f"[{_MIN_HEARTBEAT_SECONDS:g}, {_MAX_HEARTBEAT_SECONDS:g}]"
        raise InvalidArgumentError("heartbeat_seconds", f"{heartbeat_seconds} is neither 0 nor in {bounds}")
