"""Explains misses: where a look-up for a prompt ends. Read-only; nothing is counted.

Hashes cover the tokens, the LoRA, the salts and the images, and the server sees hashes only. So it knows that a block
is cached under another namespace or weights version, but not that a prompt with another salt would have hit.
"""

from dataclasses import dataclass
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_map import FIRST_MAP, FIRST_SCOPE
from kvpool.core.blocks.prefix_search import NOT_IN_SCOPE, SearchEnd
from kvpool.core.errors import InvalidArgumentError, WrongStateError, check_range
from kvpool.core.ids import (
    BlockHash,
    RequestId,
    RequestNumber,
    Scope,
    SessionNumber,
)
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.statistics import Miss, MissReason

MAX_LISTED_VERSIONS: Final = 16


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """Where a look-up in one group alone ends; see GroupEnd in admin.proto.

    Attributes:
        reason: Why the group lacks the missing block; None if it lacks none.
    """

    num_tokens: int
    max_tokens: int
    span_tokens: int
    missing_block: int | None = None
    reason: MissReason | None = None
    weights_versions: tuple[str, ...] = ()
    is_in_other_namespace: bool = False
    filling_session_number: int = 0


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """Where a look-up for a prompt ends; see ExplainPromptResponse in admin.proto.

    Attributes:
        hit_tokens: Tokens of the hit.
        miss: Where and why the look-up ended early; None if it did not.
        groups: Where it ends in each group alone.
        host_tokens: Those of the hit in host memory, which an admission would copy.
    """

    hit_tokens: int
    miss: Miss | None
    groups: tuple[GroupEnd, ...]
    host_tokens: int


def explain_prompt(pool: KVCacheManager, session: Session | None, num_tokens: int, block_hashes: bytes) -> PromptEnd:
    """Looks up a prompt, for a session or for one without namespace and weights version. O(hashes).

    Args:
        pool: The pool.
        session: The session.
        num_tokens: Tokens of the prompt.
        block_hashes: Hashes of its full hash blocks, end to end.

    Raises:
        InvalidArgumentError: The number of tokens is out of range, or that of the hashes does not follow from it.
        WrongStateError: The pool does not cache.
    """
    if not pool.config.enable_caching:
        raise WrongStateError("NOT_CACHING", "the pool does not cache, so nothing is looked up", field="pool_name")
    check_range("num_tokens", num_tokens, 1, pool.config.max_model_len)
    size, count = pool.hash_size_bytes, pool.config.num_hashes(num_tokens)
    if len(block_hashes) != size * count:
        message = f"{len(block_hashes)} bytes, {num_tokens} tokens have {count} hashes of {size} bytes"
        raise InvalidArgumentError("block_hashes", message)
    request = Request(
        RequestId(""),
        RequestNumber(0),
        session.session_number if session else SessionNumber(0),
        pool.new_tables(),
        num_tokens,
        hashes=[BlockHash(block_hashes[i : i + size]) for i in range(0, size * count, size)],
        first_map=session.first_map if session else FIRST_MAP,
    )
    computed, ends = pool.find_longest_cache_hit(request), pool.search_ends(request)
    longest = max((end.num_tokens for end in ends if end.manager.spec.keeps_all), default=0)
    scope = session.scope if session else FIRST_SCOPE
    groups = tuple(_group_end(pool, request, scope, end, longest) for end in ends)
    return PromptEnd(computed.num_tokens, computed.miss, groups, pool.num_host_tokens(computed))


def _group_end(pool: KVCacheManager, request: Request, scope: Scope, end: SearchEnd, longest: int) -> GroupEnd:
    """Describes the end in one group; groups that keep all blocks serve `longest` tokens."""
    manager, prefix_map, reason = end.manager, pool.blocks.prefix_map, end.reason
    if reason is None:
        return GroupEnd(end.num_tokens, end.max_tokens, manager.span_tokens)
    if reason in NOT_IN_SCOPE and longest > end.num_tokens and not manager.spec.keeps_all:
        reason = MissReason.NOT_KEPT
    others = [each for each in prefix_map.scopes_of(manager.group_id, end.missing_hash) if each != scope]
    block_id = prefix_map.first_copy(manager.map_id(request), end.missing_hash)
    return GroupEnd(
        end.num_tokens,
        end.max_tokens,
        manager.span_tokens,
        end.missing_block,
        reason,
        tuple(sorted(version for namespace, version in others if namespace == scope[0]))[:MAX_LISTED_VERSIONS],
        any(namespace != scope[0] for namespace, _ in others),
        0 if block_id is None else prefix_map.session_number(block_id),
    )
