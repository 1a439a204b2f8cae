"""Links, which carry steps, lent memory and records: which frame may follow which. No I/O; link.proto documents them.

| state | a server may receive | a client may receive |
|-|-|-|
| greeting | PROBE: it is probed; HELLO: it is open | PROOF: it is probed; as probed |
| probed | HELLO: it is open | WELCOME: it is open; REFUSED: it is over |
| open | REQUEST | ANSWER; REFUSED: then it is over, unless `refusal_ends` is false |
| over | nothing | nothing |

A client may send requests before the welcome. They are answered after it, in order.
"""

import hmac
from enum import IntEnum
from pathlib import PurePosixPath
from typing import Final

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from kvpool.core.errors import InvalidArgumentError, KvpoolError, UnavailableError
from kvpool.v1 import allocator_pb2, link_pb2
from kvpool.wire.address import host_and_port
from kvpool.wire.errors import ServerError, from_status, malformed_error
from kvpool.wire.frames import State, encode_frame
from kvpool.wire.protocol_version import PROTOCOL_VERSION, check_client, check_server

MAX_GREETING_BYTES: Final = 16 * 1024
"""Maximum size of what is received before the link is open, from a peer that is not authenticated."""
MAX_ANSWER_BYTES: Final = 2**31
"""Maximum size of an answer. What a server accepts bounds the answers; this bounds what another program sends."""
MAX_LENDING_BYTES: Final = 2**20
"""Maximum size of a request to a lender, and of its answer."""
_MAX_PROBE_BYTES: Final = 64
OTHER_SERVER: Final = "OTHER_SERVER"
"""Reason for which a server refuses a hello with the id of another one."""
NO_SERVER: Final = {"MALFORMED", "MESSAGE_TOO_LARGE", OTHER_SERVER}
"""Reasons of the errors of first frames that show another program at the address, or another server."""
_UNIX: Final = "unix:"
_STEPS: Final = ".steps"


class Kind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    REQUEST = 4
    ANSWER = 5
    PROBE = 6
    PROOF = 7


def server_state(max_bytes: int, *, is_probed: bool = False) -> State:
    """The first state of a server.

    Args:
        max_bytes: Maximum size of a request.
        is_probed: Whether a client may send PROBE.
    """
    requests: dict[int, tuple[int, State]] = {}
    is_open = State("open", requests)
    requests[Kind.REQUEST] = max_bytes, is_open
    hello = {int(Kind.HELLO): (MAX_GREETING_BYTES, is_open)}
    probe = {int(Kind.PROBE): (_MAX_PROBE_BYTES, State("probed", hello))} if is_probed else {}
    return State("greeting", probe | hello)


def client_state(max_bytes: int = MAX_ANSWER_BYTES, *, is_probed: bool = False, refusal_ends: bool = True) -> State:
    """The first state of a client.

    Args:
        max_bytes: Maximum size of an answer.
        is_probed: Whether the server may send PROOF.
        refusal_ends: Whether nothing follows a REFUSED that answers a request.
    """
    answers: dict[int, tuple[int, State]] = {}
    over, is_open = State("over"), State("open", answers)
    answers[Kind.ANSWER] = max_bytes, is_open
    answers[Kind.REFUSED] = MAX_GREETING_BYTES, over if refusal_ends else is_open
    greeting: dict[int, tuple[int, State]] = {
        Kind.WELCOME: (MAX_GREETING_BYTES, is_open),
        Kind.REFUSED: (MAX_GREETING_BYTES, over),
    }
    proof = {int(Kind.PROOF): (_MAX_PROBE_BYTES, State("probed", greeting))} if is_probed else {}
    return State("greeting", proof | greeting)


def proof(probed: bytes, server_id: str) -> bytes:
    """What the server with this id answers to random bytes."""
    return hmac.digest(server_id.encode(), probed, "sha256")


def check_proof(answer: bytes, probed: bytes, server_id: str) -> None:
    """Checks what answers to random bytes. Raises UnavailableError (OTHER_SERVER)."""
    if not hmac.compare_digest(answer, proof(probed, server_id)):
        raise UnavailableError(OTHER_SERVER, "another program, or another server, listens there")


def hello(message: link_pb2.LinkHello) -> bytes:
    """Encodes the first frame of a client, and states the version in it."""
    message.protocol_version = PROTOCOL_VERSION
    return encode_frame(Kind.HELLO, message.SerializeToString())


def read_hello(payload: bytes, stream: str, server_id: str = "") -> link_pb2.LinkHello:
    """Decodes the first frame of a client.

    Args:
        payload: The payload of the frame.
        stream: What links to this listener carry: a field of LinkHello.
        server_id: Id of this server, if it takes steps.

    Raises:
        InvalidArgumentError: It cannot be parsed, or is of another stream.
        UnavailableError: It is meant for another server (OTHER_SERVER).
        WrongStateError: The client speaks another protocol version.
    """
    try:
        message = link_pb2.LinkHello.FromString(payload)
    except DecodeError:
        raise malformed_error() from None
    if message.steps.server_id != server_id:  # whatever version that one speaks
        text = "another server, or an earlier process of this one, gave the client this address"
        raise UnavailableError(OTHER_SERVER, text, field="server_id", retry_seconds=0.0)
    check_client(message.protocol_version)
    if message.WhichOneof("stream") != stream:
        text = f"{message.WhichOneof('stream') or 'nothing'}; this address takes links for {stream}"
        raise InvalidArgumentError("stream", text, reason="MALFORMED")
    return message


def welcome(message: link_pb2.LinkWelcome) -> bytes:
    """Encodes the answer to a hello, and states the version in it."""
    message.protocol_version = PROTOCOL_VERSION
    return encode_frame(Kind.WELCOME, message.SerializeToString())


def read_welcome(payload: bytes) -> link_pb2.LinkWelcome:
    """Decodes the answer to a hello.

    Raises:
        ServerError: The server speaks another protocol version, or sends something else.
    """
    try:
        message = link_pb2.LinkWelcome.FromString(payload)
    except DecodeError:
        message = link_pb2.LinkWelcome()
    check_server(message.protocol_version)
    return message


def read_refusal(payload: bytes, address: str = "", token_source: str = "") -> KvpoolError:
    """Decodes the error of a REFUSED. See `from_rpc_error` for the other arguments."""
    try:
        return from_status(status_pb2.Status.FromString(payload), address, token_source)
    except DecodeError:
        return ServerError("MALFORMED", "the server's error cannot be parsed")


def steps_address(address: str) -> str:
    """The address where a server that listens on `address` takes steps, unless it has a setting."""
    if address.startswith(_UNIX):
        return address + _STEPS
    host, _, port = address.rpartition(":")
    following = int(port) + 1 if int(port) else 0
    return f"{host}:{following}" if following < 2**16 else ""


def step_listener(server_id: str, addresses: list[str], bound: list[str]) -> allocator_pb2.StepListener:
    """Tells clients where a server takes steps.

    Args:
        server_id: Id of the server process.
        addresses: The addresses of its gRPC service.
        bound: The addresses where it takes steps.
    """
    folders = {PurePosixPath(each).parent for each in addresses if each.startswith(_UNIX)}
    paths = [PurePosixPath(each.removeprefix(_UNIX)) for each in bound if each.startswith(_UNIX)]
    names = [path.name if PurePosixPath(f"{_UNIX}{path}").parent in folders else str(path) for path in paths]
    ports = [host_and_port("steps_listen", each)[1] for each in bound if not each.startswith(_UNIX)]
    return allocator_pb2.StepListener(server_id=server_id, paths=names, ports=ports)


def listener_address(listener: allocator_pb2.StepListener, called: str) -> str:
    """Where a client that calls a server at `called` reaches its listener; empty if it has none of this kind."""
    if called.startswith(_UNIX):
        path = PurePosixPath(called.removeprefix(_UNIX))
        name = _preferred(list(listener.paths), path.name + _STEPS)
        return f"{_UNIX}{path.parent / name}" if name else ""
    host, _, port = called.rpartition(":")
    found = _preferred([str(each) for each in listener.ports], str(int(port) + 1))
    return f"{host}:{found}" if found else ""


def _preferred(choices: list[str], wanted: str) -> str:
    return wanted if wanted in choices else next(iter(choices), "")
