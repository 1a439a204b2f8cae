"""Attacks with valid HTTP/2 and invalid gRPC: framing, compression, metadata, streams."""

import gzip
import struct
import threading
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any, Final

import grpc

from fuzz.attacked import POOL, Server
from fuzz.attacks_bytes import PREFACE, SETTINGS, headers, raw, send
from fuzz.contract import METHODS
from kvpool.v1 import allocator_pb2, step_pb2
from kvpool.wire.errors import from_rpc_error

_DEADLINE_SECONDS: Final = 60.0
_OPEN: Final = "/kvpool.v1.AllocatorService/OpenSession"
_SCHEDULE: Final = "/kvpool.v1.AllocatorService/Schedule"
_NUM_STREAMS: Final = 1000
_OF_METADATA: Final = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
)


@cache
def _bomb() -> bytes:
    return gzip.compress(b"\0" * (200 * 2**20), 9)


def _framed(payload: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    return bytes([compressed]) + struct.pack(">I", len(payload) if length is None else length) + payload


def _call(server: Server, path: str, body: bytes, *extra: tuple[str, str]) -> bytes:
    """Sends a hand-written call; returns the server's response."""
    data = b"".join(raw(0, 0, 1, body[at : at + 16_384]) for at in range(0, len(body), 16_384))
    opening = PREFACE + SETTINGS + raw(8, 0, 0, struct.pack(">I", 2**30)) + raw(1, 4, 1, headers(path, *extra))
    return send(server, [opening, data, raw(0, 1, 1, b"")])


def _framing(server: Server) -> None:
    pool = allocator_pb2.GetPoolRequest(pool_name=POOL).SerializeToString()
    path = "/kvpool.v1.AllocatorService/GetPool"
    for body, extra in (
        (_framed(pool, compressed=1), ()),
        (_framed(pool, compressed=255), ()),
        (_framed(pool, compressed=1), (("grpc-encoding", "gzip"),)),
        (_framed(pool, compressed=1), (("grpc-encoding", "magic"),)),
        (_framed(gzip.compress(pool)[:-4], compressed=1), (("grpc-encoding", "gzip"),)),
        (_framed(_bomb(), compressed=1), (("grpc-encoding", "gzip"),)),
        (_framed(pool, length=2**32 - 1), ()),
        (_framed(pool, length=17 * 2**20), ()),
        (_framed(pool, length=len(pool) + 1), ()),
        (_framed(pool) * 2, ()),
        (_framed(pool)[:3], ()),
        (b"", ()),
        (_framed(pool), (("content-type", "text/html"),)),
        (_framed(pool), (("grpc-accept-encoding", "," * 5000),)),
        (_framed(pool), (("grpc-status-details-bin", "not base64!"), ("authorization", "Bearer \x7f"))),
    ):
        _call(server, path, body, *extra)


def _garbage_messages(server: Server) -> None:
    """Sends malformed messages to every method: the status must be one that the method documents."""
    rng = Random(5)
    with grpc.insecure_channel(server.address) as channel:
        for method in METHODS.values():
            for data in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x01\xff", rng.randbytes(50)):
                error = _error_of(channel, method.path, data, is_stream=method.is_stream or method.answers_stream)
                code = error.code() if error else grpc.StatusCode.OK
                assert code in method.codes | {grpc.StatusCode.INVALID_ARGUMENT}, (method.key, data, code)
                assert data != b"\xff" or (error and from_rpc_error(error).reason == "MALFORMED"), (method.key, error)


def _error_of(
    channel: grpc.Channel, path: str, data: bytes, *, is_stream: bool = False, **options: Any
) -> grpc.RpcError | None:
    try:
        if is_stream:
            answers = _open(channel, path, iter([data]))
            next(iter(answers), None)
            answers.cancel()
        else:
            channel.unary_unary(path, _same, _same)(data, timeout=_DEADLINE_SECONDS, **options)
    except grpc.RpcError as error:
        return error
    return None


def _same(data: bytes) -> bytes:
    return data


def _open(channel: grpc.Channel, path: str, messages: Iterator[bytes]) -> Any:
    return channel.stream_stream(path, _same, _same)(messages, timeout=_DEADLINE_SECONDS)


def _bombs(server: Server) -> None:
    """Messages that declare too large a size, or are compressed: refused before they are read completely."""
    request = allocator_pb2.OpenSessionRequest(pool_name=POOL, client_name="x" * (40 * 2**20)).SerializeToString()
    with grpc.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate, grpc.Compression.NoCompression) * 4:
            error = _error_of(channel, _OPEN, request, compression=compression)
            assert error, compression
            is_plain = compression is grpc.Compression.NoCompression
            expected = grpc.StatusCode.RESOURCE_EXHAUSTED if is_plain else grpc.StatusCode.UNIMPLEMENTED
            assert error.code() is expected, (compression, error)


def _unknown_methods(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for path in ("/kvpool.v1.AllocatorService/Nothing", "/x/y", "/", "//", "/" + "a" * 4000):
            error = _error_of(channel, path, b"")
            assert error
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED, path


def _large_metadata(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for size in (1000, 20_000, 200_000):
            error = _error_of(channel, _OPEN, b"", metadata=(("authorization", "x" * size),))
            assert error
            assert error.code() in _OF_METADATA, error


def _streams(server: Server) -> None:
    """Thousands of streams: without a first message, half closed, or cancelled in the middle."""
    step = step_pb2.Step(session_id="none", sequence=1).SerializeToString()
    until = threading.Event()

    def never() -> Iterator[bytes]:
        until.wait(_DEADLINE_SECONDS)
        yield from ()

    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        silent = [_open(channel, METHODS["WorkerService.Join"].path, never()) for _ in range(20)]
        for i in range(_NUM_STREAMS):
            call = _open(channel, _SCHEDULE, iter([step] if i % 3 else []))
            if i % 3 == 0:
                call.cancel()
        until.set()
        for call in silent:
            call.cancel()


ATTACKS: Final[dict[str, Callable[[Server], object]]] = {
    "framing": _framing,
    "garbage messages": _garbage_messages,
    "bombs": _bombs,
    "unknown methods": _unknown_methods,
    "large metadata": _large_metadata,
    "streams": _streams,
}
