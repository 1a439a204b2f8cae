"""The files of a journal: `snapshot-N` is the state when `log-N` began, `log-N` the changes since then.

1. One server uses the folder at a time. The lock on `lock` ends with its process. Only the user can read the files.
2. A snapshot gets its name when it is complete. Until then it is `snapshot-N.part` and is not used.
3. Numbers only increase. A journal without a snapshot is invalid because its logs have no base. A snapshot without its
   log is invalid too: the log is created first, so somebody deleted it.
   A log states the size at which the log before it ended, so that a missing end is noticed. When the next log has been
   created, a log ends with END, so that a missing next log is noticed, also through hard links to older files. A log
   and a snapshot state their own identity, so that a copy that was brought back is noticed.
4. `pools` outlives the other files. It lists the pools and their epochs for when nothing else is valid. Only this file
   is written with fsync, as it changes with epochs only. It is there, if need be empty, before a server serves: an
   empty file takes no space on a full disk, and shows the next server that there were sessions.
"""

import contextlib
import fcntl
import os
import platform
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvpool.core.errors import KvpoolError
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.server.journal.codec import dumps, loads
from kvpool.server.journal.frames import MAGIC, DamageError, FrameKind, FrameReader, encode_frame
from kvpool.v1 import pool_pb2
from kvpool.wire.file_ids import file_id
from kvpool.wire.file_reserve import FileReserve
from kvpool.wire.pools import config_from_proto, config_to_proto

FORMAT: Final = 11
"""Format of snapshots and logs; increased when older files cannot be read."""

POOLS_FORMAT: Final = 2
"""Format of `pools`, which outlives the other files."""

_NUM_RESERVED: Final = 16
"""Descriptors kept for the journal, which needs three at a time."""

_ORIGINS: Final[list[list[type]]] = [[], [str, int]]
"""Types of the last fields of a header: none in `pools`."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAME: Final = re.compile(r"(log|snapshot)-(\d+)(\.part)?")


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a writer.

    Attributes:
        version: Version of kvpool and of Python. Only the same version replays changes with the same results.
        boot_id: Identifies the machine's uptime since its last boot.
    """

    version: str
    boot_id: str

    @classmethod
    def of_this_process(cls) -> "Identity":
        """Identity of this process.

        Raises:
            OSError: The boot id cannot be read.
        """
        try:
            boot_id = _BOOT_ID.read_text().strip()
        except FileNotFoundError:
            boot_id = secrets.token_hex(16)  # not valid later
        return cls(f"{version('kvpool')} {platform.python_implementation()} {platform.python_version()}", boot_id)


def format_of(name: str) -> int:
    """The format number in the header of a file with this name."""
    return POOLS_FORMAT if name == "pools" else FORMAT


@dataclass(frozen=True, slots=True)
class Header:
    """First frame of a file.

    Attributes:
        name: The file's name.
        identity: Identity of the writer.
        file_id: `file_id` of the file when it was created; not known for `pools`, of which a copy is valid.
        previous_bytes: In a log: size at which the log before it ended; 0 if there was none.
    """

    name: str
    identity: Identity
    file_id: str = ""
    previous_bytes: int = 0

    def encode(self) -> bytes:
        """Encodes the beginning of the file."""
        fields = [self.name, format_of(self.name), self.identity.version, self.identity.boot_id]
        origin = [self.file_id, self.previous_bytes] if self.file_id else []
        return MAGIC + encode_frame(FrameKind.HEADER, dumps([*fields, *origin]))


@dataclass(frozen=True, slots=True)
class PastPool:
    """An entry of the file `pools`.

    Attributes:
        name: The pool's name; empty in the entry for all removed pools together.
        epoch: The pool's epoch; the highest epoch of all removed pools.
        config: The pool's configuration; None if ranks form the pool, or if it is not valid in this version.
    """

    name: str
    epoch: int
    config: PoolConfig | None = None


class Folder:
    """The folder of a journal, locked by this process until `close`.

    Args:
        path: The folder; created if it does not exist.
        identity: Identity of the writer.

    Raises:
        OSError: The folder cannot be used, or another server uses it.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.identity = identity
        self._lock = self._lock_folder()
        self._reserve = FileReserve(_NUM_RESERVED)
        for leftover in path.glob("*.part"):
            leftover.unlink()

    def _lock_folder(self) -> int:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise OSError(f"another server uses the journal in {self.path}") from None
        return lock

    @property
    def is_in_place(self) -> bool:
        """Whether the path still leads to the folder that was locked."""
        return is_at(self._lock, self.path / "lock")

    def empty(self) -> None:
        """Prepares the folder for a new journal. Creates and locks it again if it is no longer in place.

        Raises:
            OSError: The folder cannot be used, or another server uses it.
        """
        if not self.is_in_place:
            lock = self._lock_folder()
            os.close(self._lock)
            self._lock = lock
        self.mark_begun()
        self.invalidate()

    def close(self) -> None:
        """Unlocks the folder."""
        self._reserve.close()
        os.close(self._lock)

    def log(self, number: int) -> Path:
        """Path of a log."""
        return self.path / f"log-{number}"

    def snapshot(self, number: int) -> Path:
        """Path of a complete snapshot."""
        return self.path / f"snapshot-{number}"

    def logs(self) -> list[int]:
        """Numbers of the existing logs, ascending."""
        return self._numbers("log")

    def snapshots(self) -> list[int]:
        """Numbers of the complete snapshots, ascending."""
        return self._numbers("snapshot")

    def log_bytes(self, number: int) -> int:
        """Size of a log; 0 if it does not exist.

        Raises:
            OSError: The size cannot be read.
        """
        try:
            return self.log(number).stat().st_size
        except FileNotFoundError:
            return 0

    def size_bytes(self) -> int:
        """Size of all files. Files that others delete meanwhile may be left out."""
        size_bytes = 0
        with self._reserve.released(), contextlib.suppress(FileNotFoundError):
            for path in self.path.iterdir():
                size_bytes += path.stat().st_size
        return size_bytes

    def create(self, path: Path, previous_bytes: int = 0) -> int:
        """Creates a file with its header; returns its descriptor, opened for appending.

        Args:
            path: The file.
            previous_bytes: See `Header`.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        with self._reserve.released():
            descriptor = os.open(path, flags, 0o600)
        try:
            name = path.name.removesuffix(".part")
            identity = "" if name == "pools" else file_id(path)
            write_whole(descriptor, Header(name, self.identity, identity, previous_bytes).encode())
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return descriptor

    def reopen(self, path: Path) -> int:
        """Opens an existing file for appending; returns its descriptor."""
        with self._reserve.released():
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[tuple[FrameReader, Header | None]]:
        """Opens a file after its header. Yields the header, None if it is incomplete.

        Raises:
            DamageError: The header names another file, or another format.
            OSError: The file cannot be read.
        """
        with path.open("rb") as file:
            reader = FrameReader(file)
            frame = reader.read() if reader.read_magic() else None
            if frame is None:
                yield reader, None
                return
            begins = (FrameKind.HEADER, format_of(path.name))
            match loads(frame.payload):
                case [path.name, int(number), str(by), str(boot_id), *origin] if (frame.kind, number) == begins and [
                    type(field) for field in origin
                ] in _ORIGINS:
                    yield reader, Header(path.name, Identity(by, boot_id), *origin)
                case _:
                    raise DamageError("has another name or another format in its header")

    def delete_before(self, number: int) -> None:
        """Deletes all files with a lower number, after a snapshot of this number is complete."""
        for path, name in self._files():
            if int(name[2]) < number:
                path.unlink()

    def invalidate(self) -> None:
        """Invalidates the whole journal except `pools`, by deleting or overwriting its files.

        Snapshots are deleted first, in ascending order. If the process is killed halfway, the journal is either still
        valid as before or invalid. The kernel guarantees this order to the next process. After a restart of the machine
        the boot id differs.

        Raises:
            OSError: A file can be neither deleted nor overwritten.
        """
        for path, _ in sorted(self._files(), key=lambda file: (file[1][1] != "snapshot", int(file[1][2]))):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                with self._reserve.released(), path.open("r+b") as file:
                    file.write(b"\0" * len(MAGIC))

    def mark_begun(self) -> None:
        """Creates the file `pools`, unless it exists.

        Raises:
            OSError: It cannot be created.
        """
        with self._reserve.released():
            os.close(os.open(self.path / "pools", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def read_pools(self) -> list[PastPool] | None:
        """Reads the file `pools`; None if it does not exist. If it was never written, nothing is known of the pools.

        Raises:
            DamageError: The file is damaged.
            OSError: The file cannot be read.
        """
        try:
            with self.reading(self.path / "pools") as (reader, header):
                if header is None and not (self.path / "pools").stat().st_size:
                    return [PastPool("", 0)]
                frame = reader.read()
        except FileNotFoundError:
            return None
        if frame is None or frame.kind is not FrameKind.POOLS:
            raise DamageError("is incomplete")
        entries = loads(frame.payload)
        if not isinstance(entries, list):
            raise DamageError("is not a list of pools")
        return [_past_pool(entry) for entry in entries]

    def write_pools(self, pools: list[PastPool]) -> None:
        """Replaces the file `pools`, with fsync."""
        part = self.path / "pools.part"
        descriptor = self.create(part)
        try:
            payload = dumps([[pool.name, pool.epoch, _encode_config(pool.config)] for pool in pools])
            write_whole(descriptor, encode_frame(FrameKind.POOLS, payload))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.rename(self.path / "pools")
        with self._reserve.released():
            directory = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _files(self) -> list[tuple[Path, re.Match[str]]]:
        with self._reserve.released():
            return [(path, name) for path in self.path.iterdir() if (name := _NAME.fullmatch(path.name))]

    def _numbers(self, kind: str) -> list[int]:
        return sorted(int(name[2]) for _, name in self._files() if name[1] == kind and not name[3])


def _past_pool(entry: object) -> PastPool:
    match entry:
        case [str(name), int(epoch), bytes(config)]:
            return PastPool(name, epoch, _decode_config(config))
    raise DamageError("is not a list of pools")


def _encode_config(config: PoolConfig | None) -> bytes:
    return config_to_proto(config, with_none_hash=True).SerializeToString() if config else b""


def _decode_config(encoded: bytes) -> PoolConfig | None:
    if not encoded:
        return None
    try:
        config = config_from_proto(pool_pb2.PoolConfig.FromString(encoded))
        config.check()
    except (DecodeError, KvpoolError):
        return None
    return config


def is_at(descriptor: int, path: Path) -> bool:
    """Whether a path leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def write_whole(descriptor: int, content: bytes) -> None:
    """Writes all bytes.

    Raises:
        OSError: Not all bytes could be written.
    """
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
