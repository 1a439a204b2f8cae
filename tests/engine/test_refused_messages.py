"""What becomes of the calls in a message that the service refuses, where the engine goes on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.driving import Driver, Setup, make_scheduler
from kvpool.client import Client, InvalidArgumentError, PoolInfo, connect
from kvpool.client.vllm import Scheduler
from kvpool.client.vllm.manager import KVCacheManager

SETUP = Setup(num_blocks=200)
PROMPT_TOKENS = 40


class Engine:
    """An engine on a pool of its own, with three running requests."""

    def __init__(self, scheduler: Any, client: Client, pool: str) -> None:
        self.driver = Driver(scheduler, SETUP)
        self.manager: KVCacheManager = scheduler.kv_cache_manager
        self._client = client
        self._pool_name = pool
        add_requests(self.driver)

    @property
    def pool(self) -> PoolInfo:
        return self._client.get_pool(self._pool_name)

    def spoil(self) -> None:
        """Makes the service refuse the next message."""
        self.manager.calls.builder.evict_blocks([SETUP.num_blocks])

    def finish(self) -> None:
        """Runs all requests to their end, after which the service holds nothing of them."""
        self.driver.finish()
        assert (self.pool.requests, self.pool.free_blocks) == (0, SETUP.num_blocks - 1)


def add_requests(driver: Driver) -> None:
    for i in range(3):
        driver.add(f"r{i}", [i] * PROMPT_TOKENS, 60)
    driver.step()


@pytest.fixture
def engine(address: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    setup = Setup(num_blocks=200, additional_config={"kvpool": {"address": address, "pool": request.node.name}})
    scheduler = make_scheduler(Scheduler, setup, tmp_path)
    with connect(address) as client:
        yield Engine(scheduler, client, request.node.name)


def test_frees_in_a_refused_message_go_with_the_next(engine: Engine) -> None:
    engine.driver.abort("r0")
    engine.spoil()
    with pytest.raises(InvalidArgumentError, match="block_ids"):
        engine.driver.scheduler.reset_prefix_cache()
    assert engine.pool.requests == 3
    engine.driver.step()
    assert engine.pool.requests == 2
    engine.finish()


def test_frees_go_after_several_refusals_even_if_no_request_is_left(engine: Engine) -> None:
    for name in ("r0", "r1"):
        engine.driver.abort(name)
        engine.spoil()
        with pytest.raises(InvalidArgumentError, match="block_ids"):
            engine.driver.scheduler.reset_prefix_cache()
    assert engine.pool.requests == 3
    engine.driver.abort("r2")  # the last one, so that its blocks are freed at once
    assert (engine.pool.requests, engine.pool.free_blocks) == (0, SETUP.num_blocks - 1)


def test_a_round_can_be_repeated_after_its_message_was_refused(engine: Engine, tmp_path: Path) -> None:
    """The message in flight holds frees and decodes."""
    plain = Driver(make_scheduler(Plain, SETUP, tmp_path), SETUP)
    add_requests(plain)
    for driver in (plain, engine.driver):
        driver.abort("r0")
    engine.spoil()
    with pytest.raises(InvalidArgumentError, match="block_ids"):
        engine.driver.step()
    assert engine.pool.requests == 3
    steps = []
    while not plain.is_idle:
        steps.append(plain.step())
    assert [engine.driver.step() for _ in steps] == steps
    engine.finish()


def test_preemptions_in_a_refused_message_go_with_the_next(engine: Engine) -> None:
    engine.spoil()
    with pytest.raises(InvalidArgumentError, match="block_ids"):
        engine.driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.finish()


def test_evictions_in_a_refused_message_go_with_the_next(engine: Engine) -> None:
    ((first, *_),) = engine.manager.get_block_ids("r0") or ()
    engine.manager.evict_blocks({first})
    engine.spoil()
    with pytest.raises(InvalidArgumentError, match="block_ids"):
        engine.driver.scheduler.reset_prefix_cache()
    before = engine.pool.cached_blocks
    engine.driver.step()
    assert engine.pool.cached_blocks == before - 1
    engine.finish()


def test_an_eviction_of_a_block_that_does_not_exist_is_refused_at_once(engine: Engine) -> None:
    for block_id in (-1, SETUP.num_blocks):
        with pytest.raises(InvalidArgumentError, match=f"block_ids: {block_id} is not in"):
            engine.manager.evict_blocks({0, 1, block_id})  # 0: the null block, as vLLM allows
    engine.finish()


def test_a_free_that_raises_keeps_the_predictions_of_its_request(engine: Engine) -> None:
    """The request is named in the message before, which is refused."""
    calls, session = engine.manager.calls, engine.manager.session
    request, ours = engine.driver.requests["r0"], calls.requests["r0"]
    while ours.credit_tokens > ours.num_computed_tokens:  # until the next decode needs a message
        engine.driver.step()
    engine.manager.batcher.begin()
    calls.settle()
    calls.builder.cache_blocks(ours, PROMPT_TOKENS)
    engine.spoil()
    with pytest.raises(InvalidArgumentError, match="block_ids"):
        engine.manager.free(request)
    sequence = session.sequence
    assert engine.manager.allocate_slots(request, 1) is not None
    assert session.sequence == sequence  # granted before
    assert ours.num_computed_tokens == request.num_computed_tokens + 1
