"""Draining of pools: an operator can stop one pool, or all, from accepting new sessions.

1. A pool accepts sessions if neither the pool nor the server is drained.
2. Draining does not affect open sessions; only opening a session is refused.
"""

from typing import Final

from kvpool.core.errors import UnavailableError
from kvpool.core.ids import PoolName

DRAINED_RETRY_SECONDS: Final = 5.0


class DrainState:
    """The drained pools.

    Attributes:
        is_server_drained: Whether the whole server is drained.
        drained_pools: Pools that are drained by name. Read-only for users of this class.
    """

    def __init__(self) -> None:
        self.is_server_drained = False
        self.drained_pools: set[PoolName] = set()

    def drain(self, name: PoolName | None) -> None:
        """Stops accepting new sessions in a pool or, without a name, in all pools."""
        if name is None:
            self.is_server_drained = True
        else:
            self.drained_pools.add(name)

    def undrain(self, name: PoolName | None) -> None:
        """Accepts sessions again in a pool or, without a name, in all pools that are not drained by name."""
        if name is None:
            self.is_server_drained = False
        else:
            self.drained_pools.discard(name)

    def accepts_sessions(self, name: PoolName) -> bool:
        """Whether a pool accepts new sessions."""
        return not self.is_server_drained and name not in self.drained_pools

    def check(self, name: PoolName) -> None:
        """Raises UnavailableError if a pool accepts no new sessions."""
        if not self.accepts_sessions(name):
            drained = "the server" if self.is_server_drained else f"pool {name!r}"
            message = f"{drained} is drained and takes no new sessions"
            raise UnavailableError("DRAINED", message, field="pool_name", retry_seconds=DRAINED_RETRY_SECONDS)
