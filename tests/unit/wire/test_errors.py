"""Calls that end with a status which cannot be sent."""

import asyncio
from typing import Any, NoReturn

import grpc
import pytest

from kvpool.core.errors import NotFoundError
from kvpool.server.rpc import abort, abort_internal


class EndedCall:
    """The context of a call whose connection is closed."""

    async def abort(self, *_: object) -> NoReturn:
        raise grpc.aio.InternalError("Failed execute_batch")


_METHOD = "/kvpool.v1.AllocatorService/GetPool"
_ENDED: Any = EndedCall()


async def test_the_refusal_of_an_ended_call_is_dropped() -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort(_ENDED, NotFoundError("pool_name", "no pool 'm'"), _METHOD)


async def test_a_bug_in_an_ended_call_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort_internal(_ENDED, _METHOD)
    assert [record.message for record in caplog.records] == ["bug"]
