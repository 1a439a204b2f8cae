"""Attacks below gRPC: other protocols, broken HTTP/2, floods of frames.

Each attack sends as long as the server takes it; that the server hangs up is as good an answer as any.
"""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from random import Random
from typing import Final

from hpack import Encoder

from fuzz.attacked import Server

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS: Final = b"\0\0\0\x04\0\0\0\0\0"
_TLS_HELLO: Final = bytes.fromhex(
    "1603010075010000710303" + "ab" * 32 + "00000a130113021303c02fc030010000" + "3e" + "00" * 62
)
_FLOOD: Final = 5000
_SLOW_CONNECTIONS: Final = 200


def headers(path: str, *extra: tuple[str, str]) -> bytes:
    """Header block of a gRPC call."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    return Encoder().encode([*fields, ("content-type", "application/grpc"), *extra])


def raw(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """Builds an HTTP/2 frame, possibly an invalid one; `length` is the length that it declares."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def send(server: Server, chunks: Iterable[bytes]) -> bytes:
    """Sends bytes on a new connection until all are sent or the server closes it; returns the end of the response."""
    said = b""
    with server.connect() as connection:
        connection.settimeout(0.5)
        with contextlib.suppress(OSError):
            for i, chunk in enumerate(chunks):
                connection.sendall(chunk)
                if i % 64 == 0:
                    said = (said + _read(connection, wait=False))[-4096:]
            connection.shutdown(socket.SHUT_WR)
            said += _read(connection, wait=True)
    return said


def _read(connection: socket.socket, *, wait: bool) -> bytes:
    with contextlib.suppress(TimeoutError, BlockingIOError):
        return connection.recv(65_536, 0 if wait else socket.MSG_DONTWAIT)
    return b""


def _http2(*frames: bytes) -> Iterator[bytes]:
    yield PREFACE + SETTINGS
    yield from frames


def _garbage(server: Server) -> None:
    rng = Random(7)
    for size in (1, 9, 24, 1000, 100_000):
        send(server, [rng.randbytes(size)])
        send(server, _http2(rng.randbytes(size)))


def _garbage_frames(server: Server) -> None:
    rng = Random(8)
    for _ in range(40):
        frames = [
            raw(
                rng.randrange(12),
                rng.randrange(256),
                rng.choice((0, 1, 2, 3, 2**31 - 1)),
                rng.randbytes(rng.randrange(40)),
            )
            for _ in range(12)
        ]
        send(server, _http2(*frames))


def _slowly(server: Server) -> None:
    """Connections that stay open and send a byte now and then."""
    open_calls = (
        PREFACE + SETTINGS + raw(1, 4, 1, headers("/kvpool.v1.AllocatorService/Schedule")) + raw(0, 0, 1, b"\0")
    )
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(_SLOW_CONNECTIONS)]
        for at in range(0, len(open_calls), 16):
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.sendall(open_calls[at : at + 16])


def _reset_calls(method: str, *, are_whole: bool) -> Iterator[bytes]:
    """A flood of calls that are reset at once: of whole ones the server starts each."""
    block = headers(f"/kvpool.v1.{method}")
    for i in range(1, 2 * _FLOOD, 2):
        yield raw(1, 4, i, block) + (raw(0, 1, i, b"\0" * 5) if are_whole else b"") + raw(3, 0, i, b"\0\0\0\x08")


_GET_POOL: Final = "/kvpool.v1.AllocatorService/GetPool"
_BLOCK: Final = headers(_GET_POOL)
_SCHEDULE: Final = headers("/kvpool.v1.AllocatorService/Schedule")
_JOIN: Final = headers("/kvpool.v1.WorkerService/Join")

BAD_STREAMS: Final = (
    [raw(1, 4, 0, _BLOCK)],
    [raw(1, 4, 2, _BLOCK)],
    [raw(1, 4, 5, _BLOCK), raw(1, 4, 3, _BLOCK)],
    [raw(1, 4, 1, _BLOCK), raw(1, 4, 1, _BLOCK)],
    [raw(0, 0, 0, b"data")],
    [raw(0, 0, 7, b"data")],
    [raw(0, 1, 1, b"x"), raw(1, 4, 1, _BLOCK), raw(0, 1, 1, b""), raw(0, 0, 1, b"after its end")],
    [raw(2, 0, 1, struct.pack(">IB", 1, 5))],
    [raw(5, 4, 1, struct.pack(">I", 2) + _BLOCK)],
    [raw(7, 0, 0, struct.pack(">II", 2**31 - 1, 1))],
    [raw(1, 12, 1, b"\xff" + _BLOCK)],
    [raw(99, 255, 1, b"unknown")],
)
BAD_SIZES: Final = (
    [raw(0, 0, 1, b"", 2**24 - 1)],
    [raw(1, 4, 1, _BLOCK), raw(0, 0, 1, b"\0" * 20_000)],
    [raw(4, 0, 0, b"\0" * 5)],
    [raw(4, 0, 0, struct.pack(">HI", 5, 1))],
    [raw(4, 0, 0, struct.pack(">HI", 4, 2**32 - 1))],
    [raw(6, 0, 0, b"\0")],
    [raw(3, 0, 1, b"\0")],
    [raw(8, 0, 0, struct.pack(">I", 0))],
    [raw(8, 0, 0, struct.pack(">I", 2**31 - 1))] * 2,
    [raw(1, 4, 1, _BLOCK), raw(8, 0, 1, struct.pack(">I", 2**31 - 1))] * 2,
)
BAD_HEADERS: Final = (
    b"\x80",
    b"\xff" * 20,
    b"\x3f\xff\xff\xff\xff\x7f",
    Random(9).randbytes(200),
    headers(_GET_POOL, ("x", "y" * 20_000))[:16_000],
    headers(_GET_POOL, *((f"x{i}", "y") for i in range(500))),
    headers(_GET_POOL, (":path", "/twice")),
    headers(_GET_POOL, ("UPPER", "case"), ("connection", "close"), ("\0", "\r\n")),
    headers(_GET_POOL, ("grpc-timeout", "99999999999999999999n")),
    headers(_GET_POOL, ("grpc-timeout", "-1S")),
    Encoder().encode([(":method", "GET"), (":path", "/")]),
    Encoder().encode([]),
)
FRAMES: Final[dict[str, Callable[[], Iterable[Iterable[bytes]]]]] = {
    "rapid reset": lambda: [_reset_calls("AllocatorService/Schedule", are_whole=False)],
    "rapid reset of whole calls": lambda: [_reset_calls("AdminService/ListPools", are_whole=True)],
    "a thousand streams": lambda: [[raw(1, 4, i, _JOIN) for i in range(1, 2001, 2)]],
    "a flood of continuations": lambda: [
        [raw(1, 0, 1, _BLOCK), *[raw(9, 0, 1, b"\x40\x01a\x7f" + b"b" * 127)] * _FLOOD]
    ],
    "a flood of settings": lambda: [[SETTINGS] * _FLOOD],
    "a flood of pings": lambda: [[raw(6, 0, 0, b"\0" * 8)] * _FLOOD],
    "a flood of empty data": lambda: [[raw(1, 4, 1, _SCHEDULE), *[raw(0, 0, 1, b"")] * _FLOOD]],
    "bad streams": lambda: BAD_STREAMS,
    "bad sizes": lambda: BAD_SIZES,
    "bad headers": lambda: [[raw(1, 5, 1, block)] for block in BAD_HEADERS],
}
"""The frames of each connection of an attack, after its preface."""


def _send_frames(name: str, server: Server) -> None:
    for frames in FRAMES[name]():
        send(server, _http2(*frames))


ATTACKS: Final[dict[str, Callable[[Server], object]]] = {
    "garbage": _garbage,
    "garbage frames": _garbage_frames,
    "a TLS hello": lambda server: send(server, [_TLS_HELLO]),
    "HTTP/1": lambda server: send(
        server, [b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n", b"x" * 9999]
    ),
    "half a preface": lambda server: send(server, [PREFACE[:11]]),
    "a preface alone": lambda server: send(server, [PREFACE]),
    "slow connections": _slowly,
    **{name: partial(_send_frames, name) for name in FRAMES},
}
