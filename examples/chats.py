"""Plays generated chats on a pool until SIGTERM, as a scheduler that computes nothing.

    python -m examples.chats ADDRESS POOL NUMBER

Schedulers with different numbers have different conversations over the same system prompts and documents. A scheduler
whose session ends exits with status 1, so that whatever started it starts it again.
"""

import signal
import sys
from types import FrameType
from typing import Final

from kvpool.client import KvpoolError, connect
from kvpool.replay.executor import NoModel
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import ChatShare

_SEED, _CONVERSATIONS, _TURNS = 2026, 8, 5
_STEP_SECONDS: Final = 0.02
"""The time of a round, in place of a GPU's computation."""
_DEADLINE_SECONDS: Final = 120.0
"""How long a call waits for a server that restarts, so that the session outlives it."""


def main(address: str, pool: str, number: int) -> None:
    """Plays until SIGTERM.

    Raises:
        KvpoolError: The session has ended, or the pool is not ready in time.
    """
    is_stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = True

    with connect(address, deadline_seconds=_DEADLINE_SECONDS) as client:
        client.wait_until_ready(pool, timeout_seconds=_DEADLINE_SECONDS)
        with client.open_session(pool, client_name=f"chats-{number}") as session:
            signal.signal(signal.SIGTERM, stop)  # before, it ends the process at once
            sys.stderr.write(f"a session on pool {pool!r}, epoch {session.epoch}\n")
            workload = ChatShare(_SEED, number, _CONVERSATIONS, _TURNS, num_rounds=None)
            Scheduler(session, workload, executor=NoModel(_STEP_SECONDS)).run(lambda: is_stopping)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except KvpoolError as error:
        sys.exit(f"{error.reason}: {error}")
