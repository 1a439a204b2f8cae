"""What a server remembers of its shard when it restarts, in the folder of its journal.

An identity belongs to one file, as a journal does: the file states its own `file_id`. A server that finds a copy is
another server, so it gets another member id.

The id belongs to the folder of a state, not to a machine: a new machine could inherit an address or a host name without
the state. A server whose journal was dropped keeps its id, and withdraws from the in-sync members. With an id per
process, a pair whose processes both restart could not tell whose journal is complete.
"""

import json
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvpool.server.cluster.directory import NAME, MemberId, Seen, new_member_id
from kvpool.server.cluster.record_codec import is_member_id
from kvpool.server.codec import DamageError, from_plain, to_plain
from kvpool.server.journal.folder import sync_directory
from kvpool.wire.file_ids import file_id

_NAME: Final = "member"

_log = logging.getLogger("kvpool.server.cluster")


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a server.

    Attributes:
        shard: Name of the shard.
        member_id: Its id, which outlives its process.
        known_term: Term of the newest record that it has seen; an older record in the directory is refused.
        known_revision: Revision of that record. A backup of the directory may have the same term, and name as in sync
            a server that has missed changes since.
        file_id: `file_id` of the file that it was read from, when it was written; empty if it was not read.
    """

    shard: str
    member_id: MemberId
    known_term: int = 0
    known_revision: int = 0
    file_id: str = field(default="", compare=False)

    @property
    def seen(self) -> Seen:
        """The newest record that it has seen."""
        return Seen(self.known_term, self.known_revision)


class IdentityFile:
    """The file of an identity; written with fsync, as it changes with the record of the shard only.

    A record that cannot be noted does not stop the server. Until it is, a server that restarts cannot tell that the
    directory lost that record.

    Args:
        folder: The journal's folder.
        shard: Name of the shard of this server.

    Attributes:
        identity: The identity. It is new if there is no file; that of a copy has a new member id.

    Raises:
        OSError: The file cannot be read or written, is damaged, or belongs to another shard.
    """

    def __init__(self, folder: Path, shard: str) -> None:
        self._folder = folder
        found = read_identity(folder)
        if found and found.shard != shard:
            raise OSError(f"the journal in {folder} belongs to shard {found.shard}, this server to {shard}")
        self.identity = found or Identity(shard, new_member_id())
        if found and found.file_id != file_id(folder / _NAME):
            self.identity = replace(found, member_id=new_member_id())
            _log.warning("identity was copied", extra={"shard": shard, "member": self.identity.member_id})
        if found != self.identity:
            write_identity(folder, self.identity)
        self._written = self.identity
        self._failure = ""

    @property
    def is_lost(self) -> bool:
        """Whether there is no file, because it was deleted, alone or with its folder."""
        return not (self._folder / _NAME).exists()

    def keep(self, seen: Seen) -> None:
        """Remembers the newest record. A later call tries again to write a file that could not be written."""
        if seen > self.identity.seen:
            self.identity = replace(self.identity, known_term=seen.term, known_revision=seen.revision)
        if self.identity != self._written:
            self._write()

    def restore(self) -> None:
        """Writes a lost file again, so that this server is the same member after a restart."""
        self._write()
        if not self.is_lost:
            _log.warning("identity written again", extra={"member": self.identity.member_id})

    def _write(self) -> None:
        try:
            write_identity(self._folder, self.identity)
        except OSError as error:
            before, self._failure = self._failure, str(error)
            if self._failure != before:
                _log.warning("record not kept", extra={"term": self.identity.known_term, "error": self._failure})
        else:
            self._written, self._failure = self.identity, ""


def write_identity(folder: Path, identity: Identity) -> None:
    """Writes the identity of the server of a folder.

    Raises:
        OSError: The file cannot be written.
    """
    path = folder / _NAME
    part = path.with_suffix(".part")
    part.touch(0o600)
    with part.open("w") as file:
        json.dump(to_plain(Identity, replace(identity, file_id=file_id(part))), file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync_directory(folder)


def read_identity(folder: Path) -> Identity | None:
    """Reads the identity of the server of a folder; None if there is none.

    Raises:
        OSError: The file cannot be read, or is damaged.
    """
    path = folder / _NAME
    damage = OSError(f"{path} is damaged; delete it if this server has no standby")
    try:
        identity = from_plain(Identity, json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, DamageError) as error:
        raise damage from error
    if not is_member_id(identity.member_id) or not NAME.fullmatch(identity.shard):
        raise damage
    return identity
