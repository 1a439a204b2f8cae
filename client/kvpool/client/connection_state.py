"""Whether a connection to a server may be used."""

import os

from kvpool.core.errors import WrongStateError


class ConnectionState:
    """State of a connection. It belongs to the process that made it: a forked process has none of its threads."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check(self) -> None:
        """Raises WrongStateError unless calls can be made.

        Raises:
            WrongStateError: This process was forked from the one that connected (FORKED).
        """
        if not self.is_of_this_process:
            message = "this process was forked after it connected: call connect() in it, and open a session of its own"
            raise WrongStateError("FORKED", message)

    @property
    def is_of_this_process(self) -> bool:
        """Whether the connection was made in this process."""
        return self._pid == os.getpid()
