"""The files of a journal: `snapshot-N` is the state when `log-N` began, `log-N` the changes since then.

1. One server uses the folder at a time. The lock on `lock` ends with its process. Only the user can read the files.
2. A snapshot gets its name when it is complete. Until then it is `snapshot-N.part` and is not used.
3. Numbers only increase. A journal without a snapshot is invalid because its logs have no base. A snapshot without its
   log is invalid too: the log is created first, so somebody deleted it.
   When the next log has been created, a log ends with END, before a record is in the next one. So a missing end, and a
   missing next log, are noticed, also through hard links to older files. A log and a snapshot state their own identity,
   so that a copy that was brought back is noticed.
4. `pools` outlives the other files, see `pool_list`. It is there, if need be empty, before a server serves: an empty
   file takes no space on a full disk, and shows the next server that there were sessions.
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
from typing import BinaryIO, Final, Literal

from kvpool.server.codec import DamageError, encode, from_plain, loads
from kvpool.server.journal.frames import DAMAGE, Frame, FrameKind, FrameParser, encode_frame
from kvpool.wire.descriptor_reserve import DescriptorReserve
from kvpool.wire.file_ids import file_id

FORMAT: Final = 18
"""Format of snapshots and logs; increased when older files cannot be read."""

POOLS_FORMAT: Final = 3
"""Format of `pools`, which outlives the other files."""

_BEGIN_OF_0_1: Final = b"kvpool1\n"
"""How the files of kvpool 0.1 begin, whose headers this version cannot read."""

_NUM_RESERVED: Final = 16
"""Descriptors kept for the journal, which needs three at a time."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAME: Final = re.compile(r"(log|snapshot)-(\d+)(\.part)?")


class FormatError(DamageError):
    """A file has an older or a newer format than this version reads, and may be intact."""

    def __init__(self, name: str, found: str) -> None:
        what = f"{name} has {found}, and this version reads format {format_of(name)}"
        super().__init__(f"{what}; it is not damaged: clients open new sessions")


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that writes a file.

    Attributes:
        version: Version of kvpool and of Python. Only the same version replays changes with the same results.
        boot_id: Identifies the machine's uptime since its last boot.
    """

    version: str
    boot_id: str

    @classmethod
    def this_process(cls) -> "Writer":
        """This process.

        Raises:
            OSError: The boot id cannot be read.
        """
        try:
            boot_id = _BOOT_ID.read_text().strip()
        except FileNotFoundError:
            boot_id = secrets.token_hex(16)  # not valid later
        return cls(f"{version('kvpool')} {platform.python_implementation()} {platform.python_version()}", boot_id)


@dataclass(frozen=True, slots=True)
class Header:
    """First frame of a file.

    Attributes:
        name: The file's name.
        format: Format of its content, see `format_of`.
        writer: Its writer.
        file_id: `file_id` of the file when it was created; empty for `pools`, of which a copy is valid.
    """

    name: str
    format: int
    writer: Writer
    file_id: str = ""

    def encode(self) -> bytes:
        """Encodes the frame."""
        return encode_frame(FrameKind.HEADER, encode(Header, self))


def format_of(name: str) -> int:
    """The format of a file with this name."""
    return POOLS_FORMAT if name == "pools" else FORMAT


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is read.

    Attributes:
        header: Its header; None if it is incomplete.
        frames: The frames after it, each read once.
        parser: Knows where the frames end.
        file: The file.
    """

    header: Header | None
    frames: Iterator[Frame]
    parser: FrameParser
    file: BinaryIO

    def later_frames(self) -> Iterator[Frame]:
        """The frames that were written since `frames` ended."""
        return self.parser.read(self.file)


class FrameFile:
    """A file that grows frame by frame.

    Args:
        path: The file.
        descriptor: Its descriptor, opened for appending.

    Attributes:
        size_bytes: Size of the frames that are completely written.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size_bytes = os.fstat(descriptor).st_size
        self._descriptor = descriptor

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to it, with the size that it was written with."""
        return not self.is_moved and os.fstat(self._descriptor).st_size == self.size_bytes

    @property
    def is_moved(self) -> bool:
        """Whether its path does not lead to it: it was moved, replaced or deleted."""
        return not is_at(self._descriptor, self.path)

    def append(self, frame: bytes) -> None:
        """Appends a frame.

        Raises:
            OSError: The frame is written in part, or not at all.
        """
        write_whole(self._descriptor, frame)
        self.size_bytes += len(frame)

    def cut(self) -> None:
        """Removes a frame that is written in part."""
        os.ftruncate(self._descriptor, self.size_bytes)

    def damage(self) -> None:
        """Makes a log invalid that is no longer in its place, as it may be moved back later."""
        write_whole(self._descriptor, DAMAGE)

    def sync(self) -> None:
        """Forces the content to disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


class Folder:
    """The folder of a journal, locked by this process until `close`.

    Args:
        path: The folder; created if it does not exist.
        writer: The writer of its files.

    Raises:
        OSError: The folder cannot be used, or another server uses it.
    """

    def __init__(self, path: Path, writer: Writer) -> None:
        self.path = path
        self.writer = writer
        self._lock = self._lock_folder()
        self._reserve = DescriptorReserve(_NUM_RESERVED)
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

    def size_bytes(self) -> int:
        """Size of all files. Files that others delete meanwhile may be left out."""
        size_bytes = 0
        with self._reserve.released(), contextlib.suppress(FileNotFoundError):
            for path in self.path.iterdir():
                size_bytes += path.stat().st_size
        return size_bytes

    def open_log(self, number: int) -> FrameFile | None:
        """Opens a log of an earlier process to end it; None if it does not exist."""
        path = self.log(number)
        with self._reserve.released(), contextlib.suppress(FileNotFoundError):
            return FrameFile(path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
        return None

    @contextlib.contextmanager
    def new_file(self, path: Path) -> Iterator[FrameFile]:
        """Creates a file under a temporary name. It is deleted after the block unless `name_part` was called."""
        part = _part_of(path)
        file = self.create(part)
        try:
            yield file
        finally:
            file.close()
            part.unlink(missing_ok=True)

    def name_part(self, path: Path) -> None:
        """Gives a new file its name, as it is complete."""
        _part_of(path).rename(path)

    def mark_of(self, number: int) -> tuple[str, int] | None:
        """Identity and size of a complete snapshot, which nothing changes; None if there is none.

        Raises:
            OSError: It cannot be examined.
        """
        path = self.snapshot(number)
        with contextlib.suppress(FileNotFoundError):
            return file_id(path), path.stat().st_size
        return None

    def sync(self) -> None:
        """Forces the names of the files to disk."""
        with self._reserve.released():
            sync_directory(self.path)

    def create(self, path: Path) -> FrameFile:
        """Creates a file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        with self._reserve.released():
            descriptor = os.open(path, flags, 0o600)
        try:
            name = path.name.removesuffix(".part")
            identity = "" if name == "pools" else file_id(path)
            write_whole(descriptor, Header(name, format_of(name), self.writer, identity).encode())
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return FrameFile(path, descriptor)

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
                    file.write(DAMAGE)

    def mark_begun(self) -> None:
        """Creates the file `pools`, unless it exists.

        Raises:
            OSError: It cannot be created.
        """
        with self._reserve.released():
            os.close(os.open(self.path / "pools", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def _files(self) -> list[tuple[Path, re.Match[str]]]:
        with self._reserve.released():
            return [(path, name) for path in self.path.iterdir() if (name := _NAME.fullmatch(path.name))]

    def numbers(self, kind: Literal["log", "snapshot"]) -> list[int]:
        """Numbers of the existing logs or complete snapshots, ascending."""
        return sorted(int(name[2]) for _, name in self._files() if name[1] == kind and not name[3])


@contextlib.contextmanager
def reading(path: Path) -> Iterator[OpenFile]:
    """Opens a file, and reads its header.

    Raises:
        FormatError: The file has another format.
        DamageError: The header is damaged, or names another file.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_BEGIN_OF_0_1)) == _BEGIN_OF_0_1:
            raise FormatError(path.name, "the older format of kvpool 0.1")
        file.seek(0)
        parser = FrameParser()
        frames = parser.read(file)
        first = next(frames, None)
        yield OpenFile(_header_of(path, first) if first else None, frames, parser, file)


def _header_of(path: Path, frame: Frame) -> Header:
    plain, expected = loads(frame.payload), format_of(path.name)
    found = plain.get("format") if isinstance(plain, dict) else None
    if isinstance(found, int) and found != expected:
        raise FormatError(path.name, f"the {'older' if found < expected else 'newer'} format {found}")
    header = from_plain(Header, plain)
    if header.name != path.name:
        raise DamageError("has another name in its header")
    return header


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def is_at(descriptor: int, path: Path) -> bool:
    """Whether a path leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def sync_directory(path: Path) -> None:
    """Forces the names of the files of a directory to disk."""
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_whole(descriptor: int, content: bytes) -> None:
    """Writes all bytes.

    Raises:
        OSError: Not all bytes could be written.
    """
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
