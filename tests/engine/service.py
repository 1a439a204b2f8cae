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

    def __init__(self, folder: Path, *options: str, address: str = "") -> None:
        """Starts it at an address; without one, on a socket in a folder."""
        self.address = address or f"unix:{folder / 's'}"
        lease = {"KVPOOL_SERVE_DEFAULT_LEASE_SECONDS": LEASE_SECONDS}
        super().__init__(self.address, options=options, environment=lease)


@contextmanager
def service(folder: Path, *options: str, address: str = "") -> Iterator[Service]:
    """Starts a service, and stops it unless it was killed; fails if it logged a bug or did not stop cleanly."""
    with Service(folder, *options, address=address) as started:
        yield started
