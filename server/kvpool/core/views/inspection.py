"""Paged inspection of sessions, requests and blocks for operators. Read-only.

1. The work of a page is bounded, so that inspection does not delay steps. Each function states its bound.
2. A page starts after the entry that its token names, even if that entry no longer exists. An entry that exists during
   the whole listing is returned exactly once.
3. The id of a session is secret and is never returned.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import nsmallest
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import BlockHash, BlockId, GroupId, PoolName, RequestId, SessionNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session

DEFAULT_PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 500
MAX_COUNTED_REQUESTS: Final = 4096
MAX_SCANNED_BLOCKS: Final = 4096
MAX_LISTED_NUMBERS: Final = 16
_MAX_TOKEN_LENGTH: Final = 1024


class BlockState(Enum):
    """State of a block; see BlockState in admin.proto."""

    USED = "used"
    CACHED = "cached"
    FREE = "empty"  # as people read it: counts of free blocks include cached ones


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The state of a session at one moment; see SessionInfo in admin.proto."""

    session_number: SessionNumber
    client_name: str
    pool_name: PoolName
    lease_seconds: float
    age_seconds: float
    idle_seconds: float
    streaming: bool
    sequence: int
    executed_sequence: int
    requests: int
    running_requests: int
    held_blocks: tuple[int, ...]
    min_blocks: int = 0
    max_blocks: int = 0
    weights_version: str = ""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The state of a request at one moment; see RequestInfo in admin.proto."""

    request_id: RequestId
    session_number: SessionNumber
    num_tokens: int
    num_computed_tokens: int
    held_blocks: tuple[int, ...]
    num_preemptions: int
    lora_name: str


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """The state of a block at one moment; see BlockInfo in admin.proto."""

    block_id: BlockId
    state: BlockState
    ref_cnt: int
    block_hash: BlockHash
    group_id: GroupId
    session_number: SessionNumber
    pending: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Start and size of a page.

    Attributes:
        size: Maximum number of entries, at least 1.
        token: Token returned with the previous page; empty for the first page.
    """

    size: int
    token: str

    @classmethod
    def of(cls, size: int, token: str) -> "Page":
        """Creates a page from the fields of a request; size 0 is the default size.

        Raises:
            InvalidArgumentError: The size is too large, or the token is malformed.
        """
        check_range("page_size", size, 0, MAX_PAGE_SIZE)
        if len(token) > _MAX_TOKEN_LENGTH:
            raise _token_error()
        return cls(size or DEFAULT_PAGE_SIZE, token)

    @property
    def after_number(self) -> int:
        """The number at the start of the token; 0 for the first page.

        Raises:
            InvalidArgumentError: The token does not start with a number.
        """
        number = self.token.partition(":")[0]
        if not self.token:
            return 0
        if not (number.isascii() and number.isdigit() and len(number) <= 20):  # noqa: PLR2004 - digits of 2^64
            raise _token_error()
        return int(number)


def describe_session(pool: KVCacheManager, session: Session, now_seconds: float) -> SessionInfo:
    """Describes a session. O(its requests)."""
    requests = session.requests.values()
    held = [held_blocks(request) for request in requests]
    return SessionInfo(
        session_number=session.session_number,
        client_name=session.client_name,
        pool_name=pool.config.name,
        lease_seconds=session.lease_seconds,
        age_seconds=max(now_seconds - session.opened_seconds, 0.0),
        idle_seconds=max(now_seconds - session.last_seen_seconds, 0.0),
        streaming=session.open_streams > 0,
        sequence=session.sequence,
        executed_sequence=session.executed_sequence,
        requests=len(requests),
        running_requests=sum(1 for request in requests if request.num_computed_tokens),
        held_blocks=tuple(map(sum, zip(*held, strict=True))) if held else (0,) * len(pool.config.groups),
        min_blocks=session.holding.min_blocks if session.holding else 0,
        max_blocks=session.holding.max_blocks if session.holding else 0,
        weights_version=session.weights_version,
    )


def held_blocks(request: Request) -> tuple[int, ...]:
    """Number of blocks in a request's tables per group, without null blocks."""
    return tuple(table.num_held for table in request.tables)


def list_numbers(numbers: Sequence[int]) -> str:
    """Formats numbers for a message, at most the first MAX_LISTED_NUMBERS."""
    if len(numbers) <= MAX_LISTED_NUMBERS:
        return ", ".join(map(str, numbers))
    return ", ".join(map(str, numbers[:MAX_LISTED_NUMBERS])) + f", ... ({len(numbers)} in all)"


def block_holders(sessions: Iterable[Session]) -> list[Session]:
    """The sessions whose requests hold blocks. O(requests)."""
    return [session for session in sessions if any(request.holds_blocks for request in session.requests.values())]


def page_of_sessions(
    found: Iterable[tuple[KVCacheManager, Session]], page: Page, now_seconds: float
) -> tuple[list[SessionInfo], str]:
    """Returns a page of sessions, ordered by number, with at most about 4,096 requests. O(sessions + requests).

    Returns:
        The sessions, and the token of the next page; empty on the last page.

    Raises:
        InvalidArgumentError: The token is malformed.
    """
    after = page.after_number
    infos: list[SessionInfo] = []
    counted = 0
    for pool, session in found:
        if session.session_number <= after:
            continue
        if len(infos) == page.size or counted >= MAX_COUNTED_REQUESTS:
            return infos, str(infos[-1].session_number)
        infos.append(describe_session(pool, session, now_seconds))
        counted += len(session.requests)
    return infos, ""


def page_of_requests(sessions: Sequence[Session], page: Page) -> tuple[list[RequestInfo], str]:
    """Returns a page of requests, ordered by session number and request id. O(requests of the sessions on the page).

    Returns:
        The requests, and the token of the next page; empty on the last page.

    Raises:
        InvalidArgumentError: The token is malformed.
    """
    number = page.after_number
    after_id = page.token.partition(":")[2]
    infos: list[RequestInfo] = []
    for session in sessions:
        if session.session_number < number:
            continue
        ids: Iterable[RequestId] = session.requests
        if session.session_number == number:
            ids = [request_id for request_id in ids if request_id > after_id]
        missing = page.size - len(infos)
        first = nsmallest(missing + 1, ids)
        infos += [_describe_request(session.requests[request_id]) for request_id in first[:missing]]
        if len(first) > missing:
            last = infos[-1]
            return infos, f"{last.session_number}:{last.request_id}"
    return infos, ""


def page_of_blocks(pool: KVCacheManager, state: BlockState | None, page: Page) -> tuple[list[BlockInfo], str]:
    """Returns a page of blocks by id, filtered by state if one is given. Scans at most 4,096 blocks.

    Returns:
        The blocks, and the token of the next page; empty on the last page.

    Raises:
        InvalidArgumentError: The token is malformed.
    """
    num_blocks = pool.blocks.num_blocks
    start = page.after_number + 1
    end = min(start + MAX_SCANNED_BLOCKS, num_blocks)
    infos: list[BlockInfo] = []
    for block_id in map(BlockId, range(start, end)):
        if len(infos) == page.size:
            return infos, str(block_id - 1)
        if state is None or _state_of(pool, block_id) is state:
            infos.append(_describe_block(pool, block_id))
    return infos, str(end - 1) if end < num_blocks else ""


def _describe_request(request: Request) -> RequestInfo:
    return RequestInfo(
        request_id=request.request_id,
        session_number=request.session_number,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        held_blocks=held_blocks(request),
        num_preemptions=request.num_preemptions,
        lora_name=request.lora_name or "",
    )


def _describe_block(pool: KVCacheManager, block_id: BlockId) -> BlockInfo:
    prefix_map = pool.blocks.prefix_map
    block_hash = pool.blocks.block_hash(block_id)
    ref_cnt = pool.blocks.ref_cnt(block_id)
    state = _state_of(pool, block_id)
    if block_hash is None:
        return BlockInfo(block_id, state, ref_cnt, BlockHash(b""), GroupId(0), SessionNumber(0), pending=False)
    return BlockInfo(
        block_id,
        state,
        ref_cnt,
        block_hash,
        prefix_map.group_id(block_id),
        prefix_map.session_number(block_id),
        pending=block_id in prefix_map.pending.steps,
    )


def _state_of(pool: KVCacheManager, block_id: BlockId) -> BlockState:
    if pool.blocks.ref_cnt(block_id):
        return BlockState.USED
    return BlockState.FREE if pool.blocks.block_hash(block_id) is None else BlockState.CACHED


def _token_error() -> InvalidArgumentError:
    return InvalidArgumentError("page_token", "not a next_page_token of this list")
