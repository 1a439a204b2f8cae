"""Where an engine finds its pool: what `additional_config` and the environment say."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

KEY: Final = "kvpool"
"""What `additional_config` has it under."""
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
        min_blocks: Blocks that it can always have.
        max_blocks: Most blocks that it may hold; 0 for no limit but the server's.
        deadline_seconds: How long a call may take, retries included: an engine waits so long for a service that restarts.
        start_seconds: How long to wait at the start for the service, and for leases of engines before.
    """

    address: str
    pool: str
    client_name: str = ""
    lease_seconds: float = 0.0
    min_blocks: int = 0
    max_blocks: int = 0
    deadline_seconds: float = 30.0
    start_seconds: float = 60.0

    @classmethod
    def of(cls, additional_config: object) -> "Settings":
        """Reads the settings.

        Raises:
            ValueError: One is missing, unknown, or of another kind; names it.
        """
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ValueError(f"additional_config[{KEY!r}] must be an object, not {given!r}")  # noqa: TRY004 - a setting
        values = {
            name: os.environ[variable] for name, variable in _FROM_ENVIRONMENT.items() if os.environ.get(variable)
        }
        values.update(given)
        kinds = {field.name: field.type for field in fields(cls)}
        for name, value in values.items():
            if name not in kinds:
                raise ValueError(f"additional_config[{KEY!r}] has no {name!r}; it has {', '.join(kinds)}")
            wanted = (float, int) if kinds[name] is float else kinds[name]
            if isinstance(value, bool) or not isinstance(value, wanted):  # type: ignore[arg-type]
                raise ValueError(f"additional_config[{KEY!r}][{name!r}] must be {kinds[name].__name__}, not {value!r}")  # type: ignore[union-attr]
        for name, variable in _FROM_ENVIRONMENT.items():
            if not values.get(name):
                raise ValueError(f"kvpool needs its {name}: set additional_config[{KEY!r}][{name!r}] or {variable}")
        return cls(**values)  # type: ignore[arg-type]
