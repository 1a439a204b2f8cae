"""Fault injection: named points at which a server that a test started dies, stops, waits or fails.

`support.server_program` reads the environment variable KVPOOL_FAULTS. It holds `POINT:ACTION:WHEN`, several separated
by commas. ACTION is `kill` (SIGKILL to the process itself), `stop` (SIGSTOP to the process itself), `error` (raises
OSError), `bug` (raises ZeroDivisionError) or `sleep=SECONDS` (blocks the whole process). WHEN is the number of the
visit, counted from 1, or `CHANCE@SEED`: every visit strikes with that probability, drawn from that seed (any text).
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool.server.fault_points import FaultPoints
from kvpool.server.journal.frames import FrameKind

VARIABLE: Final = "KVPOOL_FAULTS"
POINTS: Final = frozenset(
    {
        "step.decoded",  # a change was received and is not applied yet
        "journal.before_write",  # a change is applied and not in the journal yet
        "journal.half_written",  # half of the change's record is in the journal
        "step.applied",  # a change is applied, and in the journal if there is one; its response is not sent
        "step.answered",  # a step's response was handed to gRPC
        "session.opened",  # a session is open, its id is not sent yet
        "session.closed",  # a session is closed, the response is not sent yet
        "lease.expired",  # sessions ended because their lease expired
        "epoch.opened",  # ranks formed a pool, which is not announced yet
        "snapshot.begun",  # the journal's next log has begun, its snapshot is empty
        "snapshot.slice_written",  # a part of the snapshot is written
        "snapshot.before_rename",  # the whole snapshot is written under a temporary name
        "snapshot.before_delete",  # the snapshot has its name, the older files are not deleted yet
        "rank.registered",  # a rank is registered, the response is not sent yet
        "rank.initialized",  # a rank reported its allocation, which may open the pool
    }
)
"""All points. Each comment says what has happened when the point is reached."""


@dataclass(slots=True)
class _Fault:
    act: Callable[[], object]
    due: Callable[[], bool]


class ArmedFaults(FaultPoints):
    """Fault points that a test arms.

    Args:
        text: As KVPOOL_FAULTS holds it.

    Raises:
        ValueError: As `arm`.
    """

    __slots__ = ("_armed",)
    can_be_armed = True

    def __init__(self, text: str = "") -> None:
        self._armed: dict[str, list[_Fault]] = {}
        self.arm(text)

    def arm(self, text: str) -> None:
        """Arms points, in place of those armed before; an empty text arms none.

        Args:
            text: As KVPOOL_FAULTS holds it.

        Raises:
            ValueError: An entry names an unknown point or action, or is malformed. Nothing is changed then.
        """
        armed: dict[str, list[_Fault]] = {}
        for entry in filter(None, text.split(",")):
            parts = entry.split(":")
            if len(parts) != 3:
                raise ValueError(f"{VARIABLE}: {entry!r} is not POINT:ACTION:WHEN")
            point, action, when = parts
            _check(point)
            armed.setdefault(point, []).append(_Fault(_action(action), _visits(when)))
        self._armed = armed

    def reach(self, point: str) -> None:
        """Passes a point and does what is armed there.

        Raises:
            OSError: The point is armed with `error`.
            ValueError: There is no such point.
        """
        _check(point)
        for fault in self._armed.get(point, ()):
            if fault.due():
                fault.act()

    def in_halves(self, write: Callable[[int, bytes], None]) -> Callable[[int, bytes], None]:
        """A function that writes frames like `write`, and reaches `journal.half_written` within those of records."""

        def write_frame(descriptor: int, frame: bytes) -> None:
            half = len(frame) // 2 if frame[4] == FrameKind.RECORD else 0
            if half:
                write(descriptor, frame[:half])
                self.reach("journal.half_written")
            write(descriptor, frame[half:])

        return write_frame


def _check(point: str) -> None:
    if point not in POINTS:
        raise ValueError(f"{VARIABLE}: {point!r} is not a fault point; known: {', '.join(sorted(POINTS))}")


def _action(text: str) -> Callable[[], object]:
    match text.split("="):
        case ["kill"]:
            return lambda: os.kill(os.getpid(), signal.SIGKILL)
        case ["stop"]:
            return lambda: os.kill(os.getpid(), signal.SIGSTOP)
        case ["error"]:
            return _fail
        case ["bug"]:
            return lambda: 1 // 0
        case ["sleep", seconds]:
            wait_seconds = _number(seconds)
            return lambda: time.sleep(wait_seconds)
        case _:
            raise ValueError(f"{VARIABLE}: {text!r} is not an action; known: kill, stop, error, bug, sleep=SECONDS")


def _fail() -> None:
    raise OSError("a fault point was armed to fail")


def _visits(text: str) -> Callable[[], bool]:
    chance, at, seed = text.partition("@")
    if not at:
        visits = itertools.count(1)
        wanted = _number(text)
        return lambda: next(visits) == wanted
    share, source = _number(chance), random.Random(seed)  # noqa: S311 - a test's dice
    return lambda: source.random() < share


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{VARIABLE}: {text!r} is not a number") from None
