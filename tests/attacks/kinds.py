"""The attacks: what each does to a server until it ends.

An attack runs in the process of the test at the lowest priority, because a real attacker uses the processors of another
machine. It returns when `is_over` is set.
"""

import contextlib
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from attacks.target import TENANTS, Target
from kvpool.client import Client, DeadlineError
from kvpool.core.errors import ExhaustedError
from support.server import pool_config

_NUM_FILES: Final = 256
_FEW_FILES: Final = ("prlimit", f"--nofile={_NUM_FILES}:{_NUM_FILES}")
_FLOOD_CONNECTIONS: Final = 400
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ZMTP_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
_ZMTP_READY: Final = b"\4\x19\5READY\x0bSocket-Type\0\0\0\3SUB"
_BURSTS: Final = 20
_BURST_REWRITES: Final = 50
_WRITE_SECONDS: Final = 0.003
_GROWTH_BYTES: Final = 5 * 2**24
_PROMPT_TOKENS: Final = 2**12
_REFUSAL_SECONDS: Final = 120.0
"""Time limit of the first refusal for lack of memory."""


@dataclass(frozen=True, slots=True)
class Assault:
    """One run of an attack.

    Attributes:
        target: The server.
        seconds: Duration of the run.
        is_over: Set at its end.
    """

    target: Target
    seconds: float
    is_over: threading.Event


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack, and what it may cost.

    Attributes:
        run: Attacks the server until `Assault.is_over` is set.
        limit: What to put before the server's command, to limit its resources.
        has_full_log: Whether no process reads the server's log.
        is_on_small_disk: Whether the journal is on a file system of its own of 4 MiB; needs root.
        costs_journal: Whether the journal may be given up during the attack. It must be up again afterwards.
        costs_time: Whether tenants may have to repeat refused steps, so that their time is not judged.
        afterwards: Called after the attack, when the tenants have ended; the server must be ready then.
    """

    run: Callable[[Assault], None]
    limit: tuple[str, ...] = ()
    has_full_log: bool = False
    is_on_small_disk: bool = False
    costs_journal: bool = False
    costs_time: bool = False
    afterwards: Callable[[Target], None] | None = None


def flood_connections(assault: Assault) -> None:
    """Opens connections that say nothing, half a TLS greeting, or TLS and then nothing, and opens closed ones again."""
    _flood(assault.target.port, assault.is_over, [b"", b"\x16\x03\x01\x02\x00\x01", _HTTP2_PREFACE])


def flood_metrics(assault: Assault) -> None:
    """Opens connections to the metrics port that say nothing, half a request, or read no response."""
    _flood(
        assault.target.metrics_port,
        assault.is_over,
        [b"", b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"],
    )


def flood_events(assault: Assault) -> None:
    """Opens connections to the port of block events that say nothing, half a greeting, or that they subscribe."""
    _flood(
        assault.target.events_port,
        assault.is_over,
        [b"", _ZMTP_GREETING[:11], _ZMTP_GREETING + _ZMTP_READY],
    )


def _flood(port: int, is_over: threading.Event, greetings: list[bytes]) -> None:
    peers: list[socket.socket] = []
    count = 0
    while not is_over.wait(0.001):
        peer = socket.socket()
        peer.settimeout(0)
        count += 1
        with contextlib.suppress(OSError):
            peer.connect_ex(("127.0.0.1", port))
            peer.settimeout(0.05)
            peer.sendall(greetings[count % len(greetings)])
        peers.append(peer)
        if len(peers) > _FLOOD_CONNECTIONS:
            peers.pop(0).close()
    for peer in peers:
        peer.close()


def fill_log(assault: Assault) -> None:
    """Opens and closes sessions, each of which is logged; no process reads the log."""
    with assault.target.connect("attacker") as client:
        while not assault.is_over.is_set():
            client.open_session(TENANTS[0]).close()


def rewrite_tokens(assault: Assault) -> None:
    """Rewrites the token file in place: empty for a moment, then half, then whole: 20 bursts of 50 times."""
    rest_seconds = max(assault.seconds / _BURSTS - _BURST_REWRITES * 3 * _WRITE_SECONDS, 2.0)
    while not assault.is_over.is_set():
        for _ in range(_BURST_REWRITES):
            # A file that replaces this one meanwhile is not written to.
            with assault.target.tokens.open("r+b", buffering=0) as file:
                text = file.read()
                for end in (0, len(text) // 2, len(text)):
                    file.seek(0)
                    file.truncate()
                    file.write(text[:end])
                    time.sleep(_WRITE_SECONDS)
        assault.is_over.wait(rest_seconds)


def fill_disk(assault: Assault) -> None:
    """Fills the disk, frees it, and fills it again."""
    while not assault.is_over.is_set():
        with full_disk(assault.target):
            assault.is_over.wait(assault.seconds / 8)
        assault.is_over.wait(assault.seconds / 8)


@contextlib.contextmanager
def full_disk(target: Target) -> Iterator[None]:
    """The journal's disk is full during the block."""
    waste = target.journal / "waste"
    with waste.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**12))
    try:
        yield
    finally:
        waste.unlink()


def start_on_full_disk(target: Target) -> None:
    """Starts the server while the disk is full."""
    with full_disk(target):
        target.server.restart()
        target.server.restart()


def delete_journal(assault: Assault) -> None:
    """Deletes the journal's folder, or renames it."""
    number = 0
    while not assault.is_over.wait(assault.seconds / 10):
        number += 1
        with contextlib.suppress(OSError):
            if number % 2:
                shutil.rmtree(assault.target.journal)
            else:
                assault.target.journal.rename(assault.target.folder / f"taken-{number}")


def exhaust_memory(assault: Assault) -> None:
    """Caches long prompts until the server, which may grow by 80 MiB, has no memory for more; closes, and again.

    A busy machine may need longer than the attack for the first refusal. The attack then goes on until the refusal.
    """
    num_refusals = 0
    due_seconds = time.monotonic() + _REFUSAL_SECONDS

    def is_over() -> bool:
        return assault.is_over.is_set() and (num_refusals > 0 or time.monotonic() >= due_seconds)

    with assault.target.connect("attacker") as patient:
        patient.create_pool(replace(pool_config("attacker", 2**20), max_model_len=_PROMPT_TOKENS))
    # The client repeats a refused call until its deadline.
    with (
        assault.target.connect("attacker", deadline_seconds=2.0) as client,
        _limited_memory(assault.target, _GROWTH_BYTES),
    ):
        while not is_over():
            try:
                _cache_until(client, is_over)
            except DeadlineError:  # the server is too busy to answer; a new session continues
                pass
            except ExhaustedError as error:
                if error.reason != "OUT_OF_MEMORY":
                    raise
                num_refusals += 1
    assert num_refusals, "the server had memory for all"


def _cache_until(client: Client, is_over: Callable[[], bool]) -> None:
    """Caches one prompt after the other in a new session."""
    with client.open_session("attacker") as session:
        while not is_over():
            number = session.sequence
            assert session.admit(session.request(str(number), range(number, number + _PROMPT_TOKENS)))


@contextlib.contextmanager
def _limited_memory(target: Target, growth_bytes: int) -> Iterator[None]:
    """The server's address space can grow by this many bytes during the block."""
    pid, (_, hard) = target.server.pid, resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + growth_bytes, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))


ATTACKS: Final = {
    "connections": Attack(flood_connections, limit=_FEW_FILES),
    "metrics": Attack(flood_metrics),
    "events": Attack(flood_events, limit=_FEW_FILES),
    "log": Attack(fill_log, has_full_log=True),
    "tokens": Attack(rewrite_tokens),
    "disk": Attack(fill_disk, is_on_small_disk=True, costs_journal=True, afterwards=start_on_full_disk),
    "journal": Attack(delete_journal, costs_journal=True),
    "memory": Attack(exhaust_memory, costs_time=True),
}
