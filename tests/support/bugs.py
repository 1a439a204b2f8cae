"""Bugs in the log of a server."""

import re
from collections.abc import Iterable

_CANCELLED_CALL = re.compile(
    r"(?:.*Exception not handled by _handle_exceptions.*\n)?"
    r"Traceback \(most recent call last\):\n"
    r"(?:  .*\n)*  .*_schedule_rpc_coro\n"
    r"(?:asyncio\.exceptions\.)?CancelledError\n"
)
"""What gRPC prints for a call that its client cancels before its handler begins, or while the server stops."""
_BUG = re.compile(r" ERROR | CRITICAL |Traceback")


def bugs_in(log: str, expected: Iterable[str] = ()) -> list[str]:
    """The lines of errors and tracebacks in a log in the console format.

    Args:
        log: The log.
        expected: Parts of lines that are no bugs.
    """
    lines = _CANCELLED_CALL.sub("", log).splitlines()
    return [line for line in lines if _BUG.search(line) and not any(part in line for part in expected)]
