"""Attacks on the files of a server: its log, its tokens and its journal."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import Final

from attacks.attack import Assault
from attacks.target import TENANTS, Target

_BURSTS: Final = 20
_BURST_REWRITES: Final = 50
_WRITE_SECONDS: Final = 0.003


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
