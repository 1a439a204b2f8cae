"""Forwards TCP connections late, on systems whose kernel has no netem.

    python -m support.delay DELAY_US PORT...

Listens on the ports of 127.0.0.2 and forwards to the same ports of 127.0.0.1. A client that is told to use another port
of its server therefore reaches that port through the proxy, too. Bytes that arrive while earlier ones are delayed wait
for these first. Threads sleep in place of an event loop, whose timers have a resolution of a millisecond.
"""

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

from support.logging_process import LoggingProcess
from support.processes import PYTHON

CLIENTS, SERVER = "127.0.0.2", "127.0.0.1"
_TIMER_SLACK = 29
"""PR_SET_TIMERSLACK of prctl. By default, a sleep takes up to 50 us longer."""


@contextlib.contextmanager
def delayed(delay_us: float, *ports: int) -> Iterator[str]:
    """Runs the proxy in a process of its own; yields the host for clients."""
    with LoggingProcess(PYTHON, "-m", "support.delay", str(delay_us), *map(str, ports)) as proxy:
        proxy.wait_for("listening")
        yield CLIENTS


def _forward(source: socket.socket, target: socket.socket, delay_seconds: float) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**20):
            time.sleep(delay_seconds)
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, delay_seconds: float) -> None:
    while True:
        client, _ = listener.accept()
        with contextlib.suppress(OSError):
            server = socket.create_connection((SERVER, listener.getsockname()[1]))
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((client, server), (server, client)):
                threading.Thread(target=_forward, args=(*ends, delay_seconds), daemon=True).start()
            continue
        client.close()


def main(delay_us: str, *ports: str) -> None:
    """Forwards until the process is killed."""
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)  # threads inherit it
    listeners = [socket.create_server((CLIENTS, int(port))) for port in ports]
    threads = [threading.Thread(target=_accept, args=(each, float(delay_us) / 1e6)) for each in listeners]
    for each in threads:
        each.start()
    os.write(2, b"listening\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
