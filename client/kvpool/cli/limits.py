"""Options of `kvpool serve` that limit the resources of clients."""

from typing import Final

from kvpool.cli.settings import config_options
from kvpool.server.limits.config import DEFAULT_LIMITS

_HELP: Final = {
    "max_step_operations": "Maximum operations of a step.",
    "max_sessions": "Maximum sessions of all pools together.",
    "max_pool_sessions": "Maximum sessions of a pool.",
    "max_token_sessions": "Maximum sessions of a token (by name) in all pools together.",
    "max_token_pools": "Maximum pools that a token (by name) has created or formed.",
    "max_token_calls": "Maximum concurrent calls of a token (by name), including streams.",
    "max_session_requests": "Maximum requests of a session.",
    "max_session_tokens": "Maximum tokens of all requests of a session together.",
    "max_session_blocks": "Maximum blocks that a session may hold or be guaranteed; 0: no limit.",
    "max_watches": "Maximum concurrent watches of block events.",
    "max_waiting_steps": "Maximum queued steps and calls.",
    "max_calls": "Maximum concurrent calls, including streams.",
    "stall_seconds": "How long a client may leave messages unread, or delay the first message of a call.",
}

limits_options: Final = config_options(DEFAULT_LIMITS, **_HELP)
"""Adds the options of `Limits`. See docs/reference/limits.md."""
