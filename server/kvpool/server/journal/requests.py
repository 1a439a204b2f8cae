"""The requests in the newest files of a journal, which a server may be writing. Only reads the files.

The state of the newest snapshot is restored, and the changes since then are executed, as a recovery does. So the hashes
and tokens of a request are those of the server, at no cost for it. Each log names its end, after which the next log
begins; a file that the server deletes meanwhile is read to its end.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import ApplyStep
from kvpool.core.ids import RequestNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.state import State
from kvpool.server.codec import DamageError
from kvpool.server.journal.folder import OpenFile, Writer, reading
from kvpool.server.journal.frames import FrameKind
from kvpool.server.journal.records import Record, execute_record
from kvpool.server.journal.snapshot import load_snapshot

_NUM_ATTEMPTS: Final = 3
"""Number of times that the newest snapshot is looked for, if the server replaces it meanwhile."""


@dataclass(frozen=True, slots=True)
class JournaledRequest:
    """A request that a session declared.

    Attributes:
        pool: Its pool.
        session: Its session.
        request: Its tokens and hashes.
        declared_seconds: The time of its declaration, by the server's clock.
    """

    pool: KVCacheManager
    session: Session
    request: Request
    declared_seconds: float

    @property
    def has_ended(self) -> bool:
        """Whether it was freed, or its session has ended."""
        request, session = self.request, self.session
        is_open = self.pool.sessions.get(session.session_number) is session
        return not is_open or session.requests.get(request.request_id) is not request


def journaled_requests(folder: Path, reads_on: Callable[[], bool]) -> Iterator[JournaledRequest]:
    """Yields the requests that were declared since the newest snapshot, in this order, each when it has ended.

    Args:
        folder: The journal.
        reads_on: Called when everything is read; returns whether to wait for more. After false, requests that have not
            ended are yielded as they are.

    Raises:
        DamageError: The files are damaged, of another version, or there is no snapshot with a log.
        OSError: A file cannot be read.
        KvpoolError: A change is refused, so the files do not belong together.
        MismatchError: As KvpoolError, a change has another result.
    """
    state = State()
    number = _load_newest(folder, state)
    declared: deque[JournaledRequest] = deque()
    while True:
        with reading(folder / f"log-{number}") as file:
            _check_version(file)
            frames, has_next = file.frames, False
            while not has_next:
                for frame in frames:
                    if frame.kind is FrameKind.END:
                        has_next = True
                        break
                    declared += _declared(state, execute_record(state, frame.payload))
                    while declared and declared[0].has_ended:
                        yield declared.popleft()
                if not has_next and not reads_on():
                    yield from declared
                    return
                frames = file.later_frames()
        number += 1


def _load_newest(folder: Path, state: State) -> int:
    """Restores the newest snapshot, and returns its number."""
    for left in reversed(range(_NUM_ATTEMPTS)):
        numbers = [int(path.name.removeprefix("snapshot-")) for path in folder.glob("snapshot-*") if not path.suffix]
        if not numbers:
            raise DamageError("there is no snapshot")
        try:
            with reading(folder / f"snapshot-{max(numbers)}") as file:
                _check_version(file)
                load_snapshot(state, file.frames)
        except FileNotFoundError:
            if not left:
                raise
        else:
            return max(numbers)
    raise AssertionError


def _check_version(file: OpenFile) -> None:
    version = Writer.this_process().version
    if file.header is None:
        raise DamageError("a file has no header")
    if file.header.writer.version != version:
        raise DamageError(f"it was written by {file.header.writer.version}; this is {version}")


def _declared(state: State, record: Record) -> Iterator[JournaledRequest]:
    """The requests that a change declares, and does not free."""
    command = record.command
    if not isinstance(command, ApplyStep) or not any(command.step.declares):
        return
    found = state.sessions.get(command.session_id)
    if found is None:
        return
    pool, session = found
    for number, is_new in zip(command.step.request_numbers, command.step.declares, strict=True):
        request = session.by_number.get(RequestNumber(number)) if is_new else None
        if request:
            yield JournaledRequest(pool, session, request, record.now_seconds)
