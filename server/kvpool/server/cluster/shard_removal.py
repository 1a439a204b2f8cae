"""Removes a shard whose servers are permanently lost from the directory.

1. The record goes first, at the revision at which its members were probed. So a shard whose servers come back before
   that is not removed, and loses no claim.
2. The claims of its pools go after it, each while there is no record. If that ends early, another removal continues,
   and a server that claims such a pool releases the claim first: `PoolClaims`.
3. A server of the shard that comes back never serves: it has seen a term, and finds no record, see `Replica`.
"""

import asyncio
from typing import Final

from kvpool.core.errors import InvalidArgumentError, NotFoundError, UnavailableError, WrongStateError
from kvpool.server.cluster.directory import NAME, DamagedRecordError, Directory, DirectoryError, ShardName
from kvpool.server.cluster.directory_cache import DirectoryCache
from kvpool.server.cluster.reachability import reachable_address

PROBE_SECONDS: Final = 5.0
"""Time limit of the look for servers that live: a packet may be lost, and its repetition takes more than a second."""
_MAX_ATTEMPTS: Final = 3
"""Maximum number of deletions of a record that are sent until the outcome of one is known."""
_RETRY_SECONDS: Final = 0.2


async def remove_shard(directory: Directory, view: DirectoryCache, own: ShardName, name: str) -> int:
    """Removes a shard and the claims of its pools.

    Args:
        directory: The directory.
        view: What the server knows of the cluster.
        own: The server's shard.
        name: The shard.

    Returns:
        The number of pools whose names are free now.

    Raises:
        InvalidArgumentError: It is no name.
        NotFoundError: There is no such shard.
        WrongStateError: It is the server's own shard (OWN_SHARD), one of its members can be reached (SHARD_REACHABLE),
            it has changed meanwhile (SHARD_CHANGED), or its record is malformed (DAMAGED_RECORD).
        UnavailableError: The directory does not answer, or was not read yet. Part of the change may have been made.
    """
    if not NAME.fullmatch(name):
        raise InvalidArgumentError("shard", "needs 1 to 64 letters, digits, '.', '_' and '-'")
    shard = ShardName(name)
    if shard == own:
        message = f"the server belongs to shard {name!r}: call a server of another shard"
        raise WrongStateError("OWN_SHARD", message, field="shard")
    view.check_known()
    try:
        was_there = await _remove_record(directory, shard)
        pools = sorted(pool for pool, claimed_by in view.pools.items() if claimed_by == shard)
        if not (was_there or pools):
            raise NotFoundError("SHARD_NOT_FOUND", f"the cluster has no shard {name!r}", field="shard")
        return [await directory.release_pool(pool, shard, revision=0) for pool in pools].count(True)
    except DirectoryError as error:
        message = f"the directory of shards does not answer, so the shard may be removed in part; call again: {error}"
        raise UnavailableError("DIRECTORY_DOWN", message) from error
    except DamagedRecordError as error:
        raise WrongStateError("DAMAGED_RECORD", str(error), field="shard") from error


async def _remove_record(directory: Directory, shard: ShardName) -> bool:
    """Removes the record of a shard of which no member can be reached. Returns whether there was one."""
    entry = await directory.get(shard)
    if entry.record is None:
        return False
    if address := await reachable_address(entry.record, PROBE_SECONDS):
        message = f"something listens at {address}, an address of shard {shard!r}: stop it first"
        raise WrongStateError("SHARD_REACHABLE", message, field="shard")
    if not await _delete(directory, shard, entry.revision):
        message = f"the record of shard {shard!r} has just changed, so one of its servers runs"
        raise WrongStateError("SHARD_CHANGED", message, field="shard")
    return True


async def _delete(directory: Directory, shard: ShardName, revision: int) -> bool:
    """Deletes a record; repeats it while the outcome is unknown. Returns whether there is none now."""
    for _ in range(_MAX_ATTEMPTS - 1):
        try:
            return await directory.delete(shard, revision)
        except DirectoryError:
            await asyncio.sleep(_RETRY_SECONDS)
    return await directory.delete(shard, revision)
