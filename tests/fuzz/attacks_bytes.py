"""Attacks below gRPC: other protocols, broken HTTP/2, floods of frames.

Each attack sends as long as the server takes it; that the server hangs up is as good an answer as any.
"""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
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


def _rapid_reset(server: Server) -> None:
    block = headers("/kvpool.v1.AllocatorService/Schedule")
    calls = (raw(1, 4, i, block) + raw(3, 0, i, b"\0\0\0\x08") for i in range(1, 2 * _FLOOD, 2))
    send(server, _http2(*calls))


def _rapid_reset_of_calls(server: Server) -> None:
    """A flood of complete calls, so that the server starts each one."""
    block = headers("/kvpool.v1.AdminService/ListPools")
    calls = (
        raw(1, 4, i, block) + raw(0, 1, i, b"\0" * 5) + raw(3, 0, i, b"\0\0\0\x08") for i in range(1, 2 * _FLOOD, 2)
    )
    send(server, _http2(*calls))


def _thousand_streams(server: Server) -> None:
    block = headers("/kvpool.v1.WorkerService/Join")
    send(server, _http2(*(raw(1, 4, i, block) for i in range(1, 2001, 2))))


def _continuations(server: Server) -> None:
    first = raw(1, 0, 1, headers("/kvpool.v1.AllocatorService/GetPool"))
    send(server, _http2(first, *(raw(9, 0, 1, b"\x40\x01a\x7f" + b"b" * 127) for _ in range(_FLOOD))))


def _bad_streams(server: Server) -> None:
    block = headers("/kvpool.v1.AllocatorService/GetPool")
    for frames in (
        [raw(1, 4, 0, block)],
        [raw(1, 4, 2, block)],
        [raw(1, 4, 5, block), raw(1, 4, 3, block)],
        [raw(1, 4, 1, block), raw(1, 4, 1, block)],
        [raw(0, 0, 0, b"data")],
        [raw(0, 0, 7, b"data")],
        [raw(0, 1, 1, b"x"), raw(1, 4, 1, block), raw(0, 1, 1, b""), raw(0, 0, 1, b"after its end")],
        [raw(2, 0, 1, struct.pack(">IB", 1, 5))],
        [raw(5, 4, 1, struct.pack(">I", 2) + block)],
        [raw(7, 0, 0, struct.pack(">II", 2**31 - 1, 1))],
        [raw(1, 12, 1, b"\xff" + block)],
        [raw(99, 255, 1, b"unknown")],
    ):
        send(server, _http2(*frames))


def _bad_sizes(server: Server) -> None:
    block = headers("/kvpool.v1.AllocatorService/GetPool")
    for frames in (
        [raw(0, 0, 1, b"", 2**24 - 1)],
        [raw(1, 4, 1, block), raw(0, 0, 1, b"\0" * 20_000)],
        [raw(4, 0, 0, b"\0" * 5)],
        [raw(4, 0, 0, struct.pack(">HI", 5, 1))],
        [raw(4, 0, 0, struct.pack(">HI", 4, 2**32 - 1))],
        [raw(6, 0, 0, b"\0")],
        [raw(3, 0, 1, b"\0")],
        [raw(8, 0, 0, struct.pack(">I", 0))],
        [raw(8, 0, 0, struct.pack(">I", 2**31 - 1))] * 2,
        [raw(1, 4, 1, block), raw(8, 0, 1, struct.pack(">I", 2**31 - 1))] * 2,
    ):
        send(server, _http2(*frames))


def _bad_headers(server: Server) -> None:
    rng = Random(9)
    path = "/kvpool.v1.AllocatorService/GetPool"
    for block in (
        b"\x80",
        b"\xff" * 20,
        b"\x3f\xff\xff\xff\xff\x7f",
        rng.randbytes(200),
        headers(path, ("x", "y" * 20_000))[:16_000],
        headers(path, *((f"x{i}", "y") for i in range(500))),
        headers(path, (":path", "/twice")),
        headers(path, ("UPPER", "case"), ("connection", "close"), ("\0", "\r\n")),
        headers(path, ("grpc-timeout", "99999999999999999999n")),
        headers(path, ("grpc-timeout", "-1S")),
        Encoder().encode([(":method", "GET"), (":path", "/")]),
        Encoder().encode([]),
    ):
        send(server, _http2(raw(1, 5, 1, block)))


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
    "rapid reset": _rapid_reset,
    "rapid reset of whole calls": _rapid_reset_of_calls,
    "a thousand streams": _thousand_streams,
    "a flood of continuations": _continuations,
    "a flood of settings": lambda server: send(server, _http2(*[SETTINGS] * _FLOOD)),
    "a flood of pings": lambda server: send(server, _http2(*[raw(6, 0, 0, b"\0" * 8)] * _FLOOD)),
    "a flood of empty data": lambda server: send(
        server,
        _http2(raw(1, 4, 1, headers("/kvpool.v1.AllocatorService/Schedule")), *[raw(0, 0, 1, b"")] * _FLOOD),
    ),
    "bad streams": _bad_streams,
    "bad sizes": _bad_sizes,
    "bad headers": _bad_headers,
}
