"""A `kvpool serve` of its own process, to be killed and started again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.server import CommandLineServer

LEASE_SECONDS = "10"


class Service(CommandLineServer):
    """A service.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        """Starts it, with its socket in a folder."""
        self.address = f"unix:{folder / 's'}"
        lease = {"KVPOOL_SERVE_DEFAULT_LEASE_SECONDS": LEASE_SECONDS}
        super().__init__(self.address, options=options, environment=lease)


@contextmanager
def service(folder: Path, *options: str) -> Iterator[Service]:
    """Starts a service, and stops it unless it was killed; fails if it logged a bug or did not stop cleanly."""
    with Service(folder, *options) as started:
        yield started
