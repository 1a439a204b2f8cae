"""The version of the protocol, which clients, ranks and servers exchange before they rely on each other's messages."""

from typing import Final

from kvpool.core.errors import WrongStateError
from kvpool.wire.errors import ServerError

PROTOCOL_VERSION: Final = 4
"""Increment it when the meaning of a field changes, or a peer must understand a new one."""

UNSTATED: Final = 0
"""The version of a caller that states none, such as one generated from the .proto files. What changed its meaning since
version 1 is refused with an error that names the field."""


def check_client(version: int) -> None:
    """Checks, in a server, the version that a client sent. The server has changed nothing yet.

    Raises:
        WrongStateError: The server speaks another version.
    """
    if version not in (UNSTATED, PROTOCOL_VERSION):
        raise WrongStateError(
            "PROTOCOL_VERSION",
            f"the client speaks protocol version {version}, the server version {PROTOCOL_VERSION}; "
            "use the same release of kvpool on both sides",
            field="protocol_version",
        )


def check_stated(version: int, num_host_blocks: int) -> None:
    """Checks, in a server, that a client of a pool with host memory states its version: it must copy blocks.

    Raises:
        WrongStateError: It states none.
    """
    if num_host_blocks and version == UNSTATED:
        message = "state it: the engines of a pool with host memory must make the copies that results order"
        raise WrongStateError("PROTOCOL_VERSION", message, field="protocol_version")


def check_server(version: int) -> None:
    """Checks, in a client, the version that a server sent. The client relies on the server's answers.

    Raises:
        ServerError: The server speaks another version, or is from before protocol versions.
    """
    if version != PROTOCOL_VERSION:
        spoken = f"protocol version {version}" if version else "no protocol version"
        raise ServerError(
            "PROTOCOL_VERSION",
            f"the server speaks {spoken}, the client version {PROTOCOL_VERSION}; "
            "use the same release of kvpool on both sides",
            field="protocol_version",
        )
