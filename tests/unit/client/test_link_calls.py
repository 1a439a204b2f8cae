"""Links as the calls of a session, without a server."""

import asyncio
import socket
import time
from typing import Final

import pytest

from kvpool.client.transports.link_calls import AsyncioCall, SocketCall
from kvpool.core.errors import KvpoolError
from kvpool.v1.link_pb2 import LinkWelcome
from kvpool.wire import link
from kvpool.wire.errors import ServerError
from kvpool.wire.frames import encode_frame
from support.waiting import DEADLINE_SECONDS

WELCOME: Final = link.welcome(LinkWelcome())
STREAM: Final = WELCOME + encode_frame(link.Kind.ANSWER, b"a") + encode_frame(link.Kind.REFUSED, b"over")


def refusal(payload: bytes) -> KvpoolError:
    return ServerError("REFUSED", payload.decode())


async def received(call: SocketCall | AsyncioCall) -> list[object]:
    """The answers, and the error after them, which is raised again."""
    due_seconds = time.monotonic() + DEADLINE_SECONDS
    found: list[object] = []
    while found[-2:] != ["over", "over"]:
        try:
            found.append(await call.receive(due_seconds))
        except ServerError as error:
            found.append(error.message)
    return found


@pytest.mark.parametrize("at", [0, 3, len(WELCOME), len(STREAM) - 1])
def test_answers_before_a_refusal_are_taken_first_wherever_the_stream_is_cut(at: int) -> None:
    blocking, server = socket.socketpair()
    with blocking, server:
        server.sendall(STREAM)
        answers = asyncio.run(received(SocketCall(blocking, refusal)))
    call = AsyncioCall(refusal)
    loop = asyncio.new_event_loop()
    for part in (STREAM[:at], STREAM[at:]):
        call.data_received(part)
    assert loop.run_until_complete(received(call)) == answers == [WELCOME[5:], b"a", "over", "over"]
    loop.close()


def test_what_is_no_answer_is_an_error() -> None:
    call, (blocking, server) = AsyncioCall(refusal), socket.socketpair()
    with blocking, server:
        server.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        call.data_received(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        for each in (SocketCall(blocking, refusal), call):
            with pytest.raises(ServerError, match="may not come while the link is greeting"):
                asyncio.run(each.receive(time.monotonic() + DEADLINE_SECONDS))
