"""The folder of a rank's memory on CPU and of its host memory, which outlive the process of the rank.

1. The folder is private to its user. One process at a time holds its lock.
2. Each allocation is a new file, and another one for host memory, so that a process that maps earlier ones never sees
   the new contents. The files are deleted with the allocation; their memory is free when no process maps them.
3. `rank` states whose memory the files are, and which files. It is written when an epoch begins, replaced as a whole,
   and deleted before the files. Without it, or if another file has the name of one, neither is used again.
4. `borrowers` lists the processes that may map the files: all of them in its first line, and in each later one further
   sessions of a process. A last line without an end was being written when the process died, so it counts for nothing.
5. A process whose folder was deleted recreates it and continues, because its descriptor keeps the memory. A deleted
   file cannot be given a name again, so the memory is freed when this process and the engines have exited.

The files are in memory (/dev/shm), so a restart of the machine deletes them.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Final, Self
from urllib.parse import quote

from kvpool.core.errors import ExhaustedError, InvalidArgumentError, KvpoolError, WrongStateError
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import Registration
from kvpool.lending.memory_file import allocate_pages, free_bytes, open_all
from kvpool.lending.processes import pid_namespace
from kvpool.wire.file_ids import file_id
from kvpool.wire.ranks import registration_from_bytes, registration_to_bytes

_FILE: Final = "memory-{}"
HOST_FILE: Final = "host-{}"
_log = logging.getLogger("kvpool.worker")


@dataclass(frozen=True, slots=True)
class PastBorrower:
    """A process that mapped the memory when an earlier process of the rank lent it.

    Attributes:
        pid: The process.
        started_ticks: When it started, since the start of the machine: distinguishes it from a later process.
        client_id: The use of the memory within the process.
        name: Its name, for display.
        sessions: Epoch and number of each session whose steps it may run.
    """

    pid: int
    started_ticks: int
    client_id: str
    name: str
    sessions: tuple[tuple[int, int], ...]

    @property
    def leases(self) -> tuple[TableLease, ...]:
        """The sessions."""
        return tuple(TableLease(epoch, SessionNumber(number)) for epoch, number in self.sessions)


class MemoryFolder:
    """The folder of one rank."""

    def __init__(self, pool: str, rank: int, root: Path) -> None:
        """Creates and locks the folder.

        Raises:
            WrongStateError: Another process holds it, or another user owns it.
            InvalidArgumentError: It cannot be created; the field is `lend_folder`.
        """
        self._home: Final = root / f"kvpool-{os.getuid()}"
        self.path: Final = self._home / quote(pool, safe="") / str(rank)
        self._rank_fields: Final = {"pool": pool, "rank": rank}
        self._making: Final = Lock()
        """The rank's thread and the event loop both write to the folder."""
        try:
            self._lock = self._lock_folder()
        except BlockingIOError:
            message = f"another process lends rank {rank} of pool {pool!r} on this machine"
            raise WrongStateError("RANK_TAKEN", message) from None
        except OSError as error:
            is_file = isinstance(error, FileExistsError | NotADirectoryError)
            why = "it is not a folder" if is_file else error.strerror
            raise InvalidArgumentError("lend_folder", f"cannot use {error.filename or self.path}: {why}") from error
        self._number = max((int(path.name.rpartition("-")[2]) for path in self._files()), default=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._lock)

    def _lock_folder(self) -> int:
        """Creates and locks the folder; returns the lock. Raises BlockingIOError if another holds it."""
        self._home.mkdir(mode=0o700, exist_ok=True)
        if self._home.is_symlink() or self._home.stat().st_uid != os.getuid():
            raise WrongStateError("FOREIGN_FOLDER", f"{self._home} belongs to another user")
        self._home.chmod(0o700)
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise BlockingIOError(errno.EWOULDBLOCK, "another process lends this rank") from None
        return lock

    @property
    def _is_own(self) -> bool:
        """Whether the folder is the one that this process has locked."""
        try:
            return os.path.samestat((self.path / "lock").stat(), os.fstat(self._lock))
        except OSError:
            return False

    def _make_again(self) -> None:
        """Creates and locks the folder again if somebody has deleted it; see rule 5.

        Raises:
            OSError: It cannot be created, or another process has taken the rank meanwhile.
        """
        with self._making:
            if self._is_own:
                return
            try:
                lock = self._lock_folder()
            except WrongStateError as error:
                raise PermissionError(errno.EACCES, error.message) from error
            os.dup2(lock, self._lock, inheritable=False)
            os.close(lock)
        _log.warning("memory folder deleted", extra={**self._rank_fields, "path": str(self.path)})

    def create(self, size_bytes: int, host_bytes: int = 0) -> tuple[int, ...]:
        """Allocates zeroed memory in new files.

        Args:
            size_bytes: Size of the memory.
            host_bytes: Size of host memory beside it; 0 for none.

        Returns:
            Descriptors of the memory, and of the host memory if there is any, which the caller closes.

        Raises:
            MemoryError: The memory does not fit; nothing stays allocated.
            ExhaustedError: The host memory does not fit beside it, as the field `host_memory` says; likewise.
        """
        self._number += 1
        return self._create_files({_FILE: size_bytes, HOST_FILE: host_bytes})

    def _create_files(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Creates files with these sizes in bytes, none for 0. Returns their descriptors; raises as `create`."""
        sizes = {name: size_bytes for name, size_bytes in sizes.items() if size_bytes}
        total_bytes = 0
        for name, size_bytes in sizes.items():  # of all files, before one is written
            total_bytes += size_bytes
            with self._fitting(name, size_bytes):
                self._check_room(total_bytes)
        descriptors: list[int] = []
        started_seconds = time.monotonic()
        with contextlib.ExitStack() as undo:
            for name, size_bytes in sizes.items():
                path = self.path / name.format(self._number)
                with self._fitting(name, size_bytes):
                    descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                    undo.callback(path.unlink)
                    undo.callback(os.close, descriptors[-1])
                    allocate_pages(descriptors[-1], size_bytes)
            undo.pop_all()
        if host_bytes := sizes.get(HOST_FILE):
            seconds = round(time.monotonic() - started_seconds, 3)
            _log.info("host memory allocated", extra={**self._rank_fields, "bytes": host_bytes, "seconds": seconds})
        return tuple(descriptors)

    @contextlib.contextmanager
    def _fitting(self, name: str, size_bytes: int) -> Iterator[None]:
        """Raises what `create` raises if a file does not fit."""
        try:
            yield
        except OSError as error:
            message = f"{size_bytes} bytes do not fit {self.path}: {error.strerror}"
            if name == _FILE:
                raise MemoryError(message) from error
            raise ExhaustedError("OUT_OF_MEMORY", message, field="host_memory") from error

    def _check_room(self, size_bytes: int) -> None:
        self._make_again()
        left_bytes = free_bytes(self.path)
        if left_bytes is not None and size_bytes > left_bytes:
            raise OSError(errno.ENOSPC, f"its file system has {left_bytes} bytes free")

    def open(self) -> tuple[int, ...]:
        """Opens the newest files; returns their descriptors as `create` does.

        Raises:
            OSError: There is no memory.
        """
        return open_all([self._newest(_FILE), *self._host_files()])

    def memory_id(self, descriptors: Sequence[int]) -> str:
        """Identifies memory while a process maps it, also across processes of the rank."""
        return " ".join(f"{status.st_dev}:{status.st_ino}" for status in map(os.fstat, descriptors))

    def _newest(self, name: str) -> Path:
        return self.path / name.format(self._number)

    def _host_files(self) -> list[Path]:
        """The newest file of host memory, if there is one."""
        return [path for path in (self._newest(HOST_FILE),) if path.exists()]

    def delete(self) -> None:
        """Deletes what describes the memory, then the memory; nothing if another process took the rank meanwhile."""
        try:
            self._make_again()
        except OSError:
            return
        for path in (self.path / "rank", self.path / "borrowers", *self._files()):
            path.unlink(missing_ok=True)

    def write_rank(self, pool: str, registration: Registration) -> None:
        """States whose memory the newest files are: a registration with `held`."""
        self._write("rank", self._identity().encode() + b"\n" + registration_to_bytes(pool, registration))

    def read_rank(self) -> Registration | None:
        """Whose memory the newest files are; None if there is none, it was replaced, or another release wrote this."""
        with contextlib.suppress(FileNotFoundError, KvpoolError):
            identity, _, data = (self.path / "rank").read_bytes().partition(b"\n")
            if identity and identity == self._identity().encode():
                return registration_from_bytes(data)
            message = f"{self.path} holds other memory than an earlier process left there"
            _log.warning("memory dropped", extra={**self._rank_fields, "error": message})
        return None

    def _identity(self) -> str:
        """Identifies the newest memory for later processes; empty if its file was deleted."""
        try:
            return " ".join(map(file_id, (self._newest(_FILE), *self._host_files())))
        except FileNotFoundError:
            return ""

    def write_borrowers(self, borrowers: Sequence[PastBorrower]) -> None:
        """States which processes may map the newest files."""
        content = {"pid_namespace": pid_namespace(), "processes": [asdict(borrower) for borrower in borrowers]}
        self._write("borrowers", json.dumps(content).encode() + b"\n")

    def add_sessions(self, borrower: PastBorrower) -> None:
        """States that one of these processes has further sessions. O(1).

        Raises:
            OSError: There is no list that can be added to, or no space. The list is as before.
        """
        self._make_again()
        line = json.dumps(asdict(borrower)).encode() + b"\n"
        with (self.path / "borrowers").open("r+b", buffering=0) as file:
            end = file.seek(-1, os.SEEK_END) + 1
            if file.read(1) != b"\n":
                raise OSError(errno.EIO, "the last line has no end")
            if file.write(line) != len(line):
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read_borrowers(self) -> list[PastBorrower]:
        """The processes that may map the newest files.

        Raises:
            WrongStateError: They are not visible here.
            InvalidArgumentError: The list is damaged.
        """
        try:
            whole, *added = (self.path / "borrowers").read_bytes().split(b"\n")
            content = json.loads(whole)
            namespace = content["pid_namespace"]
            found: dict[PastBorrower, list[tuple[int, int]]] = {}
            for entry in (*content["processes"], *map(json.loads, added[:-1])):
                sessions = found.setdefault(PastBorrower(**{**entry, "sessions": ()}), [])
                sessions += ((int(epoch), int(number)) for epoch, number in entry["sessions"])
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgumentError("borrowers", f"{self.path / 'borrowers'} is damaged: {error}") from error
        if found and namespace != pid_namespace():
            raise WrongStateError("OTHER_PID_NAMESPACE", f"the processes that map {self.path} are not visible here")
        return [replace(borrower, sessions=tuple(sessions)) for borrower, sessions in found.items()]

    def _files(self) -> list[Path]:
        found = (path for name in (_FILE, HOST_FILE) for path in self.path.glob(name.format("*")))
        return [path for path in found if path.name.rpartition("-")[2].isdecimal()]

    def _write(self, name: str, content: bytes) -> None:
        self._make_again()
        part = self.path / f"{name}.part"
        part.write_bytes(content)
        part.rename(self.path / name)
