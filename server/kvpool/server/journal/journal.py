"""The journal of a running server: each change to the log, now and then a snapshot in place of the log.

1. A change is in the log before its answer can be sent. It is written, not forced to the disk: that guards against the
   end of the process, and a machine that restarts is noticed by its boot id.
2. A journal that misses a change is worth less than none. When a write fails, all of it is deleted, at once; the server
   goes on, and begins a new one with a snapshot. If it cannot even be deleted, the process ends before it answers.
3. A snapshot is frozen at one moment, in which the next log begins, and written between other work. Until it is whole
   the older one and both logs count.
"""

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvpool.core.ids import PoolName
from kvpool.server.fault_points import NO_FAULTS, FaultPoints
from kvpool.server.journal.calls import JournaledAllocator, WireCodec
from kvpool.server.journal.config import JournalConfig
from kvpool.server.journal.counts import JournalCounts
from kvpool.server.journal.folder import Folder, Identity, PastPool, write_whole
from kvpool.server.journal.frames import FrameKind, encode_frame
from kvpool.server.journal.recovery import Recovery, recover
from kvpool.server.journal.snapshot import Frozen

_NOT_TRUSTED_STATUS: Final = 70

_log = logging.getLogger("kvpool.server")


class Journal:
    """Recovers what a folder holds, then keeps it up to date.

    Args:
        config: The settings, with a folder.
        messages: Encodes what only `rpc` knows.
        make: Makes an allocator with nothing in it.
        identity: Who writes; None for this process.
        faults: Armed by tests.

    Attributes:
        allocator: The state. It is journaled from `begin` on.
        recovery: What was found in the folder.
        counts: What the journal did so far.

    Raises:
        OSError: The folder cannot be used, or another server uses it.
    """

    def __init__(
        self,
        config: JournalConfig,
        messages: WireCodec,
        make: Callable[[], JournaledAllocator],
        identity: Identity | None = None,
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        self.counts = JournalCounts()
        self._config = config
        self._faults = faults
        self._messages = messages
        self._folder = Folder(Path(config.folder), identity or Identity.of_this_process())
        self.recovery: Recovery = recover(self._folder, messages, make)
        self.allocator = self.recovery.allocator
        self.counts.recovery_seconds = self.recovery.seconds
        self._number = self.recovery.last_number
        self._descriptor = -1
        self._log_bytes = 0
        self._known_pools: list[tuple[PoolName, int]] | None = None
        self._due = asyncio.Event()
        self._tell()

    def begin(self, now_seconds: float) -> None:
        """Writes from now on. What was recovered gets whole leases; its snapshot is written by `run`.

        Raises:
            OSError: The folder cannot be written.
        """
        self.allocator.on_bug = self._give_up_after_bug
        if self.recovery.dropped:
            self._folder.invalidate()
        self._rotate()
        if self.recovery.dropped or not self.recovery.last_number:
            self._write_at_once()
        else:
            self._due.set()
        self.allocator.renew_leases(now_seconds)
        self._keep_pools()
        self.counts.is_up = True

    async def run(self) -> None:
        """Writes snapshots when they are due, for ever."""
        while True:
            if self.allocator.sink:
                await self._due.wait()
            else:
                await asyncio.sleep(self._config.retry_seconds)
            self._due.clear()
            try:
                await self._snapshot()
            except OSError as error:
                await self._snapshot_failed(error)

    def close(self) -> None:
        """Writes a last snapshot, which another version of this code can read too, and lets the folder go."""
        if self.allocator.sink:
            try:
                self._rotate()
                self._write_at_once()
            except OSError as error:  # the logs tell it all
                _log.warning("journal snapshot failed", extra={"error": error.strerror})
        self.allocator.sink = None
        self._close_log()
        self._folder.close()

    def append(self, kind: FrameKind, payload: bytes) -> None:
        """Writes a change; gives the journal up if that fails."""
        frame = encode_frame(kind, payload)
        try:
            self._faults.reach("journal.before_write")
            if self._faults.is_armed("journal.half_written"):
                half = len(frame) // 2
                self._write(self._descriptor, frame[:half])
                self._faults.reach("journal.half_written")
                self._write(self._descriptor, frame[half:])
            else:
                self._write(self._descriptor, frame)
            if kind is FrameKind.CALL:
                self._keep_pools()
        except OSError as error:
            self._give_up("WRITE_FAILED", error.strerror)
            return
        self._log_bytes += len(frame)
        self.counts.records += 1
        if self._log_bytes >= self._config.log_bytes:
            self._due.set()

    async def _snapshot(self) -> None:
        start = time.perf_counter()
        with self._freeze() as frozen:
            self._rotate()
            self.counts.stopped_seconds = time.perf_counter() - start
            number = self._number
            with self._new_part() as descriptor:
                self._faults.reach("snapshot.begun")
                for frame in frozen.frames():
                    self._write(descriptor, frame)
                    self._faults.reach("snapshot.slice_written")
                    await asyncio.sleep(0)
                    if number != self._number:
                        return  # the journal was given up meanwhile
                self._finish(number, start)

    def _write_at_once(self) -> None:
        start = time.perf_counter()
        with self._freeze() as frozen, self._new_part() as descriptor:
            for frame in frozen.frames():
                self._write(descriptor, frame)
            self._finish(self._number, start)

    @contextlib.contextmanager
    def _new_part(self) -> Iterator[int]:
        """The file of the next snapshot, opened, while it is written."""
        part = self._part(self._number)
        descriptor = self._folder.create(part)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
            part.unlink(missing_ok=True)

    def _finish(self, number: int, start: float) -> None:
        self._faults.reach("snapshot.before_rename")
        self._part(number).rename(self._folder.snapshot(number))
        self._faults.reach("snapshot.before_delete")
        self._folder.delete_before(number)
        self.counts.snapshots += 1
        self.counts.snapshot_seconds = time.perf_counter() - start
        self.counts.size_bytes = self._folder.size_bytes()
        if not self.counts.is_up and self.counts.failures:
            _log.warning("journal up again", extra={"bytes": self.counts.size_bytes})
        self.counts.is_up = True

    async def _snapshot_failed(self, error: OSError) -> None:
        """Without a journal, tries anew; with one, that still tells all: leaves it to its size to give it up."""
        _log.warning("journal snapshot failed", extra={"error": error.strerror})
        if not self.counts.is_up:
            if self.allocator.sink:
                self._give_up("SNAPSHOT_FAILED", error.strerror)
            return
        self.counts.size_bytes = self._folder.size_bytes()
        await asyncio.sleep(self._config.retry_seconds)
        self._due.set()

    def _freeze(self) -> Frozen:
        return Frozen(self.allocator, self._messages)

    def _rotate(self) -> None:
        descriptor = self._folder.create(self._folder.log(self._number + 1))
        self._close_log()
        self._number += 1
        self._descriptor, self._log_bytes = descriptor, 0
        self.allocator.sink = self.append

    def _keep_pools(self) -> None:
        """Writes down which pools there are, when that has changed; none at first: there is a journal."""
        pools = [(pool.config.name, pool.epoch) for pool in self.allocator.pools()]
        if pools == self._known_pools:
            return
        past = [PastPool("", self.allocator.past_epoch)]
        for pool in self.allocator.pools():
            name = pool.config.name
            formed = name in self.allocator.rank_groups
            past.append(PastPool(name, pool.epoch, b"" if formed else self._messages.encode_config(pool.config)))
        self._folder.write_pools(past)
        self._known_pools = pools

    def _give_up(self, reason: str, detail: str | None) -> None:
        self.counts.is_up = False
        self.counts.failures += 1
        self.allocator.sink = None
        self._number += 1  # ends a snapshot that is being written
        self._close_log()
        _log.error("journal given up", extra={"reason": reason, "error": detail})
        try:
            self._folder.invalidate()
            self.counts.size_bytes = self._folder.size_bytes()
        except OSError as error:
            _log.critical("journal cannot be deleted, so the server ends", extra={"error": error.strerror})
            os._exit(_NOT_TRUSTED_STATUS)
        self._due.set()

    def _give_up_after_bug(self) -> None:
        if self.allocator.sink:
            self._give_up("BUG", "a change ended half made")

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

    def _tell(self) -> None:
        found = self.recovery
        extra = {"seconds": round(found.seconds, 3), "records": found.num_records, "bytes": self._folder.size_bytes()}
        if found.dropped:
            _log.warning("journal dropped", extra={**extra, "reason": found.dropped, "error": found.detail})
        elif found.last_number:
            _log.info("journal recovered", extra=extra)
        if found.cut_bytes:
            _log.info("journal cut where nothing was answered", extra={"bytes": found.cut_bytes})
