"""A lender for tests: threads that answer on a unix socket, and memory in a file."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import Message

from kvpool.core.errors import KvpoolError
from kvpool.v1 import lending_pb2
from kvpool.wire.errors import to_status
from kvpool.wire.lending import MessageReader, encode_message
from support.waiting import DEADLINE_SECONDS

Answer = lending_pb2.LendResponse | bytes | KvpoolError | None
"""What the lender sends: a message, other bytes, a refusal, or nothing."""


class FakeLender:
    """A lender.

    Attributes:
        address: Where it listens.
        offer: Its answer to Hello.
        epoch: The pool's epoch.
        memory: The file that it lends.
        answers: Answers that replace the usual ones, by the kind of request.
        requests: What it received, in order.
    """

    def __init__(self, folder: Path, size_bytes: int = 4096) -> None:
        """Makes the memory, and listens."""
        self.address = f"unix:{folder / 'lender'}"
        self.offer = lending_pb2.Offer(
            lending_version=2, rank=0, world_size=1, available_bytes=size_bytes, is_lent=False, device="cpu"
        )
        self.epoch = 7
        self.memory = folder / "memory"
        self.memory.write_bytes(b"")
        os.truncate(self.memory, size_bytes)
        self.answers: dict[str, Answer] = {}
        self.requests: list[lending_pb2.LendRequest] = []
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

    def send(self, message: lending_pb2.LendResponse | bytes) -> None:
        """Sends something on the newest connection."""
        data = message if isinstance(message, bytes) else encode_message(message)
        self._connections[-1].sendall(data)

    def fence(self, sequence: int, *live: int, last: int, epoch: int | None = None) -> None:
        """Sends a fence: sessions with the `live` numbers may run steps, and those after `last`."""
        self.send(
            lending_pb2.LendResponse(
                fence=lending_pb2.LendFence(
                    fence_sequence=sequence,
                    epoch=self.epoch if epoch is None else epoch,
                    last_session_number=last,
                    live_session_numbers=live,
                )
            )
        )

    def answer_last(self, kind: str) -> None:
        """Answers the newest request of a kind, which had no answer, on the newest connection."""
        with self._news:
            requests = [request for request in self.requests if request.WhichOneof("message") == kind]
        self._answer(self._connections[-1], requests[-1])

    def wait_for(self, kind: str, count: int = 1) -> list[Message]:
        """Waits for `count` requests of a kind; returns all of them."""

        def found() -> list[Message]:
            return [getattr(request, kind) for request in self.requests if request.WhichOneof("message") == kind]

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
            return sum(request.WhichOneof("message") == kind for request in self.requests)

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
        reader = MessageReader(lending_pb2.LendRequest)
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(2**16):
                for request in reader.feed(data):
                    with self._news:
                        self.requests.append(request)
                        self._news.notify_all()
                    self._answer(connection, request)

    def _answer(self, connection: socket.socket, request: lending_pb2.LendRequest) -> None:
        kind = request.WhichOneof("message")
        assert kind
        answer = self.answers[kind] if kind in self.answers else self._usual_answer(request)
        if isinstance(answer, KvpoolError):
            answer = lending_pb2.LendResponse(refused=to_status(answer).SerializeToString())
        if answer is None:
            return
        data = answer if isinstance(answer, bytes) else encode_message(answer)
        if isinstance(answer, lending_pb2.LendResponse) and answer.WhichOneof("message") == "mapped":
            with self.memory.open("r+b") as memory:
                socket.send_fds(connection, [data], [memory.fileno()])
        else:
            connection.sendall(data)

    def _usual_answer(self, request: lending_pb2.LendRequest) -> lending_pb2.LendResponse | None:
        match request.WhichOneof("message"):
            case "hello":
                return lending_pb2.LendResponse(offer=self.offer)
            case "map":
                declared = request.map.declared
                mapped = lending_pb2.Mapped(
                    epoch=self.epoch,
                    num_blocks=declared.config.num_blocks,
                    size_bytes=declared.size_bytes,
                    memory_id=str(self.memory.stat().st_ino),
                )
                return lending_pb2.LendResponse(mapped=mapped)
            case "bind":
                return lending_pb2.LendResponse(bound=lending_pb2.Bound())
            case "unmap":
                return lending_pb2.LendResponse(unmapped=lending_pb2.Unmapped())
            case _:
                return None
