"""Checks that a pool agrees with itself: each counter with what it counts, each link from both of its ends.

A bug or damaged memory shows here before a request gets a block that another one uses. A server checks some blocks of
an idle pool at a time; the core's tests check all of them, and more.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.host_tier import HostTier
from kvpool.core.blocks.steps_in_flight import StepsInFlight
from kvpool.core.ids import BlockId, GroupId
from kvpool.core.sessions.quarantine import Quarantine
from kvpool.core.sessions.session import Session


class IntegrityError(Exception):
    """An invariant of the core is violated: a bug in kvpool, or damaged memory."""


def require(holds: bool, message: str) -> None:  # noqa: FBT001 - a condition
    """Raises IntegrityError unless a condition holds."""
    if not holds:
        raise IntegrityError(message)


def check_blocks(pool: BlockPool, uses: Sequence[tuple[GroupId, BlockId]], blocks: range) -> None:
    """Checks a pool's counters, and the reference counts and hashes of some blocks. O(blocks + uses).

    Args:
        pool: The blocks of the pool.
        uses: Each use of a block, with its group.
        blocks: The blocks whose reference counts and hashes are checked, of both tiers, without the null block.

    Raises:
        IntegrityError: An invariant is violated; the message names it.
    """
    owners = Counter(block_id for _, block_id in uses)
    free_list, num_free = pool.free_list, pool.num_free_blocks
    total = f"{num_free} free + {len(owners)} used + 1 null"
    require(num_free + len(owners) + 1 == pool.num_blocks, f"{total} != {pool.num_blocks}")
    require(free_list.num_in_chunks == num_free, "the free list's length is wrong")
    for block_id in map(BlockId, range(blocks.start, min(blocks.stop, pool.num_blocks))):
        count = free_list.ref_cnt(block_id)
        require(count == owners[block_id], f"block {block_id}: ref_cnt {count}, in {owners[block_id]} tables")
        require(bool(count) or free_list.is_in_chunk(block_id), f"block {block_id} is neither free nor used")
        require(pool.prefix_map.leads_back(block_id), f"block {block_id}: its hash does not lead to it")
    if pool.host:
        _check_host(pool, pool.host, range(max(blocks.start, pool.num_blocks), blocks.stop))
    shared = sum(1 for count in owners.values() if count > 1)
    require(free_list.num_shared == shared, f"{shared} blocks are shared, {free_list.num_shared} counted")
    used = Counter(group_id for group_id, _ in set(uses))
    for i, counters in enumerate(pool.group_counters):
        counted = counters.used_blocks
        require(counted == used[GroupId(i)], f"group {i}: counts {counted} used, not {used[GroupId(i)]}")


def _check_host(pool: BlockPool, host: HostTier, blocks: range) -> None:
    """Checks the second tier, and some of its blocks; its counters of cached blocks only with all of them."""
    users = Counter(block_id for use in host.uses for block_id in use.block_ids)
    require(host.num_free + len(users) == host.num_blocks, "blocks of host memory are neither free nor used")
    for block_id in map(BlockId, blocks):
        require(host.ref_cnt(block_id) == users[block_id], f"block {block_id} of host memory: wrong ref_cnt")
        require(pool.prefix_map.leads_back(block_id), f"block {block_id}: its hash does not lead to it")
    if len(blocks) == host.num_blocks:
        hashed = pool.prefix_map.hashed_among(map(BlockId, blocks))
        cached = Counter(map(pool.prefix_map.group_id, hashed))
        for i, count in enumerate(host.num_cached):
            require(count == cached[GroupId(i)], f"group {i}: counts {count} cached in host memory")


def uses_by(sessions: Iterable[Session]) -> list[tuple[GroupId, BlockId]]:
    """The blocks in the tables of sessions, and those of their copies, with their groups; once per use."""
    uses: list[tuple[GroupId, BlockId]] = []
    for session in sessions:
        for request in session.requests.values():
            for i, table in enumerate(request.tables):
                uses += [(GroupId(i), block_id) for block_id in table.held_block_ids]
        for copy in session.copies:
            uses += [(copy.group_id, block_id) for block_id in copy.held_block_ids]
    return uses


def waiting_for_steps(in_flight: StepsInFlight, quarantine: Quarantine) -> list[tuple[GroupId, BlockId]]:
    """Blocks in use that no request holds, once per session whose steps they wait for."""
    kept = [(each.group_id, b) for blocks in in_flight.kept.values() for b, each in blocks.items()]
    return kept + [(group_id, b) for each in quarantine for group_id, blocks in each.freed for b in blocks]
