"""What a client can make a server hold or do at most; docs/reference/limits.md tells what each limit protects."""

from dataclasses import dataclass, fields
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import ExhaustedError
from kvpool.core.ids import MAX_BLOCKS
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import MAX_OPERATIONS, Operation, Step

RETRY_SECONDS: Final = 1.0
MAX_COMMON_PREFIXES: Final = 64
"""Most OPERATION_COMMON_PREFIX of a step: each looks at all blocks that the session's requests have in common."""
MAX_PROMISED_BLOCKS: Final = 2**22
"""Most block ids of a step: what its look-ups promised, nulls included."""
MAX_EVICTED_BLOCKS: Final = 2**18
"""The same of a step that evicts any."""
_MOST: Final = {"max_step_operations": MAX_OPERATIONS, "max_session_blocks": MAX_BLOCKS}
_MOST_OTHERS: Final = 2**40


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server. Over one, a call or step ends in ExhaustedError with a reason of its own; nothing is changed.

    Attributes:
        max_step_operations: Most operations of a step.
        max_sessions: Most sessions, in all pools together.
        max_pool_sessions: Most sessions of a pool.
        max_token_sessions: Most sessions that were opened with the tokens of one name.
        max_token_pools: Most pools that were declared, or are formed, with the tokens of one name.
        max_token_calls: Most calls in flight that showed the tokens of one name, streams included.
        max_session_requests: Most requests of a session.
        max_session_tokens: Most tokens of all its requests together; of each block of them the server keeps a hash, in
            pools with events each token.
        max_session_blocks: Most blocks that its requests may hold, if it asks for no less; 0 for no limit.
        max_watches: Most watches of block events at a time.
        max_waiting_steps: Most steps and unary calls that wait for their turn.
        max_calls: Most calls in flight, streams included.
        stall_seconds: How long a stream may take no message off that waits for it, or a call send no first one.
    """

    max_step_operations: int = 16_384
    max_sessions: int = 4096
    max_pool_sessions: int = 1024
    max_token_sessions: int = 1024
    max_token_pools: int = 64
    max_token_calls: int = 4096
    max_session_requests: int = 65_536
    max_session_tokens: int = 2**26
    max_session_blocks: int = 0
    max_watches: int = 256
    max_waiting_steps: int = 4096
    max_calls: int = 16_384
    stall_seconds: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "stall_seconds":
                continue
            value, least, most = getattr(self, field.name), 1, _MOST.get(field.name, _MOST_OTHERS)
            if field.name == "max_session_blocks":
                least = 0
            if not least <= value <= most:
                raise ValueError(f"{field.name}: {value} is not in [{least}, {most}]")
        if not 0.1 <= self.stall_seconds <= 3600:  # noqa: PLR2004 - the message states it
            raise ValueError(f"stall_seconds: {self.stall_seconds} is not in [0.1, 3600]")

    def check_sessions(self, num_sessions: int, num_pool_sessions: int) -> None:
        """Raises ExhaustedError if one more session is one too many."""
        if num_sessions >= self.max_sessions:
            message = f"the server has {num_sessions} sessions, as many as it may"
            raise ExhaustedError("TOO_MANY_SESSIONS", message, retry_seconds=RETRY_SECONDS)
        if num_pool_sessions >= self.max_pool_sessions:
            message = f"the pool has {num_pool_sessions} sessions, as many as it may"
            raise ExhaustedError("TOO_MANY_SESSIONS", message, field="pool_name", retry_seconds=RETRY_SECONDS)

    def check_token_sessions(self, owner: str, num_sessions: int) -> None:
        """Raises ExhaustedError if one more session of a token's is one too many."""
        if num_sessions >= self.max_token_sessions:
            message = f"the token {owner!r} has {num_sessions} sessions, as many as it may"
            raise ExhaustedError("TOO_MANY_TOKEN_SESSIONS", message, retry_seconds=RETRY_SECONDS)

    def check_token_pools(self, owner: str, num_pools: int, field: str) -> None:
        """Raises ExhaustedError if one more pool of a token's, which `field` names, is one too many."""
        if num_pools >= self.max_token_pools:
            message = f"the token {owner!r} has {num_pools} pools, as many as it may"
            raise ExhaustedError("TOO_MANY_TOKEN_POOLS", message, field=field, retry_seconds=RETRY_SECONDS)

    def check_step(self, pool: KVCacheManager, session: Session, step: Step) -> None:
        """Raises ExhaustedError if a change that is new is too large, or would make the session so.

        What is malformed passes: the core says so.
        """
        if step.sequence <= session.sequence:  # it is answered from memory
            return
        count = len(step.operations)
        if count > self.max_step_operations:
            message = f"{count} operations, a step may have {self.max_step_operations}"
            raise ExhaustedError("STEP_TOO_LARGE", message, field="operations")
        if count > MAX_COMMON_PREFIXES and step.operations.count(Operation.COMMON_PREFIX) > MAX_COMMON_PREFIXES:
            message = f"a step may ask for common prefixes {MAX_COMMON_PREFIXES} times"
            raise ExhaustedError("STEP_TOO_LARGE", message, field="operations")
        if len(step.block_ids) > MAX_EVICTED_BLOCKS:
            most = MAX_EVICTED_BLOCKS if Operation.EVICT in step.operations else MAX_PROMISED_BLOCKS
            if len(step.block_ids) > most:
                message = f"{len(step.block_ids)} block ids, this step may have {most}"
                raise ExhaustedError("STEP_TOO_LARGE", message, field="block_ids")
        if step.request_ids:
            left = len(session.requests) - step.operations.count(Operation.FREE)
            if left + len(step.request_ids) > self.max_session_requests:
                message = f"the session would have more than {self.max_session_requests} requests"
                raise ExhaustedError("TOO_MANY_REQUESTS", message, field="request_ids")
        appended = step.num_appended_tokens
        if (
            session.num_tokens + sum(appended) > self.max_session_tokens
            and max(appended, default=0) <= pool.config.max_model_len
        ):
            message = f"the session's requests would have more than {self.max_session_tokens} tokens"
            raise ExhaustedError("TOO_MANY_TOKENS", message, field="num_appended_tokens")

    def quota(self, min_blocks: int, max_blocks: int) -> Quota:
        """The quota of a session that asked for so many blocks; 0 for none, or no limit of its own.

        Raises:
            ExhaustedError: It asked for more than a session may hold.
        """
        most = self.max_session_blocks
        if most:
            for field, asked in (("min_blocks", min_blocks), ("max_blocks", max_blocks)):
                if asked > most:
                    message = f"{asked}, the server lets a session hold {most}"
                    raise ExhaustedError("TOO_MANY_BLOCKS", message, field=field)
        return Quota(min_blocks, max_blocks or most)


DEFAULT_LIMITS: Final = Limits()
