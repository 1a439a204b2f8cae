"""A client that takes from a server whatever it is given, and what else costs the server memory."""

import contextlib
import os
import queue
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import grpc
from hpack import Encoder

from kvpool.client import ExhaustedError, FullAttentionSpec, HashScheme, KVCacheGroup, PoolConfig
from kvpool.core.ids import PoolName
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2, event_pb2_grpc, step_pb2
from kvpool.wire.errors import from_rpc_error
from support.waiting import DEADLINE_SECONDS

HASH_BYTES: Final = 64
_APPEND: Final = 11
_ADMIT: Final = 3
_FREE: Final = 5
_LOOKUP: Final = 13
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_WINDOW_BYTES: Final = 65_535
_FRAME_BYTES: Final = 16_384
_QUIET_SECONDS: Final = 15.0
_STREAMS: Final = 64
"""Incomplete calls of one connection."""


class GreedySession:
    """A session whose steps may be of any size.

    Args:
        stub: The service.
        pool: Name of its pool.
    """

    def __init__(self, stub: allocator_pb2_grpc.AllocatorServiceStub, pool: str) -> None:
        request = allocator_pb2.OpenSessionRequest(pool_name=pool, lease_seconds=3600)
        try:
            self._session_id = stub.OpenSession(request, timeout=DEADLINE_SECONDS).session.session_id
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        self._stub = stub
        self._sequence = self._number = 0
        self._steps: queue.Queue[step_pb2.Step | None] = queue.Queue()
        self._results: Iterator[step_pb2.StepResult] | None = None

    def step(self, **columns: Any) -> step_pb2.StepResult:
        """Makes a step.

        Raises:
            KvpoolError: It is refused.
        """
        self.begin(**columns)
        return self.finish()

    def begin(self, **columns: Any) -> None:
        """Sends a step."""
        self._steps.put(step_pb2.Step(session_id=self._session_id, sequence=self._sequence + 1, **columns))
        if self._results is None:
            self._results = self._stub.Schedule(iter(self._steps.get, None))

    def finish(self) -> step_pb2.StepResult:
        """Returns the result of the step that was sent.

        Raises:
            KvpoolError: It was refused.
        """
        assert self._results is not None
        try:
            result = next(self._results)
        except grpc.RpcError as error:  # it has ended the stream
            self._steps.put(None)
            self._steps, self._results = queue.Queue(), None
            raise from_rpc_error(error) from None
        self._sequence += 1
        return result

    def declare(
        self, count: int, num_tokens: int, hashes: bytes = b"", *, id_bytes: int = 8, admits: bool = False
    ) -> list[int]:
        """Declares requests, by default with random hashes. Returns their numbers."""
        numbers = [*range(self._number + 1, self._number + 1 + count)]
        self.step(
            operations=[_ADMIT if admits else _APPEND] * count,
            request_numbers=numbers,
            declares=[True] * count,
            num_appended_tokens=[num_tokens] * count,
            request_ids=[str(number).rjust(id_bytes, "r") for number in numbers],
            lora_names=[str(number).rjust(id_bytes, "l") for number in numbers],
            block_hashes=hashes or os.urandom(HASH_BYTES * count * num_tokens),
            token_ids=[2**32 - 1] * (count * num_tokens),
        )
        self._number += count
        return numbers

    def free(self, numbers: list[int]) -> None:
        """Frees requests. Their blocks stay cached."""
        self.step(operations=[_FREE] * len(numbers), request_numbers=numbers, executed_sequence=self._sequence)

    def close(self) -> None:
        """Closes the session."""
        self._steps.put(None)
        self._stub.CloseSession(
            allocator_pb2.CloseSessionRequest(session_id=self._session_id), timeout=DEADLINE_SECONDS
        )

    def look_up(self, number: int) -> step_pb2.StepResult:
        """Looks up the prefix of a request, whose result the server remembers."""
        return self.step(operations=[_LOOKUP], request_numbers=[number])


def refused_at_once(sessions: Sequence[GreedySession], num_tokens: int) -> int:
    """Sends a step of each session before any is answered. Returns the number of those that are refused."""
    num_refused = 0
    columns = {"operations": [_APPEND], "request_numbers": [2**31 - 1], "declares": [True]}
    hashes = os.urandom(HASH_BYTES * num_tokens)
    for session in sessions:
        session.begin(
            num_appended_tokens=[num_tokens],
            request_ids=["x"],
            block_hashes=hashes,
            token_ids=[1] * num_tokens,
            **columns,
        )
    for session in sessions:
        try:
            session.finish()
        except ExhaustedError:
            num_refused += 1
    return num_refused


def greedy_pool(name: str, num_blocks: int, *, num_groups: int = 1) -> PoolConfig:
    """A pool with block events, the longest hashes and one token per block, so that each token costs most."""
    groups = tuple(KVCacheGroup(FullAttentionSpec(1), (f"layer.{i}",)) for i in range(num_groups))
    return PoolConfig(
        name=PoolName(name),
        num_blocks=num_blocks,
        max_model_len=2**20,
        groups=groups,
        enable_events=True,
        allow_too_few_blocks=True,
        hash_scheme=HashScheme("greedy", HASH_BYTES),
    )


@contextlib.contextmanager
def unread_watches(channel: grpc.Channel, pool: str, count: int) -> Iterator[None]:
    """Holds watches with a snapshot of a pool, and reads none of them."""
    stub = event_pb2_grpc.EventServiceStub(channel)
    watches = [stub.Watch(event_pb2.WatchRequest(pool_name=pool, snapshot=True)) for _ in range(count)]
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()


class IncompleteCalls:
    """Calls whose message lacks its last byte, on one HTTP/2 connection. Sends as much as the server's windows admit.

    Args:
        port: Port of the server on this machine.
        count: Number of calls.
        size_bytes: Size of each message.
    """

    def __init__(self, port: int, count: int, size_bytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.settimeout(_QUIET_SECONDS)
        fields = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), ("te", "trailers")]
        fields += [(":path", "/kvpool.v1.AllocatorService/AllocateSlots"), ("content-type", "application/grpc")]
        self._initial = self._window = _WINDOW_BYTES
        self._streams = {1 + 2 * i: [size_bytes + 4, 0] for i in range(count)}
        """By stream: bytes that are left, and window beyond the initial one."""
        self._received = b""
        self._socket.sendall(_PREFACE)
        for stream in self._streams:
            block = Encoder().encode(fields)
            self._send(_HEADERS, 4, stream, block)
            self._send(_DATA, 0, stream, b"\0" + struct.pack(">I", size_bytes))
            self._window -= 5
            self._streams[stream] = [size_bytes - 1, -5]

    def send(self) -> int:
        """Sends until the server takes no more for a while. Returns the number of bytes sent."""
        sent = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            while any(left for left, _ in self._streams.values()):
                sent += self._send_what_fits()
                self._receive()
        return sent

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _send_what_fits(self) -> int:
        sent = 0
        for stream, state in self._streams.items():
            size = min(state[0], self._window, self._initial + state[1])
            for part in range(0, max(size, 0), _FRAME_BYTES):
                chunk = min(_FRAME_BYTES, size - part)
                self._send(_DATA, 0, stream, bytes(chunk))
                state[0] -= chunk
                state[1] -= chunk
                self._window -= chunk
                sent += chunk
        return sent

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._socket.sendall(struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload)

    def _receive(self) -> None:
        self._received += self._take()
        while len(self._received) >= 9:
            head, flags, stream = struct.unpack(">IBI", self._received[:9])
            length, kind = head >> 8, head & 255
            if len(self._received) < 9 + length:
                return
            payload, self._received = self._received[9 : 9 + length], self._received[9 + length :]
            if kind == _SETTINGS and not flags & 1:
                for at in range(0, length, 6):
                    name, value = struct.unpack_from(">HI", payload, at)
                    if name == _SETTINGS:  # the id of the initial window happens to be the same
                        self._initial = value
                self._send(_SETTINGS, 1, 0, b"")
            elif kind == _WINDOW_UPDATE:
                (more,) = struct.unpack(">I", payload)
                if stream:
                    self._streams[stream][1] += more
                else:
                    self._window += more
            elif kind == _PING and not flags & 1:
                self._send(_PING, 1, 0, payload)

    def _take(self) -> bytes:
        data = self._socket.recv(2**16)
        if not data:
            raise ConnectionError
        return data


@contextlib.contextmanager
def incomplete_calls(port: int, count: int, size_bytes: int) -> Iterator[int]:
    """Holds calls whose messages are incomplete. Yields how many of their bytes the server took."""
    connections = [IncompleteCalls(port, min(_STREAMS, count - at), size_bytes) for at in range(0, count, _STREAMS)]
    try:
        yield sum(connection.send() for connection in connections)
    finally:
        for connection in connections:
            connection.close()


def resident_mib(pid: int) -> tuple[int, int]:
    """Resident memory of a process, now and at most so far, in MiB."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:  # noqa: PTH123 - a pseudo file
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmRSS"].split()[0]) >> 10, int(fields["VmHWM"].split()[0]) >> 10
