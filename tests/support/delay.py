"""Forwards TCP connections late, on systems whose kernel has no netem.

    python -m support.delay DELAY_US PORT...

Listens on the ports of 127.0.0.2 and forwards to the same ports of 127.0.0.1. A client that learns another port of its
server therefore reaches that port through the proxy, too. Bytes that arrive while earlier ones are delayed wait for
these first. Threads sleep in place of an event loop, whose timers have a resolution of a millisecond.
"""

import contextlib
import ctypes
import socket
import sys
import threading
import time

CLIENTS, SERVER = "127.0.0.2", "127.0.0.1"


def _forward(source: socket.socket, target: socket.socket, delay_seconds: float) -> None:
    with contextlib.suppress(OSError):
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := source.recv(2**20):
            time.sleep(delay_seconds)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _accept(listener: socket.socket, delay_seconds: float) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((SERVER, listener.getsockname()[1]))
        for ends in ((client, server), (server, client)):
            threading.Thread(target=_forward, args=(*ends, delay_seconds), daemon=True).start()


def main(delay_us: str, *ports: str) -> None:
    """Forwards until the process is killed."""
    # PR_SET_TIMERSLACK, which threads inherit: by default, a sleep takes up to 50 us longer.
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
    for listener in [socket.create_server((CLIENTS, int(port))) for port in ports]:
        threading.Thread(target=_accept, args=(listener, float(delay_us) / 1e6)).start()
    print("listening", file=sys.stderr, flush=True)  # noqa: T201 - who starts it waits for this


if __name__ == "__main__":
    main(*sys.argv[1:])
