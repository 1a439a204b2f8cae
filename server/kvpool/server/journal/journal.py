"""The journal of a running server: a log of changes, replaced from time to time by a snapshot.

1. A change is in the log before its response can be sent. It is written without fsync. This protects against the death
   of the process; a restart of the machine is detected by the boot id.
2. A journal with a missing change is worse than none. When a write fails twice, or the disk is full, the whole journal
   is deleted at once. The server continues to serve and starts a new journal with a snapshot. If deletion fails too,
   the process exits before it responds.
3. A snapshot has the state of one moment, at which the next log begins. It is written between other work. Until it is
   complete, the older snapshot and both logs are valid.
"""

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

from kvpool.core.commands import ApplyStep, Command
from kvpool.core.pools.snapshots import StateSnapshot
from kvpool.core.state import State
from kvpool.server.crash import crash
from kvpool.server.fault_points import NO_FAULTS, FaultPoints
from kvpool.server.journal.config import JournalConfig
from kvpool.server.journal.folder import Folder, FrameFile, Writer
from kvpool.server.journal.frames import FrameKind, encode_frame
from kvpool.server.journal.pool_list import FULL, PoolList
from kvpool.server.journal.records import encode_record
from kvpool.server.journal.recovery import Recovery, recover
from kvpool.server.journal.snapshot import snapshot_frames
from kvpool.server.metrics.observations import JournalCounts

CHECK_SECONDS: Final = 1.0
"""Interval at which a running server checks that its files are in place."""
RETRY_SECONDS: Final = 5.0
"""Time after which a journal that could not be written is started again."""
_END: Final = encode_frame(FrameKind.END, b"")

_log = logging.getLogger("kvpool.server")


class Journal:
    """Recovers the state from a folder, then records its changes there.

    Args:
        config: The settings, with a folder.
        make: Makes an empty state.
        writer: The writer of the files; None for this process.
        faults: Fault points, armed by tests only.
        past_epoch: See `recover`.

    Attributes:
        state: The state. Its changes are recorded after `begin`.
        is_behind: Whether the state was replaced, and the attempt to write its first snapshot has not ended.
        error: Why the journal is down; empty while it is up.
        recovery: The state found in the folder.
        snapshot_lock: Held while a snapshot of the state is read, also by others.
        counts: Counts for metrics.

    Raises:
        OSError: The folder cannot be read and locked. Its files are as before.
    """

    def __init__(
        self,
        config: JournalConfig,
        make: Callable[[], State],
        writer: Writer | None = None,
        faults: FaultPoints = NO_FAULTS,
        past_epoch: int = 0,
    ) -> None:
        self._config = config
        self._faults = faults
        self._folder = Folder(Path(config.folder), writer or Writer.this_process())
        try:
            self.recovery: Recovery = recover(self._folder, make, past_epoch)
        except OSError:
            self._folder.close()
            raise
        self.state = self.recovery.state
        self.is_behind = False
        self.error = ""
        self.counts = JournalCounts(recovery_seconds=self.recovery.seconds)
        self.snapshot_lock = asyncio.Lock()
        self._pools = PoolList(self._folder, self.state)
        self._log: FrameFile | None = None
        self._number = self.recovery.last_number
        self._base = max(self._folder.numbers("snapshot"), default=0)
        self._base_mark = self._folder.mark_of(self._base)
        self._due = asyncio.Event()
        self._begun = asyncio.Event()
        self._is_replaced = asyncio.Event()

    @property
    def is_recording(self) -> bool:
        """Whether commands are written: after `begin`, and not while the journal is given up."""
        return self._log is not None

    @property
    def is_in_place(self) -> bool:
        """Whether the path of the folder leads to the one that this process has locked."""
        return self._folder.is_in_place

    @property
    def is_complete(self) -> bool:
        """Whether a restart would recover all changes so far from the folder."""
        return self.is_recording and self.counts.is_up and self.is_in_place

    def begin(self) -> None:
        """Starts recording, unless it has. `run` writes the first snapshot. Execute `RenewLeases` next.

        A journal that cannot be written is given up, as later: the server serves, and `run` begins a new one.

        Raises:
            OSError: The files of a dropped journal can be neither deleted nor overwritten, or a server that is killed
                could leave no trace of its sessions.
        """
        if self._begun.is_set():
            return
        self._begun.set()
        self._folder.mark_begun()
        if self.recovery.dropped:
            self._folder.invalidate()
        self.counts.size_bytes = self._folder.size_bytes()
        try:
            self._log = self._folder.open_log(self._number)
            self._rotate()
            self._pools.write()  # first, as it needs least space and keeps the epochs
            if self.recovery.dropped or not self.recovery.last_number:
                self._write_snapshot_at_once()
            else:
                self._due.set()
        except OSError as error:
            self._give_up("WRITE_FAILED", _detail(error))
        else:
            self.counts.is_up = True

    def restart(self) -> None:
        """Begins again, because the state was replaced. It is up when `run` has written a snapshot."""
        self._begun.set()
        self._discard()
        self.is_behind = True
        self._is_replaced.set()

    async def run(self) -> None:
        """Writes snapshots when they are due, from `begin` or `restart` on, indefinitely."""
        await self._begun.wait()
        while True:
            await self._wait_until_due()
            self._due.clear()
            self._is_replaced.clear()
            try:
                await self._snapshot()
                continue
            except OSError as error:
                self._snapshot_failed(error)
            except Exception:  # noqa: BLE001 - the journal ends, the server does not
                _log.exception("bug", extra={"method": "write_journal"})
                self._give_up("BUG", "a snapshot failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._is_replaced.wait()
            self._due.set()

    def close(self) -> None:
        """Writes a last snapshot, which another version of this code can read too, and unlocks the folder."""
        self._check_files()
        if self.is_recording:
            try:
                self._rotate()
                self._write_snapshot_at_once()
            except OSError as error:  # the logs are complete
                _log.warning("journal snapshot failed", extra={"error": _detail(error)})
        if self._log:
            self._log.close()
            self._log = None
        self._folder.close()

    def record(self, command: Command[Any], now_seconds: float, result: object) -> None:
        """Writes a command that was executed. Gives the journal up if that fails."""
        if self._log:
            self.write(encode_record(command, now_seconds, result), command)

    def write(self, frame: bytes, command: Command[Any]) -> None:
        """Writes the record of a command; see `record`."""
        log = self._log
        if log is None:
            return
        try:
            self._faults.reach("journal.before_write")
            self._take_space(frame)
            self._append(log, frame)
            if not isinstance(command, ApplyStep):
                self._pools.write()
        except OSError as error:
            self._give_up("WRITE_FAILED", _detail(error))
            return
        self.counts.records += 1
        if log.size_bytes >= self._config.log_bytes:
            self._due.set()

    def _append(self, log: FrameFile, frame: bytes) -> None:
        """Appends a record. If that fails, removes the written part and tries once more."""
        try:
            log.append(frame)
        except OSError as error:
            if error.errno in FULL:
                raise
            _log.warning("journal write repeated", extra={"error": _detail(error)})
            log.cut()
            log.append(frame)

    async def _wait_until_due(self) -> None:
        self._check_files()
        while not self._due.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._due.wait()
            self._check_files()

    def _check_files(self) -> None:
        if not self.is_recording:
            return
        try:
            lost = self._lost_file()
        except OSError as error:  # which shows nothing about the file
            _log.warning("journal read repeated", extra={"error": str(error), "seconds": CHECK_SECONDS})
            return
        if lost:
            self._give_up("FILES_LOST", f"{lost} was deleted, moved, replaced or cut")

    def _lost_file(self) -> str:
        """Name of a file that is not in its place as it was written, without which a restart fails; empty for none."""
        if not self._folder.is_in_place:
            return "the folder"
        if self._log and not self._log.is_in_place:
            return self._log.path.name
        is_lost = self.counts.is_up and self._folder.mark_of(self._base) != self._base_mark
        return self._folder.snapshot(self._base).name if is_lost else ""

    async def _snapshot(self) -> None:
        async with self.snapshot_lock:
            start = time.perf_counter()
            if not self.is_recording:
                self._folder.empty()
            with self.state.snapshot() as snapshot:
                self._rotate()
                self.counts.stopped_seconds = time.perf_counter() - start
                with contextlib.closing(self._write_snapshot(snapshot, start)) as parts:
                    for _ in parts:
                        await asyncio.sleep(0)

    def _write_snapshot_at_once(self) -> None:
        with self.state.snapshot() as snapshot:
            for _ in self._write_snapshot(snapshot, time.perf_counter()):
                pass

    def _write_snapshot(self, snapshot: StateSnapshot, start: float) -> Generator[None, None, None]:
        """Writes a snapshot, of which the log has just begun. Yields after each part; other work may be done then."""
        number, path = self._number, self._folder.snapshot(self._number)
        with self._folder.new_file(path) as file:
            self._faults.reach("snapshot.begun")
            yield
            for frame in snapshot_frames(snapshot):
                if number != self._number:
                    return  # the journal was given up in the meantime
                self._take_space(frame)
                file.append(frame)
                self._faults.reach("snapshot.slice_written")
                yield
            if number != self._number:
                return
            self._pools.write()
            self._faults.reach("snapshot.before_rename")
            self._folder.name_part(path)
        self._faults.reach("snapshot.before_delete")
        self._base, self._base_mark = number, self._folder.mark_of(number)
        self._folder.delete_before(number)
        self.counts.snapshots += 1
        self.counts.snapshot_seconds = time.perf_counter() - start
        self.counts.size_bytes = self._folder.size_bytes()
        if not self.counts.is_up and self.counts.failures:
            _log.warning("journal up again", extra={"bytes": self.counts.size_bytes})
        self.counts.is_up = True
        self.is_behind = False
        self.error = ""

    def _snapshot_failed(self, error: OSError) -> None:
        """Keeps an intact log until it exceeds the maximum size; gives a new journal up."""
        _log.warning("journal snapshot failed", extra={"error": _detail(error)})
        self.is_behind = False
        self._check_files()
        if self.counts.is_up:
            self.counts.size_bytes = self._folder.size_bytes()
        elif self.is_recording:
            self._give_up("SNAPSHOT_FAILED", _detail(error))
        elif not self.error:  # after `restart`, which has deleted the files
            self._count_failure("SNAPSHOT_FAILED", _detail(error))

    def _rotate(self) -> None:
        """Begins the next log, and ends the one before it, which may be of an earlier process."""
        before, log = self._log, self._folder.create(self._folder.log(self._number + 1))
        if before:
            try:
                before.append(_END)
            except OSError:
                log.close()
                log.path.unlink()
                before.cut()
                raise
            before.close()
        self._number += 1
        self._log = log

    def _give_up(self, reason: str, detail: str) -> None:
        """Deletes the journal. `run` begins a new one later."""
        self._count_failure(reason, detail)
        self.is_behind = False
        self._discard()

    def _count_failure(self, reason: str, detail: str) -> None:
        self.counts.failures += 1
        self.error = f"{reason}: {detail}"
        _log.error("journal given up", extra={"reason": reason, "error": detail})

    def _discard(self) -> None:
        """Deletes the journal, or exits if it cannot."""
        self.counts.is_up = False
        self.counts.size_bytes = 0
        self._pools.forget()
        self._number += 1  # stops a snapshot in progress
        log, self._log = self._log, None
        try:
            if log and log.is_moved:
                log.damage()
            if self._folder.is_in_place:
                self._folder.invalidate()
                self.counts.size_bytes = self._folder.size_bytes()
        except OSError as error:
            _log.critical("journal cannot be deleted, server exits", extra={"error": _detail(error)})
            crash()
        if log:
            log.close()
        self._due.set()

    def crash_after_bug(self, method: str) -> None:
        """Ends the process after a command that failed halfway: a restart recovers the state before it.

        Returns if a restart would not. The journal then begins again with a snapshot of what the caller makes of it.
        """
        if self.is_complete:
            _log.critical("bug: a change failed halfway, the server exits", extra={"method": method}, exc_info=True)
            crash()
        if self.is_recording:
            self._give_up("BUG", "a change failed halfway")

    def _take_space(self, frame: bytes) -> None:
        """Counts a frame that is written next.

        Raises:
            OSError: The maximum size is reached.
        """
        if self.counts.size_bytes + len(frame) > self._config.max_bytes:
            raise OSError(errno.EFBIG, "journal_max_bytes is reached")
        self.counts.size_bytes += len(frame)


def _detail(error: OSError) -> str:
    return error.strerror or str(error)
