"""Processes that end with the one that started them."""

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from kvpool.lending.processes import end_with_parent
from support.waiting import DEADLINE_SECONDS


def _work(engine: Connection) -> None:
    end_with_parent()
    engine.send(os.getpid())
    signal.pause()


def _start_workers(method: str, test: Connection) -> None:
    processes: Any = multiprocessing.get_context(method)
    ends = [processes.Pipe() for _ in range(2)]
    workers = [processes.Process(target=_work, args=(end,)) for _, end in ends]
    for worker in workers:
        worker.start()
    test.send([end.recv() for end, _ in ends])
    signal.pause()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_are_killed_when_their_engine_is(method: str) -> None:
    processes = multiprocessing.get_context("spawn")
    end, far_end = processes.Pipe()
    engine = processes.Process(target=_start_workers, args=(method, far_end))
    engine.start()
    assert end.poll(DEADLINE_SECONDS)
    exits = [os.pidfd_open(pid) for pid in end.recv()]
    assert not wait(exits, 0)
    engine.kill()
    try:
        for worker in exits:
            assert wait([worker], DEADLINE_SECONDS), "a worker has outlived its engine"
    finally:
        for worker in exits:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)


def test_a_process_that_multiprocessing_did_not_start_does_not_wait_for_its_parent() -> None:
    assert not multiprocessing.parent_process()
    end_with_parent()
    assert "kvpool-parent" not in {thread.name for thread in threading.enumerate()}
