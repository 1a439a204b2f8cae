"""A process that names sessions to a lender which no scheduler has opened; see `name_sessions` in lending.py.

`python engine.py LENDER EPOCH COUNT HOW`, with the lender's token from the environment. Maps the memory first, unless
it is to read nothing. Prints `named` at its end.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Final

from google.rpc import status_pb2

from kvpool.v1 import lending_pb2
from kvpool.wire.errors import from_status
from kvpool.wire.lending import MessageReader, encode_message, receive
from kvpool.wire.ranks import declared_to_proto
from support.lending import DECLARED, introduced

_FIRST_NUMBER: Final = 10**6
_TOGETHER: Final = 32
"""Requests whose answers are read together: fewer than the lender keeps for a process."""
_UNREAD_TIMES: Final = 20


def main() -> None:
    """Names the sessions."""
    address, epoch, count, how = sys.argv[1:]
    numbers = range(_FIRST_NUMBER, _FIRST_NUMBER + int(count))
    binds = [lending_pb2.Bind(epoch=int(epoch), session_number=number) for number in numbers]
    requests = [lending_pb2.LendRequest(bind=bind) for bind in binds]
    with introduced(address, token=os.environ["KVPOOL_TOKEN"]) as connection:
        if how == "reads nothing":
            with contextlib.suppress(OSError):  # the lender ends the connection
                connection.sendall(b"".join(map(encode_message, requests)) * _UNREAD_TIMES)
                while connection.recv(2**16):
                    pass
        else:
            _request(connection, [lending_pb2.LendRequest(map=lending_pb2.Map(declared=declared_to_proto(DECLARED)))])
            for start in range(0, len(requests), _TOGETHER):
                _request(connection, requests[start : start + _TOGETHER])
    print("named", flush=True)  # noqa: T201 - the parent reads it


def _request(connection: socket.socket, requests: Sequence[lending_pb2.LendRequest]) -> None:
    """Sends requests, and reads their answers. Only sessions above the maximum may be refused."""
    connection.sendall(b"".join(map(encode_message, requests)))
    reader = MessageReader(lending_pb2.LendResponse)
    num_answers = 0
    while num_answers < len(requests):
        data, descriptors = receive(connection)
        for descriptor in descriptors:
            os.close(descriptor)
        assert data, "the lender has ended the connection"
        for answer in reader.feed(data):
            if answer.refused:
                error = from_status(status_pb2.Status.FromString(answer.refused))
                assert error.reason == "TOO_MANY_SESSIONS", error
            num_answers += not answer.HasField("fence")


if __name__ == "__main__":
    main()
