"""The client of operators: inspects a server, drains it, resets caches, evicts sessions and removes pools.

The methods are RPCs of AdminService and DirectoryService, and return their messages, which admin.proto, pool.proto and
directory.proto in proto/kvpool/v1 document. Lists of sessions, requests and blocks are requested page by page, as the
caller iterates.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar

import grpc

from kvpool.client.blocking import run
from kvpool.client.durations import MAX_DRAIN_SECONDS, check_deadline
from kvpool.client.transports.blocking_grpc import BlockingGrpcTransport
from kvpool.core.errors import check_range
from kvpool.core.ids import BlockHash
from kvpool.core.views.inspection import MAX_PAGE_SIZE
from kvpool.v1 import admin_pb2, admin_pb2_grpc, directory_pb2
from kvpool.wire import channels
from kvpool.wire.channels import ClientCredentials, TlsConfig

DEFAULT_DEADLINE_SECONDS: Final = 10.0
_HAND_OVER_SECONDS: Final = 40.0
"""Least time limit of a hand-over. A standby of another version may load the state for 30 s first."""


class _PageRequest(Protocol):
    """The common part of requests for a page."""

    page_token: str


class _Page(Protocol):
    """The common part of responses that come in pages."""

    @property
    def next_page_token(self) -> str: ...


_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")
_PageRequestT = TypeVar("_PageRequestT", bound=_PageRequest)
_PageT = TypeVar("_PageT", bound=_Page)


_Method = Callable[[admin_pb2_grpc.AdminServiceStub], "grpc.UnaryUnaryMultiCallable[_RequestT, _ResponseT]"]
"""Picks an RPC."""


class _Transport(BlockingGrpcTransport):
    """The servers as an operator calls them: repeats no call that may have reached the primary."""

    is_patient = False
    channel_options = channels.CHANNEL_OPTIONS

    async def call_operator(
        self, method: "_Method[_RequestT, _ResponseT]", request: _RequestT, seconds: float
    ) -> _ResponseT:
        """Makes a call of AdminService."""
        attempt = partial(self._call_once, lambda link: method(link.admin), request)
        answer: _ResponseT = await self.connection.call(attempt, seconds, self.sleep)
        return answer

    async def shard(self) -> directory_pb2.Shard:
        """Asks any server, also one that is not the primary."""
        attempt = partial(self._call_once, lambda link: link.directory.GetShard, directory_pb2.GetShardRequest())
        answer: directory_pb2.GetShardResponse = await self.connection.call(
            attempt, self.deadline_seconds, self.sleep, is_any=True
        )
        return answer.shard


class AdminClient:
    """A connection of an operator to a server, or to the primary of several. Threads may share it.

    Every call raises NotFoundError, WrongStateError or InvalidArgumentError if the server refuses it and has changed
    nothing; UnavailableError if the server cannot be reached; and DeadlineError if no answer comes in time. No call
    that may have reached the primary is repeated automatically. With several addresses, a call waits for a primary
    until its deadline.
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
        """Makes the connection. A server that cannot be reached is reported by the first call.

        Args:
            address: `host:port` or `unix:/path`, or several separated by commas: see `kvpool.client.connect`.
            deadline_seconds: Time limit of each call; `hand_over` has 40 s at least.
            tls: See `kvpool.client.connect`.
            token: See `kvpool.client.connect`.
            allow_plaintext: See `kvpool.client.connect`.

        Raises:
            ValueError: See `kvpool.client.connect`.
        """
        check_deadline(deadline_seconds)
        self._deadline_seconds = deadline_seconds
        access = ClientCredentials.of(tls, token, allow_plaintext=allow_plaintext)
        self._transport = _Transport(address, deadline_seconds, access)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<AdminClient of {self.server}>"

    @property
    def server(self) -> str:
        """Address of the server that is called: the primary, after a call was answered."""
        return self._transport.target

    def overview(self) -> admin_pb2.ListPoolsResponse:
        """Returns the state of the server and of all its pools."""
        return self._call(lambda stub: stub.ListPools, admin_pb2.ListPoolsRequest())

    def sessions(self, pool: str = "") -> Iterator[admin_pb2.SessionInfo]:
        """Yields the sessions of a pool, or of all pools, in the order in which they were opened."""
        request = admin_pb2.ListSessionsRequest(pool_name=pool, page_size=MAX_PAGE_SIZE)
        for page in self._pages(lambda stub: stub.ListSessions, request):
            yield from page.sessions

    def requests(self, pool: str, session_number: int = 0) -> Iterator[admin_pb2.RequestInfo]:
        """Yields the requests of a pool, or of one of its sessions, by session and id."""
        request = admin_pb2.ListRequestsRequest(pool_name=pool, session_number=session_number, page_size=MAX_PAGE_SIZE)
        for page in self._pages(lambda stub: stub.ListRequests, request):
            yield from page.requests

    def blocks(
        self, pool: str, state: admin_pb2.BlockState.ValueType = admin_pb2.BLOCK_STATE_UNSPECIFIED
    ) -> Iterator[admin_pb2.BlockInfo]:
        """Yields the blocks of a pool by id, without the null block; only those in `state` if it is given."""
        request = admin_pb2.ListBlocksRequest(pool_name=pool, state=state, page_size=MAX_PAGE_SIZE)
        for page in self._pages(lambda stub: stub.ListBlocks, request):
            yield from page.blocks

    def explain_misses(self, pool: str, session_number: int = 0) -> admin_pb2.ExplainMissesResponse:
        """Returns what decides whether a session of a pool hits a prefix.

        The hash scheme has no none_hash if the token of the session has a salt.

        Args:
            pool: The pool.
            session_number: Number of the session; 0 for one without namespace and weights version.
        """
        request = admin_pb2.ExplainMissesRequest(pool_name=pool, session_number=session_number)
        return self._call(lambda stub: stub.ExplainMisses, request)

    def explain_prompt(
        self, pool: str, num_tokens: int, block_hashes: Sequence[BlockHash], session_number: int = 0
    ) -> admin_pb2.ExplainPromptResponse:
        """Returns where a look-up for a prompt would end, and why. It counts nothing.

        Args:
            pool: The pool.
            num_tokens: Number of tokens of the prompt.
            block_hashes: Hash of each full hash block (`PoolConfig.hash_block_size`) of the prompt.
            session_number: Number of the session that would look up; 0 for one without namespace and weights version.

        Raises:
            InvalidArgumentError: The prompt is longer than the pool's max_model_len, or has another number of hashes.
            WrongStateError: The pool does not cache (NOT_CACHING).
        """
        request = admin_pb2.ExplainPromptRequest(
            pool_name=pool, session_number=session_number, num_tokens=num_tokens, block_hashes=b"".join(block_hashes)
        )
        return self._call(lambda stub: stub.ExplainPrompt, request)

    def reset_prefix_cache(self, pool: str) -> Sequence[admin_pb2.SessionInfo]:
        """Removes all hashes of a pool, unless a request holds a block.

        Returns:
            The sessions whose requests hold blocks, at most 16; none if the cache was reset.
        """
        request = admin_pb2.AdminServiceResetPrefixCacheRequest(pool_name=pool)
        return self._call(lambda stub: stub.ResetPrefixCache, request).holders

    def evict_session(self, pool: str, session_number: int, *, kill: bool = False) -> admin_pb2.SessionInfo:
        """Ends a session of a pool and frees its blocks; returns its last state.

        Args:
            pool: The pool.
            session_number: Number of the session.
            kill: Whether to kill its processes too, in a pool whose ranks lend their memory. The session may have ended
                already and be in quarantine.

        Raises:
            NotFoundError: The pool has no such session.
            WrongStateError: The ranks of the pool lend no memory (NOT_LENT).
        """
        request = admin_pb2.EvictSessionRequest(pool_name=pool, session_number=session_number, kill=kill)
        return self._call(lambda stub: stub.EvictSession, request).session

    def set_weights_version(self, pool: str, weights_version: str, session_number: int = 0) -> tuple[int, ...]:
        """Sets the weights version of a session of a pool, or of all its open sessions.

        Call it when no step of these sessions is in flight, before the first step with the new weights; see
        `Session.set_weights_version`.

        Args:
            pool: The pool.
            weights_version: An opaque value of at most 256 bytes; empty for none.
            session_number: Number of the session; 0 for all.

        Returns:
            The numbers of these sessions.

        Raises:
            InvalidArgumentError: The version is too long.
            NotFoundError: The pool does not exist, or has no such session.
        """
        request = admin_pb2.AdminServiceSetWeightsVersionRequest(
            pool_name=pool, session_number=session_number, weights_version=weights_version
        )
        return tuple(self._call(lambda stub: stub.SetWeightsVersion, request).session_numbers)

    def drain(self, pool: str = "") -> int:
        """Makes a pool, or all pools, refuse new sessions; returns the number of open sessions."""
        return self._call(lambda stub: stub.Drain, admin_pb2.DrainRequest(pool_name=pool)).sessions

    def stop(self, timeout_seconds: float) -> int:
        """Stops the server once no session is open. It refuses new sessions until then; `undrain` cancels this.

        Args:
            timeout_seconds: Time limit for the open sessions, [0, 86400].

        Returns:
            The number of open sessions.
        """
        check_range("timeout_seconds", timeout_seconds, 0.0, MAX_DRAIN_SECONDS)
        request = admin_pb2.DrainRequest(stop=True, timeout_seconds=timeout_seconds)
        return self._call(lambda stub: stub.Drain, request).sessions

    def undrain(self, pool: str = "") -> tuple[str, ...]:
        """Makes a pool accept new sessions again, or all pools that were not drained by name.

        Returns:
            The pools of these that still refuse new sessions.
        """
        request = admin_pb2.UndrainRequest(pool_name=pool)
        return tuple(self._call(lambda stub: stub.Undrain, request).still_drained)

    def remove_pool(self, pool: str) -> None:
        """Removes a pool that has no sessions, and no ranks that are connected or expected."""
        self._call(lambda stub: stub.RemovePool, admin_pb2.RemovePoolRequest(pool_name=pool))

    def shard(self) -> directory_pb2.Shard:
        """Returns the primary and the standbys of the server's shard. The server need not be the primary."""
        return run(self._transport.shard())

    def hand_over(self) -> tuple[int, tuple[str, ...]]:
        """Makes a standby the primary of the server's shard. Sessions continue there.

        Returns:
            The term and the addresses of the new primary.

        Raises:
            WrongStateError: The server belongs to no shard (NO_SHARD); or no standby can take over now, or it did
                not in time (NO_STANDBY).
        """
        seconds = max(self._deadline_seconds, _HAND_OVER_SECONDS)
        answer = self._call(lambda stub: stub.HandOver, admin_pb2.HandOverRequest(), seconds)
        return answer.term, tuple(answer.primary_addresses)

    def close(self) -> None:
        """Ends the connection, and all calls in progress. In a forked process it does nothing."""
        run(self._transport.close())

    def _call(
        self, method: "_Method[_RequestT, _ResponseT]", request: _RequestT, deadline_seconds: float = 0.0
    ) -> _ResponseT:
        return run(self._transport.call_operator(method, request, deadline_seconds or self._deadline_seconds))

    def _pages(self, method: "_Method[_PageRequestT, _PageT]", request: _PageRequestT) -> Iterator[_PageT]:
        is_last = False
        while not is_last:
            page = self._call(method, request)
            yield page
            request.page_token = page.next_page_token
            is_last = not page.next_page_token
