"""A process that names sessions to a lender which no scheduler has opened; see `name_sessions` in lending.py.

`python engine.py LENDER EPOCH COUNT HOW`, with the lender's token from the environment. Maps the memory first, unless
it is to read nothing. Prints `named` at its end.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from kvpool.v1 import lending_pb2
from kvpool.wire import link
from kvpool.wire.ranks import declared_to_proto
from support.lending import DECLARED, introduced, lend_request
from support.raw_link import RawLink

_FIRST_NUMBER: Final = 10**6
_TOGETHER: Final = 32
"""Requests whose answers are read together: fewer than the lender keeps for a process."""
_UNREAD_TIMES: Final = 20


def main() -> None:
    """Names the sessions."""
    address, epoch, count, how = sys.argv[1:]
    numbers = range(_FIRST_NUMBER, _FIRST_NUMBER + int(count))
    binds = [lending_pb2.Bind(epoch=int(epoch), session_number=number) for number in numbers]
    requests = [lend_request(bind=bind) for bind in binds]
    with introduced(address, os.environ["KVPOOL_TOKEN"]) as connection:
        if how == "reads nothing":
            with contextlib.suppress(OSError):  # the lender ends the connection
                connection.send(b"".join(requests) * _UNREAD_TIMES)
                while connection.socket.recv(2**16):
                    pass
        else:
            _request(connection, [lend_request(map=lending_pb2.Map(declared=declared_to_proto(DECLARED)))])
            for start in range(0, len(requests), _TOGETHER):
                _request(connection, requests[start : start + _TOGETHER])
    print("named", flush=True)  # noqa: T201 - the parent reads it


def _request(connection: RawLink, requests: Sequence[bytes]) -> None:
    """Sends requests, and reads their answers. Only sessions above the maximum may be refused."""
    connection.send(b"".join(requests))
    num_answers = 0
    while num_answers < len(requests):
        found = connection.next()
        assert found, "the lender has ended the connection"
        kind, payload = found
        if kind == link.Kind.REFUSED:
            error = link.read_refusal(payload)
            assert error.reason == "TOO_MANY_SESSIONS", error
            num_answers += 1
        else:
            num_answers += not lending_pb2.LendResponse.FromString(payload).HasField("fence")


if __name__ == "__main__":
    main()
