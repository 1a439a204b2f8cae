"""Waits for what must happen, on a machine of any speed."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

DEADLINE_SECONDS: Final = 120.0
"""Much longer than anything that a test waits for takes on a slow and busy machine. Then the test fails."""


def wait_until(condition: Callable[[], object], what: str = "", seconds: float = DEADLINE_SECONDS) -> None:
    """Waits for a condition that has no event; `what` says which one did not come true."""
    due = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < due, what
        time.sleep(0.01)


async def until(condition: Callable[[], object]) -> None:
    """Waits for a condition that has no event, while other tasks run."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.005)
