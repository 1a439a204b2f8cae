"""A server's clock that a test sets."""

from kvpool.server.services.clock import ServerClock


class ManualClock(ServerClock):
    """A clock that stands still until the test changes `seconds`."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 1000.0

    def now_seconds(self) -> float:
        return self.seconds
