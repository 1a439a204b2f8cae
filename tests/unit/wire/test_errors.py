"""The status of errors: NOT_PRIMARY in both directions, and calls that end with a status which cannot be sent."""

import asyncio
from typing import Any, NoReturn

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvpool.core.errors import NotFoundError, NotPrimaryError
from kvpool.server.guard.statuses import abort_with
from kvpool.wire import link
from kvpool.wire.errors import ServerError, from_status, to_status


class EndedCall:
    """The context of a call whose connection is closed."""

    async def abort(self, *_: object) -> NoReturn:
        raise grpc.aio.InternalError("Failed execute_batch")


_METHOD = "kvpool.v1.AllocatorService/GetPool"
_ENDED: Any = EndedCall()


async def test_the_refusal_of_an_ended_call_is_dropped() -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort_with(_ENDED, NotFoundError("pool_name", "no pool 'm'"), _METHOD)


async def test_a_bug_in_an_ended_call_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort_with(_ENDED, ZeroDivisionError(), _METHOD)
    assert [record.message for record in caplog.records] == ["bug"]


@pytest.mark.parametrize(("addresses", "term"), [(("h:1", "unix:/s"), 2**63), (("h:1",), 1), ((), 0)])
def test_not_primary_keeps_the_addresses_and_the_term(addresses: tuple[str, ...], term: int) -> None:
    status = to_status(NotPrimaryError(addresses, term))
    assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("NOT_PRIMARY", "kvpool")
    assert dict(info.metadata) == {"primary": ",".join(addresses), "term": str(term)}
    error = from_status(status)
    assert isinstance(error, NotPrimaryError)
    assert (error.addresses, error.term, error.retry_seconds) == (addresses, term, None)
    assert str(error) == str(NotPrimaryError(addresses, term))


@pytest.mark.parametrize("term", ["", "-1", "1.5", "\u0663", "9" * 5000])
def test_a_malformed_term_counts_as_not_known(term: str) -> None:
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0])
    info = error_details_pb2.ErrorInfo(reason="NOT_PRIMARY", metadata={"primary": "h:1,,", "term": term})
    status.details.add().Pack(info)
    error = from_status(status)
    assert isinstance(error, NotPrimaryError)
    assert (error.addresses, error.term) == (("h:1",), 0)


def test_the_reason_counts_only_with_its_code() -> None:
    status = to_status(NotPrimaryError(("h:1",), 1))
    status.code = grpc.StatusCode.NOT_FOUND.value[0]
    assert type(from_status(status)) is NotFoundError
    assert type(link.read_refusal(status.SerializeToString())) is NotFoundError
    assert type(link.read_refusal(b"\xff")) is ServerError
