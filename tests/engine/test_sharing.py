"""Engines that share a pool, that die, and whose service dies: schedulers without a model, on a real service."""

import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.connector import Calls
from engine.driving import STATES, Driver, Setup, make_scheduler
from engine.service import service
from kvpool.client import AbortedError, KvpoolError, NotFoundError, UnavailableError, WrongStateError, connect
from kvpool.client.admin import AdminClient
from kvpool.client.session import Session
from kvpool.client.vllm import Scheduler
from support.answers import until_answered

pytestmark = pytest.mark.complete

PROMPT = [i * 7 % 512 for i in range(100)]
SETUP = Setup(num_blocks=64)


class Engine:
    """A scheduler on a pool, driven without a model."""

    def __init__(self, address: str, pool: str, folder: Path, setup: Setup = SETUP, **settings: Any) -> None:
        attached = replace(setup, additional_config={"kvpool": {"address": address, "pool": pool, **settings}})
        self.scheduler = make_scheduler(Scheduler, attached, folder)
        self.driver = Driver(self.scheduler, attached)

    def run(self, name: str, prompt: list[int], max_tokens: int = 20, **values: Any) -> int:
        """Runs a request to its end; returns how many tokens of it were cached."""
        self.driver.add(name, prompt, max_tokens, **values)
        self.run_all()
        return self.driver.cached[name]

    def run_all(self) -> None:
        """Runs what is there to its end."""
        self.driver.finish()
        self.driver.step()  # tells what ended


def test_engines_with_the_same_memory_share_cached_blocks(address: str, tmp_path: Path) -> None:
    first = Engine(address, "shared", tmp_path, memory_id="gpu0")
    second = Engine(address, "shared", tmp_path, memory_id="gpu0")
    assert first.run("a", PROMPT) == 0
    assert second.run("b", PROMPT) == 96
    assert second.run("c", [*PROMPT[:50], *range(30)]) == 48
    with connect(address) as client:
        assert client.get_pool("shared").prefix_cache.shared_hits_tokens == 144
    first.driver.add("d", [1] * 40, 9)
    second.driver.add("e", [2] * 40, 9)
    held = [engine.driver.step()["new"][0][2][0] for engine in (first, second)]
    assert not set(held[0]) & set(held[1])
    assert first.scheduler.reset_prefix_cache()  # although the other holds blocks: see test_resets.py


def test_an_engine_logs_how_warm_its_pool_is(address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvpool.client.vllm")
    first = Engine(address, "warm", tmp_path, memory_id="gpu0")
    first.run("a", PROMPT)
    Engine(address, "warm", tmp_path, memory_id="gpu0")
    attached = [vars(each)["cached_blocks"] for each in caplog.records if each.msg == "engine attached"]
    with connect(address) as client:
        assert attached == [0, client.get_pool("warm").cached_blocks]
    assert attached[1]


def test_another_layout_is_refused_with_the_differing_field(address: str, tmp_path: Path) -> None:
    Engine(address, "layout", tmp_path, memory_id="gpu0")
    with pytest.raises(WrongStateError, match="num_blocks"):
        Engine(address, "layout", tmp_path, replace(SETUP, num_blocks=65), memory_id="gpu0")
    with pytest.raises(WrongStateError, match="groups"):
        Engine(address, "layout", tmp_path, replace(SETUP, windows=(64,)), memory_id="gpu0")


def test_memory_that_differs_is_refused_while_an_engine_lives(address: str, tmp_path: Path) -> None:
    Engine(address, "memory", tmp_path)
    with pytest.raises(UnavailableError, match="memory"):
        until_answered(lambda: Engine(address, "memory", tmp_path, deadline_seconds=1.0))


class _Ahead(Engine):
    """An engine with several steps in flight; remembers which blocks they read and write."""

    def __init__(self, address: str, pool: str, folder: Path, setup: Setup) -> None:
        super().__init__(address, pool, folder, replace(setup, num_blocks=26), memory_id="gpu0")
        self.depth = setup.num_stages + setup.is_async
        self.in_flight: deque[tuple[set[int], set[int]]] = deque()

    def schedule(self) -> tuple[set[int], set[int]]:
        """Schedules a step, without its outputs; returns the blocks that it reads, and those that it writes."""
        scheduled = self.scheduler.schedule()
        self.driver._outputs.append(scheduled)
        reads, writes = set[int](), set[int]()
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            end = self.driver.requests[name].num_computed_tokens
            first = (end - num_tokens) // SETUP.block_size
            reads.update(table[: first + 1])
            writes.update(table[first : (end - 1) // SETUP.block_size + 1])
        self.in_flight.append((reads, writes))
        return reads, writes

    def settle(self) -> None:
        self.driver.settle()
        self.in_flight.popleft()


@pytest.mark.parametrize(("num_stages", "is_async"), [(1, True), (2, False), (2, True), (3, False)])
def test_engines_use_no_block_of_a_step_of_the_other_in_flight(
    address: str, tmp_path: Path, num_stages: int, *, is_async: bool
) -> None:
    pool_name, setup = f"ahead.{num_stages}.{is_async}", replace(SETUP, num_stages=num_stages, is_async=is_async)
    engines, draw = [_Ahead(address, pool_name, tmp_path, setup) for _ in range(2)], random.Random(1)
    deepest = 0
    for i in range(40):
        prompt = PROMPT[: draw.choice((20, 60))] + [draw.randrange(512) for _ in range(draw.randint(1, 60))]
        # The scheduler learns of the end of a request after it has launched the next step of it.
        ends = {"stop_token_ids": [draw.randrange(8)] if i % 3 else []}
        engines[i % 2].driver.add(f"{i}", prompt, 60, sampling=ends)
    while any(not each.driver.is_idle or each.in_flight for each in engines):
        engine = draw.choice(engines)
        (other,) = (each for each in engines if each is not engine)
        if len(engine.in_flight) < engine.depth and not engine.driver.is_idle:
            reads, writes = engine.schedule()
            for others_reads, others_writes in other.in_flight:
                assert not writes & (others_reads | others_writes)
                assert not reads & others_writes
            deepest = max(deepest, sum(bool(writes) for _, writes in engine.in_flight))
        elif engine.in_flight:
            engine.settle()
    with connect(address) as client:
        pool = client.get_pool(pool_name)
    assert deepest == engines[0].depth
    assert pool.free_blocks == 25
    assert pool.preemptions
    assert pool.prefix_cache.shared_hits_tokens


class _Loading(Engine):
    """An engine with a KV connector; `contents` has the prefix that each block of the memory holds, and whose it is."""

    def __init__(self, number: int, contents: dict[int, Any], *args: Any) -> None:
        super().__init__(*args, memory_id="gpu0")
        self._number = number
        self._contents = contents
        self._work: deque[tuple[Calls, list[tuple[str, int, int, list[int]]]]] = deque()
        self._num_calls = 0
        self.num_failed = 0
        self.scheduler.connector.fails_cached = True

    def schedule(self) -> None:
        """Schedules a step, and checks that what it hits of other engines holds what it should already."""
        connector, scheduled = self.scheduler.connector, self.scheduler.schedule()
        self.driver._outputs.append(scheduled)
        again = scheduled.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        starts |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        work: list[tuple[str, int, int, list[int]]] = []
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            num_hits = connector.hits.pop(name, starts[name] // SETUP.block_size)
            for i, block in enumerate(table[:num_hits]):
                prefix, owner = self._contents[block]
                assert owner == self._number or prefix == self._prefix(name, i), f"{name} hits block {block}"
            end = -(-(starts[name] + num_tokens) // SETUP.block_size)
            work.append((name, num_hits, starts[name] // SETUP.block_size, table[:end]))
            self._contents.update((block, ((), self._number)) for block in table[num_hits:end])
        self._work.append((connector.calls[self._num_calls :], work))
        self._num_calls = len(connector.calls)

    def settle(self) -> None:
        """Runs a step: loads and computes. A block is right if what it was loaded or computed from is."""
        calls, work = self._work.popleft()
        invalid = {(name, block) for kind, name, *rest in calls if kind == "failed" for block in rest[0]}
        self.num_failed += len(invalid)
        for name, num_hits, num_loaded, table in work:
            is_right = True
            for i, block in enumerate(table):
                if i >= num_hits:
                    is_right = (is_right or i < num_loaded) and (name, block) not in invalid
                    self._contents[block] = self._prefix(name, i) if is_right else (), self._number
                is_right = self._contents[block][0] == self._prefix(name, i)
        self.driver.settle()

    def _prefix(self, name: str, i: int) -> tuple[int, ...]:
        return tuple(self.driver.requests[name].all_token_ids[: (i + 1) * SETUP.block_size])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_async", [False, True], ids=["", "a_step_ahead"])
@pytest.mark.parametrize("failures", ["recompute", "fail"])
def test_what_a_connector_fails_to_load_is_not_hit_by_other_engines(
    failures: str, seed: int, address: str, tmp_path: Path, *, is_async: bool
) -> None:
    setup = replace(SETUP, num_blocks=60, load_failures=failures, is_async=is_async)
    pool = f"{failures}.{is_async}.{seed}"
    contents: dict[int, Any] = {}
    engines = [_Loading(i, contents, address, pool, tmp_path, setup) for i in range(2)]
    draw = random.Random(seed)
    prefixes = [[draw.randrange(512) for _ in range(80)] for _ in range(20)]
    for i in range(80):
        prompt = prefixes[i // 4] + [draw.randrange(512) for _ in range(draw.randint(1, 60))]
        engines[i % 2].driver.add(f"r{i}", prompt, 30)
    while any(not each.driver.is_idle or each.driver._outputs for each in engines):
        engine = draw.choice(engines)
        if len(engine.driver._outputs) < 1 + is_async and not engine.driver.is_idle:
            engine.schedule()
            for kind, name, *_ in engine._work[-1][0]:
                if kind == "failed" and draw.random() < 0.4:
                    engine.driver.abort(name)
        elif engine.driver._outputs:
            engine.settle()
    for each in engines:
        each.scheduler.shutdown()
        assert each.num_failed
    with connect(address) as client:
        info = client.get_pool(pool)
    assert info.free_blocks == setup.num_blocks - 1
    assert info.prefix_cache.shared_hits_tokens


def test_a_round_zeroes_no_block_that_it_has_freed(address: str, tmp_path: Path) -> None:
    setup = replace(SETUP, num_blocks=24, windows=(0, STATES), policy="priority", max_num_batched_tokens=64)
    engine, draw = Engine(address, "zeroed", tmp_path, setup, memory_id="gpu0"), random.Random(2)
    num_freed = 0
    for i in range(60):
        engine.driver.add(f"{i}", [draw.randrange(512) for _ in range(draw.randint(1, 120))], 40, priority=-i)
        for _ in range(6):
            scheduled = engine.scheduler.schedule()
            engine.driver._outputs.append(scheduled)
            owned = {0}
            for name in scheduled.num_scheduled_tokens:
                owned.update(*engine.scheduler.kv_cache_manager.get_block_ids(name))
            assert owned.issuperset(scheduled.new_block_ids_to_zero or ())
            num_freed += len(scheduled.preempted_req_ids or ())
            engine.driver.settle()
    assert num_freed


@pytest.mark.parametrize(
    "changes",
    [{"num_blocks": 80}, {"max_model_len": 512}, {"hash_algorithm": "sha256_cbor"}],
    ids=lambda each: next(iter(each)),
)
def test_the_next_engine_may_have_another_configuration(
    address: str, tmp_path: Path, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    pool = f"changed.{request.node.callspec.id}"
    first = Engine(address, pool, tmp_path)
    assert first.run("a", PROMPT) == 0
    with pytest.raises(UnavailableError, match="in use by 1 open sessions"):
        until_answered(lambda: Engine(address, pool, tmp_path, replace(SETUP, **changes), deadline_seconds=1.0))
    first.scheduler.shutdown()
    second = Engine(address, pool, tmp_path, replace(SETUP, **changes))
    assert [second.run(name, PROMPT) for name in "bc"] == [0, 96]


def _steps_of_both(served: Driver, plain: Driver) -> list[Any]:
    steps = []
    while not served.is_idle:
        steps.append((served.step(), plain.step()))
    return steps


@pytest.mark.parametrize("keeps_journal", [False, True], ids=["no_journal", "journal"])
def test_a_killed_service_ends_no_request(tmp_path: Path, *, keeps_journal: bool) -> None:
    options = ["--journal", str(tmp_path / "journal")] if keeps_journal else []
    (tmp_path / "plain").mkdir()
    plain = Driver(make_scheduler(Plain, SETUP, tmp_path / "plain"), SETUP)
    with service(tmp_path, *options) as server:
        engine = Engine(server.address, "restarted", tmp_path, deadline_seconds=20.0)
        for driver in (engine.driver, plain):
            driver.add("a", PROMPT, 60)
        steps = [(engine.driver.step(), plain.step()) for _ in range(5)]
        server.restart()
        if keeps_journal:
            steps += _steps_of_both(engine.driver, plain)
        engine.driver.finish()
        plain.finish()
        assert engine.driver.generated == plain.generated
        assert all(mine == theirs for mine, theirs in steps)
        engine.scheduler.shutdown()


@pytest.mark.parametrize("runs", [False, True])
def test_a_forgotten_session_in_memory_of_several_engines_ends_the_engine(tmp_path: Path, *, runs: bool) -> None:
    with service(tmp_path) as server:
        engine = Engine(server.address, "forgotten", tmp_path, memory_id="gpu0")
        if runs:
            engine.driver.add("a", PROMPT, 60)
            engine.driver.step()
        server.restart()
        engine.driver.add("b", PROMPT, 60)
        with pytest.raises((AbortedError, NotFoundError), match="session") as raised:
            engine.run_all()
        assert "restart the engine" in raised.value.__notes__[0]
        assert "--no-journal" in raised.value.__notes__[1]
        engine.scheduler.shutdown()


def test_an_unavailable_service_is_reported_with_address_and_advice(tmp_path: Path) -> None:
    with service(tmp_path) as server:
        engine = Engine(server.address, "away", tmp_path, deadline_seconds=5.0)
        engine.driver.add("a", PROMPT, 60)
        engine.driver.step()
        server.kill()
        with pytest.raises(UnavailableError, match=server.address) as raised:
            engine.run_all()
        assert "restart the engine" in raised.value.__notes__[0]
        engine.scheduler.shutdown()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NotFoundError("SESSION_NOT_FOUND", ""), "--no-journal"),
        (AbortedError("JOURNAL_DROPPED", ""), "log of the service"),
        (AbortedError("EPOCH_PASSED", ""), "--rank-grace-seconds"),
        (AbortedError("LEASE_EXPIRED", ""), ""),
        (UnavailableError("RANK_LOST", ""), "workers of the pool run"),
    ],
    ids=lambda each: getattr(each, "reason", None),
)
def test_the_error_of_an_engine_that_ends_names_the_remedy_for_its_cause(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: KvpoolError, remedy: str
) -> None:
    engine = Engine(address, f"remedy.{error.reason}", tmp_path, memory_id="gpu0")
    engine.driver.add("a", PROMPT, 9)
    with monkeypatch.context() as patched:
        for name in ("begin", "send"):
            patched.setattr(Session, name, Mock(side_effect=error))
        with pytest.raises(type(error)) as raised:
            engine.driver.step()
    notes = " ".join(raised.value.__notes__)
    assert "restart the engine" in notes
    assert remedy in notes
    assert ("journal" in notes) == (error.reason in {"SESSION_NOT_FOUND", "JOURNAL_DROPPED"})


def test_a_step_whose_answer_outlasted_the_lease_runs_while_the_session_is_open(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(address, "outlasted", tmp_path, memory_id="gpu0")
    monkeypatch.setattr(Session, "lease_left_seconds", property(lambda _: 0.0))
    engine.driver.add("a", PROMPT, 9)
    engine.driver.step()
    with AdminClient(address) as admin:
        admin.evict_session("outlasted", engine.scheduler.kv_cache_manager.session.session_number)
    with pytest.raises(AbortedError, match="an operator ended the session") as raised:
        engine.run_all()
    assert "restart the engine" in raised.value.__notes__[0]
