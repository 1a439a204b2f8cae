"""Which shard of a cluster has a pool, as one client knows it. No I/O of its own.

1. A client asks for the shard of a pool once, and keeps the answer and one connection per shard.
2. If the shard answers that it does not have the pool, the client asks once more. If the shard cannot be reached, the
   next call asks again, as its servers may have been replaced.
3. A server that belongs to no cluster, or is too old to say so, has all pools: its pools are at the seeds.
"""

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from kvpool.client.primary_connection import closed_error
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.wire.errors import ServerError
from kvpool.wire.seeds import NO_PRIMARY, OTHER_SHARD, ShardAddress, is_unreachable

_MOVED: Final = frozenset(("POOL_NOT_FOUND", OTHER_SHARD))
_RETRY_SECONDS: Final = 1.0


class ShardConnection(Protocol):
    """What a client keeps for a shard."""

    def learn_members(self, addresses: Sequence[str]) -> None:
        """Replaces the known addresses of the shard's servers."""


_ShardT = TypeVar("_ShardT", bound=ShardConnection)
_T = TypeVar("_T")


class Shards(Generic[_ShardT]):
    """The shards and pools that a client knows. Threads may share it."""

    def __init__(self, seeds: _ShardT, connect: Callable[[str, Sequence[str]], _ShardT]) -> None:
        """Knows no shard.

        Args:
            seeds: The connection to the addresses that the client was given.
            connect: Makes the connection to a shard, given its name and addresses. Raises ValueError if the token may
                not be sent to any of them, or a file cannot be read.
        """
        self._seeds = seeds
        self._connect = connect
        self._lock = threading.Lock()
        self._shards: dict[str, _ShardT] = {}
        self._pools: dict[str, _ShardT] = {}
        self._is_closed = False

    async def call(
        self,
        pool: str,
        locate: Callable[[], Awaitable[ShardAddress]],
        call: Callable[[_ShardT], Awaitable[_T]],
    ) -> _T:
        """Makes a call at the shard of a pool.

        Args:
            pool: The pool.
            locate: Asks a server for the shard of the pool.
            call: Makes the call at a shard. It is repeated if the shard has refused it because of rule 2.

        Raises:
            UnavailableError: The servers do not agree which shard has the pool (NOT_LOCATED), or see `connection`.
            KvpoolError: The error of either call.
        """
        known = self._pools.get(pool)
        try:
            return await call(known or await self.locate(pool, locate))
        except KvpoolError as error:
            self._forget(pool, error)
            if error.reason not in _MOVED or (known is None and error.reason != OTHER_SHARD):
                raise
        try:
            return await call(await self.locate(pool, locate))
        except KvpoolError as error:
            self._forget(pool, error)
            if error.reason != OTHER_SHARD:
                raise
            message = f"the servers do not agree now which shard has pool {pool!r}: {error}"
            raise UnavailableError("NOT_LOCATED", message, retry_seconds=_RETRY_SECONDS) from None

    async def locate(self, pool: str, locate: Callable[[], Awaitable[ShardAddress]]) -> _ShardT:
        """Asks for the shard of a pool, and remembers it. See `call` for the errors."""
        found = self.connection(await default_if_unimplemented(ShardAddress(), locate))
        self._pools[pool] = found
        return found

    def connection(self, location: ShardAddress) -> _ShardT:
        """Returns the connection to a shard.

        Raises:
            UnavailableError: A file of the credentials cannot be read, or the token may not be sent there (NO_ACCESS).
            WrongStateError: The client was closed.
        """
        if not location.shard:
            return self._seeds
        with self._lock:
            if self._is_closed:
                raise closed_error()
            known = self._shards.get(location.shard)
            if known is None:
                try:
                    known = self._shards[location.shard] = self._connect(location.shard, location.addresses)
                except ValueError as error:
                    raise UnavailableError("NO_ACCESS", str(error)) from None
        known.learn_members(location.addresses)
        return known

    def end(self) -> tuple[_ShardT, ...]:
        """Refuses further connections. Returns all that there are, for the caller to close."""
        with self._lock:
            self._is_closed = True
            return (*self._shards.values(), self._seeds)

    def _forget(self, pool: str, error: KvpoolError) -> None:
        if error.reason in _MOVED or error.reason == NO_PRIMARY or is_unreachable(error):
            self._pools.pop(pool, None)


async def default_if_unimplemented(default: _T, call: Callable[[], Awaitable[_T]]) -> _T:
    """Returns the answer of a call of DirectoryService, or `default` if the server is too old to have it."""
    try:
        return await call()
    except ServerError as error:
        if error.reason != "UNIMPLEMENTED":
            raise
        return default
