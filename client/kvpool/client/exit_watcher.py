"""A process that closes the session of a scheduler whose process was killed, so that no lease has to expire.

1. It reads the session from stdin, and waits for the end of stdin, which comes when the scheduler's process ends,
   however it ends. It then closes the session, unless the scheduler has written that it did so itself.
2. It is no child of the scheduler, as who kills a scheduler kills its children, too. A process group, a terminal or a
   service manager that stops the scheduler does not stop it.

What kills all processes of the scheduler's container also kills the watcher. The lease then ends the session.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import IO, Final, cast

from kvpool.client.blocking import run
from kvpool.client.session import Session
from kvpool.client.transports.blocking_grpc import BlockingGrpcTransport
from kvpool.core.errors import KvpoolError
from kvpool.v1 import allocator_pb2
from kvpool.wire.channels import ClientCredentials


class ExitWatcher:
    """The scheduler's end of a watcher. The scheduler keeps it as long as the session is open."""

    def __init__(self, address: str, session: Session, deadline_seconds: float) -> None:
        """Starts a watcher of this process, with the TLS and the token of its environment.

        Args:
            address: The service.
            session: The session, whose blocks no other process may use when this process has ended.
            deadline_seconds: Time limit of closing the session.

        Raises:
            OSError: The process cannot be started.
        """
        process = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a reader of the scheduler's log sees its end
            text=True,
            start_new_session=True,
        )
        process.wait()  # the watcher is its child, and continues
        self._stdin: Final = cast("IO[str]", process.stdin)
        self._write(json.dumps([address, deadline_seconds, session.session_id]))

    def dismiss(self) -> None:
        """Ends the watcher. The session has been closed."""
        self._write("closed")
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it has been killed; the lease is still there
            self._stdin.write(line + "\n")
            self._stdin.flush()


def _close_after_exit() -> None:
    address, deadline_seconds, session_id = json.loads(sys.stdin.readline())
    transport = BlockingGrpcTransport(
        address, deadline_seconds, ClientCredentials.of(None, None, allow_plaintext=False)
    )
    if not sys.stdin.read():
        with contextlib.suppress(KvpoolError):
            run(transport.call_timed("CloseSession", allocator_pb2.CloseSessionRequest(session_id=session_id)))
    run(transport.close())


if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():  # the scheduler waits for this process
        os._exit(0)
    _close_after_exit()
