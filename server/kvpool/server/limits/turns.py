"""Who has much to do on an event loop that others wait for does it bit by bit, one of them at a time."""

import asyncio


class Turns:
    """Lets one task go on in each turn of the event loop, first come, first served.

    However many do long work in bits, what else runs on the loop waits for one bit of it, not for one of each.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Waits for the task's turn; at least until all others that are ready have run."""
        async with self._lock:
            await asyncio.sleep(0)
