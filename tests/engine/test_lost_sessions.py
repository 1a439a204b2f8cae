"""Engines whose session ends: schedulers without a model on memory whose contents are checked, and `vllm serve`."""

import multiprocessing
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from engine.driving import Driver, Setup, make_scheduler
from engine.schedules import KINDS, MOST_STEPS, setup_of
from engine.service import Service, service
from engine.test_sharing import Engine
from engine.vllm_serve import REQUESTS, Serving, VllmServe, serving
from kvpool.client import AbortedError, Session, connect
from kvpool.client.admin import AdminClient
from kvpool.client.vllm import Scheduler
from support.waiting import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.timeout(900)
POOL = "lost"
LONG = replace(REQUESTS[0], max_tokens=400)
LEASE_SECONDS = 2.0
SOME_KINDS = (
    *("first_come", "a_step_ahead", "sparse_windows_a_step_ahead", "match_unit_a_step_ahead"),
    *(
        pytest.param(kind, marks=pytest.mark.complete)
        for kind in ("priority", "without_caching", "states", "drafts", "images_a_step_ahead")
    ),
)


class Memory(Driver):
    """Drives a scheduler, and keeps what its steps write to the blocks of the first group, if that keeps all tokens.

    A token's slot contains the prefix that ends with the token. Steps write when their outputs are taken, in order,
    as on a device.
    """

    def __init__(self, scheduler: Any, setup: Setup) -> None:
        super().__init__(scheduler, setup)
        self._span = 0 if setup.windows[0] else (setup.block_sizes or (setup.block_size,))[0]
        self._slots: dict[tuple[int, int], int] = {}
        self._tables: dict[str, list[int]] = {}

    def settle(self) -> float:
        scheduled = self._outputs[0]
        again = scheduled.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        starts.update(zip(again.req_ids, again.num_computed_tokens, strict=True))
        self._tables.update({new.req_id: list(new.block_ids[0]) for new in scheduled.scheduled_new_reqs})
        for name, added in zip(again.req_ids, again.new_block_ids, strict=True):
            kept = [] if name in again.resumed_req_ids else self._tables[name]
            self._tables[name] = kept + list(added[0] if added else ())
        for source, target in scheduled.kv_cache_block_copies or ():
            for place in range(self._span):
                self._slots[target, place] = self._slots.get((source, place), 0)
        took = super().settle()
        for name, count in scheduled.num_scheduled_tokens.items() if self._span else ():
            self._run(name, starts[name], count)
        return took

    def _run(self, name: str, start: int, count: int) -> None:
        """Reads the tokens before `start` and writes the others that are known by now."""
        tokens = self.requests[name].all_token_ids
        prefix = 0
        for place, token in enumerate(tokens[: start + count]):
            prefix = hash((prefix, token, self.requests[name].cache_salt))
            slot = self._tables[name][place // self._span], place % self._span
            if place >= start:
                self._slots[slot] = prefix
            assert self._slots.get(slot) == prefix, (name, place, start)


@pytest.fixture(scope="module")
def server() -> Iterator[Service]:
    """A service on which the blocks of ended sessions are free at once."""
    with TemporaryDirectory() as folder, service(Path(folder), "--quarantine-seconds", "0") as started:
        yield started


@pytest.fixture(scope="module")
def admin(server: Service) -> Iterator[AdminClient]:
    with AdminClient(server.address) as client:
        yield client


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_requests_get_all_their_tokens_whenever_sessions_end(
    kind: str, server: Service, admin: AdminClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, rng = f"lost-{kind}", random.Random(kind)
    attached = {"kvpool": {"address": server.address, "pool": pool}}
    setup = setup_of({**KINDS[kind], "additional_config": attached}, 0)
    scheduler = make_scheduler(Scheduler, setup, tmp_path)
    driver, lost = Memory(scheduler, setup), set[int]()

    def losing(method: Any) -> Any:
        def call(session: Session, *args: Any) -> None:
            if rng.random() < 0.05 and session.session_number not in lost:
                admin.evict_session(pool, session.session_number)
                lost.add(session.session_number)
            method(session, *args)

        return call

    for name in ("send", "begin"):
        monkeypatch.setattr(Session, name, losing(getattr(Session, name)))
    prefixes = [[rng.randrange(512) for _ in range(rng.randrange(200))] for _ in range(3)]
    lengths: dict[str, int] = {}
    num_steps = 0
    while len(lengths) < 40 or not driver.is_idle:
        num_steps += 1
        assert num_steps < MOST_STEPS, "nothing moves any more"
        if len(lengths) < 40 and rng.random() < 0.3:
            prompt = rng.choice(prefixes) + [rng.randrange(512) for _ in range(rng.randrange(1, 200))]
            name = f"r{len(lengths)}"
            lengths[name] = rng.randrange(1, 60)
            driver.add(name, prompt, lengths[name])
        driver.step()
    driver.drain()
    assert {name: len(tokens) for name, tokens in driver.generated.items()} == lengths
    monkeypatch.undo()
    scheduler.shutdown()
    with connect(server.address) as client:
        assert client.get_pool(pool).requests == 0
    assert lost


def test_an_engine_ends_if_a_request_that_waits_for_input_has_blocks(server: Service, tmp_path: Path) -> None:
    driver = Engine(server.address, POOL, tmp_path).driver
    driver.add("waits", [1] * 40, 2, resumable=True)
    while driver.requests["waits"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        driver.step()
    _evict(server, 0)
    driver.add("other", [2] * 40, 9)
    with pytest.raises(AbortedError, match="an operator ended the session"):
        driver.finish()


def _evict(server: Service, pid: int) -> None:
    del pid
    with AdminClient(server.address) as admin:
        (session,) = admin.sessions(POOL)
        admin.evict_session(POOL, session.session_number)


def _restart(server: Service, pid: int) -> None:
    del pid
    server.restart()


def _pause(server: Service, pid: int) -> None:
    """Stops the engine's process for longer than its lease."""
    os.kill(pid, SIGSTOP)
    with connect(server.address) as client:
        wait_until(lambda: not client.get_pool(POOL).sessions, "the lease has not ended")
    os.kill(pid, SIGCONT)


LOSSES: tuple[Callable[[Service, int], None], ...] = (_evict, _restart, _pause)


def _idle(attached: dict[str, Any], folder: Path, ready: Event) -> None:
    """The engine's process, without a model."""
    scheduler = make_scheduler(Scheduler, Setup(additional_config=attached), folder)
    ready.set()
    threading.Event().wait(DEADLINE_SECONDS)  # as vLLM for requests
    scheduler.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "lose", [_pause, *(pytest.param(each, marks=pytest.mark.complete) for each in (_evict, _restart))]
)
def test_an_idle_engine_whose_memory_others_may_use_ends(
    lose: Callable[[Service, int], None], server: Service, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    attached = {"kvpool": {**_settings(server), "memory_id": "shared"}}
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    engine = context.Process(target=_idle, args=(attached, tmp_path, ready), name="EngineCore")
    engine.start()
    assert ready.wait(DEADLINE_SECONDS)
    lose(server, engine.pid or 0)
    engine.join(DEADLINE_SECONDS)
    assert engine.exitcode == -SIGTERM
    assert re.search("engine ends: session lost .*restart the engine", capfd.readouterr().err)


def _settings(server: Service) -> dict[str, Any]:
    return {"address": server.address, "pool": POOL, "lease_seconds": LEASE_SECONDS}


# Whole engines.


@pytest.fixture
def starts() -> Iterator[Serving]:
    with serving() as started:
        yield started


def _start(starts: Serving, server: Service, **settings: Any) -> VllmServe:
    return starts.start(kvpool={**_settings(server), **settings})


@pytest.mark.complete
def test_an_engine_with_private_memory_answers_as_vllm_alone_after_each_loss(starts: Serving, server: Service) -> None:
    expected, of_long = starts.tokens_of_vllm_alone([REQUESTS[1], LONG])
    vllm = _start(starts, server)
    (engine,) = vllm.engine_pids
    for number, lose in enumerate(LOSSES, 1):
        lose(server, engine)
        assert vllm.is_healthy
        assert vllm.complete(REQUESTS[1]).tokens == expected
        with vllm.begun(LONG) as steps:
            lose(server, engine)
            assert [token for tokens in steps for token in tokens] == of_long
        assert vllm.is_healthy
        # Only a request that still runs notices the second loss.
        vllm.process.wait_for("session lost", 2 * number)


@pytest.mark.complete
def test_the_health_check_of_an_idle_engine_fails_when_it_ends(starts: Serving, server: Service) -> None:
    vllm = _start(starts, server, memory_id="served")  # the pool is replaced in another memory
    assert vllm.complete(REQUESTS[1]).tokens
    _evict(server, 0)
    wait_until(lambda: not vllm.is_healthy, "it says that it is healthy")
    vllm.process.end()
    assert "engine ends: session lost" in vllm.process.log
