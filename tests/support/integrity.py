"""Integrity checks of a pool: every counter against the counted objects, every link from both ends."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from kvpool.core.blocks.host_tier import copier
from kvpool.core.blocks.integrity import require, uses_by, waiting_for_steps
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import NULL_BLOCK, BlockId, GroupId, SessionNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import CrossAttentionSpec, allocation_spec, has_gaps


def check_integrity(pool: KVCacheManager, sessions: Iterable[Session]) -> None:
    """Checks a pool, its quarantine and all its sessions. O(num_blocks + blocks in tables); for tests and idle servers.

    Raises:
        IntegrityError: An invariant is violated; the message names it.
    """
    sessions = list(sessions)
    quarantined = [each.session for each in pool.quarantine]
    requests = [request for session in sessions + quarantined for request in session.requests.values()]
    pool.check_integrity(sessions=sessions)
    waiting = waiting_for_steps(pool.in_flight, pool.quarantine)
    owners = Counter(block_id for _, block_id in [*uses_by(sessions + quarantined), *waiting])
    owners.update(pool.sink_blocks)
    _check_free_list(pool, owners)
    _check_steps_in_flight(pool, sessions)
    evicted = sum(counters.evicted_blocks for counters in pool.blocks.group_counters)
    require(evicted <= pool.blocks.num_evicted, "the groups evicted more blocks than the pool")
    _check_prefix_map(pool, {session.session_number for session in sessions})
    _check_quarantine(pool, quarantined)
    _check_quotas(pool, sessions, owners)
    for session in sessions + quarantined:
        require(
            list(session.requests.values()) == list(session.by_number.values()), "requests by id and by number differ"
        )
        num_tokens = sum(request.num_tokens for request in session.requests.values())
        num_running = sum(request.num_computed_tokens > 0 for request in session.requests.values())
        is_counted = session.sequence > 0  # by steps, which some harnesses do without
        is_right = not is_counted or session.num_running == num_running
        require(is_right, f"{session.num_running} run as counted, not {num_running}")
        require(session.num_tokens == num_tokens, f"{session.num_tokens} tokens are counted, not {num_tokens}")
    for request in requests:
        config = pool.config
        wanted = config.num_hashes(request.num_tokens) if config.enable_caching else 0
        require(len(request.hashes) == wanted, f"{request.request_id}: {len(request.hashes)} hashes, not {wanted}")
        require(request.credit_tokens <= max(pool.credit_tokens(request), 0), f"{request.request_id}: too much credit")
        for group_id in range(len(request.tables)):
            _check_table(f"{request.request_id}, group {group_id}", request, pool, GroupId(group_id))


def _check_steps_in_flight(pool: KVCacheManager, sessions: list[Session]) -> None:
    free_list, num_held = pool.blocks.free_list, 0
    for session in sessions:
        number, launched = session.session_number, session.sequence
        held = free_list.held_by(number)
        num_held += len(held)
        require(not any(map(free_list.ref_cnt, held)), f"session {number} holds blocks that are in use")
        kept = pool.in_flight.kept.get(number, OrderedDict())
        require(all(each.until <= launched for each in kept.values()), "kept for no step")
        require(pool.in_flight.kept.get(number) != {}, f"session {number} has an empty record of kept blocks")
    require(num_held == free_list.num_held, f"{num_held} free blocks have a holder, {free_list.num_held} are counted")
    numbers = {session.session_number for session in sessions}
    require(pool.in_flight.kept.keys() <= numbers, "blocks are kept for sessions that are not open")
    require(not free_list.until and not free_list.user, "a step has not ended")


def _check_quarantine(pool: KVCacheManager, quarantined: list[Session]) -> None:
    host = pool.blocks.host
    held: set[BlockId] = set()
    for session in quarantined:
        blocks = {b for r in session.requests.values() for t in r.tables for b in t.held_block_ids}
        blocks |= {block_id for copy in session.copies for block_id in copy.held_block_ids}
        each = pool.quarantine.find(session.session_number)
        blocks |= {b for _, freed in each.freed for b in freed} if each else set()
        copies = any(use.session_number == session.session_number for use in host.uses) if host else False
        require(copies or bool(blocks), f"session {session.session_number} is in quarantine without blocks")
        held |= blocks
    counted = pool.quarantine.num_blocks
    require(counted == len(held), f"{counted} blocks are counted in quarantine, not {len(held)}")


def _check_table(where: str, request: Request, pool: KVCacheManager, group_id: GroupId) -> None:
    table, spec = request.tables[group_id], allocation_spec(pool.config.groups[group_id].spec)
    if not isinstance(spec, CrossAttentionSpec):
        num_slots = len(table.block_ids) * pool.config.span_tokens(group_id)
        require(0 <= request.num_computed_tokens <= num_slots, f"{where}: computed tokens without slots")
    require(not any(table.block_ids[: table.num_skipped]), f"{where}: holds skipped blocks")
    require(has_gaps(spec) or all(table.block_ids[table.num_skipped :]), f"{where}: null block after others")
    if not table.has_stopped_caching:
        require(table.num_cached <= len(table.block_ids), f"{where}: more cached than held")


def _check_free_list(pool: KVCacheManager, owners: Counter[BlockId]) -> None:
    free = list(pool.blocks.free_list)
    require(len(free) == len(set(free)) == pool.blocks.num_free_blocks, "the free list's length is wrong")
    require(NULL_BLOCK not in free and not set(free) & set(owners), "a block is both free and used")


def _check_quotas(pool: KVCacheManager, sessions: list[Session], owners: Counter[BlockId]) -> None:
    covering: Counter[BlockId] = Counter()
    min_blocks = waiting_covered = 0
    for session in sessions:
        holding, where = session.holding, f"session {session.session_number}"
        require(all(r.holding is holding for r in session.requests.values()), f"{where}: a different holding")
        require(all(r.first_map == session.first_map for r in session.requests.values()), f"{where}: different maps")
        if holding is None:
            continue
        tables = [table for request in session.requests.values() for table in request.tables]
        counts = Counter(b for table in tables for b in table.held_block_ids)
        counts.update(block_id for copy in session.copies for block_id in copy.held_block_ids)
        counts.update(list(pool.in_flight.kept.get(session.session_number, ())))
        require(counts == holding.counts, f"{where}: held and counted blocks differ")
        require(holding.uncovered.keys() <= counts.keys(), f"{where}: uncovered blocks that it does not hold")
        covered = counts.keys() - holding.uncovered.keys()
        num_waiting = len(pool.blocks.free_list.held_by(session.session_number))
        most = max(holding.min_blocks - num_waiting, 0)
        bounds = min(len(counts), most), min(len(counts), holding.min_blocks)
        require(bounds[0] <= len(covered) <= bounds[1], f"{where}: covers {len(covered)} blocks")
        num_waiting_covered = min(num_waiting, holding.min_blocks - len(covered))
        require(holding.num_waiting_covered == num_waiting_covered, f"{where}: waiting blocks are miscounted")
        require(holding.session_number == session.session_number, f"{where}: a holding of another session")
        waiting_covered += num_waiting_covered
        num_held = len(counts) + num_waiting
        require(not holding.max_blocks or num_held <= holding.max_blocks, f"{where}: holds more than its maximum")
        covering.update({block_id: counts[block_id] for block_id in covered})
        min_blocks += holding.min_blocks
    quotas = pool.quotas
    only_covered = sum(1 for block_id, count in covering.items() if count == owners[block_id])
    require(quotas.min_blocks == min_blocks, f"minima of {min_blocks}, {quotas.min_blocks} are counted")
    require(quotas.num_covering == covering, "covering tables are miscounted")
    require(quotas.num_reserved == min_blocks - only_covered, "blocks only in covering tables are miscounted")
    free_list = pool.blocks.free_list
    num_left = free_list.num_free - free_list.num_held + only_covered + waiting_covered - min_blocks
    require(quotas.num_left == num_left, "waiting blocks that are covered are miscounted")
    require(quotas.num_left >= 0, "common blocks exceed the pool minus all minima")


def _check_prefix_map(pool: KVCacheManager, writers: set[SessionNumber]) -> None:
    prefix_map = pool.blocks.prefix_map
    hashed = [b for b in map(BlockId, range(pool.config.num_ids)) if pool.blocks.block_hash(b) is not None]
    mapped = list(prefix_map.entries())
    by_block = {block_id: group_id for group_id, _, block_id in mapped}
    require(len(hashed) == len(by_block) == len(prefix_map), "hashed, mapped and counted blocks differ")
    by_group = Counter(group_id for block_id, group_id in by_block.items() if block_id < pool.blocks.num_blocks)
    for group_id in map(GroupId, range(len(pool.config.groups))):
        require(by_group[group_id] == prefix_map.num_cached(group_id), f"group {group_id}: cached miscounted")
    for group_id, block_hash, block_id in mapped:
        is_back = prefix_map.group_id(block_id) == group_id and prefix_map.has_hash(block_id, block_hash)
        require(is_back, f"block {block_id} does not point back to its hash")
    pending = prefix_map.pending.steps
    require(pending.keys() <= set(hashed), "a block without a hash is pending")
    require(
        sorted(pending) == sorted(b for w in writers for n in (w, copier(w)) for b in prefix_map.pending.of(n)),
        "pending blocks differ from the pending blocks of open sessions",
    )
