"""Sessions whose links a test makes and drives itself."""

from dataclasses import dataclass
from typing import Self

from kvpool.v1 import allocator_pb2, allocator_pb2_grpc
from kvpool.wire import link
from kvpool.wire.channels import TlsConfig
from support.auth import channel
from support.raw_link import RawLink, steps_hello
from support.waiting import DEADLINE_SECONDS


@dataclass(frozen=True, slots=True)
class RawSession:
    """A session that no client keeps: its lease runs.

    Attributes:
        server: Address of the server.
        session_id: The session.
        server_id: Id of the server.
        address: Where the server takes steps.
        token: The token that opened it; empty without tokens.
        tls: TLS of the connection; None for plaintext.
    """

    server: str
    session_id: str
    server_id: str
    address: str
    token: str = ""
    tls: TlsConfig | None = None

    @classmethod
    def open(cls, address: str, pool: str = "m", token: str = "", tls: TlsConfig | None = None) -> Self:
        """Opens a session with a lease of ten minutes in the pool of a server."""
        with channel(address, token or None, tls) as opened:
            stub = allocator_pb2_grpc.AllocatorServiceStub(opened)
            request = allocator_pb2.OpenSessionRequest(pool_name=pool, lease_seconds=600)
            answer = stub.OpenSession(request, timeout=DEADLINE_SECONDS)
        listener = answer.step_listener
        steps = link.listener_address(listener, address)
        return cls(address, answer.session.session_id, listener.server_id, steps, token, tls)

    def close(self) -> None:
        """Closes the session."""
        with channel(self.server, self.token or None, self.tls) as opened:
            stub = allocator_pb2_grpc.AllocatorServiceStub(opened)
            stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=self.session_id), timeout=DEADLINE_SECONDS)

    def hello(self, **fields: str) -> bytes:
        """The hello of this session; `fields` replace its fields."""
        said = {"server_id": self.server_id, "session_id": self.session_id, "token": self.token}
        return steps_hello(**{**said, **fields})

    def connect(self, first_bytes: bytes = b"") -> RawLink:
        """Connects, and sends bytes."""
        return RawLink(self.address, first_bytes, self.tls)

    def greeted(self) -> RawLink:
        """Connects, sends the hello, and waits for the welcome."""
        connected = self.connect(self.hello())
        connected.welcome()
        return connected
