"""The checks around a call, as a table: what each refuses, with which reason, before which others."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from kvpool.core.errors import ExhaustedError, KvpoolError, NotPrimaryError
from kvpool.core.state import State
from kvpool.server.auth.token_file import TokenFile
from kvpool.server.cluster.gate import Gate
from kvpool.server.guard import guard
from kvpool.server.guard.guard import Guard
from kvpool.server.guard.primary_check import PrimaryCheck
from kvpool.server.guard.token_check import TokenCheck
from kvpool.server.limits.config import Limits
from kvpool.server.limits.messages import SMALL_MESSAGE_BYTES
from kvpool.server.metrics.observations import Observations
from kvpool.server.services.calls import Calls
from kvpool.server.shutdown import Shutdown
from kvpool.v1 import allocator_pb2
from kvpool.wire.errors import from_rpc_error
from support.auth import secret_of, write_tokens
from support.waiting import DEADLINE_SECONDS, until

SERVICE: Final = "kvpool.v1.AllocatorService"
METHOD: Final = f"{SERVICE}/GetPool"
CHECKS: Final = {
    "calls of the token": "TOO_MANY_TOKEN_CALLS",
    "the request arrives": "NOTHING_SENT",
    "size of a message": "MESSAGE_TOO_LARGE",
    "format of a message": "MALFORMED",
    "the server is the primary": "NOT_PRIMARY",
    "token": "NO_TOKEN",
    "role of the token": "ROLE",
    "the token is still valid": "TOKEN_REVOKED",
    "scope": "POOL",
}
"""The reason of each check that a server of a shard with tokens makes itself, in their order."""
EXCLUSIVE: Final = (
    {"the request arrives", "size of a message"},
    {"the request arrives", "format of a message"},
    {"token", "role of the token"},
    {"the token is still valid", "token"},
    {"the token is still valid", "role of the token"},
    {"the token is still valid", "the server is the primary"},
    *({request, "scope"} for request in ("the request arrives", "size of a message", "format of a message")),
)
"""Two that no call fails at once."""
SKIPPED: Final = ("calls of the token", "the request arrives", "size of a message", "format of a message")
"""Checks that a call without permission does not reach."""
WITHOUT_PERMISSION: Final = ("token", "role of the token")
TOKENS: Final = [
    {"name": "allowed", "role": "scheduler", "pools": ["a-*"]},
    {"name": "watcher", "role": "watcher", "pools": ["*"]},
]
ELSEWHERE: Final = NotPrimaryError(("other:1",), 7)


class _Confirmed:
    """A replica, and what sends its records, whose standbys have everything."""

    last_position = confirmed = 0

    def mark(self) -> None:
        """Has nothing to send."""


class _Served:
    """A server with one method behind the guard.

    Attributes:
        channel: A channel to it, while it runs.
        requests: Requests that reached the method.
        seen: Its calls.
    """

    channel: grpc.aio.Channel

    def __init__(self, tmp_path: Path, fails: Sequence[str]) -> None:
        self.requests: list[Any] = []
        self.seen = Observations()
        self._fails = fails
        path = tmp_path / "tokens.toml"
        write_tokens(path, TOKENS)
        tokens = TokenFile(path)

        def refusal() -> NotPrimaryError | None:  # is asked between the arrival of a call and the check of its scope
            if "the token is still valid" in fails:
                write_tokens(path, TOKENS[1:])
                tokens.refresh()
            return ELSEWHERE if "the server is the primary" in fails else None

        max_calls = 0 if "calls of the token" in fails else 1
        check = TokenCheck(tokens, State(), Calls(Shutdown(int), lambda _: None), max_calls, self.seen)
        confirmed: Any = _Confirmed()  # has all that the gate uses
        gate = Gate(confirmed, confirmed, DEADLINE_SECONDS)
        stall_seconds = 0.1 if "the request arrives" in fails else DEADLINE_SECONDS
        guarded = Guard(Limits(stall_seconds=stall_seconds), self.seen, check, PrimaryCheck(gate, refusal))
        self._server = grpc.aio.server(interceptors=[guarded])
        handler = grpc.unary_unary_rpc_method_handler(
            self._serve, allocator_pb2.GetPoolRequest.FromString, allocator_pb2.GetPoolResponse.SerializeToString
        )
        self._server.add_registered_method_handlers(SERVICE, {"GetPool": handler})

    @classmethod
    @asynccontextmanager
    async def start(cls, tmp_path: Path, fails: Sequence[str]) -> "AsyncIterator[_Served]":
        served = cls(tmp_path, fails)
        address = f"unix:{tmp_path}/socket"
        served._server.add_insecure_port(address)
        await served._server.start()
        try:
            async with grpc.aio.insecure_channel(address) as served.channel:
                yield served
        finally:
            await served._server.stop(0)

    async def _serve(self, request: Any, _: object) -> allocator_pb2.GetPoolResponse:
        self.requests.append(request)
        return allocator_pb2.GetPoolResponse()

    async def call(self) -> None:
        """Makes a call that fails the checks."""
        name = "watcher" if "role of the token" in self._fails else "allowed"
        metadata = [] if "token" in self._fails else [("authorization", f"Bearer {secret_of(name)}")]
        start: Any = self.channel.stream_unary(f"/{METHOD}")
        await start(self._messages(), timeout=DEADLINE_SECONDS, metadata=metadata)

    async def _messages(self) -> AsyncIterator[bytes]:
        if "the request arrives" in self._fails:
            await asyncio.Event().wait()
        yield self._message()

    def _message(self) -> bytes:
        message = allocator_pb2.GetPoolRequest(pool_name="b" if "scope" in self._fails else "a-pool")
        encoded = message.SerializeToString()
        if "format of a message" in self._fails:
            encoded = b"\xff"
        if "size of a message" in self._fails:
            encoded *= SMALL_MESSAGE_BYTES + 1
        return encoded


async def refusal_of(tmp_path: Path, *fails: str) -> KvpoolError:
    """The error of a call that fails these checks. It does not reach the method, and is counted once."""
    async with _Served.start(tmp_path, fails) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.call()
        await until(served.seen.rpcs.total)  # after its client has the status
        assert not served.requests
    assert [(method, count) for (method, _), count in served.seen.rpcs.items()] == [(METHOD, 1)]
    error = from_rpc_error(caught.value)
    exceeded = {error.reason: 1} if isinstance(error, ExhaustedError) else {}
    assert {reason: count for reason, count in served.seen.limit_refusals.items() if count} == exceeded
    return error


def check_refused_by(check: str, error: KvpoolError) -> None:
    assert error.reason == CHECKS[check]
    if isinstance(error, NotPrimaryError):
        assert error.addresses == (ELSEWHERE.addresses if check == "the server is the primary" else ())


async def test_a_call_that_fails_no_check_is_served(tmp_path: Path) -> None:
    async with _Served.start(tmp_path, ()) as served:
        await served.call()
        await until(served.seen.rpcs.total)
    assert [request.pool_name for request in served.requests] == ["a-pool"]
    assert served.seen.rpcs == {(METHOD, "OK"): 1}
    assert served.seen.rpc_seconds[METHOD].total > 0


@pytest.mark.parametrize("check", CHECKS)
async def test_each_check_refuses_a_call(tmp_path: Path, check: str) -> None:
    check_refused_by(check, await refusal_of(tmp_path, check))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pair
        for pair in combinations(CHECKS, 2)
        if set(pair) not in EXCLUSIVE and not (pair[0] in SKIPPED and pair[1] in WITHOUT_PERMISSION)
    ],
)
async def test_the_first_of_two_checks_refuses_a_call(tmp_path: Path, first: str, second: str) -> None:
    check_refused_by(first, await refusal_of(tmp_path, first, second))


@pytest.mark.parametrize("check", WITHOUT_PERMISSION)
@pytest.mark.parametrize("skipped", SKIPPED)
async def test_a_call_without_permission_is_not_read(tmp_path: Path, check: str, skipped: str) -> None:
    check_refused_by(check, await refusal_of(tmp_path, check, skipped))


@pytest.mark.parametrize("text", [guard.__doc__, "docs/explanation/architecture.md"])
def test_the_table_names_the_checks_in_their_order(text: str) -> None:
    text = Path(text).read_text() if text.endswith(".md") else text
    rows = re.findall(r"^\| \d+ \| .*? \| (.*?) \|", text, re.MULTILINE)
    reasons = [reason for row in rows for reason in re.findall("`([A-Z_]+)`", row)]
    positions = [reasons.index(reason) for reason in CHECKS.values()]
    assert positions == sorted(positions)
