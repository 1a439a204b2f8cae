"""`vllm serve` with users over HTTP, on a service with a journal. The engine's lease is longer than the tests."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, Signals
from tempfile import TemporaryDirectory

import pytest

from engine.service import Service, service
from engine.vllm_serve import NUM_BLOCKS, REQUESTS, Serving, VllmServe
from engine.workloads import Request
from kvpool.client import PoolInfo, connect
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
POOL = "served"
LONG = [replace(each, max_tokens=300) for each in REQUESTS if len(each.prompt) < 200][:6]
"""Requests that generate while something happens."""


@pytest.fixture(scope="module")
def server() -> Iterator[Service]:
    with TemporaryDirectory() as folder, service(Path(folder), "--journal", f"{folder}/journal") as started:
        yield started


@pytest.fixture(scope="module")
def expected(starts: Serving) -> list[list[int]]:
    """What vLLM alone answers to `REQUESTS`."""
    return starts.tokens_of_vllm_alone(REQUESTS)


class Pooled:
    """A `vllm serve` on the service, which is started again if a test has ended it."""

    def __init__(self, starts: Serving, server: Service) -> None:
        self._starts = starts
        self._server = server
        self._running: VllmServe | None = None

    @property
    def vllm(self) -> VllmServe:
        """The one that runs."""
        if self._running is None or not self._running.process.is_alive:
            self._running = self._starts.start(kvpool={"address": self._server.address, "pool": POOL})
        return self._running

    @property
    def pool(self) -> PoolInfo:
        """The engine's pool."""
        with connect(self._server.address) as client:
            return client.get_pool(POOL)

    def wait_for_free_blocks(self, sessions: int) -> None:
        """Waits until no request is left, and a number of sessions."""
        state = (sessions, 0, NUM_BLOCKS - 1, 0)

        def is_free() -> bool:
            pool = self.pool
            return (pool.sessions, pool.requests, pool.free_blocks, pool.quarantined_blocks) == state

        wait_until(is_free, f"{self.pool} is not {state}")


@pytest.fixture(scope="module")
def pooled(starts: Serving, server: Service) -> Pooled:
    return Pooled(starts, server)


def _begin(vllm: VllmServe, requests: Sequence[Request], stack: ExitStack) -> None:
    """Begins requests that end, at the latest, with the stack."""
    for each in requests:
        stack.enter_context(vllm.begun(each))


@pytest.mark.complete
def test_users_receive_the_tokens_of_vllm_alone(expected: list[list[int]], pooled: Pooled) -> None:
    assert pooled.vllm.complete_all(REQUESTS) == expected
    assert [pooled.vllm.complete(each).tokens for each in REQUESTS] == expected
    assert pooled.pool.prefix_cache.hits_tokens
    pooled.wait_for_free_blocks(sessions=1)


@pytest.mark.complete
def test_no_request_notices_a_restart_of_the_service(
    expected: list[list[int]], pooled: Pooled, server: Service
) -> None:
    answers: list[list[int]] = []
    vllm = pooled.vllm
    users = threading.Thread(target=lambda: answers.extend(vllm.complete_all(REQUESTS)))
    users.start()
    for _ in range(3):
        admitted = pooled.pool.prefix_cache.queries_tokens
        wait_until(lambda: pooled.pool.prefix_cache.queries_tokens > admitted or not users.is_alive())  # noqa: B023 - called here
        server.restart()
    assert users.is_alive(), "the users had finished before"
    users.join()
    assert answers == expected
    pooled.wait_for_free_blocks(sessions=1)


def test_requests_of_users_who_disconnect_end(pooled: Pooled) -> None:
    before = [pooled.vllm.complete(each).tokens for each in REQUESTS[:4]]
    for _ in range(20):  # on a slow machine, requests can end before the test looks
        with ExitStack() as stack:
            _begin(pooled.vllm, LONG, stack)
            held = pooled.pool
        pooled.wait_for_free_blocks(sessions=1)
        if held.requests == len(LONG):
            break
    assert (held.requests, held.sessions) == (len(LONG), 1)
    assert held.free_blocks < NUM_BLOCKS - 1
    assert [pooled.vllm.complete(each).tokens for each in REQUESTS[:4]] == before


@pytest.mark.parametrize("number", [SIGTERM, pytest.param(SIGINT, marks=pytest.mark.complete)])
def test_a_signal_ends_the_session_with_its_requests(pooled: Pooled, number: Signals) -> None:
    """vLLM kills its engine at once, without time to close the session."""
    vllm = pooled.vllm
    with ExitStack() as stack:
        _begin(vllm, LONG, stack)
        assert pooled.pool.sessions == 1
        vllm.signal(number)
        pooled.wait_for_free_blocks(sessions=0)
    vllm.process.end()


@pytest.mark.complete
def test_an_engine_with_time_to_stop_answers_first(starts: Serving, server: Service) -> None:
    vllm = starts.start("--shutdown-timeout", "600", kvpool={"address": server.address, "pool": "drained"})
    with vllm.begun(LONG[0]) as steps, connect(server.address) as client:
        vllm.signal(SIGTERM)
        assert sum(len(tokens) for tokens in steps) == LONG[0].max_tokens
        wait_until(lambda: not client.get_pool("drained").sessions)
    vllm.process.end()


@pytest.mark.complete
def test_the_session_of_a_killed_engine_ends_and_another_engine_starts(pooled: Pooled) -> None:
    vllm = pooled.vllm
    first = pooled.pool
    (engine,) = vllm.engine_pids
    os.kill(engine, SIGKILL)
    pooled.wait_for_free_blocks(sessions=0)
    vllm.process.end()  # by itself
    assert pooled.vllm.complete(REQUESTS[0]).tokens
    assert (pooled.pool.sessions, pooled.pool.epoch) == (1, first.epoch + 1)


@pytest.mark.complete
def test_an_engine_whose_api_server_is_killed_keeps_its_session(pooled: Pooled) -> None:
    """vLLM leaves the engine running; its session ends when somebody ends the engine."""
    vllm = pooled.vllm
    (engine,) = vllm.engine_pids
    vllm.signal(SIGKILL)
    vllm.process.process.wait()
    assert pooled.pool.sessions == 1
    os.kill(engine, SIGTERM)
    pooled.wait_for_free_blocks(sessions=0)
    vllm.process.end()
