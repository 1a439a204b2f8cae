"""The directory of a shard: a small record that says who is primary and in sync.

1. The record changes only by compare-and-swap on its revision. Revisions only increase.
2. A swap whose outcome is unknown may still be applied later. Repeat it until its outcome is known: `change_id` makes a
   record recognizable, so that a repetition which loses against the first attempt counts as won.
3. Every read is linearizable. A watch may lag behind, and never goes back.
"""

import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, NewType, Protocol

MAX_MEMBERS: Final = 8
"""Maximum number of servers of a shard."""
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Names of shards."""
MEMBER_ID_BYTES: Final = 8
"""Random bytes of a member's id, which has two hexadecimal digits for each."""

MemberId = NewType("MemberId", str)
"""Random id of a server of a shard. It names what the server has in memory and in its journal, not its machine."""


def new_member_id() -> MemberId:
    """A random id of a server."""
    return MemberId(secrets.token_hex(MEMBER_ID_BYTES))


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a shard.

    Attributes:
        member_id: Its id.
        addresses: Addresses at which clients reach it, `host:port`.
        replication_address: Address at which standbys reach it, `host:port`.
    """

    member_id: MemberId
    addresses: tuple[str, ...]
    replication_address: str


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

    @property
    def primary_member(self) -> Member:
        """The primary.

        Raises:
            ValueError: It is not in sync; no directory holds such a record.
        """
        member = self.member(self.primary)
        if member is None:
            raise ValueError("the record names a primary that is not in sync")
        return member

    def member(self, member_id: MemberId) -> Member | None:
        """The in-sync member of this id; None if there is none."""
        return next((member for member in self.in_sync if member.member_id == member_id), None)


@dataclass(frozen=True, slots=True)
class VersionedRecord:
    """What the directory holds for a shard.

    Attributes:
        revision: Revision at which it was written. If there is none: 0, or, in a watch, one at which there was none.
        record: The record; None if there is none.
    """

    revision: int
    record: ShardRecord | None


@dataclass(frozen=True, slots=True, order=True)
class Seen:
    """The newest record that a server has seen; a later one compares greater.

    The term comes first: an etcd that replaces a lost one counts revisions from the beginning.

    Attributes:
        term: Its term; 0 for none.
        revision: Its revision.
    """

    term: int = 0
    revision: int = 0


@dataclass(frozen=True, slots=True)
class SwapResult:
    """Known outcome of a compare-and-swap.

    Attributes:
        won: Whether the new record was written.
        entry: The entry after it: the new record, or the one that was found.
    """

    won: bool
    entry: VersionedRecord


class DirectoryError(Exception):
    """The directory does not answer, or answers with an error. The outcome of a swap is then unknown."""


class DirectoryRegressedError(DirectoryError):
    """The directory is another one than before, or was restored from an older backup. An operator must look at it."""


class DamagedRecordError(Exception):
    """A record in the directory is malformed, or of a newer version. An operator must look at it."""


class Directory(Protocol):
    """Holds the record of a shard. Its methods raise DirectoryError and DamagedRecordError."""

    async def get(self) -> VersionedRecord:
        """Reads the entry."""

    async def compare_and_swap(self, revision: int, record: ShardRecord) -> SwapResult:
        """Writes a record if the entry still has this revision; 0: if there is none."""

    def watch(self) -> AsyncIterator[VersionedRecord]:
        """Yields the entry as it is now, then after each change.

        Changes that follow each other quickly may be left out. It continues after lost connections, and raises
        DirectoryError only if it cannot.
        """

    async def close(self) -> None:
        """Ends connections and watches."""
