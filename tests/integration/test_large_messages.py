"""Large and compressed messages: what is too large is refused, before it is parsed where possible."""

import gzip
import queue
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from fuzz.attacks_bytes import PREFACE, SETTINGS, headers, raw
from kvpool.client import Session, connect
from kvpool.server.limits.messages import SMALL_MESSAGE_BYTES
from kvpool.v1 import admin_pb2, allocator_pb2, event_pb2, step_pb2
from kvpool.wire.errors import from_rpc_error
from support.auth import Entry, channel, secret_of, write_tokens
from support.server import ServerProcess, pool_config, server_process
from support.waiting import DEADLINE_SECONDS

MIB = 2**20
LARGE = [("grpc.max_send_message_length", -1)]
NUM_TOGETHER = 64
SERVICE = "/kvpool.v1.AllocatorService"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as server:
        yield server


@pytest.fixture
def opened(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.addresses[0], options=LARGE) as opened:
        yield opened


@pytest.fixture
def session(server: ServerProcess, pool_name: str) -> Iterator[Session]:
    with connect(server.addresses[0], deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config(pool_name))
        with client.open_session(pool_name) as session:
            yield session


def refusal(
    opened: grpc.Channel, method: str, data: bytes, compression: grpc.Compression | None = None
) -> grpc.RpcError:
    """Sends a message; returns the error that ends the call."""
    call: Any = opened.stream_stream(method)
    with pytest.raises(grpc.RpcError) as caught:
        next(call(iter([data]), timeout=DEADLINE_SECONDS, compression=compression))
    return caught.value


def status(server: ServerProcess, name: str) -> int:
    """An entry of the process's status, in bytes."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak(server: ServerProcess) -> int:
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    return status(server, "VmHWM")


def test_compressed_messages_are_refused(opened: grpc.Channel, session: Session) -> None:
    before = session.pool()
    data = allocator_pb2.OpenSessionRequest(pool_name=session.config.name).SerializeToString()
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        call: Any = opened.unary_unary(f"{SERVICE}/OpenSession")
        with pytest.raises(grpc.RpcError, match="is disabled") as caught:
            call(data, timeout=DEADLINE_SECONDS, compression=compression)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert session.pool() == before


def test_compressed_messages_take_no_memory(server: ServerProcess, session: Session) -> None:
    message = gzip.compress(allocator_pb2.KeepAliveRequest(session_id="x" * (15 * MIB)).SerializeToString())
    body = b"\1" + struct.pack(">I", len(message)) + message
    frames = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    block = headers(f"{SERVICE}/KeepAlive", ("grpc-encoding", "gzip"))
    before = reset_peak(server)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(DEADLINE_SECONDS)
        peer.connect(server.addresses[0].removeprefix("unix:"))
        peer.sendall(PREFACE + SETTINGS + raw(8, 0, 0, struct.pack(">I", 2**30)))
        for number in range(NUM_TOGETHER):
            peer.sendall(raw(1, 4, 2 * number + 1, block))
        for number in range(NUM_TOGETHER):
            peer.sendall(b"".join(raw(0, 0, 2 * number + 1, frame) for frame in frames))
        assert session.pool(), "a well-behaved client is answered"
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(65_536):
            pass
    assert status(server, "VmHWM") - before < 200 * MIB


SMALL_METHODS: dict[str, Message] = {
    f"{SERVICE}/KeepAlive": allocator_pb2.KeepAliveRequest(session_id="x" * (SMALL_MESSAGE_BYTES + 1)),
    f"{SERVICE}/GetPool": allocator_pb2.GetPoolRequest(pool_name="x" * (15 * MIB)),
    f"{SERVICE}/WaitUntilReady": allocator_pb2.WaitUntilReadyRequest(pool_name="x" * (15 * MIB)),
    "/kvpool.v1.EventService/Watch": event_pb2.WatchRequest(pool_name="m", boot_id="x" * (15 * MIB)),
    "/kvpool.v1.AdminService/Drain": admin_pb2.DrainRequest(pool_name="x" * (15 * MIB)),
    "/grpc.health.v1.Health/Watch": allocator_pb2.GetPoolRequest(pool_name="x" * (15 * MIB)),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": allocator_pb2.GetPoolRequest(pool_name="x" * MIB),
}


@pytest.mark.parametrize("method", SMALL_METHODS)
def test_a_method_for_small_messages_refuses_large_ones(opened: grpc.Channel, session: Session, method: str) -> None:
    before = session.pool()
    error = from_rpc_error(refusal(opened, method, SMALL_METHODS[method].SerializeToString()))
    assert (error.reason, error.retry_seconds) == ("MESSAGE_TOO_LARGE", None)
    assert f"the maximum for this method is {SMALL_MESSAGE_BYTES}" in str(error)
    assert session.pool() == before


MANY_FIELDS = {
    f"{SERVICE}/Schedule": (b"\x8a\x01\x00", 33_792),  # lora_names
    f"{SERVICE}/CreatePool": (b"\x0a\x02\x22\x00", 65_536),  # config.groups
    f"{SERVICE}/Free": (b"\x28\x01", 33_792),  # one of no field
    "/kvpool.v1.WorkerService/Join": (b"\x0a\x02\x3a\x00", 65_536),  # register.layers
}
"""A field of each kind of method, and the maximum number of fields."""


@pytest.mark.parametrize("method", MANY_FIELDS)
def test_a_message_of_many_fields_is_refused_before_it_is_parsed(
    opened: grpc.Channel, session: Session, method: str
) -> None:
    before = session.pool()
    field, maximum = MANY_FIELDS[method]
    unparsable = b"\xff" * 20
    error = from_rpc_error(refusal(opened, method, field * (15 * MIB // len(field)) + unparsable))
    assert (error.reason, str(error)) == ("MESSAGE_TOO_LARGE", f"more than {maximum} fields, the maximum")
    assert session.pool() == before


def test_the_largest_step_is_answered(opened: grpc.Channel, session: Session) -> None:
    ids = [f"{number:0256}" for number in range(16_384)]
    step = step_pb2.Step(
        session_id=session.session_id,
        sequence=1,
        operations=[step_pb2.OPERATION_APPEND] * len(ids),
        request_numbers=range(1, len(ids) + 1),
        declares=[True] * len(ids),
        request_ids=ids,
        lora_names=ids,
        num_appended_tokens=[1] * len(ids),
    )
    call: Any = opened.stream_stream(
        f"{SERVICE}/Schedule", step_pb2.Step.SerializeToString, step_pb2.StepResult.FromString
    )
    answers = call(iter([step]), timeout=DEADLINE_SECONDS)
    assert next(answers).sequence == 1
    answers.cancel()


def test_a_stream_keeps_no_message_that_was_answered(
    server: ServerProcess, opened: grpc.Channel, session: Session
) -> None:
    with connect(server.addresses[0], deadline_seconds=DEADLINE_SECONDS) as client:
        sessions = [client.open_session(session.config.name) for _ in range(20)]
        unknown = b"\xfa\xff\x03\x80\x80\xc0\x07" + bytes(15 * MIB)  # a field of 15 MiB
        streams = []
        before = status(server, "VmRSS")
        for each in sessions:
            step = step_pb2.Step(session_id=each.session_id, sequence=1).SerializeToString()
            call: Any = opened.stream_stream(f"{SERVICE}/Schedule")
            outgoing = queue.SimpleQueue[bytes]()
            outgoing.put(step + unknown)
            streams.append(call(iter(outgoing.get, b"")))
            assert step_pb2.StepResult.FromString(next(streams[-1])).sequence == 1
        assert status(server, "VmRSS") - before < 150 * MIB
        for stream in streams:
            stream.cancel()
        for each in sessions:
            each.close()


TOKENS: list[Entry] = [
    {"name": "ops", "role": "admin", "pools": ["*"]},
    {"name": "watcher", "role": "watcher", "pools": ["*"]},
]


@pytest.mark.parametrize(("token", "reason"), [("watcher", "ROLE"), ("stranger", "UNKNOWN_TOKEN")])
@pytest.mark.parametrize("method", ["Schedule", "AllocateSlots"])
def test_a_token_without_rights_is_refused_before_its_message_is_parsed(
    tmp_path: Path, token: str, reason: str, method: str
) -> None:
    write_tokens(tmp_path / "tokens.toml", TOKENS)
    unparsable = b"\xff" * MIB
    with (
        server_process(f"unix:{tmp_path / 's'}", auth={"tokens": str(tmp_path / "tokens.toml")}) as server,
        channel(server.addresses[0], secret_of(token)) as opened,
        channel(server.addresses[0], secret_of("ops")) as permitted,
    ):
        assert from_rpc_error(refusal(opened, f"{SERVICE}/{method}", unparsable)).reason == reason
        assert from_rpc_error(refusal(permitted, f"{SERVICE}/{method}", unparsable)).reason == "MALFORMED"
