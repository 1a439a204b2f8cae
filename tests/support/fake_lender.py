"""A lender for tests: threads that answer on a unix socket, and memory in a file."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from kvpool.core.errors import KvpoolError
from kvpool.v1 import lending_pb2
from kvpool.v1.link_pb2 import LinkWelcome
from kvpool.wire import link
from kvpool.wire.errors import to_status
from kvpool.wire.frames import FrameReader, encode_frame
from kvpool.wire.link import Kind
from support.waiting import DEADLINE_SECONDS

Answer = lending_pb2.Mapped | bytes | KvpoolError | None
"""What the lender sends: the memory, other bytes, a refusal, or nothing."""


def answer_frame(**message: Any) -> bytes:
    """The frame of an answer."""
    return encode_frame(Kind.ANSWER, lending_pb2.LendResponse(**message).SerializeToString())


class FakeLender:
    """A lender.

    Attributes:
        address: Where it listens.
        offer: What it offers.
        epoch: The pool's epoch.
        memory: The file that it lends.
        host: Files of host memory, whose descriptors follow.
        num_host_blocks: Number of blocks in host memory.
        answers: Answers that replace the usual ones, by the kind of request, which is `hello` for the greeting.
        requests: What it received, in order, each with its kind.
    """

    def __init__(self, folder: Path, size_bytes: int = 4096) -> None:
        """Makes the memory, and listens."""
        self.address = f"unix:{folder / 'lender'}"
        self.offer = lending_pb2.LendingOffer(rank=0, world_size=1, available_bytes=size_bytes, device="cpu")
        self.epoch = 7
        self.memory = folder / "memory"
        self.memory.write_bytes(b"")
        os.truncate(self.memory, size_bytes)
        self.host: list[Path] = []
        self.num_host_blocks = 0
        self.answers: dict[str, Answer] = {}
        self.requests: list[tuple[str, Any]] = []
        self._news = threading.Condition()
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.start()

    def start(self) -> None:
        """Listens, at first or again."""
        path = self.address.removeprefix("unix:")
        Path(path).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """Ends the listener and all connections, as when the process dies."""
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.disconnect()

    def disconnect(self) -> None:
        """Ends all connections."""
        with self._news:
            connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def replace_memory(self) -> None:
        """Has other memory, of zeros, from now on."""
        replacement = self.memory.with_name("other")
        replacement.write_bytes(bytes(self.memory.stat().st_size))
        replacement.replace(self.memory)

    def add_host(self, num_blocks: int, size_bytes: int) -> Path:
        """Lends host memory, too; returns its file."""
        path = self.memory.with_name(f"host-{len(self.host)}")
        path.write_bytes(bytes(size_bytes))
        self.host.append(path)
        self.num_host_blocks = num_blocks
        return path

    def send(self, data: bytes) -> None:
        """Sends something on the newest connection."""
        self._connections[-1].sendall(data)

    def fence(self, sequence: int, *live: int, last: int, epoch: int | None = None) -> None:
        """Sends a fence: sessions with the `live` numbers may run steps, and those after `last`."""
        fence = lending_pb2.LendFence(
            fence_sequence=sequence,
            epoch=self.epoch if epoch is None else epoch,
            last_session_number=last,
            live_session_numbers=live,
        )
        self.send(answer_frame(fence=fence))

    def answer_last(self, kind: str) -> None:
        """Answers the newest request of a kind, which had no answer, on the newest connection."""
        with self._news:
            requests = [request for each, request in self.requests if each == kind]
        self._answer(self._connections[-1], kind, requests[-1])

    def wait_for(self, kind: str, count: int = 1) -> list[Any]:
        """Waits for `count` requests of a kind; returns all of them."""

        def found() -> list[Any]:
            return [request for each, request in self.requests if each == kind]

        self.wait_until(lambda: len(found()) >= count)
        with self._news:
            return found()

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Waits until a condition on the lender is met; fails after a while."""
        with self._news:
            assert self._news.wait_for(is_met, DEADLINE_SECONDS), self.requests

    def count(self, kind: str) -> int:
        """Number of requests of a kind so far."""
        with self._news:
            return sum(each == kind for each, _ in self.requests)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._news:
                self._connections.append(connection)
                self._news.notify_all()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = FrameReader(link.server_state(link.MAX_LENDING_BYTES))
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(2**16):
                for frame, payload in reader.feed(data):
                    if frame == Kind.HELLO:
                        self._take(connection, "hello", link.read_hello(payload, "lending"))
                    else:
                        request = lending_pb2.LendRequest.FromString(payload)
                        kind = request.WhichOneof("message")
                        assert kind
                        self._take(connection, kind, getattr(request, kind))

    def _take(self, connection: socket.socket, kind: str, request: Message) -> None:
        with self._news:
            self.requests.append((kind, request))
            self._news.notify_all()
        self._answer(connection, kind, request)

    def _answer(self, connection: socket.socket, kind: str, request: Any) -> None:
        answer = self.answers[kind] if kind in self.answers else self._usual_answer(kind, request)
        match answer:
            case lending_pb2.Mapped():
                with contextlib.ExitStack() as opened:
                    files = [opened.enter_context(path.open("r+b")) for path in (self.memory, *self.host)]
                    socket.send_fds(connection, [answer_frame(mapped=answer)], [file.fileno() for file in files])
            case KvpoolError():
                connection.sendall(encode_frame(Kind.REFUSED, to_status(answer).SerializeToString()))
            case bytes():
                connection.sendall(answer)

    def _usual_answer(self, kind: str, request: Any) -> Answer:
        match kind:
            case "hello":
                return link.welcome(LinkWelcome(lending=self.offer))
            case "map":
                return lending_pb2.Mapped(
                    epoch=self.epoch,
                    num_blocks=request.declared.config.num_blocks,
                    size_bytes=request.declared.size_bytes,
                    memory_id=str(self.memory.stat().st_ino),
                    num_host_blocks=self.num_host_blocks,
                )
            case "bind":
                return answer_frame(bound=lending_pb2.Bound())
            case "unmap":
                return answer_frame(unmapped=lending_pb2.Unmapped())
            case _:
                return None
