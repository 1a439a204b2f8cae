"""Finds a directory that is down before it is needed: a watch does not report that, as it waits for the connection."""

import asyncio
from collections.abc import Callable
from typing import Final

from kvpool.server.cluster.directory import DamagedRecordError, Directory, DirectoryError, Entry, ShardName

PROBE_SECONDS: Final = 5.0
"""Interval of the reads."""


async def probe(
    directory: Directory, shard: ShardName, take: Callable[[Entry], None], failed: Callable[[Exception], None]
) -> None:
    """Reads an entry regularly, indefinitely.

    Args:
        directory: The directory.
        shard: Whose entry.
        take: Takes an entry.
        failed: Takes the error of a read.
    """
    while True:
        await asyncio.sleep(PROBE_SECONDS)
        try:
            entry = await directory.get(shard)
        except (DirectoryError, DamagedRecordError) as error:
            failed(error)
        else:
            take(entry)
