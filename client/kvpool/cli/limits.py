"""Options of `kvpool serve` that limit the resources of clients."""

from dataclasses import fields
from typing import Any, Final

import click

from kvpool.cli.options import Option, together
from kvpool.server.limits.config import DEFAULT_LIMITS, Limits

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


def _option(name: str) -> Option:
    default = getattr(DEFAULT_LIMITS, name)
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=type(default), default=default, show_default=True, help=_HELP[name])


limits_options: Final = together(*(_option(field.name) for field in fields(Limits)))
"""Adds the options; `take_limits` reads them. See docs/reference/limits.md."""


def take_limits(settings: dict[str, Any]) -> Limits:
    """Removes these options from a command's settings and returns them as limits.

    Raises:
        ValueError: A limit is out of range; the message names it.
    """
    return Limits(**{field.name: settings.pop(field.name) for field in fields(Limits)})
