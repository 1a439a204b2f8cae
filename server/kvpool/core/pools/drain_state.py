"""Which pools take new sessions: an operator may drain one, or all.

1. A pool takes sessions when neither it nor the whole server is drained.
2. Sessions that are open notice nothing: only opening one is refused.
"""

from typing import Final

from kvpool.core.errors import UnavailableError
from kvpool.core.ids import PoolName

DRAINED_RETRY_SECONDS: Final = 5.0


class DrainState:
    """What is drained.

    Attributes:
        is_server_drained: Whether the whole server is.
        drained_pools: The pools that are drained by name. Read it; change it through this class.
    """

    def __init__(self) -> None:
        self.is_server_drained = False
        self.drained_pools: set[PoolName] = set()

    def drain(self, name: PoolName | None) -> None:
        """Takes no new sessions any more, in a pool or, without a name, in all."""
        if name is None:
            self.is_server_drained = True
        else:
            self.drained_pools.add(name)

    def undrain(self, name: PoolName | None) -> None:
        """Takes sessions again, in a pool or, without a name, in all that are not drained by name."""
        if name is None:
            self.is_server_drained = False
        else:
            self.drained_pools.discard(name)

    def accepts_sessions(self, name: PoolName) -> bool:
        """Whether a pool takes new sessions."""
        return not self.is_server_drained and name not in self.drained_pools

    def check(self, name: PoolName) -> None:
        """Raises UnavailableError if a pool takes no new sessions."""
        if not self.accepts_sessions(name):
            who = "the server" if self.is_server_drained else f"pool {name!r}"
            message = f"{who} is drained and takes no new sessions"
            raise UnavailableError("DRAINED", message, field="pool_name", retry_seconds=DRAINED_RETRY_SECONDS)
