"""The journal of a running server: a log of changes, replaced from time to time by a snapshot.

1. A change is in the log before its response can be sent. It is written without fsync. This protects against the death
   of the process; a restart of the machine is detected by the boot id.
2. A journal with a missing change is worse than none. When a write fails twice, or the disk is full, the whole journal
   is deleted at once. The server continues to serve and starts a new journal with a snapshot. If deletion fails too,
   the process exits before it responds.
3. A snapshot has the state of one moment, at which the next log begins. It is written between other work. Until it is
   complete, the older snapshot and both logs are valid.
4. The list of pools may be older than the log while it cannot be written: it is read only when the log is not valid.
   Then each pool begins `EPOCH_LEAP` epochs above its listed one, which covers the epochs that were not listed.
"""

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from kvpool.core.commands import ApplyStep, Command
from kvpool.core.ids import PoolName
from kvpool.core.state import State
from kvpool.server.fault_points import NO_FAULTS, FaultPoints
from kvpool.server.journal.config import JournalConfig
from kvpool.server.journal.folder import Folder, Identity, PastPool, is_at, write_whole
from kvpool.server.journal.frames import DAMAGE, FrameKind, encode_frame
from kvpool.server.journal.records import encode_record
from kvpool.server.journal.recovery import EPOCH_LEAP, Recovery, recover
from kvpool.server.journal.snapshot import snapshot_frames
from kvpool.server.metrics.observations import JournalCounts

CHECK_SECONDS: Final = 1.0
"""Interval at which a running server checks that its files are in place."""
_MAX_POOLS_FAILURES: Final = 5
"""Attempts to write the list of pools, one per check, after which the journal is given up."""
_MAX_UNLISTED_CHANGES: Final = EPOCH_LEAP // 2
"""Changes, each of which may begin an epoch, until the journal is given up if the list of pools cannot be written."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EXIT_STATUS: Final = 70

_log = logging.getLogger("kvpool.server")


class Journal:
    """Recovers the state from a folder, then records its changes there.

    Args:
        config: The settings, with a folder.
        make: Makes an empty state.
        identity: Identity of the writer; None for this process.
        faults: Fault points, armed by tests only.
        past_epoch: See `recover`.

    Attributes:
        state: The state. Its changes are recorded after `begin`.
        is_recording: Whether commands are written; not while the journal is given up.
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
        identity: Identity | None = None,
        faults: FaultPoints = NO_FAULTS,
        past_epoch: int = 0,
    ) -> None:
        self.counts = JournalCounts()
        self._config = config
        self._faults = faults
        self._folder = Folder(Path(config.folder), identity or Identity.of_this_process())
        try:
            self.recovery: Recovery = recover(self._folder, make, past_epoch)
        except OSError:
            self._folder.close()
            raise
        self.state = self.recovery.state
        self.is_recording = False
        self.is_behind = False
        self.error = ""
        self.counts.recovery_seconds = self.recovery.seconds
        self._number = self.recovery.last_number
        self._descriptor = -1
        self._base = max(self._folder.snapshots(), default=0)
        self._log_bytes = self._folder.log_bytes(self._number)
        self._known_pools: list[tuple[PoolName, int]] | None = None
        self._pools_failures = 0
        self._unlisted_changes = 0
        self._due = asyncio.Event()
        self._begun = asyncio.Event()
        self._is_replaced = asyncio.Event()
        self.snapshot_lock = asyncio.Lock()
        self._log_recovery()

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
            self._rotate()
            self._keep_pools()  # first, as it needs least space and keeps the epochs
            if self.recovery.dropped or not self.recovery.last_number:
                self._write_snapshot()
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
            if self.is_recording:
                await self._wait_until_due()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.retry_seconds):
                        await self._is_replaced.wait()
            self._due.clear()
            self._is_replaced.clear()
            try:
                await self._snapshot()
            except OSError as error:
                await self._snapshot_failed(error)
            except Exception:  # noqa: BLE001 - the journal ends, the server does not
                _log.exception("bug", extra={"method": "write_journal"})
                self._give_up("BUG", "a snapshot failed")

    def close(self) -> None:
        """Writes a last snapshot, which another version of this code can read too, and unlocks the folder."""
        self._check_files()
        if self.is_recording:
            try:
                self._rotate()
                self._write_snapshot()
            except OSError as error:  # the logs are complete
                _log.warning("journal snapshot failed", extra={"error": _detail(error)})
        self.is_recording = False
        self._close_log()
        self._folder.close()

    def record(self, command: Command[Any], now_seconds: float, result: object) -> None:
        """Writes a command that was executed. Gives the journal up if that fails."""
        if self.is_recording:
            self.write(encode_record(command, now_seconds, result), command)

    def write(self, record: bytes, command: Command[Any]) -> None:
        """Writes an encoded record of a command; see `record`."""
        if not self.is_recording:
            return
        frame = encode_frame(FrameKind.RECORD, record)
        try:
            self._faults.reach("journal.before_write")
            self._append(frame)
            if not isinstance(command, ApplyStep):
                self._list_pools()
        except OSError as error:
            self._give_up("WRITE_FAILED", _detail(error))
            return
        self._log_bytes += len(frame)
        self.counts.records += 1
        if self._log_bytes >= self._config.log_bytes:
            self._due.set()

    def _append(self, frame: bytes) -> None:
        """Appends a frame to the log. If that fails, removes the written part and tries once more."""
        try:
            if self._faults.is_armed("journal.half_written"):
                half = len(frame) // 2
                self._write(self._descriptor, frame[:half])
                self._faults.reach("journal.half_written")
                self._write(self._descriptor, frame[half:])
            else:
                self._write(self._descriptor, frame)
        except OSError as error:
            if error.errno in _FULL:
                raise
            _log.warning("journal write repeated", extra={"error": _detail(error)})
            os.ftruncate(self._descriptor, self._log_bytes)
            self._write(self._descriptor, frame)

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
        elif self._pools_failures:
            try:
                self._try_pools()
            except OSError as error:
                self._give_up("WRITE_FAILED", _detail(error))

    def _lost_file(self) -> str:
        """Name of a file that is not in its place as it was written, without which a restart fails; empty for none."""
        log, snapshot = self._folder.log(self._number), self._folder.snapshot(self._base)
        if not self._folder.is_in_place:
            return "the folder"
        if not is_at(self._descriptor, log) or os.fstat(self._descriptor).st_size != self._log_bytes:
            return log.name
        return snapshot.name if self.counts.is_up and not snapshot.exists() else ""

    async def _snapshot(self) -> None:
        async with self.snapshot_lock:
            await self._snapshot_now()

    async def _snapshot_now(self) -> None:
        start = time.perf_counter()
        if not self.is_recording:
            self._folder.empty()
        with self.state.snapshot() as snapshot:
            self._rotate()
            self.counts.stopped_seconds = time.perf_counter() - start
            number = self._number
            with self._new_part() as descriptor:
                self._faults.reach("snapshot.begun")
                await asyncio.sleep(0)
                for frame in snapshot_frames(snapshot):
                    if number != self._number:
                        return  # the journal was given up in the meantime
                    self._write(descriptor, frame)
                    self._faults.reach("snapshot.slice_written")
                    await asyncio.sleep(0)
                if number == self._number:
                    self._finish(number, start)

    def _write_snapshot(self) -> None:
        start = time.perf_counter()
        with self.state.snapshot() as snapshot, self._new_part() as descriptor:
            for frame in snapshot_frames(snapshot):
                self._write(descriptor, frame)
            self._finish(self._number, start)

    @contextlib.contextmanager
    def _new_part(self) -> Iterator[int]:
        """Opens a temporary file for the next snapshot, and deletes it at the end unless it was renamed."""
        part = self._part(self._number)
        descriptor = self._folder.create(part)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
            part.unlink(missing_ok=True)

    def _finish(self, number: int, start: float) -> None:
        self._keep_pools()
        self._faults.reach("snapshot.before_rename")
        self._part(number).rename(self._folder.snapshot(number))
        self._faults.reach("snapshot.before_delete")
        self._base = number
        self._folder.delete_before(number)
        self.counts.snapshots += 1
        self.counts.snapshot_seconds = time.perf_counter() - start
        self.counts.size_bytes = self._folder.size_bytes()
        if not self.counts.is_up and self.counts.failures:
            _log.warning("journal up again", extra={"bytes": self.counts.size_bytes})
        self.counts.is_up = True
        self.is_behind = False
        self.error = ""

    async def _snapshot_failed(self, error: OSError) -> None:
        """Retries later. An intact log is kept until it exceeds the maximum size; a new journal is given up."""
        _log.warning("journal snapshot failed", extra={"error": _detail(error)})
        self.is_behind = False
        self._check_files()
        if not self.counts.is_up:
            if self.is_recording:
                self._give_up("SNAPSHOT_FAILED", _detail(error))
            return
        self.counts.size_bytes = self._folder.size_bytes()
        await asyncio.sleep(self._config.retry_seconds)
        self._due.set()

    def _rotate(self) -> None:
        log = self._folder.log(self._number + 1)
        descriptor = self._folder.create(log, self._log_bytes)
        try:
            self._end_log()
        except OSError:
            os.close(descriptor)
            log.unlink()
            raise
        self._close_log()
        self._number += 1
        self._descriptor, self._log_bytes = descriptor, os.fstat(descriptor).st_size
        self.is_recording = True

    def _end_log(self) -> None:
        """Marks the current log, which may be of an earlier process, as followed by another one."""
        log = self._folder.log(self._number)
        if self._descriptor < 0 and log.exists():
            self._descriptor = self._folder.reopen(log)
        if self._descriptor >= 0:
            try:
                write_whole(self._descriptor, encode_frame(FrameKind.END, b""))
            except OSError:
                os.ftruncate(self._descriptor, self._log_bytes)
                raise

    def _list_pools(self) -> None:
        """Writes the list of pools after a change; if an attempt has failed, `_check_files` repeats it."""
        if self._pools_failures and self._unlisted_changes < _MAX_UNLISTED_CHANGES:
            self._unlisted_changes += 1
        else:
            self._try_pools()

    def _try_pools(self) -> None:
        """Writes the list of pools. A failure is tolerated for a while (rule 4)."""
        try:
            self._keep_pools()
        except OSError as error:
            self._pools_failures += 1
            is_tolerable = self._pools_failures < _MAX_POOLS_FAILURES and self._unlisted_changes < _MAX_UNLISTED_CHANGES
            if error.errno in _FULL or not is_tolerable:
                raise
            _log.warning("journal write repeated", extra={"error": _detail(error)})

    def _keep_pools(self) -> None:
        """Writes the list of pools when it has changed, and once for each new journal even if it is empty."""
        pools = [(PoolName(""), self.state.pools.past_epoch)]
        pools += [(pool.config.name, pool.epoch) for pool in self.state.pools]
        if pools != self._known_pools:
            past = [PastPool("", self.state.pools.past_epoch)]
            for pool in self.state.pools:
                name = pool.config.name
                formed = name in self.state.pools.rank_groups
                past.append(PastPool(name, pool.epoch, None if formed else pool.config))
            self._folder.write_pools(past)
            self._known_pools = pools
        self._pools_failures = self._unlisted_changes = 0

    def _give_up(self, reason: str, detail: str) -> None:
        """Deletes the journal. `run` begins a new one later."""
        self.counts.failures += 1
        self.error = f"{reason}: {detail}"
        _log.error("journal given up", extra={"reason": reason, "error": detail})
        self.is_behind = False
        self._discard()

    def _discard(self) -> None:
        """Deletes the journal, or exits if it cannot."""
        self.counts.is_up = False
        self.is_recording = False
        self._known_pools = None
        self._pools_failures = self._unlisted_changes = 0
        self._number += 1  # stops a snapshot in progress
        try:
            self._invalidate()
        except OSError as error:
            _log.critical("journal cannot be deleted, server exits", extra={"error": _detail(error)})
            logging.shutdown()  # writes that record
            os._exit(_EXIT_STATUS)
        self._close_log()
        self._due.set()

    def _invalidate(self) -> None:
        if self._folder.is_in_place:
            self._folder.invalidate()
            self.counts.size_bytes = self._folder.size_bytes()
        else:
            if self._descriptor >= 0:  # the files may be moved back later
                write_whole(self._descriptor, DAMAGE)
            self.counts.size_bytes = 0

    def give_up_after_bug(self) -> None:
        """Gives the journal up, because a command failed halfway: the records no longer match the state."""
        if self.is_recording:
            self._give_up("BUG", "a change failed halfway")

    def _write(self, descriptor: int, frame: bytes) -> None:
        if self.counts.size_bytes + len(frame) > self._config.max_bytes:
            raise OSError(errno.EFBIG, "journal_max_bytes is reached")
        write_whole(descriptor, frame)
        self.counts.size_bytes += len(frame)

    def _close_log(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _part(self, number: int) -> Path:
        path = self._folder.snapshot(number)
        return path.with_name(f"{path.name}.part")

    def _log_recovery(self) -> None:
        found = self.recovery
        extra = {"seconds": round(found.seconds, 3), "records": found.num_records, "bytes": self._folder.size_bytes()}
        if found.dropped:
            _log.warning("journal dropped", extra={**extra, "reason": found.dropped, "error": found.detail})
        elif found.last_number:
            _log.info("journal recovered", extra=extra)
        if found.cut_bytes:
            _log.info("unanswered journal record cut off", extra={"bytes": found.cut_bytes})


def _detail(error: OSError) -> str:
    return error.strerror or str(error)
