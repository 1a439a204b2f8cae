"""Servers of a shard that a test controls. While it is the primary, each forwards calls and links to a real server."""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from kvpool.core.errors import NotPrimaryError
from kvpool.v1 import directory_pb2
from kvpool.wire.errors import to_status
from kvpool.wire.frames import encode_frame
from kvpool.wire.link import Kind
from support.socket_server import SocketServer, abort

_OPTIONS = (("grpc.http2.min_ping_interval_without_data_ms", 1000),)  # clients send a ping every 3 s
_DIRECTORY = "/kvpool.v1.DirectoryService/"
_WATCH = f"{_DIRECTORY}Watch"


class ShardServer(SocketServer, grpc.GenericRpcHandler):
    """A server of a shard.

    Attributes:
        calls: Names of the calls that it was sent, without those of DirectoryService; `link` for each link of steps.
        watched: Set while a client watches the shard here.
    """

    def __init__(self, folder: Path, backend: str, *, has_links: bool = True) -> None:
        """Starts as the primary.

        Args:
            folder: Folder of its sockets, which is made. They have the names of the real server's.
            backend: Address of the real server.
            has_links: Whether it forwards links of steps, or clients have to use Schedule.
        """
        folder.mkdir()
        path = folder / Path(backend).name
        self.calls: list[str] = []
        self.watched = threading.Event()
        self._refusal: NotPrimaryError | None = None
        self._shard: directory_pb2.Shard | None = None
        self._answers = threading.Event()
        self._answers.set()
        self._forwarded: set[Any] = set()
        self._watches: list[queue.SimpleQueue[directory_pb2.Shard | None]] = []
        self._channel = grpc.insecure_channel(backend)
        super().__init__(path, lambda server: server.add_generic_rpc_handlers((self,)), _OPTIONS)
        self._steps = f"{backend.removeprefix('unix:')}.steps"
        self._links: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        if has_links:
            self._listener.bind(f"{path}.steps")
            self._listener.listen()
            threading.Thread(target=self._accept, daemon=True).start()

    def refuse(self, term: int, *addresses: str) -> None:
        """Ends all calls, and refuses further ones: the primary of this term has these addresses."""
        self._refusal = NotPrimaryError(addresses, term)
        for call in list(self._forwarded):
            call.cancel()
        for link in list(self._links):
            self._refuse(link)

    def lead(self) -> None:
        """Becomes the primary again."""
        self._refusal = None

    def hang(self) -> None:
        """Withholds all answers from now on. What is sent is still applied."""
        self._answers.clear()

    def report(self, term: int, *addresses: str, standbys: Sequence[str] = ()) -> None:
        """Reports a primary to those that watch the shard, now and later; and the members, if there are standbys."""
        members = [directory_pb2.Member(addresses=[standby]) for standby in standbys]
        if members:
            members.insert(0, directory_pb2.Member(addresses=addresses, is_primary=True))
        self._shard = directory_pb2.Shard(name="s", term=term, primary_addresses=addresses, members=members)
        for watch in self._watches:
            watch.put(self._shard)

    def stop(self) -> None:
        """See `SocketServer`."""
        self._answers.set()
        for watch in self._watches:
            watch.put(None)
        for each in (self._listener, *self._links):
            _end(each)
        self._listener.close()
        super().stop()
        self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        """Handles every RPC as a stream in both directions: on the wire the kinds do not differ."""
        method = str(handler_call_details.method)
        if method == _WATCH:
            return grpc.unary_stream_rpc_method_handler(self._watch)
        if not method.startswith(_DIRECTORY):
            self.calls.append(method.rpartition("/")[2])

        def forward(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._forward(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(forward)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is stopped
            while True:
                near, _ = self._listener.accept()
                self.calls.append("link")
                self._links.add(near)
                threading.Thread(target=self._forward_link, args=(near,), daemon=True).start()

    def _forward_link(self, near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far, contextlib.suppress(OSError):
            if self._refusal:
                self._refuse(near)
            far.connect(self._steps)
            threading.Thread(target=_pump, args=(near, far), daemon=True).start()
            while answer := far.recv(2**16):
                self._answers.wait()
                near.sendall(answer)
        self._links.discard(near)

    def _refuse(self, link: socket.socket) -> None:
        if self._refusal:
            with contextlib.suppress(OSError):  # the client has ended it
                link.sendall(encode_frame(Kind.REFUSED, to_status(self._refusal).SerializeToString()))
        _end(link)

    def _watch(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        shards: queue.SimpleQueue[directory_pb2.Shard | None] = queue.SimpleQueue()
        if self._shard:
            shards.put(self._shard)
        self._watches.append(shards)
        context.add_callback(lambda: shards.put(None))
        while shard := shards.get():
            yield directory_pb2.DirectoryServiceWatchResponse(shard=shard).SerializeToString()
            self.watched.set()

    def _forward(self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        is_open = method.startswith(_DIRECTORY)
        if is_open or self._refusal is None:
            forward: Any = self._channel.stream_stream(method)
            call = forward(_until_ended(requests))
            self._forwarded.add(call)
            context.add_callback(call.cancel)
            try:
                for answer in call:
                    self._answers.wait()
                    if is_open or self._refusal is None:
                        yield answer
            except grpc.RpcError as error:
                if (is_open or self._refusal is None) and context.is_active():
                    context.set_trailing_metadata(call.trailing_metadata())
                    context.abort(error.code(), error.details() or "")
            finally:
                self._forwarded.discard(call)
        if self._refusal and not is_open:
            abort(context, self._refusal)


def _pump(near: socket.socket, far: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while step := near.recv(2**16):
            far.sendall(step)
    _end(far)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is not connected
        connection.shutdown(socket.SHUT_RDWR)


def _until_ended(requests: Iterator[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(grpc.RpcError):  # the client has ended the call
        yield from requests


@contextlib.contextmanager
def shard_servers(folder: Path, backend: str, *names: str, has_links: bool = True) -> Iterator[list[ShardServer]]:
    """Runs servers of one shard. The first is the primary of term 1; the others refuse calls, and report that."""
    servers = [ShardServer(folder / name, backend, has_links=has_links) for name in names]
    for server in servers[1:]:
        server.refuse(1, servers[0].address)
    for server in servers:
        server.report(1, servers[0].address)
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
