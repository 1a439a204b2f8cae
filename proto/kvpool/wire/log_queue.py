"""Writes log records to stderr in a thread, so that a reader of stderr who pauses blocks that thread only.

1. Logging never waits: if the queue is full, the record is dropped and counted.
2. Exit never waits for longer than `FLUSH_SECONDS`. The thread writes to the file descriptor, because an exiting Python
   would wait for the lock of `sys.stderr`.
"""

import contextlib
import logging
import os
import select
import threading
from queue import Full, Queue
from typing import Final

CAPACITY_RECORDS: Final = 10_000
"""Maximum number of records that wait to be written; more than a server with `--max-sessions` logs when all end."""

FLUSH_SECONDS: Final = 2.0
"""Maximum time that an exit waits for the records to be written."""

_STDERR: Final = 2

_log = logging.getLogger("kvpool.log")


class LogQueue(logging.Handler):
    """Formats records and queues them for a thread that writes them to stderr.

    Not a `QueueHandler` with a `QueueListener`, whose `stop` waits without a limit.

    Args:
        formatter: Formats the records.
        capacity_records: Maximum number of records that wait.

    Attributes:
        dropped_records: Number of records dropped because the queue was full.
    """

    def __init__(self, formatter: logging.Formatter, capacity_records: int = CAPACITY_RECORDS) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped_records = 0
        self._unreported_records = 0
        self._counting = threading.Lock()
        self._queue: Queue[str | threading.Event] = Queue(capacity_records)
        threading.Thread(target=self._write_all, name="kvpool-log", daemon=True).start()

    def handle(self, record: logging.LogRecord) -> bool:
        """Queues a record. Takes no lock, so that the thread can log while an exit holds the handler's lock."""
        is_wanted = bool(self.filter(record))
        if is_wanted:
            self.emit(record)
        return is_wanted

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record, or drops it."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - as every handler of the standard library
            self.handleError(record)
        else:
            self.write_line(line)

    def write_line(self, line: str) -> None:
        """Queues a line, or drops it."""
        try:
            self._queue.put_nowait(line)
        except Full:
            with self._counting:
                self.dropped_records += 1
                self._unreported_records += 1

    def flush(self) -> None:
        """Waits until the queued records are written, at most `FLUSH_SECONDS`."""
        for _ in range(2):  # the first time, the thread may queue a record about dropped records
            written = threading.Event()
            try:
                self._queue.put(written, timeout=FLUSH_SECONDS / 2)
            except Full:
                return
            if not written.wait(FLUSH_SECONDS / 2):
                return

    def _write_all(self) -> None:
        while True:
            entry = self._queue.get()
            if isinstance(entry, str):
                _write(entry)
            if self._queue.empty():
                self._report_dropped()
            if isinstance(entry, threading.Event):
                entry.set()

    def _report_dropped(self) -> None:
        with self._counting:
            dropped_records, self._unreported_records = self._unreported_records, 0
        if dropped_records:
            _log.warning("log records dropped", extra={"records": dropped_records})


def dropped_log_records() -> int:
    """Returns the number of records that this process dropped."""
    return sum(handler.dropped_records for handler in logging.getLogger().handlers if isinstance(handler, LogQueue))


def _write(line: str) -> None:
    left = f"{line}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):  # stderr has no reader any more
        while left:
            try:
                left = left[os.write(_STDERR, left) :]
            except BlockingIOError:  # another process made the pipe non-blocking
                select.select((), (_STDERR,), ())
