"""A log's bugs are found; what gRPC prints for cancelled calls is none."""

import pytest

from support.bugs import bugs_in

TIME = "2026-11-25 20:56:14,775"
TRACEBACK = """Traceback (most recent call last):
  File "src/python/grpcio/grpc/_cython/_cygrpc/aio/server.pyx.pxi", line 812, in grpc._cython.cygrpc._schedule_rpc_coro
asyncio.exceptions.CancelledError
"""
UNHANDLED = f"{TIME} ERROR grpc._cython.cygrpc: Exception not handled by _handle_exceptions in servicer method [/a/B]\n"
INFO = f"{TIME} INFO kvpool.server: listening\n"


@pytest.mark.parametrize(
    "log", [INFO, TRACEBACK, UNHANDLED + TRACEBACK, INFO + UNHANDLED + TRACEBACK + INFO + TRACEBACK]
)
def test_a_cancelled_call_is_no_bug(log: str) -> None:
    assert bugs_in(log) == []


@pytest.mark.parametrize(
    "bug",
    [
        f"{TIME} ERROR kvpool.server: bug method=Step\n",
        f"{TIME} CRITICAL kvpool.server: bug\n",
        TRACEBACK.replace("CancelledError", "ValueError"),
        TRACEBACK.replace("_schedule_rpc_coro", "step"),
    ],
)
def test_errors_and_other_tracebacks_are_bugs(bug: str) -> None:
    assert bugs_in(INFO + TRACEBACK + bug + INFO + TRACEBACK) == [bug.splitlines()[0]]


def test_an_expected_error_is_no_bug() -> None:
    log = f"{TIME} ERROR kvpool.server.cluster: directory cannot be used shard=a\n"
    assert bugs_in(log, ["directory cannot be used"]) == []
