"""The time limits of `kvpool.client.admin`."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import pytest
from google.protobuf.message import Message

from kvpool.client.admin import AdminClient
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.v1 import admin_pb2
from support.socket_server import SocketServer

_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


class Server(SocketServer):
    """Notes the time that each call has.

    Attributes:
        left_seconds: The time of each call, in order.
    """

    def __init__(self, path: Path) -> None:
        self.left_seconds: list[float] = []
        answers: dict[str, Message] = {
            "HandOver": admin_pb2.HandOverResponse(term=8),
            "Drain": admin_pb2.DrainResponse(),
        }
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(partial(self._answer, answer.SerializeToString()))
            for name, answer in answers.items()
        }
        handler = grpc.method_handlers_generic_handler(_SERVICE, handlers)
        super().__init__(path, lambda server: server.add_generic_rpc_handlers((handler,)))

    def _answer(self, answer: bytes, _: bytes, context: grpc.ServicerContext) -> bytes:
        self.left_seconds.append(context.time_remaining())
        return answer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "socket") as server:
        yield server


@pytest.mark.parametrize(("deadline_seconds", "expected_seconds"), [(10.0, 40.0), (100.0, 100.0)])
def test_a_hand_over_has_the_time_for_a_copy_of_the_state(
    server: Server, deadline_seconds: float, expected_seconds: float
) -> None:
    with AdminClient(server.address, deadline_seconds=deadline_seconds) as admin:
        assert admin.hand_over() == (8, ())
        admin.drain()
    assert server.left_seconds == [
        pytest.approx(expected_seconds, abs=5.0),
        pytest.approx(deadline_seconds, abs=5.0),
    ]


def test_a_call_without_a_connection_was_not_sent(tmp_path: Path) -> None:
    with (
        AdminClient(f"unix:{tmp_path}/nowhere", deadline_seconds=10.0) as admin,
        pytest.raises(UnavailableError) as caught,
    ):
        admin.drain()
    assert not caught.value.was_sent


def test_a_call_that_a_server_has_refused_was_sent(server: Server) -> None:
    with AdminClient(server.address, deadline_seconds=10.0) as admin, pytest.raises(KvpoolError) as caught:
        admin.overview()
    assert caught.value.was_sent
