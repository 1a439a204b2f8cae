"""How a test has the worker of an engine stand still when half of a copy between the tiers is made.

The test makes a named pipe beside the socket of the lender, one for each direction of each engine, and opens it for
reading. In the middle of each copy, the worker tries to open the pipe for writing, which succeeds only if the test has
opened it. The worker then waits until the test closes the pipe.
"""

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DEMOTION, PROMOTION, BACKGROUND = "demotion", "promotion", "promotion in the background"
HALVED = {"worker_cls": "engine.halved_copies.HalvedCopiesWorker"}
"""Arguments of an engine that can stand still."""
_WAIT_SECONDS = 120.0


def _pipe(memory: str, direction: str, session: int) -> Path:
    """The pipe of the engine whose processes are in a session of the system; `memory` is the address of its lender."""
    return Path(f"{memory.removeprefix('unix:')}.{direction.replace(' ', '-')}.{session}")


def stand_still(memory: str, direction: str) -> None:
    """In a worker, in the middle of a copy: waits while the test wants it to."""
    with suppress(OSError):  # no reader is there
        pipe = os.open(_pipe(memory, direction, os.getsid(0)), os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, b".")
        closed = select.poll()
        closed.register(pipe, 0)  # always reports that the reader is gone
        closed.poll(1000 * _WAIT_SECONDS)
        os.close(pipe)


@contextmanager
def standing_still(memory: str, direction: str, session: int, has_ended: Callable[[], bool]) -> Iterator[bool]:
    """Has an engine stand still in its next copy of a direction, to the end of the context.

    Args:
        memory: Address of its lender.
        direction: DEMOTION, PROMOTION or BACKGROUND.
        session: The session of its processes.
        has_ended: Whether its work has ended, so that no copy follows.

    Yields:
        Whether it stands still: False if its work ended before.
    """
    path = _pipe(memory, direction, session)
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    due = time.monotonic() + _WAIT_SECONDS
    try:
        while not (stands := bool(select.select([pipe], [], [], 0.02)[0])) and not has_ended():
            assert time.monotonic() < due, f"no {direction} and no end of the work within {_WAIT_SECONDS} s"
        yield stands
    finally:
        path.unlink()
        os.close(pipe)
