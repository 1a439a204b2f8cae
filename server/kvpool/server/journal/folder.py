"""The files of a journal: `snapshot-N` is the state when `log-N` began, `log-N` the changes from then on.

1. One server has the folder at a time, by a lock on `lock` that ends with its process. Files are its user's alone.
2. A snapshot has its name only when it is whole; until then it is `snapshot-N.part`, and worth nothing.
3. Numbers only rise. A journal without a snapshot is none: its logs have nothing to begin from. Nor is a snapshot
   without its log, which is made before it: somebody took that away.
4. `pools` outlives the rest: which pools there were and in which epoch, for when nothing else can be trusted. It alone
   is forced to the disk, as it changes with epochs only.
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

from kvpool.server.journal.codec import dumps, loads
from kvpool.server.journal.frames import MAGIC, DamageError, FrameKind, FrameReader, encode_frame

FORMAT: Final = 3
"""Goes up when files of an older code would be understood wrongly."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAME: Final = re.compile(r"(log|snapshot)-(\d+)(\.part)?")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who writes.

    Attributes:
        version: Of this code and its Python: the same changes give the same answers only there.
        boot_id: Tells the time since the machine started from the one before.
    """

    version: str
    boot_id: str

    @classmethod
    def of_this_process(cls) -> "Identity":
        """The one that runs here."""
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else secrets.token_hex(16)  # then none is trusted
        return cls(f"{version('kvpool')} {platform.python_implementation()} {platform.python_version()}", boot_id)


@dataclass(frozen=True, slots=True)
class Header:
    """How a file begins: what it is, and who wrote it."""

    name: str
    identity: Identity

    def encode(self) -> bytes:
        """Makes the file's first bytes."""
        payload = dumps([self.name, FORMAT, self.identity.version, self.identity.boot_id])
        return MAGIC + encode_frame(FrameKind.HEADER, payload)


@dataclass(frozen=True, slots=True)
class PastPool:
    """A pool as `pools` has it.

    Attributes:
        name: Its name; empty for those that were removed, together.
        epoch: Its epoch; of those that were removed the highest.
        config: Its configuration, encoded; empty if its ranks form it.
    """

    name: str
    epoch: int
    config: bytes = b""


class Folder:
    """The folder of one journal, which this process has for itself while the object is open.

    Args:
        path: The folder; made if it is not there.
        identity: Who writes here now.

    Raises:
        OSError: It cannot be used, or another server does.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.identity = identity
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise OSError(f"another server keeps its journal in {path}") from None
        for leftover in path.glob("*.part"):
            leftover.unlink()

    def close(self) -> None:
        """Lets others have it."""
        os.close(self._lock)

    def log(self, number: int) -> Path:
        """Where a log is."""
        return self.path / f"log-{number}"

    def snapshot(self, number: int) -> Path:
        """Where a snapshot is, once it is whole."""
        return self.path / f"snapshot-{number}"

    def logs(self) -> list[int]:
        """Numbers of the logs there are, ascending."""
        return self._numbers("log")

    def snapshots(self) -> list[int]:
        """Numbers of the whole snapshots there are, ascending."""
        return self._numbers("snapshot")

    def size_bytes(self) -> int:
        """What all files take."""
        return sum(path.stat().st_size for path in self.path.iterdir())

    def create(self, path: Path) -> int:
        """Makes a file with its header; returns its descriptor, which only appends."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            write_whole(descriptor, Header(path.name.removesuffix(".part"), self.identity).encode())
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return descriptor

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[tuple[FrameReader, Identity | None]]:
        """Opens a file behind its header; tells who wrote it, None if not even the header is whole.

        Raises:
            DamageError: It is not the file that its name says, or of another format.
        """
        with path.open("rb") as file:
            reader = FrameReader(file)
            frame = reader.read() if reader.read_magic() else None
            if frame is None:
                yield reader, None
                return
            begins = (FrameKind.HEADER, FORMAT)
            match loads(frame.payload):
                case [path.name, int(number), str(written_by), str(boot_id)] if (frame.kind, number) == begins:
                    yield reader, Identity(written_by, boot_id)
                case _:
                    raise DamageError("is another file, or of another format")

    def delete_before(self, number: int) -> None:
        """Deletes what a whole snapshot makes superfluous."""
        for path, name in self._files():
            if int(name[2]) < number:
                path.unlink()

    def invalidate(self) -> None:
        """Makes sure that nothing of the journal but `pools` is ever trusted again.

        Snapshots go first, the newest of them last: killed halfway, the journal is worth what it was worth before, and
        from then on nothing. The kernel shows the next process this order; a machine that restarts is told otherwise.

        Raises:
            OSError: That cannot be done.
        """
        for path, _ in sorted(self._files(), key=lambda file: (file[1][1] != "snapshot", int(file[1][2]))):
            try:
                path.unlink()
            except OSError:
                with path.open("r+b") as file:
                    file.write(b"\0" * len(MAGIC))

    def read_pools(self) -> list[PastPool] | None:
        """Which pools there were; None if that is not known.

        Raises:
            DamageError: The file is not as it was written.
        """
        path = self.path / "pools"
        if not path.exists():
            return None
        with self.reading(path) as (reader, _):
            frame = reader.read()
        if frame is None or frame.kind is not FrameKind.POOLS:
            raise DamageError("is not whole")
        entries = loads(frame.payload)
        if not isinstance(entries, list):
            raise DamageError("holds no pools")
        return [_past_pool(entry) for entry in entries]

    def write_pools(self, pools: list[PastPool]) -> None:
        """Replaces what is known of the pools, durably."""
        part = self.path / "pools.part"
        descriptor = self.create(part)
        try:
            payload = dumps([[pool.name, pool.epoch, pool.config] for pool in pools])
            write_whole(descriptor, encode_frame(FrameKind.POOLS, payload))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.rename(self.path / "pools")
        directory = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _files(self) -> list[tuple[Path, re.Match[str]]]:
        return [(path, name) for path in self.path.iterdir() if (name := _NAME.fullmatch(path.name))]

    def _numbers(self, kind: str) -> list[int]:
        return sorted(int(name[2]) for _, name in self._files() if name[1] == kind and not name[3])


def _past_pool(entry: object) -> PastPool:
    match entry:
        case [str(name), int(epoch), bytes(config)]:
            return PastPool(name, epoch, config)
    raise DamageError("holds no pools")


def write_whole(descriptor: int, content: bytes) -> None:
    """Writes all of it.

    Raises:
        OSError: Some or all of it could not be written.
    """
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
