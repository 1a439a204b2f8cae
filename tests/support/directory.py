"""Records and calls for tests of the directory of shards."""

import asyncio
from collections.abc import AsyncIterator

from kvpool.server.cluster.directory import (
    Directory,
    DirectoryError,
    Member,
    MemberId,
    ShardRecord,
    SwapResult,
    VersionedRecord,
)
from support.waiting import DEADLINE_SECONDS


def member_of(name: str) -> Member:
    """A server of a shard."""
    return Member(MemberId(name), (f"{name}:1",), f"{name}:2")


def record_of(term: int = 1, *members: str, change_id: str = "") -> ShardRecord:
    """A record; the first member is the primary."""
    ids = members or ("a",)
    return ShardRecord(term, MemberId(ids[0]), tuple(map(member_of, sorted(ids))), change_id or f"change-{term}")


async def swap(directory: Directory, revision: int, record: ShardRecord) -> SwapResult:
    """Repeats a swap until its outcome is known: a busy machine may answer too late."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                return await directory.compare_and_swap(revision, record)
            except DirectoryError:
                await asyncio.sleep(0.05)


async def following(changes: AsyncIterator[VersionedRecord]) -> VersionedRecord:
    """The next entry of a watch."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await anext(changes)
