"""Fault points, for tests: named instants at which this process dies, stops, waits or fails, if it was armed to.

1. Nothing is armed but by `arm`, which `kvpool serve` calls with the environment variable KVPOOL_FAULTS. What is not
   armed costs one `if` a passing.
2. A name that is no point is refused, when it is armed and when it is passed.

KVPOOL_FAULTS holds `POINT:ACTION:WHEN`, several with commas between. ACTION is `kill` (SIGKILL to itself), `stop`
(SIGSTOP to itself), `error` (raises OSError) or `sleep=SECONDS` (stops the whole process for so long). WHEN is the
number of the passing, from 1, or `CHANCE@SEED`: each passing with that chance, drawn from that seed, any text.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

VARIABLE: Final = "KVPOOL_FAULTS"

POINTS: Final = frozenset(
    {
        "step.decoded",  # a change has come, nothing is done about it yet
        "journal.before_write",  # a change is applied, and not in the journal yet
        "journal.half_written",  # half of its record is
        "step.applied",  # a change is applied, and in the journal if there is one; its answer is not sent
        "step.answered",  # a step's answer was handed to gRPC
        "session.opened",  # a session is opened, its id not yet told
        "session.closed",  # a session is closed, that is not yet told
        "lease.expired",  # sessions have ended with their lease
        "epoch.opened",  # ranks have formed a pool, which is not yet told
        "snapshot.begun",  # the journal's next log has begun, its snapshot is empty
        "snapshot.slice_written",  # a part of the snapshot is written
        "snapshot.before_rename",  # all of it, not yet under its name
        "snapshot.before_delete",  # it has its name, what it makes superfluous is still there
        "rank.registered",  # a rank is known, which is not yet told
        "rank.initialized",  # a rank has said what it allocated, which may open the pool
    }
)
"""All points, by what has happened where they stand."""


@dataclass(slots=True)
class _Fault:
    act: Callable[[], None]
    due: Callable[[], bool]


_armed: Final[dict[str, list[_Fault]]] = {}


def reach(point: str) -> None:
    """Passes a point: does what is armed there, if anything is.

    Raises:
        OSError: That is what was armed.
        ValueError: Something is armed, and this is no point.
    """
    if _armed:
        _pass(point)


def is_armed(point: str) -> bool:
    """Whether anything is armed at a point, for code that has to go another way to come to it."""
    return point in _armed


def arm(text: str) -> None:
    """Arms points, in place of those that were; an empty text arms none.

    Args:
        text: As KVPOOL_FAULTS holds it.

    Raises:
        ValueError: An entry names no point or no action, or cannot be read; nothing was changed.
    """
    armed: dict[str, list[_Fault]] = {}
    for entry in filter(None, text.split(",")):
        parts = entry.split(":")
        if len(parts) != 3:  # noqa: PLR2004 - the message names them
            raise ValueError(f"{VARIABLE}: {entry!r} is not POINT:ACTION:WHEN")
        point, action, when = parts
        _check(point)
        armed.setdefault(point, []).append(_Fault(_action(action), _passing(when)))
    _armed.clear()
    _armed.update(armed)


def _pass(point: str) -> None:
    _check(point)
    for fault in _armed.get(point, ()):
        if fault.due():
            fault.act()


def _check(point: str) -> None:
    if point not in POINTS:
        raise ValueError(f"{VARIABLE}: {point!r} is no fault point; known: {', '.join(sorted(POINTS))}")


def _action(text: str) -> Callable[[], None]:
    match text.split("="):
        case ["kill"]:
            return lambda: os.kill(os.getpid(), signal.SIGKILL)
        case ["stop"]:
            return lambda: os.kill(os.getpid(), signal.SIGSTOP)
        case ["error"]:
            return _fail
        case ["sleep", seconds]:
            wait_seconds = _number(seconds)
            return lambda: time.sleep(wait_seconds)
        case _:
            raise ValueError(f"{VARIABLE}: {text!r} is no action; known: kill, stop, error, sleep=SECONDS")


def _fail() -> None:
    raise OSError("a fault point was armed to fail")


def _passing(text: str) -> Callable[[], bool]:
    chance, at, seed = text.partition("@")
    if not at:
        passings = itertools.count(1)
        wanted = _number(text)
        return lambda: next(passings) == wanted
    share, source = _number(chance), random.Random(seed)  # noqa: S311 - a test's dice
    return lambda: source.random() < share


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{VARIABLE}: {text!r} is no number") from None
