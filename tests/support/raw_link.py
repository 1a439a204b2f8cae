"""A link without a client: a test decides each byte that a server receives."""

import select
import socket
import ssl
import struct
from typing import Self

from kvpool.core.errors import KvpoolError
from kvpool.v1 import link_pb2, step_pb2
from kvpool.wire import link
from kvpool.wire.address import host_and_port
from kvpool.wire.channels import TlsConfig
from kvpool.wire.frames import FrameReader, encode_frame
from support.waiting import DEADLINE_SECONDS


class RawLink:
    """A connection to a server's listener of links."""

    def __init__(self, address: str, first_bytes: bytes = b"", tls: TlsConfig | None = None) -> None:
        if address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(DEADLINE_SECONDS)
            self.socket.connect(address.removeprefix("unix:"))
        else:
            host, port = host_and_port("address", address)
            self.socket = socket.create_connection((host, port), DEADLINE_SECONDS)
            if tls:
                self.socket = tls.context().wrap_socket(self.socket, server_hostname=host)
        self._reader = FrameReader(link.client_state(is_probed=True, refusal_ends=False))
        self._frames: list[tuple[int, bytes]] = []
        if first_bytes:  # a connection that was refused meanwhile cannot send
            self.send(first_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self.socket.close()

    def close_write(self) -> None:
        """Ends the connection in one direction: nothing more is sent."""
        self.socket.shutdown(socket.SHUT_WR)

    def wait_ended(self) -> None:
        """Waits until the server has closed the connection, without reading what it has sent before."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        assert poll.poll(1000 * DEADLINE_SECONDS), "the server did not close the connection"

    def reset(self) -> None:
        """Ends the connection as a failure does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Sends bytes."""
        self.socket.sendall(data)

    def next(self) -> tuple[int, bytes] | None:
        """Waits for the next frame; None at the end of the connection."""
        while not self._frames:
            try:
                data = self.socket.recv(2**16)
            except (ConnectionError, ssl.SSLError):  # the server closed it with bytes unread
                data = b""
            if not data:
                return None
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def welcome(self) -> None:
        """Waits for the welcome."""
        link.read_welcome(self._payload(link.Kind.WELCOME))

    def answer(self) -> step_pb2.StepResult:
        """Waits for the result of a step."""
        return step_pb2.StepResult.FromString(self._payload(link.Kind.ANSWER))

    def refusal(self) -> KvpoolError:
        """Waits for the error, with which the connection ends; skips what comes before."""
        while (found := self.next()) and found[0] != link.Kind.REFUSED:
            pass
        assert found
        assert self.next() is None
        return link.read_refusal(found[1])

    def _payload(self, expected: link.Kind) -> bytes:
        found = self.next()
        assert found, "the server ended the connection"
        kind, payload = found
        assert kind == expected, link.read_refusal(payload) if kind == link.Kind.REFUSED else kind
        return payload


def steps_hello(server_id: str, session_id: str = "session", token: str = "") -> bytes:
    """The frame of a hello for the steps of a session."""
    steps = link_pb2.StepsHello(server_id=server_id, session_id=session_id)
    return link.hello(link_pb2.LinkHello(token=token, steps=steps))


def request(sequence: int, **columns: object) -> bytes:
    """The frame of a step, by default an empty one."""
    step = step_pb2.Step(sequence=sequence, **columns)  # type: ignore[arg-type]
    return encode_frame(link.Kind.REQUEST, step.SerializeToString())
