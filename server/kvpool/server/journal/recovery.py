"""Recovers the last state from a folder's files, or reports why the files are not valid.

1. The recovered state is exactly the state after the last change that was written completely, or an empty one.
2. The change of an incomplete last frame was never answered; the frame is cut off. Any other damage drops the whole
   journal. So does a snapshot without the log that began with it, or a log without the one that follows it, as the
   state may be outdated.
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
from kvpool.server.journal.folder import Folder, Header, PastPool
from kvpool.server.journal.frames import MALFORMED, DamageError, Frame, FrameKind, encode_frame
from kvpool.server.journal.records import MismatchError, execute_record, hold_leases
from kvpool.server.journal.snapshot import read_snapshot
from kvpool.wire.file_ids import file_id

EPOCH_LEAP: Final = 1000
"""Number of epochs that may have begun without a record, while the disk was full."""
PAUSES_SECONDS: Final = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Pauses after which a journal that could not be read is read again."""


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

    After a read error it begins again, up to `len(PAUSES_SECONDS)` times.

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
    return replace(recovery, seconds=time.perf_counter() - start)


def _recover_again(folder: Folder, make: Callable[[], State], past_epoch: int) -> Recovery:
    for pause_seconds in PAUSES_SECONDS:
        try:
            return _recover_once(folder, make, past_epoch)
        except OSError as error:
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
    return replace(recovery, last_number=max([0, *folder.logs(), *folder.snapshots()]))


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
        self._log_bytes = 0
        self._is_followed = False  # by another log, as the last log states
        self._cut_bytes = 0

    def run(self) -> Recovery:
        snapshots, logs = self._folder.snapshots(), self._folder.logs()
        if not snapshots:
            if logs or self._folder.read_pools() is not None:
                raise _DroppedError("NOT_WHOLE", "there is no complete snapshot")
            return Recovery(self._state)
        base = snapshots[-1]
        later = [number for number in logs if number >= base]
        if not later or later != list(range(base, base + len(later))):
            raise _DroppedError("NOT_WHOLE", "a log is missing")
        self._load(self._folder.snapshot(base))
        for number in later:
            self._replay(self._folder.log(number), number == base, number == later[-1])
        if self._is_followed:
            raise _DroppedError("NOT_WHOLE", f"the log after log-{later[-1]} is missing")
        return Recovery(self._state, num_records=self._records, cut_bytes=self._cut_bytes)

    def _load(self, path: Path) -> None:
        with self._folder.reading(path) as (reader, header):
            self._check_origin(path, header)
            snapshot = read_snapshot(reader.read)
            if reader.is_torn:
                raise DamageError(f"{path.name} is longer than its snapshot")
        try:
            self._state.restore(snapshot)
        except (*MALFORMED, KvpoolError) as error:
            raise DamageError(f"{path.name} is of an impossible state: {error}") from error
        hold_leases(self._state)

    def _replay(self, path: Path, is_first: bool, is_last: bool) -> None:  # noqa: FBT001 - properties of the path
        with self._folder.reading(path) as (reader, header):
            may_be_new = not is_first and not self._is_followed  # the process died while it created the log
            if header or not may_be_new:
                self._check_origin(path, header)
            if header and not is_first and header.previous_bytes != self._log_bytes:
                sizes = f"{self._log_bytes} bytes, not {header.previous_bytes}"
                raise DamageError(f"the log before {path.name} ends at {sizes}")
            self._log_bytes, self._is_followed = reader.end, False
            is_new = may_be_new
            while header and (frame := reader.read()):
                is_new = False
                self._replay_frame(path, header, frame)
        if reader.is_torn and not (is_last or _ends_in_part_of_end(path, reader.end)):
            raise DamageError(f"{path.name} is torn and is not the last log")
        if is_new and is_last:
            path.unlink()
        elif reader.is_torn:
            self._cut_bytes = path.stat().st_size - reader.end
            os.truncate(path, reader.end)

    def _replay_frame(self, path: Path, header: Header, frame: Frame) -> None:
        if self._is_followed or frame.kind not in (FrameKind.RECORD, FrameKind.END):
            raise DamageError(f"{path.name} contains a frame that is not a record")
        if frame.kind is FrameKind.END:
            self._is_followed = True
            return
        if header.identity.version != self._folder.identity.version:
            raise _DroppedError("OTHER_VERSION", f"changes were written by {header.identity.version}")
        self._records += 1
        execute_record(self._state, frame.payload)
        self._log_bytes = frame.end

    def _check_origin(self, path: Path, header: Header | None) -> None:
        if header is None:
            raise DamageError(f"{path.name} has no header")
        if header.identity.boot_id != self._folder.identity.boot_id:
            raise _DroppedError("MACHINE_RESTARTED", "the machine was restarted since the journal was written")
        if header.file_id != file_id(path):
            raise _DroppedError("COPIED", f"{path.name} is a copy, which may be older than the last answers")


def _ends_in_part_of_end(path: Path, position: int) -> bool:
    """Whether a log is torn in its END, because the process was killed after it had created the next log."""
    end = encode_frame(FrameKind.END, b"")
    with path.open("rb") as file:
        file.seek(position)
        return end.startswith(file.read(len(end)))


def _dropped(folder: Folder, make: Callable[[], State], past_epoch: int, error: Exception) -> Recovery:
    reason = "ANSWERS_DIFFER"
    if isinstance(error, _DroppedError):
        reason = error.reason
    elif isinstance(error, DamageError):
        reason = "DAMAGED"
    state = make()
    state.execute(commands.LoseSessions(), 0.0)
    for past in _past_pools(folder):
        epoch = max(past.epoch, past_epoch) + EPOCH_LEAP
        if past.config:
            state.execute(commands.OpenEpoch(past.config, b"", epoch), 0.0)
        else:
            state.pools.past_epoch = max(state.pools.past_epoch, epoch)
    return Recovery(state, dropped=reason, detail=str(error))


def _past_pools(folder: Folder) -> list[PastPool]:
    try:
        return folder.read_pools() or []
    except DamageError:
        return []
