"""Checks after all sessions have ended: every block is free, and every cached block has the content of its hash."""

import signal
import time
from collections.abc import Iterator, Mapping
from typing import Final

from crash.execution import rank_memory
from crash.lent import cells_at_rest
from crash.memory import Cells, Memory
from crash.scheduler import LENT_POOL, incarnation
from crash.site import Site
from kvpool.client import KvpoolError, PoolInfo, connect
from kvpool.client.admin import AdminClient
from kvpool.v1.admin_pb2 import BlockInfo, BlockState
from support.waiting import DEADLINE_SECONDS

_PAUSE_SECONDS: Final = 0.1


def check_at_rest(site: Site) -> None:
    """Logs violations; with a journal, checks again after killing the server once more."""
    try:
        _check(site)
    except KvpoolError as error:
        site.log.write("violation", what="AT_REST", says=f"{type(error).__name__} {error.reason} {error}")


def _check(site: Site) -> None:
    with AdminClient(site.address, deadline_seconds=DEADLINE_SECONDS) as admin:
        _wait_until_empty(site, admin)
        before = {pool.config.name: list(admin.blocks(pool.config.name)) for pool in admin.overview().pools}
        for what in _wrong(site, admin, before):
            site.log.write("violation", what="AT_REST", says=what)
    if site.plan.journaled:
        site.log.write("kill", target="server", how="at rest")
        site.signal_server(signal.SIGKILL)
        site.start_server()
        with AdminClient(site.address, deadline_seconds=DEADLINE_SECONDS) as admin:
            for name, blocks in before.items():
                if list(admin.blocks(name)) != blocks:
                    site.log.write("violation", what="AT_REST", says=f"{name}: the blocks differ after a restart")


def _wait_until_empty(site: Site, admin: AdminClient) -> None:
    due = time.monotonic() + DEADLINE_SECONDS
    while list(admin.sessions()) or any(_quarantined(pool) for pool in admin.overview().pools):
        if time.monotonic() > due:
            site.log.write("violation", what="AT_REST", says=f"sessions remain: {list(admin.sessions())}")
            return
        time.sleep(_PAUSE_SECONDS)


def _quarantined(pool: object) -> int:
    return int(getattr(pool, "quarantined_blocks", 0))


def _wrong(site: Site, admin: AdminClient, blocks: Mapping[str, list[BlockInfo]]) -> Iterator[str]:
    for pool in admin.overview().pools:
        name, usable = pool.config.name, pool.config.num_blocks - 1 - pool.sink_blocks
        if pool.free_blocks != usable:
            yield f"{name}: {pool.free_blocks} of {usable} blocks are free"
        if requests := list(admin.requests(name)):
            yield f"{name}: requests are left: {requests}"
        if odd := [
            block
            for block in blocks[name]
            if block.state == BlockState.BLOCK_STATE_USED or block.pending or block.ref_cnt
        ]:
            yield f"{name}: blocks are not free: {odd}"
        for where, memory in _memories(site, pool):
            for block in blocks[name]:
                cell = memory.read(block.block_id)
                if block.block_hash and cell != bytes([block.group_id]) + block.block_hash:
                    yield f"{where}: block {block.block_id} holds {cell.hex()}, its hash is {block.block_hash.hex()}"


def _memories(site: Site, pool: PoolInfo) -> Iterator[tuple[str, Cells]]:
    """The memory of a pool; for a pool of ranks, the memory of each rank."""
    if pool.config.name == LENT_POOL:
        yield LENT_POOL, cells_at_rest(site.lent_memory)
        return
    names = [rank_memory(rank.rank, pool.epoch) for rank in pool.ranks]
    if not names:
        with connect(site.address) as client, client.open_session(pool.config.name) as session:
            names = [incarnation(session)]
    for name in names:
        yield name, Memory(site.folder, name, pool.config.num_blocks)
