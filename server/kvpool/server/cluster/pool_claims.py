"""Which shard has a pool: placement of new pools, and the claims of this server's shard in the directory.

1. A pool exists in one shard: its primary creates a pool only while the directory says that the pool is its own.
2. A claim is made before the pool, and released after it. So a claim without a pool is possible for a while, a pool
   without a claim only after the directory has lost it. A token makes a bounded number of claims without a pool
   (`TokenClaims`).
3. Nothing is written while no pool comes or goes.
4. A new pool is placed on the server's own shard, or on one of which a server can be reached. Where a claimed pool
   belongs is never changed by that.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Final

from kvpool.core.errors import ExhaustedError, KvpoolError, UnavailableError, WrongStateError
from kvpool.core.ids import PoolName
from kvpool.server.cluster.directory import DamagedRecordError, DirectoryError, ShardName, ShardRecord
from kvpool.server.cluster.directory_cache import DirectoryCache
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.reachability import Probes
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.cluster.token_claims import TokenClaims

CHECK_SECONDS: Final = 20.0
"""Interval at which claims are compared with pools. A claim without a pool is released at the second comparison."""
MAX_PROBES: Final = 8
"""Maximum number of shards that are probed for a new pool, one after the other."""

_log = logging.getLogger("kvpool.server.cluster")


def choose(
    shards: Mapping[ShardName, ShardRecord],
    num_pools: Mapping[ShardName, int],
    max_pools: int,
    zone: str,
    pick: Callable[[int], int],
) -> ShardName:
    """Chooses the shard of a new pool: of two random shards the one with fewer pools.

    The two-choices rule keeps the fullest shard near the average, also while many servers choose at the same time from
    counts that lag behind (Mitzenmacher, 2001).

    Args:
        shards: The shards.
        num_pools: Number of pools per shard.
        max_pools: Shards with this number of pools are left out.
        zone: Shards whose primary is in this zone are preferred; empty for none.
        pick: Returns a random number below its argument.

    Raises:
        ExhaustedError: All shards have the maximum of pools.
        UnavailableError: There is no shard.
    """
    if not shards:
        raise UnavailableError("NO_SHARD", "the cluster has no shard with a primary yet")
    with_space = sorted(shard for shard in shards if num_pools.get(shard, 0) < max_pools)
    if not with_space:
        message = f"each of the {len(shards)} shards has {max_pools} pools, the maximum"
        raise ExhaustedError("TOO_MANY_POOLS", message)
    near = [shard for shard in with_space if zone and shards[shard].primary_member.zone == zone]
    candidates = near or with_space
    first = candidates.pop(pick(len(candidates)))
    if not candidates:
        return first
    second = candidates[pick(len(candidates))]
    return min(first, second, key=lambda shard: num_pools.get(shard, 0))


class Placement:
    """Chooses shards of new pools for a server.

    Args:
        own: The server's shard, which is not probed.
        max_pools: Maximum number of pools of a shard.
        pick: Returns a random number below its argument.
    """

    def __init__(self, own: ShardName, max_pools: int, pick: Callable[[int], int]) -> None:
        self._own = own
        self._max_pools = max_pools
        self._pick = pick
        self._probes = Probes()

    async def choose(
        self, shards: Mapping[ShardName, ShardRecord], num_pools: Mapping[ShardName, int], zone: str
    ) -> ShardName:
        """Chooses a shard of which a server can be reached; after MAX_PROBES that cannot, the own one.

        Args:
            shards: See the function `choose`.
            num_pools: See the function `choose`.
            zone: See the function `choose`.

        Raises:
            KvpoolError: See the function `choose`; or UnavailableError: no shard can be reached.
        """
        lost: list[ShardName] = []
        shards = dict(shards)
        while True:
            try:
                chosen = choose(shards, num_pools, self._max_pools, zone, self._pick)
            except KvpoolError:
                if not lost:
                    raise
                message = f"no server can be reached of any shard that was tried: {', '.join(sorted(lost))}"
                raise UnavailableError("NO_REACHABLE_SHARD", message) from None
            if chosen == self._own or await self._probes.is_reachable(chosen, shards[chosen]):
                return chosen
            lost.append(chosen)
            del shards[chosen]
            if len(lost) == MAX_PROBES:
                shards = {shard: record for shard, record in shards.items() if shard == self._own}


class PoolClaims:
    """The claims of one server's shard.

    Args:
        member: The server's part in its shard.
        cache: What the server knows of the cluster.
        pool_names: Returns the names of the server's pools.
        placement: Chooses shards of new pools.
        token_claims: Bounds the claims of tokens.

    Attributes:
        conflicts: Pools of this shard that the directory gives to another shard, or to what is no shard.
    """

    def __init__(
        self,
        member: ShardMember,
        cache: DirectoryCache,
        pool_names: Callable[[], list[PoolName]],
        placement: Placement,
        token_claims: TokenClaims,
    ) -> None:
        self.conflicts: frozenset[PoolName] = frozenset()
        self._member = member
        self._cache = cache
        self._pool_names = pool_names
        self._placement = placement
        self._token_claims = token_claims
        self._locks: weakref.WeakValueDictionary[PoolName, asyncio.Lock] = weakref.WeakValueDictionary()
        self._unused: set[PoolName] = set()

    async def place(self, pool: PoolName, zone: str) -> ShardName:
        """Returns the shard of a pool, and chooses it if there is none.

        Raises:
            KvpoolError: See `Placement.choose`; or UnavailableError: the directory does not answer; or ExhaustedError:
                the caller's token has claimed too many names of pools that are not created.
        """
        self._cache.check_known()
        found = self._cache.pools.get(pool)
        if found in self._cache.shards:
            return found
        shard = await self._placement.choose(self._cache.shards, self._cache.num_pools, zone)
        return await self._claim(pool, shard, "pool_name")

    async def claim(self, pool: PoolName, field: str = "pool_name") -> None:
        """Claims a pool for this server's shard before it is created. A pool that exists here needs no directory.

        Args:
            pool: The pool.
            field: The field of the caller that names it, for errors.

        Raises:
            UnavailableError: The directory does not answer.
            ExhaustedError: The caller's token has claimed too many names of pools that are not created.
            WrongStateError: Another shard has the pool (OTHER_SHARD).
        """
        lock = self._locks.setdefault(pool, asyncio.Lock())
        async with lock:  # not while it is being released
            if pool in self._pool_names():
                return
            self._unused.discard(pool)
            found = await self._claim(pool, self._member.shard, field)
        if found != self._member.shard:
            raise self._other_shard(pool, found, field)

    async def run(self) -> None:
        """Compares claims with pools, indefinitely, while this server is the primary."""
        while True:
            if self._member.replica.role is Role.PRIMARY and self._cache.is_known:
                try:
                    await self.compare()
                except (DirectoryError, KvpoolError) as error:
                    _log.warning("claims of pools cannot be compared", extra={"error": str(error)})
            await asyncio.sleep(CHECK_SECONDS)

    async def compare(self) -> None:
        """Claims pools that are not claimed, and releases claims that had no pool at the last comparison, either.

        Raises:
            DirectoryError: The directory does not answer.
        """
        own, revision = self._member.shard, self._member.replica.entry.revision
        pools = set(self._pool_names())
        claimed = {pool for pool, shard in self._cache.pools.items() if shard == own}
        conflicts = []
        for pool in sorted(pools - claimed):
            try:
                found = await self._claimed_by(pool, own)
            except DamagedRecordError as error:
                conflicts.append(pool)
                _log.error("damaged record", extra={"error": str(error)})
                continue
            if found != own:
                conflicts.append(pool)
                _log.error("two shards have a pool of the same name", extra={"pool": pool, "shard": found})
        self.conflicts = frozenset(conflicts)
        for pool in sorted(self._unused & (claimed - pools)):
            await self._release(pool, revision)
        self._unused = claimed - set(self._pool_names())

    async def _release(self, pool: PoolName, revision: int) -> None:
        """Releases a claim. The standbys know first that the pool is gone."""
        lock = self._locks.setdefault(pool, asyncio.Lock())
        async with lock:
            await self._member.confirmed()
            if pool in self._unused and pool not in self._pool_names():
                await self._member.directory.release_pool(pool, self._member.shard, revision)

    async def _claim(self, pool: PoolName, shard: ShardName, field: str) -> ShardName:
        self._token_claims.add(pool, field)
        try:
            return await self._claimed_by(pool, shard)
        except DirectoryError as error:
            message = f"the directory of shards does not answer, so no pool can be created: {error}"
            raise UnavailableError("DIRECTORY_DOWN", message) from error
        except DamagedRecordError as error:
            raise WrongStateError("DAMAGED_RECORD", str(error), field=field) from error

    async def _claimed_by(self, pool: PoolName, shard: ShardName) -> ShardName:
        """Claims a pool, also if a shard that was removed still has it. Returns the shard that has it."""
        found = await self._member.directory.claim_pool(pool, shard)
        if found == shard or found in self._cache.shards:
            return found
        if not await self._member.directory.release_pool(pool, found, revision=0):
            return found
        return await self._member.directory.claim_pool(pool, shard)

    def _other_shard(self, pool: PoolName, found: ShardName, field: str) -> WrongStateError:
        record = self._cache.shards.get(found)
        where = f", at {', '.join(record.primary_member.addresses)}" if record else ""
        message = f"pool {pool!r} belongs to shard {found!r}{where}; this server has shard {self._member.shard!r}"
        return WrongStateError("OTHER_SHARD", message, field=field)
