"""Options of `kvpool serve` for what clients can make the server hold or do at most."""

from dataclasses import fields
from typing import Any, Final

import click

from kvpool.cli.options import Option, together
from kvpool.server.limits.config import DEFAULT_LIMITS, Limits

_HELP: Final = {
    "max_step_operations": "Most operations of a step.",
    "max_sessions": "Most sessions, in all pools together.",
    "max_pool_sessions": "Most sessions of a pool.",
    "max_token_sessions": "Most sessions of one token, by its name, in all pools together.",
    "max_token_pools": "Most pools that one token, by its name, has declared or formed.",
    "max_token_calls": "Most calls in flight of one token, by its name, streams included.",
    "max_session_requests": "Most requests of a session.",
    "max_session_tokens": "Most tokens of a session's requests together.",
    "max_session_blocks": "Most blocks that a session may hold or be guaranteed; 0: no limit.",
    "max_watches": "Most watches of block events at a time.",
    "max_waiting_steps": "Most steps and calls that wait for their turn.",
    "max_calls": "Most calls in flight, streams included.",
    "stall_seconds": "How long a client may read nothing that waits for it, or send no first message of a call.",
}


def _option(name: str) -> Option:
    default = getattr(DEFAULT_LIMITS, name)
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=type(default), default=default, show_default=True, help=_HELP[name])


limits_options: Final = together(*(_option(field.name) for field in fields(Limits)))
"""Adds the options to a command; see docs/reference/limits.md."""


def take_limits(settings: dict[str, Any]) -> Limits:
    """Takes the options' values out of a command's settings.

    Raises:
        ValueError: One is out of range; names it.
    """
    return Limits(**{field.name: settings.pop(field.name) for field in fields(Limits)})
