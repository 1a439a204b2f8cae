"""Configurable limits of a server; docs/reference/limits.md describes what each one protects."""

from dataclasses import dataclass, fields
from typing import Final

from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import ExhaustedError, check_setting
from kvpool.core.ids import MAX_BLOCKS
from kvpool.core.steps.columns import MAX_OPERATIONS

RETRY_SECONDS: Final = 1.0
_RANGES: Final = {
    "max_step_operations": (1, MAX_OPERATIONS),
    "max_session_blocks": (0, MAX_BLOCKS),
    "max_connections": (0, 2**20),
    "max_memory_bytes": (0, 2**50),
    "stall_seconds": (0.1, 3600),
}
_DEFAULT_RANGE: Final = (1, 2**40)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server. A call or step above one fails with ExhaustedError and its own reason; nothing is changed.

    Attributes:
        max_step_operations: Maximum number of operations per step.
        max_sessions: Maximum number of sessions in all pools together.
        max_pool_sessions: Maximum number of sessions per pool.
        max_token_sessions: Maximum number of sessions opened with the tokens of one name.
        max_token_pools: Maximum number of pools declared, or being formed, with the tokens of one name.
        max_total_blocks: Maximum number of blocks of all pools together, those being formed included.
        max_token_blocks: Maximum number of blocks of the pools that count to the tokens of one name, together.
        max_token_calls: Maximum number of calls in flight with the tokens of one name, streams included.
        max_total_requests: Maximum number of requests of all sessions together.
        max_token_requests: Maximum number of requests of the sessions opened with the tokens of one name, together.
        max_session_requests: Maximum number of requests per session.
        max_total_tokens: Maximum number of tokens of the requests of all sessions together.
        max_token_tokens: Maximum number of tokens of the requests of the sessions opened with the tokens of one name.
        max_session_tokens: Maximum number of tokens of all requests of a session together. The server keeps a hash for
            each block of them, and in pools with events each token.
        max_session_blocks: Maximum number of blocks that the requests of a session may hold. A session can
            request a lower maximum. 0: no limit.
        max_watches: Maximum number of open watches of block events.
        max_waiting_steps: Maximum number of steps and unary calls that wait for their turn.
        max_waiting_bytes: Maximum number of bytes of their large messages together.
        max_calls: Maximum number of calls in flight, streams included.
        max_connections: Maximum number of connections per address; 0: as many as the process may open, up to 8,192.
        max_memory_bytes: Resident memory of the process beyond which steps, new pools and new sessions are refused, as
            far as they need more; 0: no limit.
        max_event_bytes: Maximum number of bytes of the block events that all pools together keep for watchers. Each
            pool keeps an equal share, as if there were `max_pools` of them.
        stall_seconds: Maximum time for which a client may leave a stream's message unread, send no first message, or
            not complete the handshakes of a connection.
    """

    max_step_operations: int = 16_384
    max_sessions: int = 4096
    max_pool_sessions: int = 1024
    max_token_sessions: int = 512
    max_token_pools: int = 64
    max_total_blocks: int = 2**25
    max_token_blocks: int = 2**24
    max_token_calls: int = 4096
    max_total_requests: int = 2**21
    max_token_requests: int = 2**20
    max_session_requests: int = 65_536
    max_total_tokens: int = 2**30
    max_token_tokens: int = 2**29
    max_session_tokens: int = 2**26
    max_session_blocks: int = 0
    max_watches: int = 256
    max_waiting_steps: int = 4096
    max_waiting_bytes: int = 2**28
    max_calls: int = 16_384
    max_connections: int = 0
    max_memory_bytes: int = 0
    max_event_bytes: int = 2**36
    stall_seconds: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_setting(field.name, getattr(self, field.name), *_RANGES.get(field.name, _DEFAULT_RANGE))

    def check_sessions(self, num_sessions: int, num_pool_sessions: int) -> None:
        """Raises ExhaustedError if no further session may be opened."""
        if num_sessions >= self.max_sessions:
            raise _too_many("TOO_MANY_SESSIONS", f"the server has {num_sessions} sessions")
        if num_pool_sessions >= self.max_pool_sessions:
            raise _too_many("TOO_MANY_SESSIONS", f"the pool has {num_pool_sessions} sessions", "pool_name")

    def check_token_sessions(self, owner: str, num_sessions: int) -> None:
        """Raises ExhaustedError if no further session may be opened with the tokens of this name."""
        if num_sessions >= self.max_token_sessions:
            raise _too_many("TOO_MANY_TOKEN_SESSIONS", f"the token {owner!r} has {num_sessions} sessions", "pool_name")

    def check_token_pools(self, owner: str, num_pools: int, field: str) -> None:
        """Raises ExhaustedError if no further pool may be created with the tokens of this name."""
        if num_pools >= self.max_token_pools:
            raise _too_many("TOO_MANY_TOKEN_POOLS", f"the token {owner!r} has {num_pools} pools", field)

    def check_blocks(self, owner: str, num_blocks: int, num_other_blocks: int, field: str) -> None:
        """Raises ExhaustedError if a pool of `num_blocks` has no place beside other pools.

        Args:
            owner: Name of the token whose pools the others are; empty for all other pools.
            num_blocks: Blocks of the pool.
            num_other_blocks: Blocks of the other pools.
            field: The field that names the blocks.
        """
        reason, others, name, maximum = "TOO_MANY_BLOCKS", "other pools", "total", self.max_total_blocks
        if owner:
            reason, others = "TOO_MANY_TOKEN_BLOCKS", f"other pools of the token {owner!r}"
            name, maximum = "token", self.max_token_blocks
        if num_blocks + num_other_blocks > maximum:
            message = f"{num_blocks} blocks requested, {others} have {num_other_blocks}"
            message += f"; the maximum together is {maximum} (--max-{name}-blocks)"
            raise ExhaustedError(reason, message, field=field)

    def quota(self, min_blocks: int, max_blocks: int) -> Quota:
        """Returns the quota of a session that requests these blocks. 0: no minimum, or no maximum of its own.

        Raises:
            ExhaustedError: The session requests more than `max_session_blocks`.
        """
        maximum = self.max_session_blocks
        if maximum:
            for field, requested in (("min_blocks", min_blocks), ("max_blocks", max_blocks)):
                if requested > maximum:
                    message = f"{requested}; the server's maximum per session is {maximum}"
                    raise ExhaustedError("TOO_MANY_BLOCKS", message, field=field)
        return Quota(min_blocks, max_blocks or maximum)


def _too_many(reason: str, count: str, field: str = "") -> ExhaustedError:
    return ExhaustedError(reason, f"{count}, the maximum", field=field, retry_seconds=RETRY_SECONDS)


DEFAULT_LIMITS: Final = Limits()
