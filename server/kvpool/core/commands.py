"""Every change of a server's state as a value, see `State.execute`.

1. A command holds everything that its result depends on besides the state and the time: ids, random bytes and values
   that the server's settings decided. The same commands at the same times give the same results, also under other
   settings.
2. A command that is refused changes nothing.
3. The effect of a command that is not `recorded` ends with the process.

The journal once recorded changes by wrapping the core's methods by name: a renamed argument broke replay. Values cost a
microsecond per step. A method per command beside them would be a second way in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final, Generic, TypeVar

from kvpool.core.blocks.quota import NO_QUOTA, Quota
from kvpool.core.ids import PoolName, SessionId, SessionNumber
from kvpool.core.ranks.messages import RankGroup
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step, StepResult

_ResultT_co = TypeVar("_ResultT_co", covariant=True)


class Command(Generic[_ResultT_co]):
    """A change; the type argument is the type of its result."""

    __slots__ = ()
    recorded: ClassVar[bool] = True


_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])

HANDLERS: Final[dict[type[Command[Any]], Callable[..., Any]]] = {}
"""The method that executes each command."""


def handles(kind: type[Command[Any]]) -> Callable[[_MethodT], _MethodT]:
    """Makes a method of the state, which takes a command and the time, the handler of a command."""

    def register(method: _MethodT) -> _MethodT:
        HANDLERS[kind] = method
        return method

    return register


# Pools


@dataclass(frozen=True, slots=True)
class CreatePool(Command[bool]):
    """Creates a pool, or finds an existing one with the same configuration, or replaces one in another memory.

    Attributes:
        config: Configuration of the pool.
        none_hash: Random bytes, used if the configuration has no none_hash.
        epoch: First epoch of a new pool.
        owner: Name of the token that owns a new pool; empty for none.
        memory_id: The memory that holds the engine's tensors, see `memory_identity`; empty if not given.

    Returns:
        Whether the pool is new, or replaces an earlier one.

    Raises:
        InvalidArgumentError: The configuration or the memory is out of range, or one request of max_model_len does not
            fit a new pool.
        WrongStateError: A pool of this name has another configuration; names the field.
        UnavailableError: It has sessions in another memory.
        ExhaustedError: The process has too little memory.
    """

    config: PoolConfig
    none_hash: bytes
    epoch: int = 1
    owner: str = ""
    memory_id: str = ""


@dataclass(frozen=True, slots=True)
class OpenEpoch(Command[None]):
    """Opens a pool formed by ranks, or reopens it, empty in both cases.

    Attributes:
        config: Configuration of the pool; when a pool is reopened, it may differ from the earlier one.
        none_hash: Random bytes, used if the configuration has no none_hash.
        epoch: The new epoch, higher than all earlier ones.
        ranks_fence: Whether every rank reports when no step of an ended session is in flight.
        owner: Name of the token that owns a new pool; empty for none.

    Raises:
        InvalidArgumentError: The configuration is out of range.
        ExhaustedError: The process has too little memory.
    """

    config: PoolConfig
    none_hash: bytes
    epoch: int
    ranks_fence: bool = False
    owner: str = ""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """A session that a command ended.

    Attributes:
        pool_name: Its pool.
        epoch: The pool's epoch before the end.
        session_id: Its id.
        session_number: Its number.
        client_name: Name of its scheduler.
        num_requests: Number of its requests.
        is_quarantined: Whether its blocks are in quarantine.
    """

    pool_name: PoolName
    epoch: int
    session_id: SessionId
    session_number: SessionNumber
    client_name: str
    num_requests: int
    is_quarantined: bool = False


@dataclass(frozen=True, slots=True)
class PassEpoch(Command[tuple[SessionEnd, ...]]):
    """Ends all sessions of a pool that lost a rank, and clears its blocks; the pool stays suspended.

    Raises:
        ExhaustedError: The process has too little memory.
    """

    pool_name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SuspendPool(Command[None]):
    """Suspends allocation in a pool while a rank is absent."""

    pool_name: str


@dataclass(frozen=True, slots=True)
class ResumePool(Command[None]):
    """Ends the suspension of a pool."""

    pool_name: str


@dataclass(frozen=True, slots=True)
class KeepRankGroup(Command[None]):
    """Stores the state of a pool's ranks. Execute this before the effects of the change are applied to the pool."""

    pool_name: PoolName
    rank_group: RankGroup


@dataclass(frozen=True, slots=True)
class RemovePool(Command[None]):
    """Removes a pool. The caller must check that the pool has no ranks, not even silent or lost ones.

    Raises:
        NotFoundError: No pool has this name.
        WrongStateError: The pool has open sessions or blocks in quarantine; names the sessions. A new pool of the
            same name must not allocate blocks that a step may still write.
    """

    pool_name: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache(Command[bool]):
    """Clears the prefix cache of a pool at an operator's request; see `KVCacheManager.reset_prefix_cache`."""

    pool_name: str


@dataclass(frozen=True, slots=True)
class Drain(Command[None]):
    """Stops accepting new sessions in a pool, or in all; see `PoolRegistry.drained`."""

    pool_name: PoolName | None


@dataclass(frozen=True, slots=True)
class Undrain(Command[None]):
    """Accepts new sessions again; see `PoolRegistry.drained`."""

    pool_name: PoolName | None


# Sessions


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Result of `OpenSession`.

    Attributes:
        session_id: The session; an earlier one if the key had opened it.
        is_new: Whether this command opened it.
        starts_epoch: Whether the pool started a new epoch in other memory.
    """

    session_id: SessionId
    is_new: bool
    starts_epoch: bool = False


@dataclass(frozen=True, slots=True)
class OpenSession(Command[SessionOpened]):
    """Opens a session in a pool, or finds the open session that the same key opened. Renews the lease.

    If the pool's blocks are in another, unused memory, the pool first starts a new epoch.

    Attributes:
        pool_name: The pool.
        session_id: Id for a new session.
        client_name: Name that the client gives itself.
        lease_seconds: The lease, as chosen by `LeaseBounds.choose`.
        open_key: Random key of the caller, so that it can retry the call; empty to always open a new session.
        requested: The requested values from which lease and quota were chosen. With a known key they are compared,
            as are the pool, the client's name and the memory; lease and quota are then ignored.
        quota: Guaranteed and maximum number of blocks.
        owner: Name of the token that owns the session; empty for none.
        salt: Separates the session's hashes from others; empty for the hashes of the pool.
        namespace: An opaque value. Sessions find cached blocks only of sessions with an equal namespace, even by an
            equal hash; empty for the namespace of sessions without one.
        weights_version: Weights with which the engine computes; see `SetWeightsVersion`.
        memory_id: The memory that holds the engine's tensors, see `memory_identity`; empty if not given.
        reserve_tokens: See `Session`. It has none in a pool that reserves no slots.

    Raises:
        InvalidArgumentError: The client's name, the key, the memory, the weights version or the quota is out of range,
            or the key was used with other arguments.
        NotFoundError: The pool does not exist.
        UnavailableError: The pool is drained or suspended, or another memory is in use.
        ExhaustedError: The quota's minimum cannot be guaranteed now, or the process has too little memory.
    """

    pool_name: str
    session_id: SessionId
    client_name: str
    lease_seconds: float
    open_key: str = ""
    requested: tuple[float, ...] = ()
    quota: Quota = NO_QUOTA
    owner: str = ""
    salt: bytes = b""
    namespace: bytes = b""
    memory_id: str = ""
    weights_version: str = ""
    reserve_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KeepAlive(Command[None]):
    """Renews the lease of a session. Leases start again with each process, so this is not recorded.

    Raises:
        NotFoundError: No session ever had this id.
        AbortedError: The session has ended.
    """

    recorded: ClassVar[bool] = False
    session_id: str


@dataclass(frozen=True, slots=True)
class AttachStream(Command[None]):
    """Records a stream of an open session, which keeps the session alive. Streams end with the process."""

    recorded: ClassVar[bool] = False
    session_id: SessionId


@dataclass(frozen=True, slots=True)
class DetachStream(Command[None]):
    """Records the end of a stream; the lease of its session, if that is still open, starts now."""

    recorded: ClassVar[bool] = False
    session_id: SessionId


@dataclass(frozen=True, slots=True)
class ApplyStep(Command[StepResult]):
    """Applies a step, or returns the earlier result if the step is a retry. Renews the lease.

    Attributes:
        session_id: The session.
        step: The step.
        message: The change as it was sent, see `kvpool.wire.changes`. A retry must have the same bytes, and a record
            holds them in place of the step. Empty for a caller that sends each step once and records none.

    Raises:
        InvalidArgumentError: A field is malformed or out of range.
        NotFoundError: A request is unknown, or no session ever had this id.
        AbortedError: The session has ended.
        WrongStateError: The step is out of sequence, or a request is not in the state for it.
        UnavailableError: The pool is suspended.
        ExhaustedError: The process has too little memory.
    """

    session_id: str
    step: Step
    message: bytes = b""


@dataclass(frozen=True, slots=True)
class MarkExecuted(Command[None]):
    """Publishes the blocks that a session filled up to an executed change. Renews the lease.

    Raises:
        InvalidArgumentError: The change was not sent yet.
        NotFoundError: No session ever had this id.
        AbortedError: The session has ended.
    """

    session_id: str
    executed_sequence: int


@dataclass(frozen=True, slots=True)
class SetWeightsVersion(Command[bool]):
    """Sets the version of the weights with which a session's engine computes from now on. Does not renew the lease.

    Sessions find cached blocks only of sessions with an equal version. Blocks that were not reported as executed are
    evicted. Requests that hold blocks keep them, and cache no further ones. A request that is preempted, or holds none
    yet, begins with the new version.

    Attributes:
        session_id: The session.
        weights_version: The version, an opaque value of at most 256 bytes.
        set_key: Random key of the caller, so that it can retry the call; empty to always set the version.

    Returns:
        Whether the session had another version. A retry of the last call with a key changes nothing.

    Raises:
        InvalidArgumentError: The version or the key is too long.
        NotFoundError: No session ever had this id.
        AbortedError: The session has ended.
        WrongStateError: A later call with another key has set the version.
        ExhaustedError: The process has too little memory.
    """

    session_id: str
    weights_version: str
    set_key: str = ""


@dataclass(frozen=True, slots=True)
class FreePart(Command[int]):
    """Frees a part of what a large session holds, which then closes in less time. Renews the lease.

    Returns:
        The number of freed requests.

    Raises:
        NotFoundError: No session ever had this id.
        AbortedError: The session has ended.
    """

    session_id: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """Result of `CloseSession`.

    Attributes:
        num_freed_requests: Number of freed requests.
        end: The session; None if an earlier command closed it.
    """

    num_freed_requests: int
    end: SessionEnd | None = None


@dataclass(frozen=True, slots=True)
class CloseSession(Command[SessionClosed]):
    """Frees a session's requests and ends it. A session that was closed is not closed again.

    Attributes:
        session_id: The session.
        num_freed_requests: Number of requests that `FreePart` freed before.

    Raises:
        NotFoundError: The session does not exist, or its end is no longer remembered.
        AbortedError: The session ended in another way.
    """

    session_id: str
    num_freed_requests: int = 0


class EndReason(Enum):
    """Why a session is ended without its scheduler. The name is the reason that later calls of the session get."""

    LEASE_EXPIRED = "lease_expired"
    SESSION_EVICTED = "session_evicted"
    PROCESS_GONE = "process_gone"


@dataclass(frozen=True, slots=True)
class EndSession(Command[SessionEnd]):
    """Ends an open session without its scheduler; its blocks are freed at once or after a quarantine.

    Attributes:
        session_id: The session.
        reason: Why it is ended.
        quarantine_seconds: Duration of the quarantine in pools where not all ranks answer fences; 0 to free at once.
    """

    session_id: SessionId
    reason: EndReason
    quarantine_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class QuarantineEnd:
    """A session whose quarantine a command ended.

    Attributes:
        session: The session as it ended.
        seconds: Duration of the quarantine.
    """

    session: SessionEnd
    seconds: float


@dataclass(frozen=True, slots=True)
class EndQuarantine(Command[tuple[QuarantineEnd, ...]]):
    """Frees the quarantined blocks of ended sessions, as none of their steps can be in flight.

    Attributes:
        pool_name: The pool.
        session_numbers: Numbers of the sessions; those not in quarantine are ignored.

    Raises:
        NotFoundError: The pool does not exist.
    """

    pool_name: str
    session_numbers: tuple[SessionNumber, ...]


# Restarts


@dataclass(frozen=True, slots=True)
class LoseSessions(Command[None]):
    """Records that the state of earlier sessions was lost."""


@dataclass(frozen=True, slots=True)
class EndLostSteps(Command[None]):
    """Records that no step of a lost session can still run."""


@dataclass(frozen=True, slots=True)
class RenewLeases(Command[None]):
    """Restarts all leases, without streams, and all quarantines with a duration, as this process has just started."""
