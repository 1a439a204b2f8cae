"""Whether a server of another shard can be reached. The directory does not say so: it is not written at rest.

A connection counts, whatever the server would answer: it needs no token, and shows that a process listens. Heartbeats
or leases in etcd would be written at rest, and a pause of etcd would look like the loss of every server.
"""

import asyncio
from typing import Final

from kvpool.server.cluster.directory import ShardName, ShardRecord
from kvpool.wire.address import host_and_port

PROBE_SECONDS: Final = 0.5
"""Time limit of a probe that a client waits for."""
LATE_SECONDS: Final = 0.1
"""Time in which a server that was busy until the limit handles what has arrived meanwhile."""


async def reachable_address(record: ShardRecord, limit_seconds: float) -> str | None:
    """Connects to all in-sync members at once, and ends the connections.

    Returns:
        The first address that accepts a connection; None if there is none within the limit.
    """
    members = sorted(record.in_sync, key=lambda member: member.member_id != record.primary)
    addresses = dict.fromkeys(address for member in members for address in member.addresses)
    attempts = [asyncio.create_task(_connected(address)) for address in addresses]
    search = asyncio.create_task(_first(attempts))
    try:
        for seconds in (limit_seconds, LATE_SECONDS):
            await asyncio.wait([search], timeout=seconds)
        return search.result() if search.done() else None
    finally:
        for task in (search, *attempts):
            task.cancel()
        await asyncio.gather(search, *attempts, return_exceptions=True)


class Probes:
    """Probes of shards. Callers that ask for the same shard at the same time share one probe."""

    def __init__(self) -> None:
        self._running: dict[ShardName, asyncio.Task[str | None]] = {}

    async def is_reachable(self, shard: ShardName, record: ShardRecord) -> bool:
        """Whether an in-sync member of a shard accepts a connection; see `reachable_address`."""
        probe = self._running.get(shard)
        if probe is None:
            probe = self._running[shard] = asyncio.create_task(reachable_address(record, PROBE_SECONDS))
            probe.add_done_callback(lambda _: self._running.pop(shard))
        return await asyncio.shield(probe) is not None


async def _first(attempts: list[asyncio.Task[str | None]]) -> str | None:
    for attempt in asyncio.as_completed(attempts):
        if address := await attempt:
            return address
    return None


async def _connected(address: str) -> str | None:
    """Returns the address if it accepts a connection."""
    loop = asyncio.get_running_loop()
    try:
        if address.startswith("unix:"):
            transport, _ = await loop.create_unix_connection(asyncio.Protocol, address.removeprefix("unix:"))
        else:
            transport, _ = await loop.create_connection(asyncio.Protocol, *host_and_port("address", address))
    except (OSError, ValueError):  # a malformed address; UnicodeError of a name is a ValueError
        return None
    transport.abort()
    return address
