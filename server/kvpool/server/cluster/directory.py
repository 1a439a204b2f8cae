"""The directory of shards: who is primary, and which servers are in sync. A small record per shard.

1. A record changes only by compare-and-swap on its revision. Revisions of a shard only increase.
2. A swap whose outcome is unknown may still be applied later. Repeat it until its outcome is known: `change_id` makes a
   record recognizable, so that a repetition which loses against the first attempt counts as won.
3. Every read is linearizable. A watch may lag behind, and never goes back.
"""

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, NewType, Protocol

MAX_MEMBERS: Final = 8
"""Maximum number of servers of a shard."""
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Names of clusters and shards."""

MemberId = NewType("MemberId", str)
"""Random id of a server of a shard. It names what the server has in memory and in its journal, not its machine."""

ShardName = NewType("ShardName", str)


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a shard.

    Attributes:
        member_id: Its id.
        addresses: Addresses at which clients reach it, `host:port`.
        replication_address: Address at which standbys reach it, `host:port`.
        zone: Its zone: machines of one zone may fail together. Empty: not configured.
    """

    member_id: MemberId
    addresses: tuple[str, ...]
    replication_address: str
    zone: str = ""


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """Which servers hold a shard.

    Attributes:
        term: Number of the primary's term, at least 1; each takeover increases it by one.
        primary: The primary, one of `in_sync`.
        in_sync: The members that have every answered record, at most `MAX_MEMBERS`, sorted by id.
        change_id: Random id of this change of the record.
    """

    term: int
    primary: MemberId
    in_sync: tuple[Member, ...]
    change_id: str

    def member(self, member_id: MemberId) -> Member | None:
        """The in-sync member of this id; None if there is none."""
        return next((member for member in self.in_sync if member.member_id == member_id), None)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the directory holds for a shard.

    Attributes:
        revision: Revision at which it was written; 0 if there is none.
        record: The record; None if there is none.
    """

    revision: int
    record: ShardRecord | None


@dataclass(frozen=True, slots=True)
class Swap:
    """Known outcome of a compare-and-swap.

    Attributes:
        won: Whether the new record was written.
        entry: The entry after it: the new record, or the one that was found.
    """

    won: bool
    entry: Entry


class DirectoryError(Exception):
    """The directory does not answer, or answers with an error. The outcome of a swap is then unknown."""


class DirectoryWentBackError(DirectoryError):
    """The directory is another one than before, or was restored from an older backup. An operator must look at it."""


class DamagedRecordError(Exception):
    """A record in the directory is malformed, or of a newer version. An operator must look at it."""


class Directory(Protocol):
    """A store of shard records. Its methods raise DirectoryError and DamagedRecordError."""

    async def get(self, shard: ShardName) -> Entry:
        """Reads an entry."""

    async def compare_and_swap(self, shard: ShardName, revision: int, record: ShardRecord) -> Swap:
        """Writes a record if the entry still has this revision; 0: if there is none."""

    def watch(self, shard: ShardName) -> AsyncIterator[Entry]:
        """Yields the entry as it is now, then after each change.

        Changes that follow each other quickly may be left out. It continues after lost connections, and raises
        DirectoryError only if it cannot.
        """

    async def list_shards(self) -> Mapping[ShardName, Entry]:
        """Reads all entries."""

    async def close(self) -> None:
        """Ends connections and watches."""
