"""The synchronous client."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

from kvpool.client.blocking import blocking, iterate, run
from kvpool.client.durations import MAX_LEASE_SECONDS, MAX_WAIT_SECONDS, check_deadline
from kvpool.client.process_name import process_name
from kvpool.client.session import Session
from kvpool.client.transports.embedded import EMBEDDED, EmbeddedTransport
from kvpool.client.transports.transport import EventBatch, OpenedSession, SessionOptions, Transport, watch_options
from kvpool.core.errors import check_range
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.v1.pool_pb2 import PoolInfo
from kvpool.wire.channels import ClientCredentials, TlsConfig

DEFAULT_DEADLINE_SECONDS: Final = 30.0

_SessionT = TypeVar("_SessionT")


def connect(
    address: str,
    *,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tls: TlsConfig | None = None,
    token: str | Path | None = None,
    allow_plaintext: bool = False,
) -> "Client":
    """Connects to a service.

    Args:
        address: `host:port`, `unix:/path`, or `embedded:` for the core in this process. Several addresses, separated
            by commas, are those of a primary and its standbys, of one pair: the client calls another one when the
            primary is replaced. With one address it cannot.
        deadline_seconds: Time limit of each call, retries included, (0, 86400].
        tls: TLS for TCP. None for the values of KVPOOL_TLS_CA, KVPOOL_TLS_CERT, KVPOOL_TLS_KEY and
            KVPOOL_TLS_SERVER_NAME, or plaintext if these are not set.
        token: The token, or the file that holds it, which is read again for each call and stream. None for the value of
            KVPOOL_TOKEN or KVPOOL_TOKEN_FILE.
        allow_plaintext: Send the token over plaintext TCP to other machines.

    Raises:
        ValueError: The address has none of these forms, the deadline is out of range, a file cannot be read, or others
            could read the token on the network. A server that cannot be reached is reported by the first call.
    """
    access = ClientCredentials.of(tls, token, allow_plaintext=allow_plaintext)
    return connect_as(access, address, deadline_seconds)


def connect_as(access: ClientCredentials, address: str, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> "Client":
    """Connects with the given TLS and token, without a look at the environment."""
    check_deadline(deadline_seconds)
    if address == EMBEDDED:
        return Client(EmbeddedTransport())
    from kvpool.client.transports.blocking_grpc import (  # noqa: PLC0415 - the embedded core needs no grpc
        BlockingGrpcTransport,
    )

    return Client(BlockingGrpcTransport(address, deadline_seconds, access))


class ClientBase(Generic[_SessionT]):
    """The coroutines of a client. See `kvpool.client.blocking` for how the synchronous client runs them."""

    _session: Callable[[OpenedSession], _SessionT]
    """Makes a session."""

    def __init__(self, service: Transport) -> None:
        self._service = service

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._service.target}>"

    async def _create_pool(self, config: PoolConfig, *, memory_id: str = "") -> PoolInfo:
        """Declares a pool, for an engine that holds the tensors itself. Finds it if it has the same configuration.

        Args:
            config: The pool.
            memory_id: The memory that the engine will name when it opens a session. A pool of another configuration in
                another memory is replaced, as nothing in it can be hit again. Empty: no pool is replaced.

        Raises:
            InvalidArgumentError: The configuration is invalid.
            WrongStateError: The pool has another configuration (`POOL_DIFFERS`).
            UnavailableError: It has, and sessions in its memory are open, or in quarantine (`OTHER_MEMORY`).
        """
        return await self._service.create_pool(config, memory_id)

    async def _get_pool(self, name: str) -> PoolInfo:
        """Returns the current state of a pool."""
        return await self._service.get_pool(name)

    async def _wait_until_ready(self, name: str, *, timeout_seconds: float) -> PoolInfo:
        """Waits until a pool exists, with all its ranks, and serves. Waits for a server that starts or restarts, too.

        Args:
            name: The pool's name.
            timeout_seconds: How long to wait, [0, 3600].

        Raises:
            InvalidArgumentError: The time is out of range.
            DeadlineError: The pool is not ready in time. The message states its state and the missing ranks.
            NotFoundError: There is no such pool.
            UnavailableError: The server cannot be reached.
        """
        check_range("timeout_seconds", timeout_seconds, 0.0, MAX_WAIT_SECONDS)
        return await self._service.wait_until_ready(name, timeout_seconds)

    async def _open_session(  # noqa: PLR0913 - the fields of the RPC
        self,
        pool: str,
        *,
        client_name: str = "",
        lease_seconds: float = 0.0,
        min_blocks: int = 0,
        max_blocks: int = 0,
        memory_id: str = "",
        weights_version: str = "",
        reserve_tokens: int = 0,
    ) -> _SessionT:
        """Opens a session on a pool for this scheduler.

        If an asyncio task is cancelled in this call, it may leave a session that ends with its lease.

        Args:
            pool: The pool's name.
            client_name: Name of the scheduler, for people. Empty: `PROGRAM@HOST:PID` of this process.
            lease_seconds: How long the session outlives its last call; 0 for the server's default, 10.
            min_blocks: Number of blocks that are guaranteed to the session; 0 for none.
            max_blocks: Maximum number of blocks that its requests hold, each counted once; 0 for the server's limit.
            memory_id: Name of the memory in which the engine holds the tensors, at most 128 bytes. Use another name
                whenever the tensors are allocated again, and the same name in all processes that see the same memory.
                Sessions in one memory share the cached blocks. A session in another memory waits until the earlier
                sessions have ended; then the pool starts a new epoch with an empty cache. Leave it empty for a pool
                that ranks form.
            weights_version: Version of the weights with which the engine computes, at most 256 bytes, equal in engines
                with the same weights. Requests hit blocks of sessions with an equal version only. See
                `Session.set_weights_version`.
            reserve_tokens: Number of tokens for which running requests hold slots beyond those that they need, at most
                4,096, while enough blocks are free. Decodes take them without waiting for the service. Other sessions
                then find a full block up to 4 steps later. 0: blocks are taken in the order in which vLLM takes them.

        Raises:
            InvalidArgumentError: An argument is out of range.
            ExhaustedError: `min_blocks` cannot be guaranteed now, or the pool has its maximum number of sessions.
            UnavailableError: Sessions in another memory are open, or in quarantine (`OTHER_MEMORY`).
        """
        check_range("lease_seconds", lease_seconds, 0.0, MAX_LEASE_SECONDS)
        name = client_name if client_name.strip() else process_name()
        options = SessionOptions(
            pool, name, lease_seconds, min_blocks, max_blocks, memory_id, weights_version, reserve_tokens
        )
        return self._session(await self._service.open_session(options))

    async def _close(self) -> None:
        """Ends the connection. Sessions that are still open end with their lease."""
        await self._service.close()


class Client(ClientBase[Session]):
    """A connection to a service."""

    _session = Session
    create_pool = blocking(ClientBase._create_pool)
    get_pool = blocking(ClientBase._get_pool)
    wait_until_ready = blocking(ClientBase._wait_until_ready)
    open_session = blocking(ClientBase[Session]._open_session)
    close = blocking(ClientBase._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(
        self, pool: str, *, from_sequence: int = 0, snapshot: bool = False, heartbeat_seconds: float | None = None
    ) -> Iterator[EventBatch]:
        """Yields a pool's block events, batch by batch, and waits for more (embedded: ends after the newest batch).

        With a snapshot, the watch begins with everything that is cached, and never ends: it continues over lost
        connections, batches that are no longer kept, and server restarts, with another snapshot where necessary. A pool
        that no longer exists is reported as cleared.
        `PrefixIndex` builds a map of it. Without a snapshot, it ends with an error where it cannot continue.

        Args:
            pool: The pool's name.
            from_sequence: First batch to yield; 0 for the next one.
            snapshot: Whether to begin with everything that is cached.
            heartbeat_seconds: Interval of heartbeats while there are no other messages, [0.1, 3600]. A watch with a
                snapshot reconnects after three missed heartbeats. 0 for never. None for 5 with a snapshot, else 0.

        Raises:
            InvalidArgumentError: A batch that does not exist yet, or both a batch and a snapshot.
            WrongStateError: The pool publishes no events, or the batches are no longer kept.
            NotFoundError: There is no such pool.
        """
        options = watch_options(pool, from_sequence, heartbeat_seconds, snapshot=snapshot)
        return iterate(run(self._service.watch(options)))
