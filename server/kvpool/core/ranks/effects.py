"""What a change of a membership requires from its caller."""

from dataclasses import dataclass

from kvpool.core.errors import KvpoolError
from kvpool.core.ids import SessionNumber
from kvpool.core.ranks.messages import LinkId, ServerMessage
from kvpool.core.specs.pool_config import PoolConfig


@dataclass(frozen=True, slots=True)
class MessageSent:
    """Effect: a message is sent to a rank."""

    link: LinkId
    message: ServerMessage


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """Effect: end a rank's stream with an error."""

    link: LinkId
    error: KvpoolError


@dataclass(frozen=True, slots=True)
class PoolOpened:
    """Effect: open the pool, empty, in a new epoch; `ranks_fence` is true if every rank answers fences."""

    config: PoolConfig
    epoch: int
    ranks_fence: bool


@dataclass(frozen=True, slots=True)
class PoolSuspended:
    """Effect: refuse allocations for now; keep blocks and sessions unchanged."""


@dataclass(frozen=True, slots=True)
class PoolResumed:
    """Effect: continue a suspended pool; blocks and sessions are unchanged."""


@dataclass(frozen=True, slots=True)
class EpochPassed:
    """Effect: drop the contents of all blocks and end all sessions; `epoch` is the next epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SessionsFenced:
    """Effect: end the quarantine of these ended sessions; no step of theirs is in flight on any rank, or will be."""

    numbers: tuple[SessionNumber, ...]


RankEffect = MessageSent | LinkEnded
"""What is done to one rank's stream."""


@dataclass(frozen=True, slots=True)
class ProcessesGone:
    """Effect: end those of these sessions that are open, as a process of each has exited."""

    numbers: tuple[SessionNumber, ...]


PoolEffect = PoolOpened | PoolSuspended | PoolResumed | EpochPassed | SessionsFenced | ProcessesGone
"""An effect on the pool."""

Effect = RankEffect | PoolEffect
"""An action that a change of the membership requires from its caller. Effects are carried out in order."""
