"""Where an engine finds its pool: what `additional_config` and the environment say."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

KEY: Final = "kvpool"
"""What `additional_config` has it under."""
_ACCEPTED: Final[dict[type, tuple[type, ...]]] = {str: (str,), int: (int,), float: (int, float)}
_FROM_ENVIRONMENT: Final = {"address": "KVPOOL_ADDRESS", "pool": "KVPOOL_POOL"}


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine is attached to the service. How it shows who it is, comes from the environment: see `connect`.

    Attributes:
        address: `host:port` or `unix:/path`; KVPOOL_ADDRESS if it is not given.
        pool: The pool's name; KVPOOL_POOL if it is not given. With data parallelism each engine has its own memory, and
            its own pool: ".dp" and its index are added.
        client_name: Tells people which engine this is.
        lease_seconds: How long the blocks of an engine that dies are kept; 0 for the server's default.
        memory_id: Which memory the engine keeps its blocks in. Engines that see the same memory share a pool under the
            same name of it; if none is given, this engine's memory is its own, and gone with it.
        min_blocks: Blocks that it can always have.
        max_blocks: Most blocks that it may hold; 0 for no limit but the server's.
        deadline_seconds: How long a call may take, retries included: how long an engine waits for a service that
            restarts; and, at its start, for the lease of the engine before it.
    """

    address: str
    pool: str
    client_name: str = ""
    lease_seconds: float = 0.0
    memory_id: str = ""
    min_blocks: int = 0
    max_blocks: int = 0
    deadline_seconds: float = 30.0

    @classmethod
    def of(cls, additional_config: object) -> "Settings":
        """Reads the settings.

        Raises:
            ValueError: One is missing, unknown, or of another kind; names it.
        """
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ValueError(_where() + f" must be an object, not {given!r}")  # noqa: TRY004 - a setting is wrong
        values: dict[str, Any] = {
            name: os.environ[variable] for name, variable in _FROM_ENVIRONMENT.items() if os.environ.get(variable)
        }
        values.update(given)
        kinds: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        for name, value in values.items():
            if name not in kinds:
                raise ValueError(_where(name) + f" is not known; known: {', '.join(kinds)}")
            if isinstance(value, bool) or not isinstance(value, _ACCEPTED[kinds[name]]):
                raise ValueError(_where(name) + f" must be {kinds[name].__name__}, not {value!r}")  # noqa: TRY004 - likewise
        for name, variable in _FROM_ENVIRONMENT.items():
            if not values.get(name):
                raise ValueError(f"kvpool needs {_where(name)}, or {variable} in the environment")
        return cls(**values)


def _where(name: str = "") -> str:
    return f"additional_config[{KEY!r}]" + (f"[{name!r}]" if name else "")
