"""Whether a connection to a server may be used, and the errors of its calls."""

import os

import grpc

from kvpool.core.errors import KvpoolError, WrongStateError
from kvpool.wire.channels import Access
from kvpool.wire.errors import from_rpc_error


class ConnectionState:
    """State of a connection. It belongs to the process that made it: a forked process has none of its threads."""

    def __init__(self, address: str, access: Access) -> None:
        self._address = address
        self._token_source = access.token_source
        self._pid = os.getpid()
        self._is_closed = False

    def check(self) -> None:
        """Raises WrongStateError unless calls can be made.

        Raises:
            WrongStateError: This process was forked from the one that connected (FORKED), or it was closed (CLOSED).
        """
        if self._pid != os.getpid():
            message = "this process was forked after it connected: call connect() in it, and open a session of its own"
            raise WrongStateError("FORKED", message)
        if self._is_closed:
            raise closed_error()

    def error_of(self, error: grpc.RpcError) -> KvpoolError:
        """Decodes the error of a call. Names the server that cannot be reached, or the token that it refuses."""
        return from_rpc_error(error, self._address, self._token_source)

    def end(self) -> bool:
        """Notes that it is closed. Returns whether there is something to end: not twice, nor in a forked process."""
        is_open, self._is_closed = not self._is_closed, True
        return is_open and self._pid == os.getpid()


def closed_error() -> WrongStateError:
    """Makes the error of a call on a connection that was closed."""
    return WrongStateError("CLOSED", "the client was closed; its sessions end with their leases: call connect() again")
