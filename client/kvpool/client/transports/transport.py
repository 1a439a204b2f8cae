"""The interface between a client and the service, and the values that pass through it."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvpool.client.durations import check_heartbeat
from kvpool.client.lease import LeaseTimer
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.events import BlockEvent
from kvpool.core.ids import SessionNumber
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step, StepResult
from kvpool.v1.pool_pb2 import PoolInfo

DEFAULT_HEARTBEAT_SECONDS: Final = 5.0
"""Interval of heartbeats of a watch with a snapshot."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The arguments of `Client.open_session`, by the names of OpenSessionRequest.

    Attributes:
        pool_name: The pool's name.
        client_name: Name of the scheduler, for people.
        lease_seconds: Wanted lease; 0 for the server's default.
        min_blocks: Minimum number of blocks.
        max_blocks: Maximum number of blocks; 0 for none.
        memory_id: Name of the memory that holds the tensors; may be empty.
        weights_version: Version of the weights; may be empty.
        reserve_tokens: Number of tokens for which requests hold slots in reserve.
    """

    pool_name: str
    client_name: str = ""
    lease_seconds: float = 0.0
    min_blocks: int = 0
    max_blocks: int = 0
    memory_id: str = ""
    weights_version: str = ""
    reserve_tokens: int = 0


class SessionCalls(Protocol):
    """Makes the calls of one session, one step at a time. Call `Transport.check_usable` before each step."""

    async def prepare(self) -> None:
        """Makes the connection of the steps, if possible. Otherwise the first step does, and raises the error."""

    async def exchange(self, step: Step) -> StepResult:
        """Sends a step and waits for its result. The same step, sent again, gets the same result."""

    async def begin_exchange(self, step: Step) -> None:
        """Sends a step without waiting. Call `exchange` with it next: it waits for the result, and raises errors."""

    def is_answered(self) -> bool:
        """Whether `exchange` with the step that was begun would not wait for the service."""

    async def mark_executed(self, executed_sequence: int) -> None:
        """Reports which steps have been executed."""

    async def set_weights_version(self, weights_version: str) -> None:
        """Sets the weights version of the session."""

    async def close(self) -> None:
        """Frees the session's requests and ends it."""

    def forget(self) -> None:
        """Releases everything that is kept for the session, which has ended."""


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session that the service opened.

    Attributes:
        transport: The transport that opened it.
        calls: Makes its calls.
        session_id: Its secret name.
        config: The pool's configuration, none_hash included.
        lease_seconds: The lease: how long the session outlives its last call.
        epoch: The pool's epoch.
        session_number: Its number on the server, never used again; not secret.
        lease_timer: The time for which the lease is certain to last; renewed by the transport.
        weights_version: Its weights version.
        reserve_tokens: Number of tokens for which its requests hold slots in reserve.
    """

    transport: "Transport"
    calls: SessionCalls
    session_id: str
    config: PoolConfig
    lease_seconds: float
    epoch: int
    session_number: SessionNumber
    lease_timer: LeaseTimer
    weights_version: str = ""
    reserve_tokens: int = 0


class WatchKind(Enum):
    """Kind of a message of a watch."""

    START = "start"
    """A snapshot of everything that is cached follows. It replaces all earlier messages."""
    BATCH = "batch"
    """The events of one change of the pool."""
    SNAPSHOT = "snapshot"
    """Part of the snapshot."""
    SNAPSHOT_END = "snapshot_end"
    """The snapshot is complete: the messages since the start are the pool's map after batch `sequence`."""
    HEARTBEAT = "heartbeat"
    """No event since batch `sequence`."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A message of a watch: the block events of one change of a pool, unless `kind` is another.

    Attributes:
        sequence: The batch's number, from 1, without gaps; in other kinds, that of the newest batch before.
        events: The events, in order.
        kind: Kind of the message.
        epoch: The pool's epoch.
        boot_id: Identifies one run of the server process. Batch numbers of different runs are unrelated.
        time_seconds: Time of the change, in seconds since 1970 by the server's clock.
    """

    sequence: int
    events: tuple[BlockEvent, ...] = ()
    kind: WatchKind = WatchKind.BATCH
    epoch: int = 0
    boot_id: str = ""
    time_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The arguments of `Client.watch`, by the names of WatchRequest.

    Attributes:
        pool_name: The pool's name.
        from_sequence: First batch wanted; 0 for the next one, or with a snapshot.
        snapshot: Whether to begin with a snapshot, and to continue over lost connections and server restarts.
        heartbeat_seconds: Interval of heartbeats while there are no other messages; 0 for none.
    """

    pool_name: str
    from_sequence: int = 0
    snapshot: bool = False
    heartbeat_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.snapshot and self.from_sequence:
            raise InvalidArgumentError("from_sequence", "cannot be combined with a snapshot")
        check_heartbeat(self.heartbeat_seconds)


def watch_options(pool: str, from_sequence: int, heartbeat_seconds: float | None, *, snapshot: bool) -> WatchOptions:
    """Makes options. By default, heartbeats come with a snapshot only."""
    if heartbeat_seconds is None:
        heartbeat_seconds = DEFAULT_HEARTBEAT_SECONDS if snapshot else 0.0
    return WatchOptions(pool, from_sequence, snapshot, heartbeat_seconds)


class Transport(Protocol):
    """The service of one server, or of a primary and its standbys. Every method raises `KvpoolError`.

    The coroutines of a transport for asyncio suspend while they wait; those of a blocking one never suspend.
    """

    @property
    def target(self) -> str:
        """Address of the server that is called; the primary, after a call was answered."""

    async def create_pool(self, config: PoolConfig, memory_id: str = "") -> PoolInfo:
        """Declares a pool, or finds the one that was declared with the same configuration."""

    async def get_pool(self, name: str) -> PoolInfo:
        """Returns the current state of a pool."""

    async def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """Waits until a pool exists and is ready."""

    async def open_session(self, options: SessionOptions) -> OpenedSession:
        """Opens a session on a pool."""

    async def watch(self, options: WatchOptions) -> AsyncGenerator[EventBatch]:
        """Begins a watch, which is established when this returns."""

    async def close(self) -> None:
        """Ends all connections."""

    def check_usable(self) -> None:
        """Raises WrongStateError if this process cannot make calls. Cheap: it is called for each step."""
