"""Recovers the last state from a folder's files, or reports why the files are not valid.

1. The recovered state is exactly the state after the last change that was written completely, or an empty one.
2. The change of an incomplete last frame was never answered; the frame is cut off when all files are read. Any other
   damage drops the whole journal. So does a snapshot without the log that began with it, or a log without the one that
   follows it, as the state may be outdated.
3. When the journal is dropped, its pools are recreated empty, in an epoch above all earlier ones. Sessions are refused
   with this reason.
4. A file that cannot be read, also for want of memory, shows nothing about its content. It is read again, for a short
   time, and never dropped.
"""

import errno
import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvpool.core import commands
from kvpool.core.errors import OUT_OF_MEMORY, KvpoolError
from kvpool.core.state import State
from kvpool.server.codec import DamageError
from kvpool.server.journal.folder import Folder, FormatError, Header, Writer, reading
from kvpool.server.journal.frames import Frame, FrameKind
from kvpool.server.journal.pool_list import EPOCH_LEAP, PastPool, read_pools
from kvpool.server.journal.records import MismatchError, execute_record
from kvpool.server.journal.snapshot import load_snapshot
from kvpool.wire.backoff import Backoff
from kvpool.wire.file_ids import file_id

NUM_REPETITIONS: Final = 5
"""Number of times that a journal is read again after a read error, with pauses of 3 s in all."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Result of a recovery.

    Attributes:
        state: The recovered state.
        last_number: Highest number of any remaining file; 0 if there is none.
        dropped: Reason why the journal was dropped; empty if it was valid or did not exist.
        detail: The reason in words.
        num_records: Number of replayed changes.
        cut_bytes: Bytes of an unanswered change that were cut off the last log.
        seconds: Duration of the recovery.
    """

    state: State
    last_number: int = 0
    dropped: str = ""
    detail: str = ""
    num_records: int = 0
    cut_bytes: int = 0
    seconds: float = 0.0


_log = logging.getLogger("kvpool.server")


class _DroppedError(Exception):
    """The files are undamaged, but not valid for this server."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def recover(folder: Folder, make: Callable[[], State], past_epoch: int = 0) -> Recovery:
    """Recovers the state from a folder, with the garbage collector disabled. O(blocks + changes since the snapshot).

    After a read error it begins again, up to `NUM_REPETITIONS` times.

    Args:
        folder: The folder.
        make: Makes an empty state.
        past_epoch: An epoch that earlier servers may have used even if the folder does not list it, because they could
            not write. Pools of a dropped journal get higher ones.

    Raises:
        OSError: The folder or a file cannot be read. The files are as before.
    """
    start = time.perf_counter()
    had_collector = gc.isenabled()
    gc.disable()
    try:
        recovery = _recover_again(folder, make, past_epoch)
    finally:
        if had_collector:
            gc.enable()
    recovery = replace(recovery, seconds=time.perf_counter() - start)
    _log_recovery(recovery, folder)
    return recovery


def _recover_again(folder: Folder, make: Callable[[], State], past_epoch: int) -> Recovery:
    backoff = Backoff(0.1, 1.6, jitter=0.0)
    for _ in range(NUM_REPETITIONS):
        try:
            return _recover_once(folder, make, past_epoch)
        except OSError as error:
            pause_seconds = backoff.next()
            _log.warning("journal read repeated", extra={"error": str(error), "seconds": pause_seconds})
            time.sleep(pause_seconds)  # nothing is served before the journal has been read
    try:
        return _recover_once(folder, make, past_epoch)
    except OSError as error:
        raise OSError(f"journal: {folder.path} cannot be read, and stays as it is: {error}") from error


def _recover_once(folder: Folder, make: Callable[[], State], past_epoch: int) -> Recovery:
    try:
        recovery = _Recoverer(folder, make()).run()
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - the server must start in spite of a bug
        if _is_of_memory(error):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None  # without the state that its frames hold
        if not isinstance(error, _DroppedError | DamageError | MismatchError | KvpoolError):
            _log.exception("bug", extra={"method": "recover"})
        recovery = _dropped(folder, make, past_epoch, error)
    return replace(recovery, last_number=max([0, *folder.numbers("log"), *folder.numbers("snapshot")]))


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is a lack of memory."""
    while error and not isinstance(error, MemoryError) and getattr(error, "reason", "") != OUT_OF_MEMORY:
        error = error.__cause__
    return error is not None


class _Recoverer:
    def __init__(self, folder: Folder, state: State) -> None:
        self._folder = folder
        self._state = state
        self._records = 0
        self._is_followed = False  # by another log, as the last log states

    def run(self) -> Recovery:
        snapshots, logs = self._folder.numbers("snapshot"), self._folder.numbers("log")
        if not snapshots:
            if logs or read_pools(self._folder) is not None:
                raise _DroppedError("NOT_WHOLE", "there is no complete snapshot")
            return Recovery(self._state)
        base = snapshots[-1]
        later = [number for number in logs if number >= base]
        if not later or later != list(range(base, base + len(later))):
            raise _DroppedError("NOT_WHOLE", "a log is missing")
        self._load(self._folder.snapshot(base))
        log, *others = map(self._folder.log, later)
        end = self._replay(log)
        for other in others:
            if not self._is_followed:
                self._check_unused(other, is_last=other == others[-1])
                other.unlink()
                break
            log, end = other, self._replay(other)
        if self._is_followed:
            raise _DroppedError("NOT_WHOLE", f"the log after {log.name} is missing")
        cut_bytes = log.stat().st_size - end
        if cut_bytes:
            os.truncate(log, end)
        return Recovery(self._state, num_records=self._records, cut_bytes=cut_bytes)

    def _load(self, path: Path) -> None:
        with reading(path) as file:
            self._check_origin(path, file.header)
            load_snapshot(self._state, file.frames)
            if file.parser.is_torn:
                raise DamageError(f"{path.name} is longer than its snapshot")

    def _replay(self, path: Path) -> int:
        """Executes the records of a log. Returns where the last one ends."""
        with reading(path) as file:
            header = self._check_origin(path, file.header)
            self._is_followed = False
            for frame in file.frames:
                self._replay_frame(path, header.writer, frame)
            if file.parser.is_torn and self._is_followed:
                raise DamageError(f"{path.name} is longer than its records")
            return file.parser.end

    def _check_unused(self, path: Path, *, is_last: bool) -> None:
        """Checks that the process died after it had begun to create a log, and before it ended the one before."""
        with reading(path) as file:
            if not is_last or next(file.frames, None):
                raise DamageError(f"the end of the log before {path.name} is missing")

    def _replay_frame(self, path: Path, writer: Writer, frame: Frame) -> None:
        if self._is_followed or frame.kind not in (FrameKind.RECORD, FrameKind.END):
            raise DamageError(f"{path.name} contains a frame that is not a record")
        if frame.kind is FrameKind.END:
            self._is_followed = True
            return
        if writer.version != self._folder.writer.version:
            raise _DroppedError("OTHER_VERSION", f"changes were written by {writer.version}")
        self._records += 1
        execute_record(self._state, frame.payload)

    def _check_origin(self, path: Path, header: Header | None) -> Header:
        if header is None:
            raise DamageError(f"{path.name} has no header")
        if header.writer.boot_id != self._folder.writer.boot_id:
            raise _DroppedError("MACHINE_RESTARTED", "the machine was restarted since the journal was written")
        if header.file_id != file_id(path):
            raise _DroppedError("COPIED", f"{path.name} is a copy, which may be older than the last answers")
        return header


def _dropped(folder: Folder, make: Callable[[], State], past_epoch: int, error: Exception) -> Recovery:
    reason = "ANSWERS_DIFFER"
    if isinstance(error, _DroppedError):
        reason = error.reason
    elif isinstance(error, DamageError):
        reason = "OTHER_FORMAT" if isinstance(error, FormatError) else "DAMAGED"
    state = make()
    state.execute(commands.LoseSessions(), 0.0)
    for past in _past_pools(folder):
        epoch = max(past.epoch, past_epoch) + EPOCH_LEAP
        if config := past.decoded_config():
            state.execute(commands.OpenEpoch(config, b"", epoch), 0.0)
        else:
            state.pools.past_epoch = max(state.pools.past_epoch, epoch)
    return Recovery(state, dropped=reason, detail=str(error))


def _past_pools(folder: Folder) -> list[PastPool]:
    unlisted = PastPool("", 0)  # of any name and epoch
    try:
        return [unlisted, *(read_pools(folder) or ())]
    except DamageError:
        return [unlisted]


def _log_recovery(found: Recovery, folder: Folder) -> None:
    extra = {"seconds": round(found.seconds, 3), "records": found.num_records, "bytes": folder.size_bytes()}
    if found.dropped:
        _log.warning("journal dropped", extra={**extra, "reason": found.dropped, "error": found.detail})
    elif found.last_number:
        _log.info("journal recovered", extra=extra)
    if found.cut_bytes:
        _log.info("unanswered journal record cut off", extra={"bytes": found.cut_bytes})
