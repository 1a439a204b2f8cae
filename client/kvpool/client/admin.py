"""For operators: what a server holds and who uses it; and to drain, reset, evict and remove.

The calls are those of AdminService; proto/kvpool/v1/admin.proto says what each promises. Those that list sessions,
requests or blocks ask page by page, as the caller reads on.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar

import grpc

from kvpool.core.views.inspection import MAX_PAGE_SIZE, BlockInfo, BlockState, RequestInfo, SessionInfo
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import admin_pb2, admin_pb2_grpc
from kvpool.wire import admin as wire_admin
from kvpool.wire import channels
from kvpool.wire import pools as wire_pools
from kvpool.wire.address import check_address
from kvpool.wire.channels import Access, TlsConfig
from kvpool.wire.errors import from_rpc_error

__all__ = ["AdminClient", "BlockInfo", "BlockState", "Overview", "RequestInfo", "ServerInfo", "SessionInfo"]

DEFAULT_DEADLINE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server as it is at one moment.

    Attributes:
        version: Release of kvpool.
        uptime_seconds: Seconds since it started.
        draining: Whether no pool takes new sessions: it is drained as a whole, or stops.
    """

    version: str
    uptime_seconds: float
    draining: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """A server and its pools, those that form included, by name."""

    server: ServerInfo
    pools: tuple[PoolInfo, ...]


class _Page(Protocol):
    """What all answers have that come in pages."""

    @property
    def next_page_token(self) -> str: ...


_PageT = TypeVar("_PageT", bound=_Page)


class AdminClient:
    """A connection of an operator to a server. Threads may share it.

    Every call raises NotFoundError, WrongStateError or InvalidArgumentError for what the server refuses, having changed
    nothing; UnavailableError where nobody answers, and DeadlineError where no answer comes in time. Nothing is tried
    again by itself.
    """

    def __init__(
        self,
        address: str,
        *,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
        tls: TlsConfig | None = None,
        token: str | Path | None = None,
        allow_plaintext: bool = False,
    ) -> None:
        """Makes the connection; that nobody answers is found out by the first call.

        Args:
            address: `host:port` or `unix:/path`.
            deadline_seconds: How long each call may take.
            tls: As of `kvpool.client.connect`; likewise the others.
            token: See there.
            allow_plaintext: See there.

        Raises:
            ValueError: As there.
        """
        check_address(address)
        self._deadline_seconds = deadline_seconds
        access = Access.of(tls, token, allow_plaintext=allow_plaintext)
        self._channel = access.channel(address, channels.CHANNEL_OPTIONS)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def overview(self) -> Overview:
        """Tells of the server and of all its pools."""
        with _converted():
            answer = self._stub.ListPools(admin_pb2.ListPoolsRequest(), timeout=self._deadline_seconds)
        server = ServerInfo(answer.server.version, answer.server.uptime_seconds, answer.server.draining)
        return Overview(server, tuple(map(wire_pools.info_from_proto, answer.pools)))

    def sessions(self, pool: str = "") -> Iterator[SessionInfo]:
        """Yields the sessions of a pool, or of all, in the order they were opened."""
        request = admin_pb2.ListSessionsRequest(pool_name=pool, page_size=MAX_PAGE_SIZE)

        def ask(token: str) -> admin_pb2.ListSessionsResponse:
            request.page_token = token
            return self._stub.ListSessions(request, timeout=self._deadline_seconds)

        for page in _pages(ask):
            yield from map(wire_admin.session_from_proto, page.sessions)

    def requests(self, pool: str, session_number: int = 0) -> Iterator[RequestInfo]:
        """Yields the requests of a pool, or of one of its sessions, session by session, by id."""
        request = admin_pb2.ListRequestsRequest(pool_name=pool, session_number=session_number, page_size=MAX_PAGE_SIZE)

        def ask(token: str) -> admin_pb2.ListRequestsResponse:
            request.page_token = token
            return self._stub.ListRequests(request, timeout=self._deadline_seconds)

        for page in _pages(ask):
            yield from map(wire_admin.request_from_proto, page.requests)

    def blocks(self, pool: str, state: BlockState | None = None) -> Iterator[BlockInfo]:
        """Yields the blocks of a pool by id, the null block left out; only those in `state` if one is given."""
        request = admin_pb2.ListBlocksRequest(
            pool_name=pool, state=wire_admin.block_state_to_proto(state), page_size=MAX_PAGE_SIZE
        )

        def ask(token: str) -> admin_pb2.ListBlocksResponse:
            request.page_token = token
            return self._stub.ListBlocks(request, timeout=self._deadline_seconds)

        for page in _pages(ask):
            yield from map(wire_admin.block_from_proto, page.blocks)

    def reset_prefix_cache(self, pool: str) -> tuple[SessionInfo, ...]:
        """Drops all hashes of a pool if no request holds a block.

        Returns:
            The sessions that are in the way, at most 16; none if the cache was reset.
        """
        request = admin_pb2.AdminServiceResetPrefixCacheRequest(pool_name=pool)
        with _converted():
            answer = self._stub.ResetPrefixCache(request, timeout=self._deadline_seconds)
        return tuple(map(wire_admin.session_from_proto, answer.holders))

    def evict_session(self, pool: str, session_number: int) -> SessionInfo:
        """Ends a session of a pool and takes its blocks back; returns how it was."""
        request = admin_pb2.EvictSessionRequest(pool_name=pool, session_number=session_number)
        with _converted():
            answer = self._stub.EvictSession(request, timeout=self._deadline_seconds)
        return wire_admin.session_from_proto(answer.session)

    def drain(self, pool: str = "") -> int:
        """Takes no new sessions in a pool, or in all; returns how many are open there."""
        with _converted():
            return self._stub.Drain(admin_pb2.DrainRequest(pool_name=pool), timeout=self._deadline_seconds).sessions

    def stop(self, timeout_seconds: float) -> int:
        """Stops the server once no session is open, and takes no new ones until then; `undrain` takes it back.

        Args:
            timeout_seconds: How long the sessions that are open may go on, [0, 86400].

        Returns:
            How many there are.
        """
        request = admin_pb2.DrainRequest(stop=True, timeout_seconds=timeout_seconds)
        with _converted():
            return self._stub.Drain(request, timeout=self._deadline_seconds).sessions

    def undrain(self, pool: str = "") -> tuple[str, ...]:
        """Takes new sessions again in a pool, or in all that were not drained by name.

        Returns:
            Pools that still take none among what was asked for.
        """
        request = admin_pb2.UndrainRequest(pool_name=pool)
        with _converted():
            return tuple(self._stub.Undrain(request, timeout=self._deadline_seconds).still_drained)

    def remove_pool(self, pool: str) -> None:
        """Forgets a pool that has no sessions, and no ranks that are there or waited for."""
        with _converted():
            self._stub.RemovePool(admin_pb2.RemovePoolRequest(pool_name=pool), timeout=self._deadline_seconds)

    def close(self) -> None:
        """Ends the connection, and the calls that wait for an answer."""
        self._channel.close()


def _pages(ask: Callable[[str], _PageT]) -> Iterator[_PageT]:
    token = ""
    while True:
        with _converted():
            page = ask(token)
        yield page
        token = page.next_page_token
        if not token:
            return


@contextlib.contextmanager
def _converted() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
