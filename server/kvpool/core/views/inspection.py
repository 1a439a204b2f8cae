"""Paged inspection of sessions, requests and blocks for operators. Read-only.

1. The work of a page is bounded, so that inspection does not delay steps. Each function states its bound.
2. A page starts after the entry that its token names, even if that entry no longer exists. An entry that exists during
   the whole listing is returned exactly once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import nsmallest
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import BlockId, RequestId
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
    found: Iterable[tuple[KVCacheManager, Session]], page: Page
) -> tuple[list[tuple[KVCacheManager, Session]], str]:
    """Returns a page of sessions, ordered by number, with at most about 4,096 requests. O(sessions + requests).

    Returns:
        The sessions with their pools, and the token of the next page; empty on the last page.

    Raises:
        InvalidArgumentError: The token is malformed.
    """
    after = page.after_number
    listed: list[tuple[KVCacheManager, Session]] = []
    counted = 0
    for pool, session in found:
        if session.session_number <= after:
            continue
        if len(listed) == page.size or counted >= MAX_COUNTED_REQUESTS:
            return listed, str(listed[-1][1].session_number)
        listed.append((pool, session))
        counted += len(session.requests)
    return listed, ""


def page_of_requests(sessions: Sequence[Session], page: Page) -> tuple[list[Request], str]:
    """Returns a page of requests, ordered by session number and request id. O(requests of the sessions on the page).

    Returns:
        The requests, and the token of the next page; empty on the last page.

    Raises:
        InvalidArgumentError: The token is malformed.
    """
    number = page.after_number
    after_id = page.token.partition(":")[2]
    listed: list[Request] = []
    for session in sessions:
        if session.session_number < number:
            continue
        ids: Iterable[RequestId] = session.requests
        if session.session_number == number:
            ids = [request_id for request_id in ids if request_id > after_id]
        missing = page.size - len(listed)
        first = nsmallest(missing + 1, ids)
        listed += [session.requests[request_id] for request_id in first[:missing]]
        if len(first) > missing:
            last = listed[-1]
            return listed, f"{last.session_number}:{last.request_id}"
    return listed, ""


def page_of_blocks(pool: KVCacheManager, state: BlockState | None, page: Page) -> tuple[list[BlockId], str]:
    """Returns a page of blocks of both tiers by id, filtered by state if one is given. Scans at most 4,096 blocks.

    Returns:
        The blocks, and the token of the next page; empty on the last page.

    Raises:
        InvalidArgumentError: The token is malformed.
    """
    num_ids = pool.config.num_ids
    start = page.after_number + 1
    end = min(start + MAX_SCANNED_BLOCKS, num_ids)
    listed: list[BlockId] = []
    for block_id in map(BlockId, range(start, end)):
        if len(listed) == page.size:
            return listed, str(block_id - 1)
        if state is None or state_of(pool, block_id) is state:
            listed.append(block_id)
    return listed, str(end - 1) if end < num_ids else ""


def state_of(pool: KVCacheManager, block_id: BlockId) -> BlockState:
    """Returns the state of a block."""
    if pool.blocks.ref_cnt(block_id):
        return BlockState.USED
    return BlockState.FREE if pool.blocks.block_hash(block_id) is None else BlockState.CACHED


def _token_error() -> InvalidArgumentError:
    return InvalidArgumentError("page_token", "not a next_page_token of this list")
