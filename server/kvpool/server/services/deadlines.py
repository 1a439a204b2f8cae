"""The tasks of a server that watch deadlines of leases, quarantines and ranks, and the integrity of idle pools."""

import asyncio
import contextlib
import logging
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName
from kvpool.server.services.components import Components
from kvpool.server.services.executor import ChangeFailedError

_CHECK_SECONDS: Final = 1.0
_CHECKED_BLOCKS: Final = 1024
_MAX_USES: Final = 2**14
"""A check takes less than 10 ms, in which no step is served: 2 us per block, and 0.3 us per entry of a table."""
_log = logging.getLogger("kvpool.server")


async def watch_deadlines(parts: Components) -> None:
    """Ends leases, quarantines and grace times that are over, and detects silent ranks. Runs indefinitely."""
    while True:
        await parts.clock.sleep_until(min(parts.state.next_expiry_seconds(), parts.ranks.next_deadline_seconds()))
        with contextlib.suppress(ChangeFailedError):  # what is due next is done in the next round
            parts.sessions.end_due()
            parts.ranks.tick()


async def watch_integrity(parts: Components) -> None:
    """Checks some blocks of each idle pool every second, and ends the epoch of a damaged one. Runs indefinitely."""
    checked: dict[PoolName, tuple[tuple[int, int], int]] = {}
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        before, checked = checked, {}
        for pool in list(parts.state.pools):
            name, now = pool.config.name, (pool.epoch, pool.activity.steps)
            then, first = before.get(name, (None, 1))
            if then == now and _num_uses(pool) <= _MAX_USES:
                blocks = range(first, min(first + _CHECKED_BLOCKS, pool.config.num_ids))
                first = 1 if blocks.stop == pool.config.num_ids else blocks.stop
                try:
                    pool.check_integrity(blocks)
                except Exception as error:  # noqa: BLE001 - damage may break the check itself; the epoch ends
                    _log.critical("pool damaged", extra={"pool": name, "error": str(error)}, exc_info=True)
                    with contextlib.suppress(ChangeFailedError):  # the epoch has ended all the same
                        parts.ranks.end_epoch(name)
            checked[name] = now, first


def _num_uses(pool: KVCacheManager) -> int:
    """Number of entries in the tables of the pool's open sessions, and of copies under way. O(requests + steps)."""
    requests = [request for session in pool.sessions.values() for request in session.requests.values()]
    num_copies = sum(len(use.block_ids) for use in pool.blocks.host.uses) if pool.blocks.host else 0
    return num_copies + sum(len(table.block_ids) for request in requests for table in request.tables)
