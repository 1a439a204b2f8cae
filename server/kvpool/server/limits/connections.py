"""The number of connections that fit into the process's limit of open files."""

import contextlib
import resource
import sys
from collections.abc import Sequence
from typing import Final

from kvpool.wire.address import ip_addresses

NUM_OTHER_FILES: Final = 128
"""Files that are kept for everything but connections: the journal, credentials, metrics, listeners, gRPC, Python."""
_MOST_AUTOMATIC: Final = 8192
"""Maximum per address that is chosen without a setting: twice the default of `max_sessions`."""


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard one. The soft limit is low for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an infinite limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections(requested: int, addresses: Sequence[str]) -> int:
    """Returns the maximum number of connections per address, so that all of them fit into the limit of open files.

    Args:
        requested: The setting `max_connections`; 0: as many as fit, up to 8,192.
        addresses: The addresses that the server listens on.

    Raises:
        OSError: The limit of open files is too low.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    num_files = sum(map(_num_files, addresses))
    fitting = (limit - NUM_OTHER_FILES) // num_files
    if fitting < max(requested, 1):
        needed = max(requested, 1) * num_files + NUM_OTHER_FILES
        raise OSError(
            f"max_connections: {requested or 1} for each address, as many for steps, and {NUM_OTHER_FILES} other files "
            f"need {needed} file descriptors; the limit is {limit} (ulimit -n)"
        )
    return requested or min(fitting, _MOST_AUTOMATIC)


def _num_files(address: str) -> int:
    """Descriptors per client of an address: a connection and a link, and the process of a client on this machine."""
    return 3 if address.startswith("unix:") else 2 * len(ip_addresses(address))
