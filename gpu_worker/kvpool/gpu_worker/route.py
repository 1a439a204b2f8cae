"""Which server a rank calls next: for the shard of its pool, or to join the shard. No I/O, no clock, no thread.

1. Before a rank joins, it asks a server of its addresses for the shard of the pool (Place).
2. It goes on to another server of the shard at once, if one names the primary or cannot be reached. When no server of
   the shard is left to try, or one refuses the rank, it asks again.
3. If no server of its addresses answers, the rank joins the shard that it knows, if it knows one.
"""

from kvpool.core.errors import KvpoolError
from kvpool.wire.seeds import AddressBook, PrimarySearch, ShardAddress


class Route:
    """The way of one rank to the primary of its pool's shard.

    Attributes:
        asks: Whether the next call asks for the shard, instead of joining it.
        shard: Name of the shard to join; empty for that of any server, and None if it is not known.
    """

    def __init__(self, seeds: tuple[str, ...]) -> None:
        """Begins with the addresses that the rank was given, which may be of servers of different shards."""
        self.asks = True
        self._seeds = AddressBook(seeds)
        self._asking = PrimarySearch(self._seeds, is_any=True)
        self.shard: str | None = None
        self._servers = AddressBook(seeds)
        self._joining = PrimarySearch(self._servers)

    @property
    def target(self) -> str:
        """Address of the next call."""
        return (self._seeds if self.asks else self._servers).target

    def placed(self, location: ShardAddress) -> None:
        """Notes the answer of a server: the next call joins this shard."""
        self.asks = False
        self._asking = PrimarySearch(self._seeds, is_any=True)
        if location.shard != self.shard:
            self.shard = location.shard
            self._servers = AddressBook(location.addresses or self._seeds.seeds)
            self._joining = PrimarySearch(self._servers)
        elif location.addresses:
            self._servers.learn_members(location.addresses)
            self._servers.target = location.addresses[0]

    def joined(self) -> None:
        """Notes that the server works: a later search begins from the start."""
        self._joining = PrimarySearch(self._servers)

    def failed(self, error: KvpoolError) -> float | None:
        """Notes that a call failed. Returns the pause before the next one in seconds; None for the caller's own."""
        pause_seconds = (self._asking if self.asks else self._joining).failed(self.target, error)
        if pause_seconds != 0.0:
            self.asks = not self.asks or self.shard is None
        return pause_seconds
