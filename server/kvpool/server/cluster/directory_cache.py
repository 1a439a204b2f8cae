"""The directory as a server has last seen it: the shards, and which shard has which pool."""

import asyncio
import logging
from collections import Counter

from kvpool.core.errors import NotFoundError, UnavailableError
from kvpool.core.ids import PoolName
from kvpool.server.cluster.directory import (
    Changes,
    DamagedRecordError,
    Directory,
    DirectoryError,
    ShardName,
    ShardRecord,
)
from kvpool.wire.backoff import Backoff

_log = logging.getLogger("kvpool.server.cluster")


class DirectoryCache:
    """The directory as this server has last seen it. It may lag behind.

    Attributes:
        shards: The shards that have a record.
        pools: The shard of each pool.
        num_pools: Number of pools per shard.
        is_known: Whether the directory has been read.
        error: Why the directory cannot be used; empty while it can.
    """

    def __init__(self) -> None:
        self.shards: dict[ShardName, ShardRecord] = {}
        self.pools: dict[PoolName, ShardName] = {}
        self.num_pools: Counter[ShardName] = Counter()
        self.is_known = False
        self.error = ""

    def take(self, changes: Changes) -> None:
        """Applies changes of the directory."""
        self.error = ""
        if changes.is_whole:
            self.shards, self.pools, self.num_pools = {}, {}, Counter()
            self.is_known = True
        for shard, entry in changes.shards.items():
            if entry.record:
                self.shards[shard] = entry.record
            else:
                self.shards.pop(shard, None)
        for pool, claimed_by in changes.pools.items():
            before = self.pools.pop(pool, None)
            if before is not None:
                self.num_pools[before] -= 1
            if claimed_by is not None:
                self.pools[pool] = claimed_by
                self.num_pools[claimed_by] += 1

    async def follow(self, directory: Directory) -> None:
        """Applies each change of the directory, indefinitely. While it cannot be read, the cache stays as it was."""
        backoff = Backoff(0.1, 1.0)
        while True:
            try:
                async for changes in directory.watch_all():
                    self.take(changes)
                    backoff.reset()
            except (DirectoryError, DamagedRecordError) as error:
                self.error = str(error)
                _log.info("view of the cluster is not current", extra={"error": str(error)})
            await asyncio.sleep(backoff.next())

    def shard_of(self, pool: str) -> ShardName:
        """The shard of a pool.

        Raises:
            NotFoundError: No shard has it.
            UnavailableError: The directory has not been read yet.
        """
        self.check_known()
        shard = self.pools.get(PoolName(pool))
        if shard is None:
            raise NotFoundError("POOL_NOT_FOUND", f"no shard has a pool {pool!r}", field="pool_name")
        return shard

    def check_known(self) -> None:
        """Raises UnavailableError if the directory has not been read yet."""
        if not self.is_known:
            raise UnavailableError("DIRECTORY_UNKNOWN", "the server has not read the directory of shards yet")
