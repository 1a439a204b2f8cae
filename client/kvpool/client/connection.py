"""Where a client begins."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvpool.client.session import Session
from kvpool.client.transports.embedded import EmbeddedTransport, EventBatch, Transport, watch_options
from kvpool.client.transports.messages import DEFAULT_DEADLINE_SECONDS
from kvpool.core.blocks.quota import Quota
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.pool_info import PoolInfo
from kvpool.wire.address import check_address
from kvpool.wire.channels import Access, TlsConfig

EMBEDDED: Final = "embedded:"


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
        address: `host:port`, `unix:/path`, or `embedded:` for the core in this process.
        deadline_seconds: How long each call may take, retries included.
        tls: For TCP; None for what KVPOOL_TLS_CA, KVPOOL_TLS_CERT, KVPOOL_TLS_KEY and KVPOOL_TLS_SERVER_NAME say, and
            plaintext if they say nothing.
        token: The token, or the file that holds it, which is read anew for each call and stream; None for what
            KVPOOL_TOKEN or KVPOOL_TOKEN_FILE says.
        allow_plaintext: Send the token over plaintext TCP beyond this machine.

    Raises:
        ValueError: The address is of none of these forms, a file cannot be read, or the token would go where others can
            read it. That nobody answers is found out by the first call.
    """
    return connect_as(Access.of(tls, token, allow_plaintext=allow_plaintext), address, deadline_seconds)


def connect_as(access: Access, address: str, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> "Client":
    """The same, with what is shown at the door in one piece; nothing comes from the environment."""
    if address == EMBEDDED:
        return Client(EmbeddedTransport())
    check_address(address)
    from kvpool.client.transports.grpc import GrpcTransport  # noqa: PLC0415 - the embedded core needs no grpc

    return Client(GrpcTransport(address, deadline_seconds, access))


class Client:
    """A connection to a service."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_pool(self, config: PoolConfig) -> PoolInfo:
        """Declares a pool, for an engine that holds the tensors itself; or finds the one that was declared alike."""
        return self._transport.create_pool(config)

    def get_pool(self, name: str) -> PoolInfo:
        """Tells what a pool is like now."""
        return self._transport.get_pool(name)

    def wait_until_ready(self, name: str, *, timeout_seconds: float) -> PoolInfo:
        """Waits until a pool is there, with all its ranks, and serves; over a server that starts or restarts, too.

        Args:
            name: The pool's name.
            timeout_seconds: How long to wait, [0, 3600].

        Raises:
            DeadlineError: It is not ready by then; says how it is, and which ranks are missing.
            NotFoundError: It is not even there.
            UnavailableError: Nor is the server.
        """
        return self._transport.wait_until_ready(name, timeout_seconds)

    def open_session(  # noqa: PLR0913 - what the wire asks
        self,
        pool: str,
        *,
        client_name: str = "",
        lease_seconds: float = 0.0,
        min_blocks: int = 0,
        max_blocks: int = 0,
        memory_id: str = "",
    ) -> Session:
        """Attaches this scheduler to a pool.

        Args:
            pool: The pool's name.
            client_name: Tells people which scheduler this is.
            lease_seconds: How long the session outlives its last sign of life; 0 for the server's default, 10.
            min_blocks: Blocks that it can always have, whatever others do; 0 for none.
            max_blocks: Most blocks that its requests may hold, each counted once; 0 for no limit but the server's.
            memory_id: Names the memory that the engine holds the tensors in, at most 128 bytes: another whenever they
                are allocated anew, the same in all processes that see them. Sessions in one memory share what is
                cached; with another the pool begins anew, when those before have ended. Empty for one that ranks form.

        Raises:
            ExhaustedError: `min_blocks` cannot be guaranteed now, or the pool has as many sessions as it may.
            UnavailableError: Sessions in another memory are open, or in quarantine (`OTHER_MEMORY`).
        """
        quota = Quota(min_blocks, max_blocks)
        return Session(
            self._transport, self._transport.open_session(pool, client_name, lease_seconds, quota, memory_id)
        )

    def resume_session(self, session_id: str, *, sequence: int = 0) -> Session:
        """Takes a session up again within its lease: for a scheduler that was started anew and had stored these two.

        From then on it is this process that drives the session. The one before, should it still run, is refused
        whatever it sends (AbortedError), and its block tables by the ranks. Where these answer fences, this returns
        when no step of it is in flight, and can be called again if the deadline comes first. In other pools wait until
        no step of it runs before blocks are freed or written.

        Args:
            session_id: `Session.session_id`, the first or any later one.
            sequence: `Session.sequence`, the last that is known; 0 for none.

        Returns:
            The session, after its last change; what it holds is in `held_requests`, to be adopted or freed.

        Raises:
            InvalidArgumentError: The sequence is of a step that was never applied.
            AbortedError: The session has ended, or yet another process resumed it meanwhile.
            DeadlineError: A step of the process before is in flight, or a rank is away, for too long.
            NotFoundError: The server knows no such session.
        """
        return Session(self._transport, self._transport.resume_session(session_id, sequence))

    def watch(
        self, pool: str, *, from_sequence: int = 0, snapshot: bool = False, heartbeat_seconds: float | None = None
    ) -> Iterator[EventBatch]:
        """Yields a pool's block events, batch by batch, waiting for more (embedded: until there are no more).

        With a snapshot it begins with all that is cached, and goes on for ever: it survives lost connections, batches
        that are no longer kept, and restarts of the server, with another snapshot where it must; `PrefixIndex` makes a
        map of it. Without one it ends with an error where it cannot go on.

        Args:
            pool: The pool's name.
            from_sequence: First batch wanted; 0 for the next one to come.
            snapshot: Whether to begin with all that is cached.
            heartbeat_seconds: After how long without another message a heartbeat is to come, [0.1, 3600]; after three
                that did not, a watch with a snapshot connects anew. 0 for never. None for 5 with a snapshot, else 0.

        Raises:
            InvalidArgumentError: A batch that does not exist yet, or both a batch and a snapshot.
            WrongStateError: The pool publishes no events, or the batches are no longer kept.
            NotFoundError: There is no such pool.
        """
        return self._transport.watch(watch_options(pool, from_sequence, heartbeat_seconds, snapshot=snapshot))

    def close(self) -> None:
        """Ends the connection. Sessions that are still open live on for their lease."""
        self._transport.close()
